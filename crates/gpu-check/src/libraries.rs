//! Where cuBLASLt is, if the linker does not find it: beside a CUDA toolkit, or in a Python environment.

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cudarc::{cublaslt, driver};

const NAMES: [&str; 2] = ["libcublasLt.so.12", "libcublasLt.so.13"];
/// Where it is looked for, all folders within.
const PLACES: [&str; 5] = ["/usr/local", "/opt", "/usr/lib", "/home", "/root"];
/// Folders that are looked through, and how deep they lie.
const MAX_FOLDERS: usize = 200_000;
const MAX_DEPTH: usize = 9;
/// Set for a program that was started again with the library's folder.
const STARTED_AGAIN: &str = "INFLIGHT_GPU_CHECK_LIBRARIES";

/// Starts this program again with the folder of cuBLASLt in `LD_LIBRARY_PATH`, if it needs that. Returns if the library
/// is found already, or nowhere: then the stages that need it say so.
pub fn find() {
    // The stand-in for cuBLASLt needs that for the driver.
    // SAFETY: opening libraries that are part of the CUDA installation runs their initialisers.
    let is_there = unsafe { driver::sys::is_culib_present() && cublaslt::sys::is_culib_present() };
    if is_there || env::var_os(STARTED_AGAIN).is_some() {
        return;
    }
    let Some(folder) = PLACES
        .iter()
        .find_map(|place| folder_below(Path::new(place)))
    else {
        eprintln!("no libcublasLt.so.12 or .13: name its folder in LD_LIBRARY_PATH");
        return;
    };
    eprintln!("cuBLASLt is in {}", folder.display());
    let mut path = folder.into_os_string();
    if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    let Ok(program) = env::current_exe() else {
        return;
    };
    let error = Command::new(program)
        .args(env::args_os().skip(1))
        .env("LD_LIBRARY_PATH", path)
        .env(STARTED_AGAIN, "1")
        .exec();
    eprintln!("cannot start again: {error}");
}

/// The nearest folder below `place` that has the library.
fn folder_below(place: &Path) -> Option<PathBuf> {
    let mut folders = VecDeque::from([(place.to_owned(), 0)]);
    let mut num_folders = 0;
    while let Some((folder, depth)) = folders.pop_front() {
        if NAMES.iter().any(|name| folder.join(name).is_file()) {
            return Some(folder);
        }
        num_folders += 1;
        if num_folders > MAX_FOLDERS || depth == MAX_DEPTH {
            continue;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            // Links are not followed: they may lead round in a circle.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push_back((entry.path(), depth + 1));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_in_a_folder_below() {
        let place = env::temp_dir().join(format!("gpu-check-libraries-{}", std::process::id()));
        let folder = place.join("a/nvidia/cublas/lib");
        fs::create_dir_all(&folder).expect("a folder");
        fs::create_dir_all(place.join("b")).expect("a folder");
        assert_eq!(folder_below(&place), None);
        fs::write(folder.join(NAMES[0]), "").expect("a file");
        assert_eq!(folder_below(&place), Some(folder));
        fs::remove_dir_all(place).expect("there");
    }
}
