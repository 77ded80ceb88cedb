//! Where keys, values and scales lie in a block.

use super::GROUP;
use crate::device::{KvDtype, KvLayout};

/// Where the groups of a head begin in a block, and how long each is, in words of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct KvPart {
    pub start: usize,
    pub group_len: usize,
}

/// Keys, values and their scales of a head.
pub(super) type KvParts = [KvPart; 3];

impl KvLayout {
    /// Elements of a head, padded to whole registers.
    pub(in super::super) fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Elements of a group of keys: `[head_dim / 2][16 positions][2]`.
    pub(in super::super) fn key_group_len(&self) -> usize {
        self.head_dim * GROUP
    }

    /// Elements of a group of values: `[8 pairs of positions][padded_dim][2]`.
    pub(in super::super) fn value_group_len(&self) -> usize {
        self.padded_dim() * GROUP
    }

    pub(in super::super) fn positions_per_block(&self) -> usize {
        self.block_size.tokens().index()
    }

    pub(super) fn groups_per_block(&self) -> usize {
        self.positions_per_block().div_ceil(GROUP)
    }

    /// Words of a group: of keys, of values, of scales.
    fn group_words(&self) -> [usize; 3] {
        let (keys, values) = (self.key_group_len(), self.value_group_len());
        match self.dtype {
            KvDtype::Bf16 => [keys, values, 0],
            KvDtype::Int8 => [keys / 2, values / 2, 2 * GROUP],
        }
    }

    /// Words of a block in one layer.
    pub(super) fn block_len(&self) -> usize {
        let words_per_group: usize = self.group_words().iter().sum();
        self.num_kv_heads * self.groups_per_block() * words_per_group
    }

    /// Where the parts of a head are in a block: first all heads' keys, then their values, then their
    /// scales.
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
