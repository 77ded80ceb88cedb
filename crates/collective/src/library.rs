//! Path of this shared library; its companion files are in the same directory.

use std::env;
use std::ffi::{CStr, OsStr};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The path that a file of this name has beside the file that this library was loaded from, or beside the program that
/// it is linked into.
pub fn beside_library(name: &str) -> PathBuf {
    library_path().unwrap_or_default().with_file_name(name)
}

/// The file that this library was loaded from; `None` if the system does not say it.
fn library_path() -> Option<PathBuf> {
    let own = library_path as fn() -> Option<PathBuf>;
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address belongs to a function of this library, and `info` lives until the call returns.
    let is_found = unsafe { libc::dladdr(own as *const libc::c_void, info.as_mut_ptr()) } != 0;
    // SAFETY: all zeros is a value, which the call replaces.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !is_found || name.is_null() {
        return None;
    }
    // SAFETY: the name is a C string, which lives as long as the library is loaded.
    let name = OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes());
    // The name of a program is the one that it was called by, which need not be a path.
    match env::args_os().next().is_some_and(|called| called == name) {
        true => env::current_exe().ok(),
        false => PathBuf::from(name).canonicalize().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_the_name_that_it_was_called_by() {
        let test = env::current_exe().expect("the system says it");
        assert_eq!(library_path(), Some(test.clone()));
        assert_eq!(beside_library("other"), test.with_file_name("other"));
    }
}
