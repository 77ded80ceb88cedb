//! Pinned host memory for blocks of the KV cache and snapshots of recurrent states that the device has given up.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result};

use super::memory::{DeviceSpan, PinnedMemory};
use inflight_base::LoadError;

/// Copies of equally many bytes each, `[num_copies]` of what is in several places on the device, one place after the
/// other. The GPU reads and writes them on its own, in the order of the stream.
pub struct HostCopies {
    stream: Arc<CudaStream>,
    /// `None` if there are no copies.
    memory: Option<PinnedMemory<u8>>,
    bytes_per_copy: usize,
    num_copies: usize,
}

impl HostCopies {
    /// Reserves `num_copies` copies.
    ///
    /// # Errors
    ///
    /// There is not enough memory that can be pinned.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        bytes_per_copy: usize,
        num_copies: usize,
    ) -> Result<Self, LoadError> {
        let num_bytes = num_copies.saturating_mul(bytes_per_copy);
        let reserve = || PinnedMemory::sized_by(stream, num_bytes, "kv_cache_host_memory_bytes");
        Ok(Self {
            stream: stream.clone(),
            memory: (num_bytes > 0).then(reserve).transpose()?,
            bytes_per_copy,
            num_copies,
        })
    }

    /// Copies these places to a copy, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// There is no such copy, or the places have more bytes.
    pub(super) fn offload(
        &mut self,
        sources: impl Iterator<Item = DeviceSpan>,
        target: usize,
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        for (span, bytes) in self.places(target, sources) {
            // SAFETY: both ranges are inside memory that is reserved for them. The memory of the host lives until the
            // stream has been waited for (`drop`), and nobody else looks at it before.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(self.at(bytes), span.num_bytes);
                result::memcpy_dtoh_async(bytes, span.address, self.stream.cu_stream())?;
            }
        }
        Ok(())
    }

    /// Copies one of them back to these places on the device, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// There is no such copy, or the places have more bytes.
    pub(super) fn onboard(
        &self,
        source: usize,
        targets: impl Iterator<Item = DeviceSpan>,
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        for (span, bytes) in self.places(source, targets) {
            // SAFETY: as in `offload`.
            unsafe {
                let bytes = std::slice::from_raw_parts(self.at(bytes), span.num_bytes);
                result::memcpy_htod_async(span.address, bytes, self.stream.cu_stream())?;
            }
        }
        Ok(())
    }

    /// The bytes of a copy, once the stream's work is done.
    ///
    /// # Errors
    ///
    /// The driver reports an error.
    ///
    /// # Panics
    ///
    /// There is no such copy.
    pub(super) fn bytes_mut(&mut self, copy: usize) -> Result<&mut [u8], DriverError> {
        self.stream.synchronize()?;
        let address = self.at(self.bytes_of(copy));
        // SAFETY: the range is inside memory that is borrowed as a whole, was zeroed at first, and has no copy on its
        // way.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, self.bytes_per_copy) })
    }

    /// These places of the device, each with the range of its bytes in a copy.
    fn places(
        &self,
        copy: usize,
        spans: impl Iterator<Item = DeviceSpan>,
    ) -> impl Iterator<Item = (DeviceSpan, Range<usize>)> {
        let Range { mut start, end } = self.bytes_of(copy);
        spans.map(move |span| {
            let bytes = start..start + span.num_bytes;
            start = bytes.end;
            assert!(start <= end, "a copy has {} bytes", self.bytes_per_copy);
            (span, bytes)
        })
    }

    fn bytes_of(&self, copy: usize) -> Range<usize> {
        assert!(copy < self.num_copies, "copy {copy} of {}", self.num_copies);
        copy * self.bytes_per_copy..(copy + 1) * self.bytes_per_copy
    }

    /// The address of some bytes.
    fn at(&self, bytes: Range<usize>) -> *mut u8 {
        let memory = self.memory.as_ref();
        memory.expect("a copy has bytes").address_of(bytes)
    }
}

impl Drop for HostCopies {
    /// The GPU may still write to the memory, which is freed next. If the device is lost, it does not.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}
