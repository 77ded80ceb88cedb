//! Where keys, values and scales lie in a block.

use super::GROUP;
use crate::device::{KvDtype, KvLayout, KvValues};

/// The groups of a head in a block: the offset of the first and the length of each, in 16-bit words.
#[derive(Clone, Copy)]
pub(super) struct KvPart {
    pub start: usize,
    pub group_len: usize,
}

/// The keys, the values and the scales of a head.
pub(super) type KvParts = [KvPart; 3];

impl KvLayout {
    /// Elements of a value, padded to whole registers.
    pub(in super::super) fn padded_dim(&self) -> usize {
        self.value_dim().next_multiple_of(GROUP)
    }

    /// Elements per group of keys: `[head_dim / 2][16 positions][2]`.
    pub(in super::super) fn key_group_len(&self) -> usize {
        self.head_dim * GROUP
    }

    /// Elements per group of values: `[8 pairs of positions][padded_dim][2]`. None are stored if they are in the keys.
    pub(in super::super) fn value_group_len(&self) -> usize {
        self.padded_dim() * GROUP
    }

    pub(in super::super) fn positions_per_block(&self) -> usize {
        self.block_size.tokens().index()
    }

    pub(super) fn groups_per_block(&self) -> usize {
        self.positions_per_block().div_ceil(GROUP)
    }

    /// Words per group of keys, of values, and of scales.
    fn group_words(&self) -> [usize; 3] {
        let keys = self.key_group_len();
        let values = match self.values {
            KvValues::OfTheirOwn => self.value_group_len(),
            KvValues::InKeys(_) => 0,
        };
        match self.dtype {
            KvDtype::Bf16 => [keys, values, 0],
            // An fp8 cache is refused, but its size may be asked for.
            KvDtype::Int8 | KvDtype::Fp8 => [keys / 2, values / 2, 2 * GROUP],
        }
    }

    /// Words per block in one layer.
    pub(super) fn block_len(&self) -> usize {
        let words_per_group: usize = self.group_words().iter().sum();
        self.num_kv_heads * self.groups_per_block() * words_per_group
    }

    /// The parts of a head in a block. The keys of all heads come first, then their values, then their scales.
    pub(super) fn parts(&self, head: usize) -> KvParts {
        let mut start = 0;
        self.group_words().map(|group_len| {
            let part_len = self.groups_per_block() * group_len;
            let part = KvPart {
                start: start + head * part_len,
                group_len,
            };
            start += self.num_kv_heads * part_len;
            part
        })
    }
}
