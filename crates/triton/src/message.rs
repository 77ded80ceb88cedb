//! A JSON document that Triton holds.

use std::ffi::{CStr, c_char};
use std::ptr::{self, NonNull};
use std::slice;

use super::error::{check, get_object};
use super::{Error, sys};

/// A message that we own.
pub(super) struct Message(NonNull<sys::TRITONSERVER_Message>);

impl Message {
    /// Takes ownership of a message.
    ///
    /// # Safety
    /// `raw` is a message that nobody else deletes.
    pub(super) unsafe fn from_raw(raw: NonNull<sys::TRITONSERVER_Message>) -> Self {
        Self(raw)
    }

    /// A message with this JSON text; an error if Triton cannot parse it.
    pub(super) fn from_json(json: &str) -> Result<Self, Error> {
        let base = json.as_ptr().cast::<c_char>();
        // SAFETY: base and length describe `json`, which Triton copies; the message is ours.
        unsafe {
            get_object(|out| sys::TRITONSERVER_MessageNewFromSerializedJson(out, base, json.len()))
        }
        .map(Self)
    }

    /// The JSON text.
    pub(super) fn to_json(&self) -> Result<String, Error> {
        let mut base: *const c_char = ptr::null();
        let mut byte_size = 0;
        // SAFETY: the message is ours; the text belongs to it and is copied below.
        unsafe {
            check(sys::TRITONSERVER_MessageSerializeToJson(
                self.as_ptr(),
                &raw mut base,
                &raw mut byte_size,
            ))
        }?;
        if base.is_null() {
            return Ok(String::new());
        }
        // SAFETY: Triton says that `byte_size` bytes stand at `base`.
        let bytes = unsafe { slice::from_raw_parts(base.cast::<u8>(), byte_size) };
        // Some messages count their terminator and some do not.
        let bytes = CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes);
        String::from_utf8(bytes.to_vec())
            .map_err(|_| Error::internal("a message of Triton's is not valid UTF-8"))
    }

    pub(super) fn as_ptr(&self) -> *mut sys::TRITONSERVER_Message {
        self.0.as_ptr()
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: the message is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_MessageDelete(self.0.as_ptr())) };
    }
}
