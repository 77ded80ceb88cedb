//! The batch manager's C interface. `include/inflight_batch_manager.h` documents it.
//!
//! ```text
//! abi.rs          the header's types
//! callbacks.rs    the application's functions as `TensorCallbacks`
//! responses.rs    responses that the application owns
//! executor.rs     the exported functions of the executor
//! ranks.rs        those for processes that are other ranks
//! lib.rs          those of the manager with callbacks
//! ```

mod abi;
mod callbacks;
mod executor;
mod ranks;
mod responses;

use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

use inflight_base::{LoadError, SequenceId, StepError};
use inflight_manager::{
    BatchManager, ManagerOptions, ManagerThread, ServingRank, TensorLayer, TensorModel,
};

use abi::{Batch, Stops};
use callbacks::CCallbacks;

/// A batch manager of an application.
pub enum Manager {
    /// The one that has the requests.
    Serving(ManagerThread),
    /// Another rank of it.
    Rank(ServingRank),
}

/// What a process has of a batch manager.
enum Loaded {
    /// All of it but what other ranks have.
    Manager(Box<BatchManager>, TensorModel),
    /// Another rank, which has no requests.
    Rank(ServingRank),
}

/// Creates a manager; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_create(
    options: *const c_char,
    callbacks: *const abi::Callbacks,
    error: *mut c_char,
) -> *mut Manager {
    let create = || -> Result<Box<Manager>, String> {
        if callbacks.is_null() {
            return Err("callbacks may not be NULL".to_owned());
        }
        // SAFETY: every version of the struct starts with its version.
        let version = unsafe { (&raw const (*callbacks).version).read() };
        abi::check_version(version)?;
        // SAFETY: callbacks of this version have all fields.
        let callbacks = unsafe { CCallbacks::new(*callbacks) }?;
        // SAFETY: null, or a C string by the header.
        Ok(Box::new(match unsafe { load(options) }? {
            Loaded::Manager(manager, model) => {
                let layer = TensorLayer::new(callbacks, model);
                let thread = ManagerThread::spawn(*manager, None, layer);
                Manager::Serving(thread.map_err(|error| error.to_string())?)
            }
            Loaded::Rank(rank) => Manager::Rank(rank),
        }))
    };
    // SAFETY: by the header, `error` has room for the text.
    unsafe { created(catch_unwind(AssertUnwindSafe(create)), error) }
}

/// Loads the checkpoint of the JSON `options`, or begins to serve rank 0, which does.
///
/// # Safety
/// `options` must be null, or a C string.
unsafe fn load(options: *const c_char) -> Result<Loaded, String> {
    // SAFETY: the same contract as this function's.
    let options = unsafe { abi::read_text(options, "the options") }?;
    let loaded = || {
        let options = ManagerOptions::parse(options)?;
        Ok(match options.serve_rank()? {
            Some(rank) => Loaded::Rank(rank),
            None => {
                let (manager, model) = options.load()?;
                Loaded::Manager(Box::new(manager), model)
            }
        })
    };
    loaded().map_err(|error: LoadError| error.to_string())
}

/// The object for the application; null, with the reason in `error`, if there is none.
///
/// # Safety
/// `error` must be null, or valid for writes of the header's `INFLIGHT_BATCH_MANAGER_ERROR_SIZE` bytes.
unsafe fn created<T>(
    created: std::thread::Result<Result<Box<T>, String>>,
    error: *mut c_char,
) -> *mut T {
    match created.unwrap_or_else(|_| Err("the batch manager panicked".to_owned())) {
        Ok(object) => Box::into_raw(object),
        Err(reason) => {
            // SAFETY: the same contract as this function's.
            unsafe { abi::write_error(&reason, error) };
            std::ptr::null_mut()
        }
    }
}

/// Wakes a manager; see the header.
///
/// # Safety
/// `manager` must be null, or a live manager.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_wake(manager: *mut Manager) {
    // SAFETY: null, or a live manager.
    if let Some(Manager::Serving(manager)) = unsafe { manager.as_ref() } {
        manager.wake();
    }
}

/// Waits until a manager has no more requests, and frees it; see the header.
///
/// # Safety
/// `manager` must be null, or a live manager.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_join(manager: *mut Manager) -> i32 {
    // SAFETY: the same contract as this function's.
    unsafe { end(manager, ManagerThread::join) }
}

/// Closes and frees a manager; see the header.
///
/// # Safety
/// `manager` must be null, or a live manager.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_destroy(manager: *mut Manager) -> i32 {
    // SAFETY: the same contract as this function's.
    unsafe { end(manager, ManagerThread::close) }
}

/// # Safety
/// `manager` must be null, or a live manager.
unsafe fn end(manager: *mut Manager, end: fn(ManagerThread) -> Result<(), StepError>) -> i32 {
    if manager.is_null() {
        return 0;
    }
    // SAFETY: the pointer comes from `Box::into_raw`, and the caller gives up the manager.
    let manager = unsafe { Box::from_raw(manager) };
    let ended = catch_unwind(AssertUnwindSafe(|| match *manager {
        Manager::Serving(manager) => end(manager),
        Manager::Rank(rank) => rank.join(),
    }));
    i32::from(!matches!(ended, Ok(Ok(()))))
}

/// Adds a request; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_add(
    batch: *mut Batch,
    request: *const abi::Request,
    error: *mut c_char,
) -> i32 {
    let add = || -> Result<(), String> {
        // SAFETY: null, or valid during the call.
        let batch = unsafe { batch.as_mut() }.ok_or("the batch may not be NULL")?;
        // SAFETY: null, or valid during the call.
        let request = unsafe { request.as_ref() }.ok_or("the request may not be NULL")?;
        // SAFETY: its pointers are valid during the call.
        batch.0.push(unsafe { abi::read_request(request) }?);
        Ok(())
    };
    let added = catch_unwind(AssertUnwindSafe(add));
    match added.unwrap_or_else(|_| Err("reading the request panicked".to_owned())) {
        Ok(()) => 0,
        Err(reason) => {
            // SAFETY: null, or by the header with room for the text.
            unsafe { abi::write_error(&reason, error) };
            1
        }
    }
}

/// Adds a request to stop; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_stops_add(stops: *mut Stops, request_id: u64) {
    // SAFETY: null, or valid during the call.
    if let Some(stops) = unsafe { stops.as_mut() } {
        stops.0.push(SequenceId(request_id));
    }
}
