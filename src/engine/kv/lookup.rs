//! Looking a prompt up: what `reserve` would find, and what is worth waiting for.

use super::prefix::{Content, PrefixIndex, PrefixWalk};
use super::table::Chain;
use super::tiers::Tiers;
use super::{KvCacheConfig, NextBlock, ReuseOptions};
use crate::base::{Blocks, TokenId, Tokens};

/// What is in the cache of a context that would start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct PrefixMatch {
    /// Tokens that need not be computed.
    pub(in crate::engine) num_tokens: Tokens,
    /// Blocks of the device that would be shared. Those outside of the window would be freed at once and do not count.
    pub(in crate::engine) num_shared: Blocks,
    /// The shared blocks that are free now.
    pub(in crate::engine) num_shared_free: Blocks,
    /// How many fewer free blocks there would be: `num_shared_free`, and the new ones, with those for content in host
    /// memory.
    pub(in crate::engine) lacking: Blocks,
    /// The first full block that the context would have to write, if it would be reused once another sequence has
    /// written it.
    pub(in crate::engine) next: Option<NextBlock>,
}

impl PrefixMatch {
    /// Nothing is in the cache: the context takes `num_blocks`.
    pub(super) fn nothing(num_blocks: Blocks) -> Self {
        Self {
            num_tokens: Tokens::ZERO,
            num_shared: Blocks::ZERO,
            num_shared_free: Blocks::ZERO,
            lacking: num_blocks,
            next: None,
        }
    }
}

/// Looks prompts up, and changes nothing.
pub(super) struct Lookup<'a> {
    config: &'a KvCacheConfig,
    tiers: &'a Tiers,
    prefix: &'a PrefixIndex,
}

impl<'a> Lookup<'a> {
    pub(super) fn new(
        config: &'a KvCacheConfig,
        tiers: &'a Tiers,
        prefix: &'a PrefixIndex,
    ) -> Self {
        Self {
            config,
            tiers,
            prefix,
        }
    }

    /// What is in the cache for a context of `tokens`, of which at most `max_reusable` may be reused.
    pub(super) fn find(
        &self,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
    ) -> PrefixMatch {
        let known = Tokens(tokens.len() as u32);
        let root = match reuse.enabled {
            true => self.prefix.find_root(&reuse.salt),
            false => None,
        };
        // Without a root, no sequence writes blocks that are worth waiting for.
        let Some(root) = root else {
            return PrefixMatch::nothing(self.config.max_blocks(known));
        };
        let walk = self.walk(root, tokens, max_reusable);
        let num_tokens = walk.num_tokens(self.config.block_size);
        let hidden = self.config.hidden(num_tokens);
        let path = (0..walk.num_blocks)
            .rev()
            .zip(self.prefix.path_up(walk.tail));
        let mut num_shared = Blocks::ZERO;
        let mut num_shared_free = Blocks::ZERO;
        let mut num_onboarded = Blocks::ZERO;
        for (_, block) in path.filter(|(place, _)| !hidden.contains(place)) {
            if self.tiers.is_on_host(block) {
                num_onboarded += Blocks(1);
                continue;
            }
            num_shared += Blocks(1);
            num_shared_free += Blocks(u32::from(self.tiers.device().num_holders(block) == 0));
        }
        let max_reusable = max_found(tokens, max_reusable);
        let next = self.sparable_block(tokens, walk.num_blocks, num_tokens, max_reusable);
        let num_places = Blocks(walk.num_blocks as u32);
        PrefixMatch {
            num_tokens,
            num_shared,
            num_shared_free,
            lacking: self
                .config
                .lacking(num_places, num_shared + num_onboarded, known)
                + num_onboarded
                + num_shared_free,
            next: next.map(|next| self.prefix.next_block(walk.tail, next)),
        }
    }

    /// Walks from `root` along `tokens`, of which at most `max_reusable` may be reused.
    pub(super) fn walk(
        &self,
        root: Content,
        tokens: &[TokenId],
        max_reusable: Tokens,
    ) -> PrefixWalk {
        let max_found = max_found(tokens, max_reusable);
        let enable_partial = self.config.enable_partial_reuse;
        self.prefix.walk(root, tokens, max_found, enable_partial)
    }

    /// The first full block of `tokens` behind `chain`, if others will find it.
    pub(super) fn next_block(&self, chain: &Chain, tokens: &[TokenId]) -> Option<NextBlock> {
        let next_tokens = self.block_tokens(tokens, chain.num_committed())?;
        Some(self.prefix.next_block(chain.tail()?, next_tokens))
    }

    /// The tokens of the block at `place`, if they fill it, and if a sequence that has computed it could spare this one
    /// more than the first `num_found` tokens.
    fn sparable_block<'t>(
        &self,
        tokens: &'t [TokenId],
        place: usize,
        num_found: Tokens,
        max_found: usize,
    ) -> Option<&'t [TokenId]> {
        let block = self.block_tokens(tokens, place)?;
        let end = (place + 1) * block.len();
        let sparable = match self.config.enable_partial_reuse {
            true => end.min(max_found) > num_found.index(),
            false => end <= max_found,
        };
        sparable.then_some(block)
    }

    /// The tokens of the block at `place`, if they fill it.
    fn block_tokens<'t>(&self, tokens: &'t [TokenId], place: usize) -> Option<&'t [TokenId]> {
        let block_size = self.config.block_size.tokens().index();
        tokens.get(place * block_size..(place + 1) * block_size)
    }
}

/// How many of `tokens` can be reused at all. The last is always computed, because its logits give the next one.
fn max_found(tokens: &[TokenId], max_reusable: Tokens) -> usize {
    tokens.len().saturating_sub(1).min(max_reusable.index())
}
