//! Where this library lies.

use std::ffi::{CStr, OsStr};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The file that this library was loaded from, or the program that it is linked into; `None` if the system does not say it.
pub fn library_path() -> Option<PathBuf> {
    let own = library_path as fn() -> Option<PathBuf>;
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is that of a function of this library, and `info` lives until the call returns.
    let is_found = unsafe { libc::dladdr(own as *const libc::c_void, info.as_mut_ptr()) } != 0;
    // SAFETY: all zeros is a value, which the call replaces.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !is_found || name.is_null() {
        return None;
    }
    // SAFETY: the name is a C string, which lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(name) };
    PathBuf::from(OsStr::from_bytes(name.to_bytes()))
        .canonicalize()
        .ok()
}
