//! The few declarations of `tritonbackend.h` and `tritonserver.h` that a batch strategy needs. The server that opens
//! the library has these functions.

use std::ffi::{c_char, c_void};

/// An object of Triton's.
pub type Object = *mut c_void;

/// `TRITONSERVER_ERROR_INVALID_ARG`.
pub const INVALID_ARG: u32 = 3;

unsafe extern "C" {
    pub fn TRITONSERVER_ErrorNew(code: u32, message: *const c_char) -> Object;
    pub fn TRITONSERVER_ErrorDelete(error: Object);
    pub fn TRITONSERVER_MessageSerializeToJson(
        message: Object,
        json: *mut *const c_char,
        num_bytes: *mut usize,
    ) -> Object;
    pub fn TRITONSERVER_MessageDelete(message: Object) -> Object;
    pub fn TRITONBACKEND_ModelConfig(model: Object, version: u32, config: *mut Object) -> Object;
    pub fn TRITONBACKEND_RequestInputCount(request: Object, count: *mut u32) -> Object;
    pub fn TRITONBACKEND_RequestInputByIndex(
        request: Object,
        index: u32,
        input: *mut Object,
    ) -> Object;
    pub fn TRITONBACKEND_InputProperties(
        input: Object,
        name: *mut *const c_char,
        data_type: *mut u32,
        shape: *mut *const i64,
        num_dims: *mut u32,
        num_bytes: *mut u64,
        num_buffers: *mut u32,
    ) -> Object;
}
