//! Where cuBLASLt and NCCL are, if the linker does not find them: beside a CUDA toolkit, or in a Python environment.

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cudarc::{cublaslt, driver};
use inflight_device_cuda::num_gpus;

const CUBLASLT: [&str; 2] = ["libcublasLt.so.12", "libcublasLt.so.13"];
const NCCL: [&str; 1] = ["libnccl.so.2"];
/// Where they are looked for, all folders within.
const PLACES: [&str; 5] = ["/usr/local", "/opt", "/usr/lib", "/home", "/root"];
/// Folders that are looked through, and how deep they lie.
const MAX_FOLDERS: usize = 200_000;
const MAX_DEPTH: usize = 9;
/// Set for a program that was started again with the libraries' folders.
const STARTED_AGAIN: &str = "INFLIGHT_GPU_CHECK_LIBRARIES";

/// Starts this program again with the folders of cuBLASLt and, for several GPUs, of NCCL in `LD_LIBRARY_PATH`, if it
/// needs that. Returns if the libraries are found already, or nowhere: then the stages that need them say so.
pub fn find() {
    if env::var_os(STARTED_AGAIN).is_some() {
        return;
    }
    let mut folders = Vec::new();
    for (name, names, is_there) in [
        ("cuBLASLt", &CUBLASLT[..], has_cublaslt()),
        ("NCCL", &NCCL[..], num_gpus() < 2 || has_nccl()),
    ] {
        if is_there {
            continue;
        }
        let places = PLACES.iter().map(Path::new);
        let Some(folder) = places
            .into_iter()
            .find_map(|place| folder_below(place, names))
        else {
            let names = names.join(" or ");
            eprintln!("no {name}: name the folder of {names} in LD_LIBRARY_PATH");
            continue;
        };
        eprintln!("{name} is in {}", folder.display());
        folders.push(folder);
    }
    if folders.is_empty() {
        return;
    }
    let earlier = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    folders.extend(env::split_paths(&earlier).filter(|folder| !folder.as_os_str().is_empty()));
    let (Ok(program), Ok(path)) = (env::current_exe(), env::join_paths(folders)) else {
        return;
    };
    let error = Command::new(program)
        .args(env::args_os().skip(1))
        .env("LD_LIBRARY_PATH", path)
        .env(STARTED_AGAIN, "1")
        .exec();
    eprintln!("cannot start again: {error}");
}

fn has_cublaslt() -> bool {
    // The stand-in for cuBLASLt needs that for the driver.
    // SAFETY: opening libraries that are part of the CUDA installation runs their initialisers.
    unsafe { driver::sys::is_culib_present() && cublaslt::sys::is_culib_present() }
}

fn has_nccl() -> bool {
    // SAFETY: the name is a C string. Opening the library runs its initialisers.
    unsafe { !libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW).is_null() }
}

/// The nearest folder below `place` that has a file of one of these names.
fn folder_below(place: &Path, names: &[&str]) -> Option<PathBuf> {
    let mut folders = VecDeque::from([(place.to_owned(), 0)]);
    let mut num_folders = 0;
    while let Some((folder, depth)) = folders.pop_front() {
        if names.iter().any(|name| folder.join(name).is_file()) {
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
    fn libraries_are_found_in_folders_below() {
        let place = env::temp_dir().join(format!("gpu-check-libraries-{}", std::process::id()));
        fs::create_dir_all(place.join("b")).expect("a folder");
        for (names, folder) in [(&CUBLASLT[..], "cublas"), (&NCCL[..], "nccl")] {
            let folder = place.join("a/nvidia").join(folder).join("lib");
            fs::create_dir_all(&folder).expect("a folder");
            assert_eq!(folder_below(&place, names), None);
            fs::write(folder.join(names[0]), "").expect("a file");
            assert_eq!(folder_below(&place, names), Some(folder));
        }
        fs::remove_dir_all(place).expect("there");
    }
}
