//! Blocks that the pool gave up, in pinned memory of the host.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result};

use super::kv_cache::KvCache;
use super::memory::PinnedMemory;
use inflight_base::{BlockId, HostBlockId, LoadError};

/// Copies of blocks, `[num_blocks]` of what a block has in each array of each layer, one after the other. The GPU reads
/// and writes them on its own, in the order of the stream.
pub struct HostBlocks {
    stream: Arc<CudaStream>,
    /// `None` if there are no blocks.
    memory: Option<PinnedMemory<u8>>,
    bytes_per_block: usize,
}

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
        let reserve = || PinnedMemory::sized_by(stream, num_bytes, "kv_cache_host_memory_bytes");
        Ok(Self {
            stream: stream.clone(),
            memory: (num_bytes > 0).then(reserve).transpose()?,
            bytes_per_block,
        })
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
        // SAFETY: the range is inside memory that is borrowed as a whole, was zeroed at first, and has no copy on its
        // way.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, self.bytes_per_block) })
    }

    fn offset(&self, block: HostBlockId) -> usize {
        block.index() * self.bytes_per_block
    }

    /// The address of some bytes.
    fn at(&self, bytes: Range<usize>) -> *mut u8 {
        let memory = self.memory.as_ref();
        memory.expect("a block has bytes").address_of(bytes)
    }
}

impl Drop for HostBlocks {
    /// The GPU may still write to the memory, which is freed next. If the device is lost, it does not.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}
