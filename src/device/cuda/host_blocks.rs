//! Blocks that the pool gave up, in pinned memory of the host.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result};

use super::kv_cache::KvCache;
use crate::base::{BlockId, HostBlockId, LoadError};

/// Copies of blocks, `[num_blocks]` of what a block has in each array of each layer, one after the other. The GPU reads
/// and writes them on its own, in the order of the stream.
pub struct HostBlocks {
    stream: Arc<CudaStream>,
    /// `None` if there are no blocks.
    address: Option<std::ptr::NonNull<u8>>,
    num_bytes: usize,
    bytes_per_block: usize,
}

// SAFETY: the memory belongs to this value, and no thread keeps it to itself.
unsafe impl Send for HostBlocks {}

impl HostBlocks {
    /// Reserves `num_blocks` blocks of the shape of those of `cache`.
    ///
    /// # Errors
    ///
    /// There is not enough memory that can be pinned.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        cache: &KvCache,
        num_blocks: usize,
    ) -> Result<Self, LoadError> {
        let bytes_per_block = cache.spans(BlockId(0)).map(|span| span.len()).sum();
        let num_bytes = num_blocks.saturating_mul(bytes_per_block);
        let mut blocks = Self {
            stream: stream.clone(),
            address: None,
            num_bytes: 0,
            bytes_per_block,
        };
        if num_bytes == 0 {
            return Ok(blocks);
        }
        let reserve = || {
            stream.context().bind_to_thread()?;
            // SAFETY: a new allocation, which is freed once, when it is dropped.
            unsafe { result::malloc_host(num_bytes, 0) }
        };
        let address = reserve().map_err(|error: DriverError| {
            LoadError::Resource(format!(
                "no {num_bytes} bytes of pinned host memory ({error}): lower kv_cache_host_memory_bytes"
            ))
        })?;
        blocks.address = std::ptr::NonNull::new(address.cast());
        blocks.num_bytes = num_bytes;
        Ok(blocks)
    }

    /// Copies a block of `cache` to one of these, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// There is no such block in either.
    pub(super) fn offload(
        &mut self,
        cache: &KvCache,
        source: BlockId,
        target: HostBlockId,
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        let mut offset = self.offset(target);
        for span in cache.spans(source) {
            let bytes = self.at(offset..offset + span.len());
            // SAFETY: both ranges are inside memory that is reserved for blocks. The memory of the host lives until the
            // stream has been waited for (`drop`), and nobody else looks at it before.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(bytes, span.len());
                result::memcpy_dtoh_async(bytes, span.address, self.stream.cu_stream())?;
            }
            offset += span.len();
        }
        Ok(())
    }

    /// Copies one of these to a block of `cache`, after the stream's other work.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// There is no such block in either.
    pub(super) fn onboard(
        &self,
        source: HostBlockId,
        cache: &KvCache,
        target: BlockId,
    ) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()?;
        let mut offset = self.offset(source);
        for span in cache.spans(target) {
            let bytes = self.at(offset..offset + span.len());
            // SAFETY: as in `offload`.
            unsafe {
                let bytes = std::slice::from_raw_parts(bytes, span.len());
                result::memcpy_htod_async(span.address, bytes, self.stream.cu_stream())?;
            }
            offset += span.len();
        }
        Ok(())
    }

    /// The bytes of a block, once the stream's work is done.
    ///
    /// # Errors
    ///
    /// The driver reports an error.
    ///
    /// # Panics
    ///
    /// There is no such block.
    pub(super) fn bytes_mut(&mut self, block: HostBlockId) -> Result<&mut [u8], DriverError> {
        self.stream.synchronize()?;
        let start = self.offset(block);
        let address = self.at(start..start + self.bytes_per_block);
        // SAFETY: the range is inside the allocation, which is borrowed as a whole, and no copy is on its way. It may not
        // have been written: the system gives zeroed pages.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, self.bytes_per_block) })
    }

    fn offset(&self, block: HostBlockId) -> usize {
        block.index() * self.bytes_per_block
    }

    /// The address of some bytes.
    fn at(&self, bytes: Range<usize>) -> *mut u8 {
        assert!(
            bytes.end <= self.num_bytes,
            "{bytes:?} of {}",
            self.num_bytes
        );
        let Some(address) = self.address else {
            unreachable!("no bytes without an address");
        };
        // SAFETY: the offset is inside the allocation.
        unsafe { address.as_ptr().add(bytes.start) }
    }
}

impl Drop for HostBlocks {
    fn drop(&mut self) {
        let Some(address) = self.address.take() else {
            return;
        };
        // The GPU may still write to it. If the device is lost, it does not.
        let _ = self.stream.synchronize();
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: it was allocated in `new`, and nobody uses it any more.
        let _ = unsafe { result::free_host(address.as_ptr().cast()) };
    }
}
