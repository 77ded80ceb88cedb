//! Triton's description of a piece of memory.

use std::ptr::NonNull;

use super::error::{check, get_object};
use super::{Error, sys};

/// An amount of system memory in Triton's form.
pub(super) struct SystemMemory(NonNull<sys::TRITONSERVER_BufferAttributes>);

impl SystemMemory {
    pub fn new(bytes: usize) -> Result<Self, Error> {
        let kind = sys::TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_CPU;
        // SAFETY: the object that is made is ours.
        let this = Self(unsafe { get_object(|out| sys::TRITONSERVER_BufferAttributesNew(out)) }?);
        let raw = this.as_ptr();
        // SAFETY: the object is alive.
        unsafe { check(sys::TRITONSERVER_BufferAttributesSetMemoryType(raw, kind)) }?;
        // SAFETY: as above.
        unsafe { check(sys::TRITONSERVER_BufferAttributesSetMemoryTypeId(raw, 0)) }?;
        // SAFETY: as above.
        unsafe { check(sys::TRITONSERVER_BufferAttributesSetByteSize(raw, bytes)) }?;
        Ok(this)
    }

    pub fn as_ptr(&self) -> *mut sys::TRITONSERVER_BufferAttributes {
        self.0.as_ptr()
    }
}

impl Drop for SystemMemory {
    fn drop(&mut self) {
        // SAFETY: the object is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_BufferAttributesDelete(self.as_ptr())) };
    }
}
