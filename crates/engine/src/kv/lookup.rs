//! Looking a prompt up: what `reserve` would find, and what is worth waiting for.

use std::ops::Range;

use super::prefix::{Content, PrefixIndex, PrefixWalk};
use super::table::Chain;
use super::tiers::Tiers;
use super::{KvCacheConfig, MAX_KV_GROUPS, NextBlock, ReuseOptions};
use inflight_base::{BlockId, Blocks, TokenId, Tokens};

/// What is in the cache of a context that would start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixMatch {
    /// Tokens that need not be computed.
    pub(crate) num_tokens: Tokens,
    /// Blocks that others hold and that it would share until it ends, in groups without a window: so many fewer it will
    /// ever take.
    pub(crate) num_spared: Blocks,
    /// How many fewer free blocks there would be: the shared ones that are free now, and the new ones, with those for
    /// content in host memory.
    pub(crate) lacking: Blocks,
    /// The first full block that the context would have to write, if it would be reused once another sequence has
    /// written it.
    pub(crate) next: Option<NextBlock>,
}

impl PrefixMatch {
    /// Nothing is in the cache: the context takes `num_blocks`.
    pub(super) fn nothing(num_blocks: Blocks) -> Self {
        Self {
            num_tokens: Tokens::ZERO,
            num_spared: Blocks::ZERO,
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
        let mut num_spared = Blocks::ZERO;
        let mut lacking = Blocks::ZERO;
        for group in 0..self.config.groups.num_groups() {
            let (mut num_found, mut num_taken, mut num_held) = (Blocks::ZERO, 0, 0);
            for (_, block) in self.seen(&walk, group) {
                num_found += Blocks(1);
                let is_free = || self.tiers.device().num_holders(block) == 0;
                if self.tiers.is_on_host(block) || is_free() {
                    num_taken += 1;
                } else {
                    num_held += 1;
                }
            }
            let num_places = Blocks(walk.num_blocks as u32);
            lacking += self.config.lacking(group, num_places, num_found, known) + Blocks(num_taken);
            if group < self.config.groups.num_whole() {
                num_spared += Blocks(num_held);
            }
        }
        let max_reusable = max_found(tokens, max_reusable);
        // Where sequences have states, the one behind it may not be kept.
        let next = match self.tiers.snapshots.is_enabled() {
            true => None,
            false => self.sparable_block(tokens, walk.num_blocks, num_tokens, max_reusable),
        };
        PrefixMatch {
            num_tokens,
            num_spared,
            lacking,
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
        let mut walk = self.prefix.walk(root, tokens, max_found, enable_partial);
        loop {
            if self.tiers.snapshots.is_enabled() {
                walk = self.to_snapshot(root, &walk);
            }
            let num_blocks = walk.num_blocks;
            if self.config.groups.num_groups() > 1 {
                walk = self.usable(walk);
            }
            if !self.tiers.snapshots.is_enabled() || walk.num_blocks == num_blocks {
                return walk;
            }
        }
    }

    /// The full blocks that are found for `tokens`, if that is further than the states behind them are kept.
    pub(super) fn num_blocks_without_state(&self, root: Content, tokens: &[TokenId]) -> Blocks {
        if !self.tiers.snapshots.is_enabled() {
            return Blocks::ZERO;
        }
        let max_found = max_found(tokens, Tokens(u32::MAX));
        let walk = self.prefix.walk(root, tokens, max_found, false);
        let has_state = self.to_snapshot(root, &walk).num_blocks == walk.num_blocks;
        Blocks(if has_state { 0 } else { walk.num_blocks as u32 })
    }

    /// As much of `walk` as has a snapshot of the states behind it.
    fn to_snapshot(&self, root: Content, walk: &PrefixWalk) -> PrefixWalk {
        let path = self.prefix.path_up(walk.tail);
        let mut path = (1..=walk.num_blocks).rev().zip(path);
        let found = path.find(|(_, node)| self.tiers.snapshots.of(*node).is_some());
        let end = found.and_then(|(num_blocks, node)| {
            let tail = self.prefix.content_of(node)?;
            Some((num_blocks, tail))
        });
        let (num_blocks, tail) = end.unwrap_or((0, root));
        PrefixWalk {
            num_blocks,
            tail,
            partial: None,
        }
    }

    /// The blocks of `group` on the path of `walk` that its queries see, the last first, each with its place.
    pub(super) fn seen(
        &self,
        walk: &PrefixWalk,
        group: usize,
    ) -> impl Iterator<Item = (usize, BlockId)> {
        let hidden = self
            .config
            .hidden(group, walk.num_tokens(self.config.block_size));
        let path = (0..walk.num_blocks).rev();
        let path = path.zip(self.prefix.path_up(walk.tail));
        let path = path.filter(move |(place, _)| !hidden.contains(place));
        path.filter_map(move |(place, node)| Some((place, self.block(node, group)?)))
    }

    /// The block of `group` at a node, if it is in the cache.
    pub(super) fn block(&self, node: BlockId, group: usize) -> Option<BlockId> {
        match group {
            0 => Some(node),
            _ => self.prefix.beside(node, group),
        }
    }

    /// As much of `walk` as every group has what its queries see.
    ///
    /// ```text
    /// group 0   | 7 | 2 | 5 | 6 | 9 |
    /// group 1   |   |   | 8 | 4 |   |      window of 2 blocks: usable up to the fourth, as 8 and 4 are there
    /// ```
    fn usable(&self, mut walk: PrefixWalk) -> PrefixWalk {
        let others = 1..self.config.groups.num_groups();
        let has_all = |node: BlockId| {
            let mut groups = others.clone();
            groups.all(|group| self.prefix.beside(node, group).is_some())
        };
        walk.partial = walk.partial.filter(|(node, _)| has_all(*node));
        let hidden = |walk: &PrefixWalk| {
            let num_tokens = walk.num_tokens(self.config.block_size);
            let mut hidden: [Range<usize>; MAX_KV_GROUPS] = Default::default();
            for group in others.clone() {
                hidden[group] = self.config.hidden(group, num_tokens);
            }
            hidden
        };
        let mut is_hidden = hidden(&walk);
        let path = (0..walk.num_blocks)
            .rev()
            .zip(self.prefix.path_up(walk.tail));
        for (place, node) in path {
            let lacks = |group: usize| {
                !is_hidden[group].contains(&place) && self.prefix.beside(node, group).is_none()
            };
            if others.clone().any(lacks) {
                walk = PrefixWalk {
                    num_blocks: place,
                    tail: self.prefix.parent(node),
                    partial: None,
                };
                is_hidden = hidden(&walk);
            }
        }
        walk
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
