//! Batches by total volume: a batch ends before the request with which its inputs would have more than
//! `MAX_BATCH_VOLUME_BYTES` bytes, a parameter of the model's config.pbtxt. See README.md.
//!
//! Triton calls the five functions at the end of this file. It holds the lock of the model's queue while it forms a
//! batch, so a strategy must neither wait nor compute much.

mod abi;

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

use abi::Object;
use serde_json::Value;

/// What all batches of a model share.
struct Batcher {
    max_bytes: u64,
}

/// The batch that is being formed.
struct Batch {
    max_bytes: u64,
    num_bytes: u64,
    num_requests: usize,
}

impl Batcher {
    /// The batcher of a model with this configuration.
    fn new(config: &Value) -> Result<Self, String> {
        let given = config
            .pointer("/parameters/MAX_BATCH_VOLUME_BYTES/string_value")
            .and_then(Value::as_str)
            .ok_or("the batch strategy needs the parameter MAX_BATCH_VOLUME_BYTES")?;
        match given.trim().parse() {
            Ok(max_bytes) if max_bytes > 0 => Ok(Self { max_bytes }),
            _ => Err(format!(
                "MAX_BATCH_VOLUME_BYTES is '{given}', not a number of bytes, 1 or above"
            )),
        }
    }
}

impl Batch {
    /// Whether a request of this size joins. The first always does: Triton would ask about it again and again.
    fn includes(&mut self, num_bytes: u64) -> bool {
        let total = self.num_bytes.saturating_add(num_bytes);
        let fits = self.num_requests == 0 || total <= self.max_bytes;
        if fits {
            self.num_bytes = total;
            self.num_requests += 1;
        }
        fits
    }
}

/// The configuration of a model.
///
/// # Safety
/// The model is alive.
unsafe fn config_of(model: Object) -> Result<Value, String> {
    let (mut message, mut json, mut num_bytes) = (ptr::null_mut(), ptr::null(), 0);
    // SAFETY: the model is alive. The text belongs to the message, which is deleted after the text was read.
    unsafe {
        check(abi::TRITONBACKEND_ModelConfig(model, 1, &raw mut message))?;
        let serialised =
            abi::TRITONSERVER_MessageSerializeToJson(message, &raw mut json, &raw mut num_bytes);
        let config = check(serialised).and_then(|()| {
            let text = slice::from_raw_parts(json.cast(), num_bytes);
            serde_json::from_slice(text).map_err(|error| error.to_string())
        });
        check(abi::TRITONSERVER_MessageDelete(message))?;
        config
    }
}

/// Bytes of all inputs of a request.
///
/// # Safety
/// The request is alive.
unsafe fn volume_of(request: Object) -> Result<u64, String> {
    let mut count = 0;
    // SAFETY: the request is alive.
    check(unsafe { abi::TRITONBACKEND_RequestInputCount(request, &raw mut count) })?;
    let mut volume = 0u64;
    for index in 0..count {
        let (mut input, mut num_bytes) = (ptr::null_mut(), 0);
        // SAFETY: the request has this input. Properties that are not wanted may be null.
        unsafe {
            check(abi::TRITONBACKEND_RequestInputByIndex(
                request,
                index,
                &raw mut input,
            ))?;
            check(abi::TRITONBACKEND_InputProperties(
                input,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                &raw mut num_bytes,
                ptr::null_mut(),
            ))?;
        }
        volume = volume.saturating_add(num_bytes);
    }
    Ok(volume)
}

/// Deletes an error of Triton's.
fn check(error: Object) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: whoever gets an error deletes it.
    unsafe { abi::TRITONSERVER_ErrorDelete(error) };
    Err("Triton refused a call of the batch strategy".to_owned())
}

/// Runs the body of one of the functions. An error, or a panic, becomes an error of Triton's.
fn guarded(body: impl FnOnce() -> Result<(), String>) -> Object {
    let outcome = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err("the batch strategy panicked".to_owned()));
    let Err(message) = outcome else {
        return ptr::null_mut();
    };
    let message = CString::new(message).unwrap_or_default();
    // SAFETY: the message is alive during the call.
    unsafe { abi::TRITONSERVER_ErrorNew(abi::INVALID_ARG, message.as_ptr()) }
}

/// A model is loaded. An error here fails the load.
///
/// # Safety
/// For tritonserver alone, as tritonbackend.h says; so are all of these.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatcherInitialize(
    batcher: *mut *mut c_void,
    model: Object,
) -> Object {
    guarded(|| {
        // SAFETY: the model is alive.
        let made = Batcher::new(&unsafe { config_of(model) }?)?;
        // SAFETY: it points to a variable.
        unsafe { batcher.write(Box::into_raw(Box::new(made)).cast()) };
        Ok(())
    })
}

/// The model is unloaded.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatcherFinalize(batcher: *mut c_void) -> Object {
    guarded(|| {
        if !batcher.is_null() {
            // SAFETY: it came out of a box, and Triton passes it only once.
            drop(unsafe { Box::from_raw(batcher.cast::<Batcher>()) });
        }
        Ok(())
    })
}

/// A batch begins.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchInitialize(
    batcher: *const c_void,
    batch: *mut *mut c_void,
) -> Object {
    guarded(|| {
        // SAFETY: null while the model is unloaded, or what was made for the model.
        let Some(batcher) = (unsafe { batcher.cast::<Batcher>().as_ref() }) else {
            return Ok(());
        };
        let made = Batch {
            max_bytes: batcher.max_bytes,
            num_bytes: 0,
            num_requests: 0,
        };
        // SAFETY: it points to a variable.
        unsafe { batch.write(Box::into_raw(Box::new(made)).cast()) };
        Ok(())
    })
}

/// Whether a request joins the batch; otherwise the batch is sent without it.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchIncludeRequest(
    request: Object,
    batch: *mut c_void,
    includes: *mut bool,
) -> Object {
    guarded(|| {
        // SAFETY: it points to a variable.
        unsafe { includes.write(true) };
        // SAFETY: null, or the batch that began last.
        if let Some(batch) = unsafe { batch.cast::<Batch>().as_mut() } {
            // SAFETY: the request is alive, and the variable as above.
            unsafe { includes.write(batch.includes(volume_of(request)?)) };
        }
        Ok(())
    })
}

/// A batch is sent or given up.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchFinalize(batch: *mut c_void) -> Object {
    guarded(|| {
        if !batch.is_null() {
            // SAFETY: it came out of a box, and Triton passes it only once.
            drop(unsafe { Box::from_raw(batch.cast::<Batch>()) });
        }
        Ok(())
    })
}
