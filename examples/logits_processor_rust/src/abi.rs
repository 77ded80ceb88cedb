//! `include/inflight_logits_processor.h` as Rust types; the header documents the fields.

use std::ffi::{c_char, c_void};

pub const ABI_VERSION: u32 = 2;
pub const ERROR_SIZE: usize = 512;

#[repr(C)]
pub struct Request {
    pub request_id: u64,
    pub client_request_id: *const c_char,
    pub client_id: u64,
    pub has_client_id: u32,
    pub vocab_size: u32,
    pub arguments: *const c_char,
}

#[repr(C)]
pub struct Entry {
    pub request_id: u64,
    pub client_request_id: *const c_char,
    pub client_id: u64,
    pub has_client_id: u32,
    pub beam: u32,
    pub num_prompt_tokens: u32,
    pub num_tokens: u32,
    pub vocab_size: u32,
    pub tokens: *const u32,
    pub logits: *mut f32,
    pub stream: *mut c_void,
    pub state: *mut c_void,
    pub error: *mut c_char,
    pub status: i32,
}

#[repr(C)]
pub struct Processor {
    pub name: *const c_char,
    pub context: *mut c_void,
    pub create: Option<
        unsafe extern "C" fn(*mut c_void, *const Request, *mut *mut c_void, *mut c_char) -> i32,
    >,
    pub destroy: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    pub process: Option<unsafe extern "C" fn(*mut c_void, *mut Entry) -> i32>,
    pub process_batch: Option<unsafe extern "C" fn(*mut c_void, *mut Entry, usize)>,
}

// SAFETY: the pointers refer to constants.
unsafe impl Sync for Processor {}

#[repr(C)]
pub struct Table {
    pub abi_version: u32,
    pub num_processors: u32,
    pub processors: *const Processor,
}

// SAFETY: the pointers refer to constants.
unsafe impl Sync for Table {}
