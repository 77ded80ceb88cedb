//! Responses in the header's form.

use std::ffi::{CString, c_char};

use inflight_manager::{HostTensors, TensorResponse};

use crate::abi::CTensor;

/// The tensors of a response, described for C. They stay where they are: the descriptions point into them.
pub(crate) struct BorrowedTensors {
    described: Vec<CTensor>,
    /// What the descriptions' names point to.
    _names: Vec<CString>,
}

impl BorrowedTensors {
    /// Describes `tensors`, which must outlive the use of the descriptions.
    pub(crate) fn of(tensors: &HostTensors) -> Self {
        let names: Vec<_> = tensors.keys().map(|name| c_text(name)).collect();
        let describe = |(name, tensor): (&CString, &_)| describe(name, tensor);
        Self {
            described: names.iter().zip(tensors.values()).map(describe).collect(),
            _names: names,
        }
    }

    pub(crate) fn as_ptr(&self) -> *const CTensor {
        self.described.as_ptr()
    }

    pub(crate) fn len(&self) -> u64 {
        self.described.len() as u64
    }
}

fn describe(name: &CString, tensor: &inflight_manager::HostTensor) -> CTensor {
    CTensor {
        name: name.as_ptr(),
        data_type: tensor.data_type as u32,
        num_dims: tensor.shape.len() as u32,
        shape: tensor.shape.as_ptr(),
        data: tensor.bytes.as_ptr().cast(),
        num_bytes: tensor.bytes.len() as u64,
    }
}

/// `inflight_response`
#[repr(C)]
pub struct Response {
    request_id: u64,
    tensors: *const CTensor,
    num_tensors: u64,
    is_final: i32,
    error: *const c_char,
}

/// `inflight_responses`: the two fields of the header, and what they point to.
#[repr(C)]
pub struct Responses {
    responses: *const Response,
    num_responses: u64,
    _described: Vec<Response>,
    _parts: Vec<(BorrowedTensors, CString, TensorResponse)>,
}

impl Responses {
    /// Keeps `responses` for the application. Moving the result moves none of what the pointers point to: all of it is
    /// in vectors.
    pub(crate) fn new(responses: Vec<TensorResponse>) -> Self {
        let part = |response: TensorResponse| {
            let tensors = BorrowedTensors::of(&response.tensors);
            (tensors, c_text(&response.error), response)
        };
        let parts: Vec<_> = responses.into_iter().map(part).collect();
        let describe =
            |(tensors, error, response): &(BorrowedTensors, CString, TensorResponse)| Response {
                request_id: response.id.0,
                tensors: tensors.as_ptr(),
                num_tensors: tensors.len(),
                is_final: response.is_final.into(),
                error: error.as_ptr(),
            };
        let described: Vec<_> = parts.iter().map(describe).collect();
        Self {
            responses: described.as_ptr(),
            num_responses: described.len() as u64,
            _described: described,
            _parts: parts,
        }
    }
}

/// A C string of `text` without its zero bytes.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes = text.bytes().filter(|byte| *byte != 0);
    CString::new(bytes.collect::<Vec<_>>()).unwrap_or_default()
}
