//! The types of the C header, and their conversion from C.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use triton_inflight::base::{ClientId, SequenceId};
use triton_inflight::manager::{HostTensor, HostTensors, TensorRequest, TensorType};

pub(crate) const VERSION: u32 = 1;
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

/// Copies a request. Returns None if it violates the header.
///
/// # Safety
/// All pointers must be null, or valid for the number of elements that the request states.
pub(crate) unsafe fn read_request(request: &Request) -> Option<TensorRequest> {
    let has_tensors = request.num_tensors > 0;
    if request.num_tensors > MAX_TENSORS || has_tensors && request.tensors.is_null() {
        return None;
    }
    let mut tensors = HostTensors::new();
    if has_tensors {
        // SAFETY: not null, and valid for `num_tensors` by this function's contract.
        let all = unsafe { slice::from_raw_parts(request.tensors, request.num_tensors as usize) };
        for tensor in all {
            // SAFETY: its pointers are valid by this function's contract.
            let (name, tensor) = unsafe { read_tensor(tensor) }?;
            if tensors.insert(name, tensor).is_some() {
                return None;
            }
        }
    }
    Some(TensorRequest {
        id: SequenceId(request.request_id),
        client_id: (request.has_client_id != 0).then_some(ClientId(request.client_id)),
        is_streaming: request.is_streaming != 0,
        tensors,
    })
}

/// # Safety
/// As for [`read_request`].
unsafe fn read_tensor(tensor: &CTensor) -> Option<(String, HostTensor)> {
    let data_type = TensorType::ALL
        .into_iter()
        .find(|data_type| *data_type as u32 == tensor.data_type)?;
    let num_bytes = usize::try_from(tensor.num_bytes).ok()?;
    let is_invalid = tensor.num_dims > 0 && tensor.shape.is_null()
        || num_bytes > 0 && tensor.data.is_null()
        || num_bytes > isize::MAX as usize;
    if tensor.name.is_null() || tensor.num_dims > MAX_DIMS || is_invalid {
        return None;
    }
    // SAFETY: not null, so a C string by this function's contract.
    let name = unsafe { CStr::from_ptr(tensor.name) }.to_str().ok()?;
    let shape = match tensor.num_dims {
        0 => Vec::new(),
        // SAFETY: not null, and valid for `num_dims` by this function's contract.
        num => unsafe { slice::from_raw_parts(tensor.shape, num as usize) }.to_vec(),
    };
    let bytes = match num_bytes {
        0 => Vec::new(),
        // SAFETY: not null, and valid for `num_bytes` by this function's contract.
        _ => unsafe { slice::from_raw_parts(tensor.data.cast::<u8>(), num_bytes) }.to_vec(),
    };
    let tensor = HostTensor {
        data_type,
        shape,
        bytes,
    };
    Some((name.to_owned(), tensor))
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
