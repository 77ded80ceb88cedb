//! The header's types, and what is read from them.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use triton_inflight::base::{ClientId, SequenceId};
use triton_inflight::manager::{HostTensor, HostTensors, TensorRequest, TensorType};

pub(crate) const VERSION: u32 = 1;
const ERROR_SIZE: usize = 512;
const MAX_DIMS: u32 = 8;
/// More than a request can have by name.
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

/// Copies a request; `None` if it is not what the header says.
///
/// # Safety
/// Its pointers are good, and of as many elements as it says.
pub(crate) unsafe fn read_request(request: &Request) -> Option<TensorRequest> {
    let has_tensors = request.num_tensors > 0;
    if request.num_tensors > MAX_TENSORS || has_tensors && request.tensors.is_null() {
        return None;
    }
    let mut tensors = HostTensors::new();
    if has_tensors {
        // SAFETY: there are so many.
        let all = unsafe { slice::from_raw_parts(request.tensors, request.num_tensors as usize) };
        for tensor in all {
            // SAFETY: its pointers are good.
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
/// As [`read_request`].
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
    // SAFETY: it is a C string.
    let name = unsafe { CStr::from_ptr(tensor.name) }.to_str().ok()?;
    let shape = match tensor.num_dims {
        0 => Vec::new(),
        // SAFETY: there are so many.
        num => unsafe { slice::from_raw_parts(tensor.shape, num as usize) }.to_vec(),
    };
    let bytes = match num_bytes {
        0 => Vec::new(),
        // SAFETY: there are so many.
        _ => unsafe { slice::from_raw_parts(tensor.data.cast::<u8>(), num_bytes) }.to_vec(),
    };
    let tensor = HostTensor {
        data_type,
        shape,
        bytes,
    };
    Some((name.to_owned(), tensor))
}

/// Writes a text that is cut where there is no more room.
///
/// # Safety
/// `error` is null, or has room for `ERROR_SIZE` bytes.
pub(crate) unsafe fn write_error(text: &str, error: *mut c_char) {
    if error.is_null() {
        return;
    }
    let mut end = text.len().min(ERROR_SIZE - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: there is room for it and the zero behind it, and it is ours.
    unsafe {
        error.copy_from_nonoverlapping(text.as_ptr().cast(), end);
        error.add(end).write(0);
    }
}
