//! `include/inflight_batch_manager.h`: the batch manager with callbacks in C. What everything is stands there.
//!
//! ```text
//! abi.rs          the header's types
//! callbacks.rs    an application's functions as `TensorCallbacks`
//! lib.rs          the exported functions
//! ```

mod abi;
mod callbacks;

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use triton_inflight::manager::{ManagerOptions, ManagerThread, TensorLayer};

use abi::{Batch, Stops};
use callbacks::CCallbacks;

/// A manager that serves an application.
pub struct Manager(ManagerThread);

/// Makes a manager, see the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_create(
    options: *const c_char,
    callbacks: *const abi::Callbacks,
    error: *mut c_char,
) -> *mut Manager {
    let create = || -> Result<Box<Manager>, String> {
        if options.is_null() || callbacks.is_null() {
            return Err("options and callbacks may not be NULL".to_owned());
        }
        // SAFETY: it is a C string.
        let options = unsafe { CStr::from_ptr(options) };
        // SAFETY: all versions begin with their version.
        let version = unsafe { (&raw const (*callbacks).version).read() };
        if version != abi::VERSION {
            return Err(format!(
                "the application was made for version {version} of inflight_batch_manager.h, and this is \
                 version {}; compile it anew",
                abi::VERSION
            ));
        }
        // SAFETY: callbacks of this version have all the fields.
        let callbacks = unsafe { CCallbacks::new(*callbacks) }?;
        let options = options.to_str().map_err(|error| error.to_string())?;
        let options = ManagerOptions::parse(options).map_err(|error| error.to_string())?;
        let (manager, model) = options.load().map_err(|error| error.to_string())?;
        let layer = TensorLayer::new(callbacks, model);
        let thread = ManagerThread::spawn(manager, None, layer);
        let thread = thread.map_err(|error| error.to_string())?;
        Ok(Box::new(Manager(thread)))
    };
    let created =
        catch_unwind(AssertUnwindSafe(create)).unwrap_or_else(|_| Err("it panicked".to_owned()));
    match created {
        Ok(manager) => Box::into_raw(manager),
        Err(reason) => {
            // SAFETY: it has room for as many bytes.
            unsafe { abi::write_error(&reason, error) };
            std::ptr::null_mut()
        }
    }
}

/// Wakes a manager, see the header.
///
/// # Safety
/// `manager` is one that was created and not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_wake(manager: *mut Manager) {
    // SAFETY: it is null, or alive.
    if let Some(manager) = unsafe { manager.as_ref() } {
        manager.0.wake();
    }
}

/// Waits for a manager whose application has no more requests, see the header.
///
/// # Safety
/// `manager` is null, or one that was created and neither joined nor destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_join(manager: *mut Manager) -> i32 {
    // SAFETY: as this function's.
    unsafe { end(manager, ManagerThread::join) }
}

/// Ends a manager, see the header.
///
/// # Safety
/// `manager` is null, or one that was created and neither joined nor destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_manager_destroy(manager: *mut Manager) -> i32 {
    // SAFETY: as this function's.
    unsafe { end(manager, ManagerThread::close) }
}

/// # Safety
/// `manager` is null, or one that was created and not ended.
unsafe fn end(
    manager: *mut Manager,
    end: fn(ManagerThread) -> Result<(), triton_inflight::base::StepError>,
) -> i32 {
    if manager.is_null() {
        return 0;
    }
    // SAFETY: it was made by `Box::into_raw`, and nobody uses it after this.
    let manager = unsafe { Box::from_raw(manager) };
    let ended = catch_unwind(AssertUnwindSafe(|| end(manager.0)));
    i32::from(!matches!(ended, Ok(Ok(()))))
}

/// Adds a request, see the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_batch_add(
    batch: *mut Batch,
    request: *const abi::Request,
) -> i32 {
    // SAFETY: each is null, or good for the call.
    let (Some(batch), Some(request)) = (unsafe { batch.as_mut() }, unsafe { request.as_ref() })
    else {
        return 1;
    };
    // SAFETY: its pointers are good for the call.
    match catch_unwind(AssertUnwindSafe(|| unsafe { abi::read_request(request) })) {
        Ok(Some(request)) => {
            batch.0.push(request);
            0
        }
        _ => 1,
    }
}

/// Adds a request that is to be stopped, see the header.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_stops_add(stops: *mut Stops, request_id: u64) {
    // SAFETY: it is null, or good for the call.
    if let Some(stops) = unsafe { stops.as_mut() } {
        stops.0.push(triton_inflight::base::SequenceId(request_id));
    }
}
