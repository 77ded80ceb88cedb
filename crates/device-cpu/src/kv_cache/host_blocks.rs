//! Blocks that the pool gave up, in memory of their own.

use super::KvCache;
use inflight_base::{BlockId, HostBlockId, LoadError};
use inflight_device::memory::Buffer;

/// Copies of blocks, `[num_blocks][num_planes]` of what a block has in a plane. Physical memory is taken when one is
/// first written.
pub struct HostBlocks {
    /// Words of a block in all planes.
    block_len: usize,
    buffer: Buffer,
}

impl HostBlocks {
    /// Reserves `num_blocks` blocks of the shape of those of `cache`.
    ///
    /// # Errors
    ///
    /// If the system refuses the address space.
    pub(crate) fn new(cache: &KvCache, num_blocks: usize) -> Result<Self, LoadError> {
        let block_len = cache.num_planes * cache.plane_len;
        let len = block_len.saturating_mul(num_blocks);
        Ok(Self {
            block_len,
            buffer: Buffer::zeroed(len)?,
        })
    }

    /// Copies a block of `cache` to one of these.
    ///
    /// # Panics
    ///
    /// If there is no such block in either.
    pub(crate) fn offload(&mut self, cache: &KvCache, source: BlockId, target: HostBlockId) {
        let words = self.words_of(target);
        let words = &mut self.buffer.as_mut_slice()[words];
        for plane in 0..cache.num_planes {
            let source = &cache.buffer.as_slice()[cache.words_of(source, plane)];
            words[plane * cache.plane_len..][..cache.plane_len].copy_from_slice(source);
        }
    }

    /// Copies one of these to a block of `cache`.
    ///
    /// # Panics
    ///
    /// If there is no such block in either.
    pub(crate) fn onboard(&self, source: HostBlockId, cache: &mut KvCache, target: BlockId) {
        let words = &self.buffer.as_slice()[self.words_of(source)];
        for plane in 0..cache.num_planes {
            let source = &words[plane * cache.plane_len..][..cache.plane_len];
            let target = cache.words_of(target, plane);
            cache.buffer.as_mut_slice()[target].copy_from_slice(source);
        }
    }

    /// The bytes of a block.
    ///
    /// # Panics
    ///
    /// If there is no such block.
    pub(crate) fn bytes_mut(&mut self, block: HostBlockId) -> &mut [u8] {
        let words = self.words_of(block);
        bytemuck::cast_slice_mut(&mut self.buffer.as_mut_slice()[words])
    }

    fn words_of(&self, block: HostBlockId) -> std::ops::Range<usize> {
        block.index() * self.block_len..(block.index() + 1) * self.block_len
    }
}
