//! Groups of layers: the blocks of a group hold what its layers need, and are freed behind its window.
//!
//! ```text
//! table of a sequence, two groups         place 0   place 1   place 2   place 3   place 4
//!
//! group 0: layers that see everything   [ Block 4 , Block 6 , Block 8 , Block 2 , Block 1 ]
//! group 1: layers with a window         [  NONE   ,  NONE   ,  NONE   , Block 5 , Block 3 ]
//! ```

use std::ops::Range;

use super::AttentionWindow;
use inflight_base::{BlockSize, Blocks, Tokens};

/// The most groups of layers.
pub const MAX_KV_GROUPS: usize = 16;

/// The attention window of each group of layers: groups with full attention first, then by window size, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroups {
    /// The window of each group; entries behind the last group are `None`.
    windows: [Option<AttentionWindow>; MAX_KV_GROUPS],
    num_groups: usize,
    /// Groups without a window.
    num_whole: usize,
}

impl KvGroups {
    /// All layers in one group, which sees so much.
    pub fn one(window: Option<AttentionWindow>) -> Self {
        Self::new(&[window])
    }

    /// A group for each of `windows`; `None` stands for layers that see every position.
    ///
    /// # Panics
    /// If there is none or more than [`MAX_KV_GROUPS`], or one sees more than the one before it.
    pub fn new(windows: &[Option<AttentionWindow>]) -> Self {
        let num_groups = windows.len();
        assert!(
            (1..=MAX_KV_GROUPS).contains(&num_groups),
            "{num_groups} groups of layers"
        );
        let size = |window: &Option<AttentionWindow>| window.map_or(Tokens(u32::MAX), |it| it.size);
        assert!(
            windows.iter().rev().is_sorted_by_key(size),
            "the first group sees most: {windows:?}"
        );
        let mut all = [None; MAX_KV_GROUPS];
        all[..num_groups].copy_from_slice(windows);
        Self {
            windows: all,
            num_groups,
            num_whole: windows.iter().filter(|window| window.is_none()).count(),
        }
    }

    /// The number of groups.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// The number of groups without a window, which are the first ones.
    pub fn num_whole(&self) -> usize {
        self.num_whole
    }

    /// Whether any group has a window.
    pub fn any_windows(&self) -> bool {
        self.num_whole < self.num_groups
    }

    /// The window of each group.
    pub fn windows(&self) -> &[Option<AttentionWindow>] {
        &self.windows[..self.num_groups]
    }

    /// The most blocks that a sequence of `kv_len` positions holds at once, of which at most `max_chunk` are computed
    /// in a step.
    pub(crate) fn max_blocks(
        &self,
        kv_len: Tokens,
        max_chunk: Tokens,
        block_size: BlockSize,
    ) -> Blocks {
        let groups = 0..self.num_groups;
        groups
            .map(|group| self.max_blocks_of(group, kv_len, max_chunk, block_size))
            .fold(Blocks::ZERO, |sum, blocks| {
                Blocks(sum.0.saturating_add(blocks.0))
            })
    }

    /// The most blocks of one group.
    pub(super) fn max_blocks_of(
        &self,
        group: usize,
        kv_len: Tokens,
        max_chunk: Tokens,
        block_size: BlockSize,
    ) -> Blocks {
        let all = kv_len.blocks_ceil(block_size);
        let Some(window) = self.windows[group] else {
            return all;
        };
        // See `freed`.
        let kept = match self.num_groups {
            1 => Tokens::ZERO,
            _ => block_size.tokens(),
        };
        all.min(window.max_blocks(max_chunk + kept, block_size))
    }

    /// The places in a table whose block of `group` is freed when `computed` positions are.
    ///
    /// With several groups, a sequence keeps what another one sees that goes on from its last full block: else a prefix
    /// that all of the first group is cached of would not be found for want of a single block.
    pub(super) fn freed(
        &self,
        group: usize,
        computed: Tokens,
        block_size: BlockSize,
    ) -> Range<usize> {
        let Some(window) = self.windows[group] else {
            return 0..0;
        };
        match self.num_groups {
            1 => window.hidden(computed, block_size),
            _ => window.hidden(last_full(computed, block_size), block_size),
        }
    }

    /// The next number of computed positions, after `computed`, at which more may be freed; `None` if never.
    pub(super) fn next_freed(&self, computed: Tokens, block_size: BlockSize) -> Option<Tokens> {
        match self.num_groups {
            1 => Some(self.windows[0]?.next_hidden(computed, block_size)),
            _ if self.any_windows() => {
                Some(last_full(computed, block_size) + block_size.tokens() + Tokens(1))
            }
            _ => None,
        }
    }
}

/// Where a sequence would go on that shares all but the last of `computed` positions, as far as they fill blocks.
fn last_full(computed: Tokens, block_size: BlockSize) -> Tokens {
    computed
        .saturating_sub(Tokens(1))
        .floor_to_block(block_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(size: u32) -> Option<AttentionWindow> {
        Some(AttentionWindow {
            size: Tokens(size),
            num_sinks: Tokens(0),
        })
    }

    #[test]
    fn a_long_sequence_holds_all_of_some_groups_and_a_window_of_others() {
        let groups = KvGroups::new(&[None, window(8), window(8)]);
        assert_eq!((groups.num_groups(), groups.num_whole()), (3, 1));
        let block_size = BlockSize::new(4).expect("not zero");
        // A window of 8 and one more touch 3 blocks at most, and one is kept behind them.
        for (kv_len, expected) in [(4, 3), (8, 6), (12, 9), (16, 12), (20, 13), (400, 108)] {
            let blocks = groups.max_blocks(Tokens(kv_len), Tokens(1), block_size);
            assert_eq!(blocks, Blocks(expected), "{kv_len} positions");
        }
    }

    #[test]
    #[should_panic(expected = "the first group sees most")]
    fn groups_are_in_order() {
        KvGroups::new(&[window(8), None]);
    }
}
