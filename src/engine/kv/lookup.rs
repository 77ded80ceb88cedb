//! Looking a prompt up: what `reserve` would find, and what is worth waiting for.

use super::prefix::{Content, PrefixIndex, PrefixWalk};
use super::{BlockTable, KvCacheManager, NextBlock, ReuseOptions};
use crate::base::{Blocks, TokenId, Tokens};

/// What `reserve` would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct PrefixMatch {
    /// Tokens that need not be computed.
    pub(in crate::engine) num_tokens: Tokens,
    /// Blocks that would be shared; those outside of the window are given back at once and not counted.
    pub(in crate::engine) num_shared: Blocks,
    /// Those of them that are free now.
    pub(in crate::engine) num_shared_free: Blocks,
    /// How many free blocks less there would be: `num_shared_free`, and the new ones.
    pub(in crate::engine) lacking: Blocks,
    /// The first full block that the context would have to write, if another that writes it first
    /// could spare it that.
    pub(in crate::engine) next: Option<NextBlock>,
}

impl KvCacheManager {
    /// What `reserve` would find for a context of `tokens`, of which `max_reused` may be taken over.
    pub(in crate::engine) fn find(
        &self,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reused: Tokens,
    ) -> PrefixMatch {
        let known = Tokens(tokens.len() as u32);
        let nothing = PrefixMatch {
            num_tokens: Tokens::ZERO,
            num_shared: Blocks::ZERO,
            num_shared_free: Blocks::ZERO,
            lacking: self.max_blocks(known),
            next: None,
        };
        let Some(prefix) = self.prefix.as_ref().filter(|_| reuse.enabled) else {
            return nothing;
        };
        // Without a root nobody is writing anything that it could wait for.
        let Some(root) = prefix.find_root(&reuse.salt) else {
            return nothing;
        };
        let max_reused = self.max_reused(tokens, max_reused);
        let walk = self.walk(prefix, root, tokens, max_reused);
        let num_tokens = self.num_found(&walk);
        let hidden = self.hidden(num_tokens);
        let path = (0..walk.num_blocks).rev().zip(prefix.path_up(walk.tail));
        let mut num_shared = Blocks::ZERO;
        let mut num_shared_free = Blocks::ZERO;
        for (_, block) in path.filter(|(place, _)| !hidden.contains(place)) {
            num_shared += Blocks(1);
            num_shared_free += Blocks(u32::from(self.pool.num_holders(block) == 0));
        }
        let next = self.sparable_block(tokens, walk.num_blocks, num_tokens, max_reused);
        let num_places = Blocks(walk.num_blocks as u32);
        PrefixMatch {
            num_tokens,
            num_shared,
            num_shared_free,
            lacking: self.lacking(num_places, num_shared, known) + num_shared_free,
            next: next.map(|next| prefix.next_block(walk.tail, next)),
        }
    }

    /// The first full block among `tokens` that the sequence of `table` has still to write, if others
    /// will find it then.
    pub(in crate::engine) fn next_block(
        &self,
        table: &BlockTable,
        tokens: &[TokenId],
    ) -> Option<NextBlock> {
        let prefix = self.prefix.as_ref()?;
        let chain = table.places.chain.as_ref()?;
        let next_tokens = self.block_tokens(tokens, chain.num_committed)?;
        Some(prefix.next_block(chain.tail?, next_tokens))
    }

    /// How many of `tokens` can be taken over at all. The last is computed in any case, because its logits
    /// give the next one.
    pub(super) fn max_reused(&self, tokens: &[TokenId], max_reused: Tokens) -> usize {
        tokens.len().saturating_sub(1).min(max_reused.index())
    }

    pub(super) fn walk(
        &self,
        prefix: &PrefixIndex,
        root: Content,
        tokens: &[TokenId],
        max_reused: usize,
    ) -> PrefixWalk {
        prefix.walk(root, tokens, max_reused, self.config.enable_partial_reuse)
    }

    pub(super) fn num_found(&self, walk: &PrefixWalk) -> Tokens {
        let full = Blocks(walk.num_blocks as u32).tokens(self.config.block_size);
        full + Tokens(walk.partial.map_or(0, |(_, num_positions)| num_positions))
    }

    /// The tokens of the block at `place`, if they fill it and one that has computed them could spare
    /// some others than the first `num_found`.
    fn sparable_block<'a>(
        &self,
        tokens: &'a [TokenId],
        place: usize,
        num_found: Tokens,
        max_reused: usize,
    ) -> Option<&'a [TokenId]> {
        let block = self.block_tokens(tokens, place)?;
        let end = (place + 1) * block.len();
        let sparable = match self.config.enable_partial_reuse {
            true => end.min(max_reused) > num_found.index(),
            false => end <= max_reused,
        };
        sparable.then_some(block)
    }

    /// The tokens of the block at `place`, if they fill it.
    fn block_tokens<'a>(&self, tokens: &'a [TokenId], place: usize) -> Option<&'a [TokenId]> {
        let block_size = self.config.block_size.tokens().index();
        tokens.get(place * block_size..(place + 1) * block_size)
    }
}
