//! The functions of `libinflight_mpi.so`, the plug-in through which the ranks of a model use MPI.
//!
//! The library needs no MPI: it opens the plug-in, which lies beside it, where ranks of several hosts are asked for.
//! Implementations of MPI are binary compatible with themselves at most, so the plug-in, which is small, is built on
//! each system.
//!
//! Functions return 0 or MPI's number of an error. All but `join` and `leave` may be called by any thread at any time
//! in between.

use std::ffi::{CStr, c_char, c_int};

/// Changes with every change of this file.
pub const VERSION: u32 = 1;

/// The name of the only exported function.
pub const ENTRY_POINT: &CStr = c"inflight_mpi";

/// The exported function. What it returns is never freed.
pub type EntryPoint = unsafe extern "C" fn() -> *const Interface;

/// A world whose threads may not all call MPI, see [`Interface::join`].
pub const TOO_FEW_THREADS: c_int = -1;

/// The processes that were started together.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct World {
    /// This process, from 0.
    pub rank: c_int,
    /// Their number.
    pub size: c_int,
}

/// A message that is being sent or received, or one that was found. MPI's own handle is in it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Handle(pub usize);

/// The functions.
#[repr(C)]
pub struct Interface {
    /// [`VERSION`]. The rest is unknown if it is another one.
    pub version: u32,
    /// Waits until all processes have called it. Initialises MPI, unless the process has done so before; in both cases
    /// all threads must be allowed to call it, or the result is [`TOO_FEW_THREADS`]. Messages are apart from all others
    /// of the process.
    pub join: unsafe extern "C" fn(world: *mut World) -> c_int,
    /// Waits until all processes have called it. Finalises MPI, if `join` has initialised it. For the thread of `join`.
    pub leave: unsafe extern "C" fn() -> c_int,
    /// Ends all processes of the world, also before `join` has returned. May return before this one ends.
    pub abort: unsafe extern "C" fn(status: c_int),
    /// Begins to send `len` bytes, which must stay as they are until `is_done`.
    pub send: unsafe extern "C" fn(
        to: c_int,
        tag: c_int,
        bytes: *const u8,
        len: usize,
        message: *mut Handle,
    ) -> c_int,
    /// Looks for the next message from a rank, or from any if `from` is negative; if there is one, it must be received.
    pub find: unsafe extern "C" fn(
        from: c_int,
        tag: c_int,
        is_there: *mut bool,
        message: *mut Handle,
        len: *mut usize,
    ) -> c_int,
    /// Begins to receive a message that was found, all of its `len` bytes. Nothing else may use them until `is_done`.
    pub receive: unsafe extern "C" fn(message: *mut Handle, bytes: *mut u8, len: usize) -> c_int,
    /// Whether a message was sent or received. If so, or after an error, the handle is no longer one.
    pub is_done: unsafe extern "C" fn(message: *mut Handle, is_done: *mut bool) -> c_int,
    /// Writes what an error means, as a C string of at most `len` bytes.
    pub describe: unsafe extern "C" fn(error: c_int, text: *mut c_char, len: usize),
}
