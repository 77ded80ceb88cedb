//! How full the KV cache is, and what reuse has come to.

use crate::base::{BlockSize, Blocks};

/// How full the KV cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvUsage {
    /// Blocks of the pool.
    pub num_blocks: Blocks,
    /// Blocks that sequences hold.
    pub num_used: Blocks,
    /// Positions per block.
    pub block_size: BlockSize,
}

impl KvUsage {
    /// Blocks that nobody holds.
    pub fn num_free(&self) -> Blocks {
        self.num_blocks - self.num_used
    }
}

/// What reuse has come to since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseTotals {
    /// Blocks that were taken blank, or evicted for it.
    pub num_taken_blocks: u64,
    /// Blocks of contexts that were found, whole or in part.
    pub num_reused_blocks: u64,
    /// Blocks of contexts that were looked for and not found.
    pub num_missed_blocks: u64,
    /// Tokens that were found, and so not computed.
    pub num_reused_tokens: u64,
}

impl ReuseTotals {
    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            num_taken_blocks: self.num_taken_blocks + other.num_taken_blocks,
            num_reused_blocks: self.num_reused_blocks + other.num_reused_blocks,
            num_missed_blocks: self.num_missed_blocks + other.num_missed_blocks,
            num_reused_tokens: self.num_reused_tokens + other.num_reused_tokens,
        }
    }
}
