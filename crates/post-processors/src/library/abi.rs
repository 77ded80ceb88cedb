//! Rust types of `include/inflight_logits_processor.h`, which documents the fields.

use std::ffi::{CStr, c_char, c_void};

pub(super) const ABI_VERSION: u32 = 2;
pub(super) const ERROR_SIZE: usize = 512;
pub(super) const MAX_PROCESSORS: u32 = 1024;
/// Name of the function that a library exports.
pub(super) const ENTRY_POINT: &CStr = c"inflight_get_logits_processors";

#[repr(C)]
pub(super) struct Request {
    pub request_id: u64,
    pub client_request_id: *const c_char,
    pub client_id: u64,
    pub has_client_id: u32,
    pub vocab_size: u32,
    pub arguments: *const c_char,
}

#[repr(C)]
pub(super) struct Entry {
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

pub(super) type CreateFn =
    unsafe extern "C" fn(*mut c_void, *const Request, *mut *mut c_void, *mut c_char) -> i32;
pub(super) type DestroyFn = unsafe extern "C" fn(*mut c_void, *mut c_void);
pub(super) type ProcessFn = unsafe extern "C" fn(*mut c_void, *mut Entry) -> i32;
pub(super) type ProcessBatchFn = unsafe extern "C" fn(*mut c_void, *mut Entry, usize);

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Processor {
    pub name: *const c_char,
    pub context: *mut c_void,
    pub create: Option<CreateFn>,
    pub destroy: Option<DestroyFn>,
    pub process: Option<ProcessFn>,
    pub process_batch: Option<ProcessBatchFn>,
}

#[repr(C)]
pub(super) struct Table {
    pub abi_version: u32,
    pub num_processors: u32,
    pub processors: *const Processor,
}

pub(super) type GetTable = unsafe extern "C" fn() -> *const Table;

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::mem::{offset_of, size_of};
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Lets the C compiler compare the header with the types of this file.
    #[test]
    fn types_match_the_c_header() {
        let mut source = String::from("#include \"inflight_logits_processor.h\"\n");
        let mut equal = |left: String, right: usize| {
            let _ = writeln!(source, "_Static_assert({left} == {right}, \"{left}\");");
        };
        equal("INFLIGHT_LOGITS_ABI_VERSION".into(), ABI_VERSION as usize);
        equal("INFLIGHT_LOGITS_ERROR_SIZE".into(), ERROR_SIZE);
        macro_rules! compare {
            ($rust:ident $c:literal: $($field:ident)*) => {
                equal(format!("sizeof({})", $c), size_of::<$rust>());
                $(equal(
                    format!("offsetof({}, {})", $c, stringify!($field)),
                    offset_of!($rust, $field),
                );)*
            };
        }
        compare!(Request "inflight_logits_request": request_id client_request_id client_id has_client_id
            vocab_size arguments);
        compare!(Entry "inflight_logits_entry": request_id client_request_id client_id has_client_id beam
            num_prompt_tokens num_tokens
            vocab_size tokens logits stream state error status);
        compare!(Processor "inflight_logits_processor": name context create destroy process process_batch);
        compare!(Table "inflight_logits_table": abi_version num_processors processors);
        let name = ENTRY_POINT.to_str().expect("ASCII");
        let _ = writeln!(
            source,
            "const inflight_logits_table *(*entry)(void) = {name};"
        );
        let folder = std::env::temp_dir().join(format!("inflight-abi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("abi.c");
        std::fs::write(&file, &source).expect("a file");
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include");
        let output = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"])
            .arg("-fsyntax-only")
            .arg("-I")
            .args([&include, &file])
            .output()
            .expect("a C compiler");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        std::fs::remove_dir_all(&folder).expect("it was made here");
    }
}
