//! The keys and values of all sequences: a pool of blocks.

mod host_blocks;
mod int8;
mod layer;
mod layout;

use std::ops::Range;

use inflight_base::{BlockId, LoadError};
use inflight_device::memory::Buffer;
use inflight_device::{
    CpuKvDtype, KvBatch, KvDtype, KvLayout, KvLayouts, KvSpan, LayerGroups, LayerPlace,
};
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
/// values   head 0: group 0 [8 pairs][value_dim, padded to 16][2 positions], group 1, ...; head 1: ...
/// scales   head 0: group 0 [16 of keys, 16 of values], group 1, ...; head 1: ...     int8 only, bf16
/// indexer  group 0 [indexer_dim / 2][16 positions][2 elements], group 1, ...         only with values in the keys
/// ```
///
/// There are no values if they are [in the keys](inflight_device::KvValues::InKeys).
///
/// The pool is `[num_planes][num_blocks][plane_len]` words:
///
/// ```text
/// one layout for all layers     a plane for each layer of a group
/// layouts that differ           one plane; in a block the layers of its group follow one another
/// ```
pub struct KvCache {
    layouts: KvLayouts,
    /// Of each layer.
    dtypes: Vec<CpuKvDtype>,
    groups: LayerGroups,
    num_blocks: usize,
    num_planes: usize,
    /// Words of a block in a plane.
    plane_len: usize,
    /// Where the first block of each layer begins.
    layer_starts: Vec<usize>,
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
    /// If a `head_dim` is odd or zero, values are in keys whose type is not bf16, an indexer has keys of an odd length
    /// or without latents, or `groups` has other layers.
    pub fn new(
        layouts: KvLayouts,
        groups: LayerGroups,
        num_blocks: usize,
    ) -> Result<Self, LoadError> {
        let dtypes = layouts.layers().iter().map(|layout| layout.dtype.on_cpu());
        let dtypes = dtypes.collect::<Result<_, _>>()?;
        for layout in layouts.layers() {
            let head_dim = layout.head_dim;
            assert!(
                head_dim > 0 && head_dim.is_multiple_of(2),
                "head_dim {head_dim} is even"
            );
            assert!(
                layout.stores_values() || layout.dtype == KvDtype::Bf16,
                "{layout:?}: one scale for different parts"
            );
            assert!(
                layout.indexer_dim == 0
                    || layout.indexer_dim.is_multiple_of(2) && !layout.stores_values(),
                "{layout:?}: an indexer is beside latents"
            );
        }
        let num_layers = layouts.layers().len();
        assert_eq!(num_layers, groups.num_layers(), "layers in groups");
        let (num_planes, plane_len) = match layouts.layers() {
            [first, ..] if !layouts.differ() => (groups.layers_per_group(), first.block_len()),
            _ => (1, layouts.largest_group(&groups, KvLayout::block_len)),
        };
        let len = plane_len
            .checked_mul(num_planes)
            .and_then(|len| len.checked_mul(num_blocks))
            .unwrap_or(usize::MAX);
        let buffer = Buffer::zeroed(len)?;
        let layer_starts = layer_starts(&layouts, &groups, num_blocks);
        Ok(Self {
            layouts,
            dtypes,
            groups,
            num_blocks,
            num_planes,
            plane_len,
            layer_starts,
            buffer,
        })
    }

    /// Bytes of one block of these layers, padding and scales included.
    pub fn bytes_per_block(layouts: &KvLayouts, groups: &LayerGroups) -> usize {
        2 * layouts.largest_group(groups, KvLayout::block_len)
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
            self.layouts.block_size(),
            self.num_blocks,
        )
    }

    /// Whether `batch` was checked for a pool of this size and shape.
    pub(super) fn fits(&self, batch: &KvBatch<'_>) -> bool {
        batch.is_for(
            self.groups.num_groups(),
            self.layouts.block_size(),
            self.num_blocks,
        )
    }

    /// The shape of the blocks of a layer.
    pub fn layout(&self, layer: usize) -> &KvLayout {
        &self.layouts.layers()[layer]
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
        let Some(layout) = self.layouts.layers().first() else {
            return;
        };
        layout.check_copy(self.num_blocks, source, target, num_positions);
        // The groups of a head are consecutive. A group is copied as a whole even if only a part of it is needed.
        let num_groups = num_positions.div_ceil(GROUP);
        for plane in 0..self.num_planes {
            let [from, to] = [source, target].map(|block| self.words_of(block, plane));
            let words = self.buffer.as_mut_slice();
            if self.layouts.differ() {
                // The parts depend on the group of the block, which is not known here.
                words.copy_within(from, to.start);
                continue;
            }
            for part in (0..layout.num_kv_heads).flat_map(|head| layout.parts(head)) {
                let (from, to) = (from.start + part.start, to.start + part.start);
                words.copy_within(from..from + num_groups * part.group_len, to);
            }
        }
    }

    /// The words of a block in a plane.
    fn words_of(&self, block: BlockId, plane: usize) -> Range<usize> {
        assert!(
            block.index() < self.num_blocks,
            "{block:?} of {}",
            self.num_blocks
        );
        let start = (plane * self.num_blocks + block.index()) * self.plane_len;
        start..start + self.plane_len
    }

    /// One layer of the pool for reading.
    pub(super) fn layer(&self, layer: usize) -> KvLayer<'_> {
        KvLayer {
            layout: self.layout(layer),
            dtype: self.dtypes[layer],
            group: self.groups.place(layer).group,
            num_blocks: self.num_blocks,
            stride: self.plane_len,
            base: self.layer_base(layer),
        }
    }

    /// One layer of the pool for storing from several threads.
    pub(super) fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_> {
        let base = self.layer_base(layer);
        // The pointer is derived from a mutable borrow, because it will be written through.
        let offset = (base as usize - self.buffer.as_ptr() as usize) / 2;
        KvLayerMut {
            // SAFETY: the offset of a layer is inside the buffer.
            base: unsafe { self.buffer.as_mut_ptr().add(offset) },
            layout: &self.layouts.layers()[layer],
            dtype: self.dtypes[layer],
            group: self.groups.place(layer).group,
            num_blocks: self.num_blocks,
            stride: self.plane_len,
        }
    }

    /// Where the first block of a layer begins.
    fn layer_base(&self, layer: usize) -> *const u16 {
        // SAFETY: the layer begins in its first block, which is in the buffer, or at its end if there are no blocks.
        unsafe { self.buffer.as_ptr().add(self.layer_starts[layer]) }
    }
}

/// Where the first block of each layer begins, in words.
fn layer_starts(layouts: &KvLayouts, groups: &LayerGroups, num_blocks: usize) -> Vec<usize> {
    let layers = layouts.layers();
    let start = |layer: usize| {
        let LayerPlace { group, index } = groups.place(layer);
        match layouts.differ() {
            false => index * num_blocks * layers[layer].block_len(),
            // Behind the other layers of the group.
            true => (0..index)
                .map(|before| {
                    let of_place = LayerPlace {
                        group,
                        index: before,
                    };
                    let in_place = (0..layers.len()).filter(|&it| groups.place(it) == of_place);
                    let lens = in_place.map(|it| layers[it].block_len());
                    lens.max().unwrap_or(0)
                })
                .sum(),
        }
    };
    (0..layers.len()).map(start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::BlockSize;
    use inflight_device::KvValues;

    #[test]
    fn layers_with_other_heads_have_words_of_their_own() {
        let layout = |num_kv_heads, head_dim| KvLayout {
            num_kv_heads,
            head_dim,
            values: KvValues::OfTheirOwn(head_dim),
            indexer_dim: 0,
            block_size: BlockSize::new(16).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        let layers = [layout(3, 16), layout(1, 32), layout(3, 16), layout(1, 32)];
        for groups in [
            LayerGroups::one(4),
            LayerGroups::new(&[0, 1, 0, 1]),
            LayerGroups::new(&[1, 1, 0, 1]),
        ] {
            let layouts = KvLayouts::new(layers[0].block_size, layers.to_vec());
            let num_blocks = 3;
            let mut cache = KvCache::new(layouts, groups.clone(), num_blocks).expect("memory");
            let bytes = KvCache::bytes_per_block(&cache.layouts, &groups);
            assert_eq!(2 * cache.buffer.len(), num_blocks * bytes);
            // Each layer writes its number everywhere in the blocks of its group, of which one is its own.
            let mut encoded = Encoded::default();
            for (layer, layout) in layers.iter().enumerate() {
                let block = BlockId(groups.place(layer).group as u32);
                let vector = vec![(layer + 1) as f32; layout.head_dim];
                for at in 0..16 * layout.num_kv_heads {
                    let place = (block, at % 16);
                    let cache = cache.layer_mut(layer);
                    cache.store(place, at / 16, [&vector, &vector], &mut encoded);
                }
            }
            for block in 0..groups.num_groups() as u32 {
                cache.copy_positions(BlockId(block), BlockId(2), 16);
                for (layer, layout) in layers.iter().enumerate() {
                    if groups.place(layer).group != block as usize {
                        continue;
                    }
                    for (block, head) in [block, 2]
                        .into_iter()
                        .flat_map(|block| (0..layout.num_kv_heads).map(move |head| (block, head)))
                    {
                        let layer_of_cache = cache.layer(layer);
                        let group = layer_of_cache.group(BlockId(block), head, 0);
                        let expected = half::bf16::from_f32((layer + 1) as f32).to_bits();
                        let stored = group.keys.iter().chain(group.values);
                        assert!(
                            stored.into_iter().all(|&word| word == expected),
                            "{groups:?}"
                        );
                    }
                }
            }
        }
    }

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
                        values: KvValues::OfTheirOwn(head_dim),
                        indexer_dim: 0,
                        block_size: BlockSize::new(positions).expect("not zero"),
                        dtype,
                    };
                    let (num_layers, num_blocks) = (2, 5);
                    let layouts = KvLayouts::alike(layout, num_layers);
                    let groups = LayerGroups::one(num_layers);
                    let bytes_per_block = num_layers * 3 * num_groups * 16 * bytes_per_position;
                    assert_eq!(KvCache::bytes_per_block(&layouts, &groups), bytes_per_block);
                    let cache = KvCache::new(layouts, groups, num_blocks).expect("address space");
                    assert_eq!(2 * cache.buffer.len(), num_blocks * bytes_per_block);
                }
            }
        }
    }

    #[test]
    fn a_block_has_the_keys_of_an_indexer_and_they_are_copied_with_it() {
        let layout = |indexer_dim| KvLayout {
            num_kv_heads: 1,
            head_dim: 12,
            values: KvValues::InKeys(8),
            indexer_dim,
            block_size: BlockSize::new(20).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        // Layers that are alike, and some without an indexer.
        for layers in [[layout(6); 2], [layout(6), layout(0)]] {
            let layouts = KvLayouts::new(layers[0].block_size, layers.to_vec());
            let groups = LayerGroups::one(layers.len());
            let elements = layers.iter().map(|it| it.head_dim + it.indexer_dim);
            let bytes = 2 * 2 * GROUP * elements.sum::<usize>();
            assert_eq!(KvCache::bytes_per_block(&layouts, &groups), bytes);
            let mut cache = KvCache::new(layouts, groups, 2).expect("memory");
            for position in 0..20 {
                let key = [position as u16; 12];
                let place = (BlockId(0), position);
                for (layer, layout) in layers.iter().enumerate() {
                    let cache = cache.layer_mut(layer);
                    cache.store_key(place, &key);
                    if layout.indexer_dim > 0 {
                        let key = key.map(|word| word + 100);
                        cache.store_indexer_key(place, &key[..layout.indexer_dim]);
                    }
                }
            }
            cache.copy_positions(BlockId(0), BlockId(1), 20);
            for (layer, layout) in layers.iter().enumerate() {
                let cache = cache.layer(layer);
                for position in 0..20_usize {
                    let (group, lane) = (position / GROUP, position % GROUP);
                    let of_lane = |words: &[u16]| -> Vec<u16> {
                        let pairs = words.chunks(2 * GROUP);
                        pairs.flat_map(|it| it[2 * lane..][..2].to_vec()).collect()
                    };
                    let keys = of_lane(cache.group(BlockId(1), 0, group).keys);
                    assert_eq!(keys, [position as u16; 12]);
                    let of_indexer = of_lane(cache.indexer_keys(BlockId(1), group));
                    assert_eq!(of_indexer, vec![position as u16 + 100; layout.indexer_dim]);
                }
            }
        }
    }
}
