//! The configuration of a KV cache, and what a request shares of it.

use std::ops::Range;
use std::sync::Arc;

use super::KvGroups;
use inflight_base::{BlockSize, Blocks, Tokens};

/// Whether a request shares blocks, and with which others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReuseOptions {
    /// `false`: it neither reuses blocks nor leaves any for others.
    pub enabled: bool,
    /// The request shares only with requests of its own salt.
    pub salt: Option<Arc<str>>,
}

impl Default for ReuseOptions {
    fn default() -> Self {
        Self {
            enabled: true,
            salt: None,
        }
    }
}

/// The configuration of a KV cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvCacheConfig {
    pub(crate) num_blocks: Blocks,
    /// Blocks in host memory, for content that the device gives up; none without reuse.
    pub(crate) num_host_blocks: Blocks,
    pub(crate) block_size: BlockSize,
    /// The groups of layers. A sequence has a block for each at every place.
    pub(crate) groups: KvGroups,
    /// The most tokens of one sequence in one step; not zero.
    pub(crate) max_chunk: Tokens,
    /// Whether full blocks are kept for others.
    pub(crate) enable_reuse: bool,
    /// Whether the beginning of a block is copied where the whole block does not match.
    pub(crate) enable_partial_reuse: bool,
    /// Snapshots of recurrent states, without which no prefix is reused where sequences have states; 0 where they have
    /// none.
    pub(crate) num_snapshots: u32,
    /// Snapshots in host memory, for those that the device gives up.
    pub(crate) num_host_snapshots: u32,
    /// Tokens of a prompt from one snapshot to the next, besides the one at its end; 0 if there are none.
    pub(crate) snapshot_interval: Tokens,
}

impl KvCacheConfig {
    /// The most blocks that a sequence of `kv_len` positions holds at once.
    pub(super) fn max_blocks(&self, kv_len: Tokens) -> Blocks {
        self.groups
            .max_blocks(kv_len, self.max_chunk, self.block_size)
    }

    /// The most blocks of the groups without a window.
    pub(super) fn max_whole_blocks(&self, kv_len: Tokens) -> Blocks {
        let num_places = kv_len.blocks_ceil(self.block_size);
        Blocks(num_places.0.saturating_mul(self.groups.num_whole() as u32))
    }

    /// The blocks of `group` to take for `kv_len` positions when `num_places` are covered and `num_held` held.
    pub(super) fn lacking(
        &self,
        group: usize,
        num_places: Blocks,
        num_held: Blocks,
        kv_len: Tokens,
    ) -> Blocks {
        let uncovered = kv_len
            .blocks_ceil(self.block_size)
            .saturating_sub(num_places);
        let most = self
            .groups
            .max_blocks_of(group, kv_len, self.max_chunk, self.block_size);
        uncovered.min(most.saturating_sub(num_held))
    }

    /// The places in a table whose block of `group` no query at or after `computed` sees.
    pub(super) fn hidden(&self, group: usize, computed: Tokens) -> Range<usize> {
        let window = self.groups.windows()[group].as_ref();
        window.map_or(0..0, |it| it.hidden(computed, self.block_size))
    }
}
