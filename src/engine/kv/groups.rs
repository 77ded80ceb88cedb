//! Groups of layers: the blocks of a group hold what its layers need, and are freed behind its window.
//!
//! ```text
//! table of a sequence, two groups         place 0   place 1   place 2   place 3   place 4
//!
//! group 0: layers that see everything   [ Block 4 , Block 6 , Block 8 , Block 2 , Block 1 ]
//! group 1: layers with a window         [  NONE   ,  NONE   ,  NONE   , Block 5 , Block 3 ]
//! ```

use super::AttentionWindow;
use crate::base::{BlockSize, Blocks, Tokens};

/// The most groups of layers.
pub const MAX_KV_GROUPS: usize = 8;

/// What the queries of each group of layers see: the groups without a window first, then those with the largest windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroups {
    /// Those behind the last group are `None`.
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

    /// The most blocks that a sequence of `kv_len` positions holds at once, of which at most `max_chunk` are computed in a
    /// step.
    pub(in crate::engine) fn max_blocks(
        &self,
        kv_len: Tokens,
        max_chunk: Tokens,
        block_size: BlockSize,
    ) -> Blocks {
        let groups = self.windows().iter();
        groups
            .map(|window| max_blocks_of(window.as_ref(), kv_len, max_chunk, block_size))
            .fold(Blocks::ZERO, |sum, blocks| {
                Blocks(sum.0.saturating_add(blocks.0))
            })
    }
}

/// The most blocks of one group, with this window.
pub(super) fn max_blocks_of(
    window: Option<&AttentionWindow>,
    kv_len: Tokens,
    max_chunk: Tokens,
    block_size: BlockSize,
) -> Blocks {
    let all = kv_len.blocks_ceil(block_size);
    window.map_or(all, |window| {
        all.min(window.max_blocks(max_chunk, block_size))
    })
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
        // A window of 8 and one more touch 3 blocks at most.
        for (kv_len, expected) in [(4, 3), (8, 6), (12, 9), (16, 10), (400, 106)] {
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
