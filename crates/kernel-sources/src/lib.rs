//! The sources of the CUDA kernels: what build scripts and `cargo xtask kernels` compile.

use std::ffi::OsStr;
use std::fs;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};

/// All sources of a folder, each as its name and its contents: two folders are equal if these are.
///
/// # Errors
///
/// The folder or a file in it cannot be read; the error names it.
pub fn snapshot(folder: &Path) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for path in files(folder)? {
        all.extend_from_slice(path.file_name().unwrap_or_default().as_encoded_bytes());
        all.push(b'\n');
        all.extend(fs::read(&path).map_err(|error| cannot_read(&path, &error))?);
    }
    Ok(all)
}

/// The files of these folders with this extension, sorted by path.
///
/// # Errors
///
/// A folder cannot be read; the error names it.
pub fn files_with_extension(folders: &[&Path], extension: &str) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for folder in folders {
        all.extend(files(folder)?);
    }
    all.retain(|path| path.extension() == Some(OsStr::new(extension)));
    all.sort();
    Ok(all)
}

/// Whether this build script runs for Clippy, which runs and links nothing. Cargo runs it in a folder of its own then,
/// so that nobody else misses what it does not compile.
pub fn is_for_clippy() -> bool {
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    wrapper.is_some_and(|it| it.file_stem() == Some(OsStr::new("clippy-driver")))
}

/// The files of a folder, sorted by name.
///
/// # Errors
///
/// The folder cannot be read; the error names it.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| cannot_read(folder, &error))? {
        let path = entry?.path();
        if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn cannot_read(path: &Path, error: &Error) -> Error {
    Error::new(
        error.kind(),
        format!("cannot read {}: {error}", path.display()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_changes_with_every_name_and_every_byte() {
        let folder = std::env::temp_dir().join(format!("kernel-sources-{}", std::process::id()));
        fs::create_dir_all(folder.join("nested")).expect("a folder");
        fs::write(folder.join("b.cu"), "two").expect("a file");
        fs::write(folder.join("a.cuh"), "one").expect("a file");
        let first = snapshot(&folder).expect("a snapshot");
        assert_eq!(first, b"a.cuh\noneb.cu\ntwo");
        let kernels = files_with_extension(&[&folder], "cu").expect("the folder");
        assert_eq!(kernels, [folder.join("b.cu")]);
        fs::rename(folder.join("b.cu"), folder.join("c.cu")).expect("a rename");
        assert_ne!(snapshot(&folder).expect("a snapshot"), first);
        fs::remove_dir_all(&folder).expect("the folder");
        let error = snapshot(&folder).expect_err("no folder");
        assert!(error.to_string().contains("kernel-sources-"), "{error}");
    }
}
