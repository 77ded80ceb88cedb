//! Where in a block everything lies.

use std::fmt;
use std::str::FromStr;

use super::GROUP;
use crate::base::BlockSize;

/// What keys and values are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// As they are computed with.
    #[default]
    Bf16,
    /// 8 bits an element, and a bf16 scale for each vector: the largest element is 127 times it.
    Int8,
}

impl KvDtype {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::Int8];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|dtype| dtype.as_str() == name);
        named.ok_or_else(|| {
            let known = Self::ALL.map(Self::as_str).join(", ");
            format!("'{name}' is no type of a KV cache; known are {known}")
        })
    }
}

/// The shape of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Elements of a head, an even number.
    pub head_dim: usize,
    /// Positions of a block. A multiple of 16 is read in place; another one is correct, but slower and
    /// larger, unless a block holds a whole sequence.
    pub block_size: BlockSize,
    /// What the elements are stored as.
    pub dtype: KvDtype,
}

/// Where the groups of a head begin in a block, and how long each is, in words of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub start: usize,
    pub group_len: usize,
}

/// Keys, values and their scales of a head.
pub(super) type Parts = [Part; 3];

impl KvLayout {
    /// Memory that a block takes in all layers.
    pub fn bytes_per_block(&self, num_layers: usize) -> usize {
        2 * num_layers * self.block_len()
    }

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
    pub(super) fn parts(&self, head: usize) -> Parts {
        let mut start = 0;
        self.group_words().map(|group_len| {
            let part_len = self.groups_per_block() * group_len;
            let part = Part {
                start: start + head * part_len,
                group_len,
            };
            start += self.num_kv_heads * part_len;
            part
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_what_they_name() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
        }
        let error = "fp8".parse::<KvDtype>().expect_err("unknown");
        assert!(error.contains("fp8") && error.contains("int8"), "{error}");
    }
}
