//! The place of a rank, which the system frees when its process ends.
//!
//! A place is a lock of one byte of the memory's file, by an open file description that only its process has
//! (`F_OFD_SETLK` in fcntl(2)). It needs no process ids, which mean nothing in another container and may be used again.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::super::error::CollectiveError;

/// A locked place.
pub(super) struct Place {
    file: File,
}

impl Place {
    /// Takes the place of a rank. `file` was [opened](open_again) for it.
    ///
    /// # Errors
    ///
    /// Another process has it.
    pub(super) fn take(file: File, rank: usize) -> Result<Self, CollectiveError> {
        let mut lock = byte_lock(rank);
        // SAFETY: the lock lives until the call returns.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
        match result {
            -1 => Err(CollectiveError::Memory(format!(
                "the place of rank {rank} cannot be taken, perhaps because another process is this rank: {}",
                io::Error::last_os_error()
            ))),
            _ => Ok(Self { file }),
        }
    }

    /// Whether the place of another rank is taken.
    pub(super) fn is_taken(&self, rank: usize) -> bool {
        let mut lock = byte_lock(rank);
        // SAFETY: the lock lives until the call returns.
        let result =
            unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        // Without an answer, the time limit decides.
        result == -1 || lock.l_type != libc::F_UNLCK as libc::c_short
    }
}

/// Opens the file of a descriptor again, so that its locks belong to the caller alone.
///
/// # Errors
///
/// It cannot be opened.
pub(super) fn open_again(memory: BorrowedFd<'_>) -> Result<File, CollectiveError> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let file = File::options().read(true).write(true).open(path);
    file.map_err(|error| CollectiveError::Memory(format!("cannot be opened again: {error}")))
}

fn byte_lock(rank: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: rank as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}
