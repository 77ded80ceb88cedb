//! The types of the C header, and their conversion from C.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use inflight_base::{ClientId, SequenceId};
use inflight_manager::{HostTensor, HostTensors, TensorRequest, TensorType};

pub(crate) const VERSION: u32 = 4;
const ERROR_SIZE: usize = 512;
const MAX_DIMS: u32 = 8;
/// Maximum number of tensors in a request: more than there are known names.
const MAX_TENSORS: u64 = 256;

/// `inflight_tensor`
#[repr(C)]
pub struct CTensor {
    pub(crate) name: *const c_char,
    pub(crate) data_type: u32,
    pub(crate) num_dims: u32,
    pub(crate) shape: *const i64,
    pub(crate) data: *const c_void,
    pub(crate) num_bytes: u64,
}

/// `inflight_request`
#[repr(C)]
pub struct Request {
    request_id: u64,
    client_id: u64,
    has_client_id: u32,
    is_streaming: u32,
    tensors: *const CTensor,
    num_tensors: u64,
}

/// `inflight_callbacks`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Callbacks {
    pub(crate) version: u32,
    pub(crate) context: *mut c_void,
    pub(crate) get_requests: Option<unsafe extern "C" fn(*mut c_void, i32, *mut Batch) -> i32>,
    pub(crate) send_response:
        Option<unsafe extern "C" fn(*mut c_void, u64, *const CTensor, u64, i32, *const c_char)>,
    pub(crate) reject_duplicate: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    pub(crate) poll_stop_signals: Option<unsafe extern "C" fn(*mut c_void, *mut Stops)>,
    pub(crate) return_stats: Option<unsafe extern "C" fn(*mut c_void, *const c_char)>,
}

/// `inflight_batch`
#[derive(Default)]
pub struct Batch(pub(crate) Vec<TensorRequest>);

/// `inflight_stops`
#[derive(Default)]
pub struct Stops(pub(crate) Vec<SequenceId>);

/// `inflight_executor_options`
#[repr(C)]
pub struct ExecutorOptions {
    pub(crate) version: u32,
    pub(crate) manager: *const c_char,
    pub(crate) max_queue_size: u64,
    pub(crate) max_num_statistics: u64,
}

/// Copies a request.
///
/// # Errors
/// It violates the header.
///
/// # Safety
/// All pointers must be null, or valid for the number of elements that the request states.
pub(crate) unsafe fn read_request(request: &Request) -> Result<TensorRequest, String> {
    if request.num_tensors > MAX_TENSORS {
        let num_tensors = request.num_tensors;
        return Err(format!(
            "the request has {num_tensors} tensors, and may have at most {MAX_TENSORS}"
        ));
    }
    let num_tensors = request.num_tensors as usize;
    // SAFETY: null, or valid for `num_tensors` by this function's contract.
    let all = unsafe { elements(request.tensors, num_tensors) }
        .ok_or("the request's tensors are NULL or not aligned")?;
    let mut tensors = HostTensors::new();
    for tensor in all {
        // SAFETY: its pointers are valid by this function's contract.
        let (name, tensor) = unsafe { read_tensor(tensor) }?;
        if tensors.contains_key(&name) {
            return Err(format!("tensor '{name}' is given twice"));
        }
        tensors.insert(name, tensor);
    }
    Ok(TensorRequest {
        id: SequenceId(request.request_id),
        client_id: (request.has_client_id != 0).then_some(ClientId(request.client_id)),
        is_streaming: request.is_streaming != 0,
        tensors,
    })
}

/// Copies a tensor. Its size is checked first, so that a wrong number is neither read nor allocated.
///
/// # Safety
/// As for [`read_request`].
unsafe fn read_tensor(tensor: &CTensor) -> Result<(String, HostTensor), String> {
    if tensor.name.is_null() {
        return Err("a tensor's name is NULL".to_owned());
    }
    // SAFETY: not null, so a C string by this function's contract.
    let name = unsafe { CStr::from_ptr(tensor.name) };
    let name = name
        .to_str()
        .map_err(|error| format!("a tensor's name is not UTF-8: {error}"))?;
    let invalid = |reason: String| Err(format!("tensor '{name}' {reason}"));
    let known = TensorType::ALL.into_iter();
    let Some(data_type) = known.clone().find(|it| *it as u32 == tensor.data_type) else {
        return invalid(format!("has the unknown data_type {}", tensor.data_type));
    };
    if tensor.num_dims > MAX_DIMS {
        let num_dims = tensor.num_dims;
        return invalid(format!(
            "has {num_dims} dimensions, and may have at most {MAX_DIMS}"
        ));
    }
    // SAFETY: null, or valid for `num_dims` by this function's contract.
    let Some(shape) = (unsafe { elements(tensor.shape, tensor.num_dims as usize) }) else {
        return invalid("has a shape that is NULL or not aligned".to_owned());
    };
    let sizes = shape.iter().map(|&size| u64::try_from(size).ok());
    let one = Some(data_type.num_bytes() as u64);
    let num_bytes = sizes.fold(one, |product, size| product?.checked_mul(size?));
    if num_bytes != Some(tensor.num_bytes) {
        return invalid(format!(
            "has {} bytes, which does not match {} {shape:?}",
            tensor.num_bytes,
            data_type.name()
        ));
    }
    let num_bytes = usize::try_from(tensor.num_bytes).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(num_bytes).is_err() {
        return invalid(format!(
            "has {num_bytes} bytes, for which there is no memory"
        ));
    }
    // SAFETY: null, or valid for `num_bytes` by this function's contract; no more than a vector can have.
    let Some(data) = (unsafe { elements(tensor.data.cast::<u8>(), num_bytes) }) else {
        return invalid("has data that is NULL".to_owned());
    };
    bytes.extend_from_slice(data);
    let tensor = HostTensor {
        data_type,
        shape: shape.to_vec(),
        bytes,
    };
    Ok((name.to_owned(), tensor))
}

/// The elements at `first`, which may be null if there are none; `None` if it is null or not aligned.
///
/// # Safety
/// `first` must be null, or valid for `num` elements during `'a`, which have at most `isize::MAX` bytes.
unsafe fn elements<'a, T>(first: *const T, num: usize) -> Option<&'a [T]> {
    if num == 0 {
        return Some(&[]);
    }
    if first.is_null() || !first.is_aligned() {
        return None;
    }
    // SAFETY: not null, aligned, and valid by this function's contract.
    Some(unsafe { slice::from_raw_parts(first, num) })
}

/// The text at `text`.
///
/// # Errors
/// It is null, or not UTF-8; `name` says what it is.
///
/// # Safety
/// `text` must be null, or a C string during `'a`.
pub(crate) unsafe fn read_text<'a>(text: *const c_char, name: &str) -> Result<&'a str, String> {
    if text.is_null() {
        return Err(format!("{name} may not be NULL"));
    }
    // SAFETY: not null, so a C string by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|error| format!("{name} is not UTF-8: {error}"))
}

/// Checks that the application was built for this version of the header.
///
/// # Errors
/// It was built for another one.
pub(crate) fn check_version(version: u32) -> Result<(), String> {
    if version == VERSION {
        return Ok(());
    }
    Err(format!(
        "the application was built for version {version} of inflight_batch_manager.h, but this library has version \
         {VERSION}; rebuild the application"
    ))
}

/// Writes `text` to `error`, truncated to fit.
///
/// # Safety
/// `error` must be null, or valid for writes of `ERROR_SIZE` bytes.
pub(crate) unsafe fn write_error(text: &str, error: *mut c_char) {
    if error.is_null() {
        return;
    }
    let mut end = text.len().min(ERROR_SIZE - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: the buffer has room for the text and its terminating zero.
    unsafe {
        error.copy_from_nonoverlapping(text.as_ptr().cast(), end);
        error.add(end).write(0);
    }
}
