//! Waiting for a word of shared memory (futex(2)).

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `seen`, at most for `limit`. It may wake for no reason.
pub(super) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: the word and the time live until the call returns. The result does not matter: the caller looks at the
    // word.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            seen,
            &raw const limit,
            ptr::null::<u32>(),
            0_u32,
        );
    }
}

/// Wakes all who sleep because of `word`, in any process.
pub(super) fn wake_all(word: &AtomicU32) {
    // SAFETY: the word lives until the call returns.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            libc::c_int::MAX,
            ptr::null::<libc::timespec>(),
            ptr::null::<u32>(),
            0_u32,
        );
    }
}
