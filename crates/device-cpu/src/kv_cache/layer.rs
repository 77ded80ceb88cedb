//! One layer of the pool.

use crate::kv_cache::GroupedLayout;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use super::layout::KvPart;
use super::{GROUP, int8};
use crate::elementwise::round_to_bf16;
use inflight_base::BlockId;
use inflight_device::{CpuKvDtype, KvLayout};

/// A layer of the pool for reading.
pub(crate) struct KvLayer<'a> {
    pub(super) layout: &'a KvLayout,
    pub(super) dtype: CpuKvDtype,
    pub(super) group: usize,
    pub(super) num_blocks: usize,
    /// Words from a block to the next one.
    pub(super) stride: usize,
    pub(super) base: *const u16,
}

// SAFETY: nobody writes to the pool while it is borrowed for reading.
unsafe impl Sync for KvLayer<'_> {}

/// 16 positions of a head as they are stored, in 16-bit words.
#[derive(Clone, Copy)]
pub(crate) struct KvGroup<'a> {
    pub keys: &'a [u16],
    pub values: &'a [u16],
    /// The scales of the keys, then those of the values. Empty for bf16.
    pub scales: &'a [u16],
}

impl KvLayer<'_> {
    pub fn layout(&self) -> &KvLayout {
        self.layout
    }

    /// The type of its elements.
    pub fn dtype(&self) -> CpuKvDtype {
        self.dtype
    }

    /// The group of layers that it is in.
    pub fn layer_group(&self) -> usize {
        self.group
    }

    /// A group of positions of a head.
    pub fn group(&self, block: BlockId, head: usize, group: usize) -> KvGroup<'_> {
        let layout = self.layout;
        assert!(block.index() < self.num_blocks, "block of the pool");
        assert!(head < layout.num_kv_heads && group < layout.groups_per_block());
        let block = block.index() * self.stride;
        let [keys, values, scales, _] = layout.parts(head).map(|KvPart { start, group_len }| {
            let start = block + start + group * group_len;
            // SAFETY: the group is inside the block, and the block inside the layer; nobody writes while the
            // pool is borrowed.
            unsafe { std::slice::from_raw_parts(self.base.add(start), group_len) }
        });
        KvGroup {
            keys,
            values,
            scales,
        }
    }

    /// The keys of the indexer in a group of positions, `[indexer_dim / 2][16 positions][2 elements]`.
    pub fn indexer_keys(&self, block: BlockId, group: usize) -> &[u16] {
        let layout = self.layout;
        assert!(block.index() < self.num_blocks, "block of the pool");
        assert!(group < layout.groups_per_block());
        let [.., KvPart { start, group_len }] = layout.parts(0);
        let start = block.index() * self.stride + start + group * group_len;
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.base.add(start), group_len) }
    }
}

/// A layer of the pool for storing, from several threads.
pub(crate) struct KvLayerMut<'a> {
    pub(super) layout: &'a KvLayout,
    pub(super) dtype: CpuKvDtype,
    pub(super) group: usize,
    pub(super) num_blocks: usize,
    /// Words from a block to the next one.
    pub(super) stride: usize,
    pub(super) base: *mut u16,
}

// SAFETY: it is only written, and only with relaxed atomic stores, so there is no data race even if two tokens
// have the same position by mistake. Each part of a pool is always stored with the same width.
unsafe impl Sync for KvLayerMut<'_> {}

/// Scratch memory for one vector.
#[derive(Default)]
pub(crate) struct Encoded {
    bf16: Vec<u16>,
    int8: Vec<u8>,
}

impl KvLayerMut<'_> {
    /// The group of layers that it is in.
    pub fn layer_group(&self) -> usize {
        self.group
    }

    /// Stores the key and the value of one head at a position of a block.
    #[inline(always)]
    pub fn store(
        &self,
        (block, position): (BlockId, usize),
        head: usize,
        [key, value]: [&[f32]; 2],
        encoded: &mut Encoded,
    ) {
        let layout = self.layout;
        assert!(block.index() < self.num_blocks, "block of the pool");
        assert!(head < layout.num_kv_heads && position < layout.positions_per_block());
        assert!(key.len() == layout.head_dim && value.len() == layout.value_dim());
        assert!(layout.stores_values());
        let (group, lane) = (position / GROUP, position % GROUP);
        let block = block.index() * self.stride;
        let [keys, values, scales, _] = layout
            .parts(head)
            .map(|KvPart { start, group_len }| block + start + group * group_len);
        match self.dtype {
            CpuKvDtype::Bf16 => {
                self.store_bf16_key(keys + 2 * lane, round(key, &mut encoded.bf16));
                // The elements of two positions alternate.
                let place = values + lane / 2 * (2 * layout.padded_dim()) + lane % 2;
                self.store_bf16_value(place, round(value, &mut encoded.bf16));
            }
            CpuKvDtype::Int8 => {
                encoded.int8.resize(key.len().max(value.len()), 0);
                let bytes = &mut encoded.int8[..key.len()];
                self.store_word(scales + lane, int8::quantise(key, bytes));
                self.store_int8_key(keys + lane, bytes);
                let bytes = &mut encoded.int8[..value.len()];
                self.store_word(scales + GROUP + lane, int8::quantise(value, bytes));
                let place = values + lane / 2 * layout.padded_dim();
                self.store_int8_value(2 * place + lane % 2, bytes);
            }
        }
    }

    /// Stores the key of the only head at a position of a block of a bf16 cache, whose values are in the keys.
    #[inline(always)]
    pub fn store_key(&self, place: (BlockId, usize), key: &[u16]) {
        let layout = self.layout;
        assert!(self.dtype == CpuKvDtype::Bf16 && !layout.stores_values());
        assert_eq!(key.len(), layout.head_dim, "a whole key");
        let [keys, ..] = layout.parts(0);
        self.store_in(keys, place, key);
    }

    /// Stores the key of an indexer at a position of a block.
    #[inline(always)]
    pub fn store_indexer_key(&self, place: (BlockId, usize), key: &[u16]) {
        assert_eq!(key.len(), self.layout.indexer_dim, "a whole key");
        let [.., keys] = self.layout.parts(0);
        self.store_in(keys, place, key);
    }

    /// Stores a key in bf16 at a position of a part of a block.
    #[inline(always)]
    fn store_in(&self, part: KvPart, (block, position): (BlockId, usize), key: &[u16]) {
        assert!(block.index() < self.num_blocks, "block of the pool");
        assert!(position < self.layout.positions_per_block());
        let (group, lane) = (position / GROUP, position % GROUP);
        let place = block.index() * self.stride + part.start + group * part.group_len;
        self.store_bf16_key(place + 2 * lane, key);
    }

    fn store_bf16_key(&self, place: usize, key: &[u16]) {
        for (pair, &[k0, k1]) in key.as_chunks::<2>().0.iter().enumerate() {
            let bits = u32::from_ne_bytes(bytemuck::cast([k0, k1]));
            let place = place + pair * 2 * GROUP;
            // SAFETY: inside the group, and aligned to 4 bytes like all its parts.
            let place = unsafe { AtomicU32::from_ptr(self.base.add(place).cast()) };
            place.store(bits, Ordering::Relaxed);
        }
    }

    fn store_bf16_value(&self, place: usize, value: &[u16]) {
        for (d, &bits) in value.iter().enumerate() {
            self.store_word(place + 2 * d, bits);
        }
    }

    fn store_int8_key(&self, place: usize, key: &[u8]) {
        for (pair, &bytes) in key.as_chunks::<2>().0.iter().enumerate() {
            self.store_word(place + pair * GROUP, u16::from_ne_bytes(bytes));
        }
    }

    /// `place` is a byte offset.
    fn store_int8_value(&self, place: usize, value: &[u8]) {
        for (d, &byte) in value.iter().enumerate() {
            // SAFETY: inside the group.
            let place = unsafe { AtomicU8::from_ptr(self.base.cast::<u8>().add(place + 2 * d)) };
            place.store(byte, Ordering::Relaxed);
        }
    }

    fn store_word(&self, place: usize, bits: u16) {
        // SAFETY: the place is inside a group.
        let place = unsafe { AtomicU16::from_ptr(self.base.add(place)) };
        place.store(bits, Ordering::Relaxed);
    }
}

#[inline(always)]
fn round<'a>(x: &[f32], out: &'a mut Vec<u16>) -> &'a [u16] {
    out.resize(x.len(), 0);
    round_to_bf16(x, out);
    out
}
