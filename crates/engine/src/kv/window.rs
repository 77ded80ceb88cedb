//! The attention window: which positions later queries see, and therefore which blocks can be freed.
//!
//! ```text
//! block_size = 4, num_sinks = 2, size = 6; the next query is at position 17
//!
//! position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15 |16 17
//! seen        s  s                                  w  w  w  w  w  w      17 - size < p
//! table      [ Block 7   ,   NONE     ,   NONE     , Block 5    , Block 2 ]
//! ```
//!
//! The sinks are the first positions, which every query sees (Xiao et al., "Efficient streaming
//! language models with attention sinks", 2023).

use std::ops::Range;

use inflight_base::{BlockSize, Blocks, Tokens};

/// A query at position `q` sees the positions below `num_sinks`, and those above `q - size` up to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionWindow {
    /// The largest window of all layers, not zero. No layer needs a block outside of it.
    pub size: Tokens,
    /// The number of first positions that are always seen.
    pub num_sinks: Tokens,
}

impl AttentionWindow {
    /// The places in a block table that no query at or after position `computed` sees.
    pub(super) fn hidden(&self, computed: Tokens, block_size: BlockSize) -> Range<usize> {
        let first_seen = (computed + Tokens(1)).saturating_sub(self.size);
        let end = first_seen
            .floor_to_block(block_size)
            .blocks_ceil(block_size);
        let start = self.num_sinks.blocks_ceil(block_size);
        start.index()..end.max(start).index()
    }

    /// The next number of computed positions, after `computed`, at which more may be hidden.
    pub(super) fn next_hidden(&self, computed: Tokens, block_size: BlockSize) -> Tokens {
        let first_seen = (computed + Tokens(1)).saturating_sub(self.size);
        first_seen.floor_to_block(block_size) + block_size.tokens() + self.size - Tokens(1)
    }

    /// The most blocks that hold a chunk of at most `max_chunk` tokens and the positions that it sees.
    ///
    /// ```text
    ///             |--- size - 1 ---|-- chunk --|      at worst it begins with the last position
    /// | sinks | ... |     |     |     |     |         of a block, and ends with the first of another
    /// ```
    pub(crate) fn max_blocks(&self, max_chunk: Tokens, block_size: BlockSize) -> Blocks {
        let span = u64::from(self.size.0) + u64::from(max_chunk.0) - 1;
        let tokens = u64::from(block_size.tokens().0);
        let num_spanned = (span + tokens - 2) / tokens + 1;
        let num_spanned = u32::try_from(num_spanned).unwrap_or(u32::MAX);
        let num_sinks = self.num_sinks.blocks_ceil(block_size);
        Blocks(num_spanned.saturating_add(num_sinks.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_hidden_exactly_when_no_later_query_sees_a_position_of_it() {
        for tokens in 1..=5 {
            let block_size = BlockSize::new(tokens).expect("not zero");
            for (size, num_sinks, computed) in cases() {
                let window = AttentionWindow {
                    size: Tokens(size),
                    num_sinks: Tokens(num_sinks),
                };
                let hidden = window.hidden(Tokens(computed), block_size);
                let next = window.next_hidden(Tokens(computed), block_size);
                assert!(next > Tokens(computed));
                for same in computed..next.0 {
                    assert_eq!(window.hidden(Tokens(same), block_size), hidden);
                }
                for block in 0..30 {
                    let mut positions = block * tokens..(block + 1) * tokens;
                    // The first query sees the furthest back.
                    let is_seen = positions.any(|p| p < num_sinks || p + size > computed);
                    assert_eq!(
                        hidden.contains(&(block as usize)),
                        !is_seen,
                        "block {block} of {tokens}, {window:?}, computed {computed}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_bound_is_reached_and_never_passed() {
        for tokens in 1..=5 {
            let block_size = BlockSize::new(tokens).expect("not zero");
            for (size, num_sinks, max_chunk) in cases().filter(|&(_, _, chunk)| chunk > 0) {
                let window = AttentionWindow {
                    size: Tokens(size),
                    num_sinks: Tokens(num_sinks),
                };
                let held = |computed: u32| {
                    let covered = Tokens(computed + max_chunk).blocks_ceil(block_size);
                    covered.index() - window.hidden(Tokens(computed), block_size).len()
                };
                let most = (0..200).map(held).max().expect("not empty");
                let bound = window.max_blocks(Tokens(max_chunk), block_size);
                assert_eq!(bound.index(), most, "blocks of {tokens}, {window:?}");
            }
        }
    }

    /// Sizes, sinks, and a third number.
    fn cases() -> impl Iterator<Item = (u32, u32, u32)> {
        let pairs = (1..9).flat_map(|size| (0..6).map(move |num_sinks| (size, num_sinks)));
        pairs.flat_map(|(size, num_sinks)| (0..24).map(move |n| (size, num_sinks, n)))
    }
}
