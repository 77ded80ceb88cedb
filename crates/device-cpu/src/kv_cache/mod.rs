//! The keys and values of all sequences: a pool of blocks.

mod host_blocks;
mod int8;
mod layer;
mod layout;

use std::ops::Range;

use inflight_base::{BlockId, LoadError};
use inflight_device::memory::Buffer;
use inflight_device::{KvBatch, KvDtype, KvLayout, KvSpan, KvValues, LayerGroups, LayerPlace};
pub(crate) use layout::GroupedLayout;

pub use host_blocks::HostBlocks;
pub(super) use int8::widen;
pub(super) use layer::{Encoded, KvGroup, KvLayer, KvLayerMut};

/// Positions per group: the lanes of one register of scores.
pub(super) const GROUP: usize = 16;

/// The pool: `num_blocks` blocks with as many layers as a group has. Physical memory is taken when a block is first
/// written.
///
/// In a block, positions are grouped by 16, in the order in which the attention kernels multiply them:
///
/// ```text
/// keys     head 0: group 0 [head_dim / 2][16 positions][2 elements], group 1, ...; head 1: ...
/// values   head 0: group 0 [8 pairs][head_dim, padded to 16][2 positions], group 1, ...; head 1: ...
/// scales   head 0: group 0 [16 of keys, 16 of values], group 1, ...; head 1: ...     int8 only, bf16
/// ```
///
/// There are no values if they are [in the keys](KvValues::InKeys).
pub struct KvCache {
    layout: KvLayout,
    groups: LayerGroups,
    num_blocks: usize,
    /// `[layers_per_group][num_blocks]` of what a block has in a layer.
    buffer: Buffer,
}

impl KvCache {
    /// Reserves the pool.
    ///
    /// # Errors
    ///
    /// If the CPU does not [store](inflight_device::KvDtype::ON_CPU) the element type, or the system refuses the
    /// address space.
    ///
    /// # Panics
    ///
    /// If `head_dim` is odd or zero, or values are in keys whose type is not bf16.
    pub fn new(
        layout: KvLayout,
        groups: LayerGroups,
        num_blocks: usize,
    ) -> Result<Self, LoadError> {
        layout.dtype.check_on_cpu()?;
        let head_dim = layout.head_dim;
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "head_dim {head_dim} is even"
        );
        assert!(
            layout.values == KvValues::OfTheirOwn || layout.dtype == KvDtype::Bf16,
            "{layout:?}: one scale for different parts"
        );
        let len = layout
            .block_len()
            .checked_mul(groups.layers_per_group())
            .and_then(|len| len.checked_mul(num_blocks))
            .unwrap_or(usize::MAX);
        Ok(Self {
            layout,
            groups,
            num_blocks,
            buffer: Buffer::zeroed(len)?,
        })
    }

    /// Bytes of one block of so many layers, padding and scales included.
    pub fn bytes_per_block(layout: &KvLayout, num_layers: usize) -> usize {
        2 * num_layers * layout.block_len()
    }

    /// Checks the spans of a step once, for all its operations.
    ///
    /// # Panics
    ///
    /// As [`KvBatch::new`].
    pub fn batch<'a>(&self, spans: &'a [KvSpan], block_tables: &'a [BlockId]) -> KvBatch<'a> {
        KvBatch::new(
            spans,
            block_tables,
            self.groups.num_groups(),
            self.layout.block_size,
            self.num_blocks,
        )
    }

    /// Whether `batch` was checked for a pool of this size and shape.
    pub(super) fn fits(&self, batch: &KvBatch<'_>) -> bool {
        batch.is_for(
            self.groups.num_groups(),
            self.layout.block_size,
            self.num_blocks,
        )
    }

    /// The shape of its blocks.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The groups of its layers.
    pub fn groups(&self) -> &LayerGroups {
        &self.groups
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Copies the keys and values of the first `num_positions` positions of a block to another block, in all
    /// layers. The contents of the later positions of `target` are unspecified until they are stored.
    ///
    /// # Panics
    ///
    /// If a block is not in this pool, both are the same, or a block has fewer positions.
    pub fn copy_positions(&mut self, source: BlockId, target: BlockId, num_positions: usize) {
        let layout = self.layout;
        layout.check_copy(self.num_blocks, source, target, num_positions);
        // The groups of a head are consecutive. A group is copied as a whole even if only a part of it is needed.
        let num_groups = num_positions.div_ceil(GROUP);
        let words = self.buffer.as_mut_slice();
        for layer in 0..self.groups.layers_per_group() {
            let place =
                |block: BlockId| (layer * self.num_blocks + block.index()) * layout.block_len();
            let (from, to) = (place(source), place(target));
            for part in (0..layout.num_kv_heads).flat_map(|head| layout.parts(head)) {
                let (from, to) = (from + part.start, to + part.start);
                words.copy_within(from..from + num_groups * part.group_len, to);
            }
        }
    }

    /// The words of a block in a layer of its group.
    fn words_of(&self, block: BlockId, layer: usize) -> Range<usize> {
        assert!(
            block.index() < self.num_blocks,
            "{block:?} of {}",
            self.num_blocks
        );
        let block_len = self.layout.block_len();
        let start = (layer * self.num_blocks + block.index()) * block_len;
        start..start + block_len
    }

    /// One layer of the pool for reading.
    pub(super) fn layer(&self, layer: usize) -> KvLayer<'_> {
        let LayerPlace { group, index } = self.groups.place(layer);
        KvLayer {
            layout: &self.layout,
            group,
            num_blocks: self.num_blocks,
            base: self.layer_base(index),
        }
    }

    /// One layer of the pool for storing from several threads.
    pub(super) fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_> {
        let LayerPlace { group, index } = self.groups.place(layer);
        let base = self.layer_base(index);
        // The pointer is derived from a mutable borrow, because it will be written through.
        let offset = (base as usize - self.buffer.as_ptr() as usize) / 2;
        KvLayerMut {
            // SAFETY: the offset of a layer is inside the buffer.
            base: unsafe { self.buffer.as_mut_ptr().add(offset) },
            layout: &self.layout,
            group,
            num_blocks: self.num_blocks,
        }
    }

    /// Where a layer begins, by its index in its group.
    fn layer_base(&self, layer: usize) -> *const u16 {
        let num_layers = self.groups.layers_per_group();
        assert!(layer < num_layers, "layer {layer} of {num_layers}");
        // SAFETY: the buffer holds that many times `num_layers` elements.
        unsafe {
            self.buffer
                .as_ptr()
                .add(layer * self.num_blocks * self.layout.block_len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::BlockSize;

    #[test]
    fn a_pool_takes_what_it_is_sized_with_padding_included() {
        let num_groups = [(1, 1), (15, 1), (16, 1), (17, 2), (20, 2), (33, 3)];
        for (positions, num_groups) in num_groups {
            for (head_dim, padded_dim) in [(64, 64), (20, 32)] {
                // Two bytes per element; or one, and two for the scale of each key and value.
                for (dtype, bytes_per_position) in [
                    (KvDtype::Bf16, 2 * (head_dim + padded_dim)),
                    (KvDtype::Int8, head_dim + padded_dim + 2 * 2),
                ] {
                    let layout = KvLayout {
                        num_kv_heads: 3,
                        head_dim,
                        values: KvValues::OfTheirOwn,
                        block_size: BlockSize::new(positions).expect("not zero"),
                        dtype,
                    };
                    let (num_layers, num_blocks) = (2, 5);
                    let cache = KvCache::new(layout, LayerGroups::one(num_layers), num_blocks)
                        .expect("address space");
                    let bytes_per_block = num_layers * 3 * num_groups * 16 * bytes_per_position;
                    assert_eq!(
                        KvCache::bytes_per_block(&layout, num_layers),
                        bytes_per_block
                    );
                    assert_eq!(2 * cache.buffer.len(), num_blocks * bytes_per_block);
                }
            }
        }
    }
}
