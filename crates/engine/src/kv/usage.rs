//! How full the KV cache is, and the totals of block reuse.

use inflight_base::{BlockSize, Blocks};

/// How full the KV cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvUsage {
    /// Blocks in the pool.
    pub num_blocks: Blocks,
    /// Blocks that sequences hold.
    pub num_used: Blocks,
    /// Blocks in host memory.
    pub num_host_blocks: Blocks,
    /// Blocks in host memory that have a content.
    pub num_host_used: Blocks,
    /// Snapshots of recurrent states.
    pub num_snapshots: u32,
    /// Snapshots that sequences can begin with.
    pub num_snapshots_used: u32,
    /// Snapshots in host memory.
    pub num_host_snapshots: u32,
    /// Snapshots in host memory that sequences can begin with.
    pub num_host_snapshots_used: u32,
    /// Positions per block.
    pub block_size: BlockSize,
}

impl KvUsage {
    /// Free blocks.
    pub fn num_free(&self) -> Blocks {
        self.num_blocks - self.num_used
    }
}

/// The totals of block reuse since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseTotals {
    /// Blocks that were taken from the free list to be written, blank or evicted.
    pub num_taken_blocks: u64,
    /// Context blocks that were found in the cache, whole or in part.
    pub num_reused_blocks: u64,
    /// Context blocks that were not found.
    pub num_missed_blocks: u64,
    /// Tokens that were found, and need not be computed.
    pub num_reused_tokens: u64,
    /// Blocks that went to host memory instead of being forgotten.
    pub num_offloaded_blocks: u64,
    /// Blocks that came back from there.
    pub num_onboarded_blocks: u64,
    /// Snapshots of recurrent states that were taken.
    pub num_saved_states: u64,
    /// Sequences that began with one.
    pub num_restored_states: u64,
    /// Snapshots that went to host memory instead of being forgotten.
    pub num_offloaded_states: u64,
    /// Snapshots that were read there.
    pub num_onboarded_states: u64,
}

impl ReuseTotals {
    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            num_taken_blocks: self.num_taken_blocks + other.num_taken_blocks,
            num_reused_blocks: self.num_reused_blocks + other.num_reused_blocks,
            num_missed_blocks: self.num_missed_blocks + other.num_missed_blocks,
            num_reused_tokens: self.num_reused_tokens + other.num_reused_tokens,
            num_offloaded_blocks: self.num_offloaded_blocks + other.num_offloaded_blocks,
            num_onboarded_blocks: self.num_onboarded_blocks + other.num_onboarded_blocks,
            num_saved_states: self.num_saved_states + other.num_saved_states,
            num_restored_states: self.num_restored_states + other.num_restored_states,
            num_offloaded_states: self.num_offloaded_states + other.num_offloaded_states,
            num_onboarded_states: self.num_onboarded_states + other.num_onboarded_states,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_totals_is_that_of_each() {
        let totals = |first| ReuseTotals {
            num_taken_blocks: first,
            num_reused_blocks: first + 1,
            num_missed_blocks: first + 2,
            num_reused_tokens: first + 3,
            num_offloaded_blocks: first + 4,
            num_onboarded_blocks: first + 5,
            num_saved_states: first + 6,
            num_restored_states: first + 7,
            num_offloaded_states: first + 8,
            num_onboarded_states: first + 9,
        };
        let sum = ReuseTotals {
            num_taken_blocks: 110,
            num_reused_blocks: 112,
            num_missed_blocks: 114,
            num_reused_tokens: 116,
            num_offloaded_blocks: 118,
            num_onboarded_blocks: 120,
            num_saved_states: 122,
            num_restored_states: 124,
            num_offloaded_states: 126,
            num_onboarded_states: 128,
        };
        assert_eq!(totals(10).plus(totals(100)), sum);
    }
}
