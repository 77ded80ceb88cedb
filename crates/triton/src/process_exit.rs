//! The end of the server's process while instances are loaded.
//!
//! A server that has not stopped when its exit time-out passes calls `exit`, with requests in flight. That destroys
//! what the threads of this library and of the server still use, and can wait for ever for an open gRPC stream (server
//! 2.51). So the first thing that such an exit does is to end the process here, with the same status: no call enters
//! the server any more.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

static NUM_LOADED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// Of the C library: has `exit` call a function, before those that are registered already.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// A loaded instance, which may have requests in flight as long as the value lives.
pub(super) struct LoadedInstance(());

impl LoadedInstance {
    pub fn new() -> Self {
        NUM_LOADED.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for LoadedInstance {
    fn drop(&mut self) {
        NUM_LOADED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Puts the end of this library before all that the process has registered for its exit so far.
pub(super) fn come_first() {
    // The function must still be there when the process exits.
    if keep_library() {
        // SAFETY: the library stays, and with it the function; it uses no argument. A process that has no memory for
        // the registration exits as it would without it.
        unsafe { on_exit(end, ptr::null_mut()) };
    }
}

extern "C" fn end(status: c_int, _: *mut c_void) {
    if NUM_LOADED.load(Ordering::SeqCst) == 0 {
        return;
    }
    // SAFETY: writes what the process has buffered, and ends it.
    unsafe {
        libc::fflush(ptr::null_mut());
        libc::_exit(status);
    }
}

/// Keeps this library in memory when it is closed. Returns whether it does: it does not in a program that it is linked
/// into.
fn keep_library() -> bool {
    let own = keep_library as fn() -> bool;
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address belongs to a function of this library, and `info` lives until the call returns.
    let is_found = unsafe { libc::dladdr(own as *const c_void, info.as_mut_ptr()) } != 0;
    // SAFETY: all zeros is a value, which the call replaces.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !is_found || name.is_null() {
        return false;
    }
    // SAFETY: the name is a C string, which lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(name) };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: the library is loaded already, so that nothing of it runs.
    let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if library.is_null() {
        return false;
    }
    // SAFETY: a handle that is not used again.
    unsafe { libc::dlclose(library) };
    true
}
