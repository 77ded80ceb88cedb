//! Where keys, values and scales lie in a block.

use super::GROUP;
use inflight_device::{KvDtype, KvLayout, KvValues};

/// The groups of a head in a block: the offset of the first and the length of each, in 16-bit words.
#[derive(Clone, Copy)]
pub(crate) struct KvPart {
    pub start: usize,
    pub group_len: usize,
}

/// The keys, the values, the scales, and the keys of an indexer of a head.
pub(crate) type KvParts = [KvPart; 4];

/// How the CPU's kernels lay out a block.
pub(crate) trait GroupedLayout {
    /// The shape of a block.
    fn layout(&self) -> &KvLayout;

    /// Elements of a value, padded to whole registers.
    fn padded_dim(&self) -> usize {
        self.layout().value_dim().next_multiple_of(GROUP)
    }

    /// Elements per group of keys: `[head_dim / 2][16 positions][2]`.
    fn key_group_len(&self) -> usize {
        self.layout().head_dim * GROUP
    }

    /// Elements per group of values: `[8 pairs of positions][padded_dim][2]`. None are stored if they are in the keys.
    fn value_group_len(&self) -> usize {
        self.padded_dim() * GROUP
    }

    /// Positions of a block.
    fn positions_per_block(&self) -> usize {
        self.layout().block_size.tokens().index()
    }

    /// Groups of positions per block, the last one padded.
    fn groups_per_block(&self) -> usize {
        self.positions_per_block().div_ceil(GROUP)
    }

    /// Words per group of keys, of values, of scales, and of the keys of an indexer.
    fn group_words(&self) -> [usize; 4] {
        let keys = self.key_group_len();
        let values = match self.layout().values {
            KvValues::OfTheirOwn(_) => self.value_group_len(),
            KvValues::InKeys(_) => 0,
        };
        let of_indexer = self.layout().indexer_dim * GROUP;
        match self.layout().dtype {
            KvDtype::Bf16 => [keys, values, 0, of_indexer],
            // An fp8 cache is refused, but its size may be asked for.
            KvDtype::Int8 | KvDtype::Fp8 => [keys / 2, values / 2, 2 * GROUP, of_indexer],
        }
    }

    /// Words per block in one layer.
    fn block_len(&self) -> usize {
        let words_per_group: usize = self.group_words().iter().sum();
        self.layout().num_kv_heads * self.groups_per_block() * words_per_group
    }

    /// The parts of a head in a block. The keys of all heads come first, then their values, then their
    /// scales, then the keys of an indexer.
    fn parts(&self, head: usize) -> KvParts {
        let mut start = 0;
        self.group_words().map(|group_len| {
            let part_len = self.groups_per_block() * group_len;
            let part = KvPart {
                start: start + head * part_len,
                group_len,
            };
            start += self.layout().num_kv_heads * part_len;
            part
        })
    }
}

impl GroupedLayout for KvLayout {
    fn layout(&self) -> &KvLayout {
        self
    }
}
