//! A beam: one text of a sequence, and the KV blocks that it holds. Without beam search a sequence has one.

use std::ops::Range;

use crate::ReuseOptions;
use crate::kv::{BlockTable, KvCacheManager};
use crate::sequence_tokens::SequenceTokens;
use inflight_base::{Blocks, SnapshotId, StateRow, TokenId, Tokens};

/// The tokens of one text, and the blocks with their keys and values.
#[derive(Default)]
pub(super) struct Beam {
    /// `None` while they are out with a step.
    tokens: Option<Box<SequenceTokens>>,
    blocks: BlockTable,
}

impl Beam {
    /// A beam without anything in the cache. `blocks` is empty, with room for all it will ever need.
    pub(super) fn new(tokens: SequenceTokens, blocks: BlockTable) -> Self {
        Self {
            tokens: Some(Box::new(tokens)),
            blocks,
        }
    }

    /// Its tokens.
    ///
    /// # Panics
    /// If a step has them. So do `tokens_mut` and `take_tokens`.
    #[inline]
    pub(super) fn tokens(&self) -> &SequenceTokens {
        self.tokens.as_ref().expect("no step has the tokens")
    }

    #[inline]
    pub(super) fn tokens_mut(&mut self) -> &mut SequenceTokens {
        self.tokens.as_mut().expect("no step has the tokens")
    }

    /// Moves its tokens out, for a step.
    #[inline]
    pub(super) fn take_tokens(&mut self) -> Box<SequenceTokens> {
        self.tokens.take().expect("in one step at a time")
    }

    /// Puts its tokens back after a step.
    #[inline]
    pub(super) fn put_tokens(&mut self, tokens: Box<SequenceTokens>) {
        self.tokens = Some(tokens);
    }

    /// Records that the first `computed` of its tokens are in the cache.
    #[inline]
    pub(super) fn commit(&mut self, computed: Tokens, kv: &mut KvCacheManager) {
        let tokens = self.tokens.as_ref().expect("no step has the tokens");
        kv.commit(&mut self.blocks, tokens.keys(), computed);
    }

    /// Appends the token of the candidate that continues it.
    pub(super) fn extend(&mut self, token: TokenId) {
        self.tokens_mut().push_unchecked(token);
    }

    /// Its block table.
    #[inline]
    pub(super) fn blocks(&self) -> &BlockTable {
        &self.blocks
    }

    /// Takes the blocks of its first `len` tokens; those that are found in the cache are shared. Returns how many of
    /// the tokens are in them.
    pub(super) fn reserve(
        &mut self,
        len: Tokens,
        reuse: &ReuseOptions,
        kv: &mut KvCacheManager,
    ) -> Tokens {
        let tokens = self.tokens.as_ref().expect("no step has the tokens");
        let max_reusable = tokens.max_reusable();
        let keys = &tokens.keys()[..len.index()];
        kv.reserve(&mut self.blocks, keys, reuse, max_reusable)
    }

    /// Restores the states behind its first `computed` tokens, see [`KvCacheManager::restore_states`].
    pub(super) fn restore_states(
        &mut self,
        computed: Tokens,
        row: StateRow,
        kv: &mut KvCacheManager,
    ) {
        kv.restore_states(&mut self.blocks, computed, row);
    }

    /// Takes snapshots of its recurrent states, see [`KvCacheManager::take_snapshots`].
    pub(super) fn take_snapshots(
        &mut self,
        chunk: Range<Tokens>,
        context: Option<Tokens>,
        kv: &mut KvCacheManager,
    ) -> impl Iterator<Item = (Tokens, SnapshotId)> {
        kv.take_snapshots(&mut self.blocks, chunk, context)
    }

    /// Takes the blocks that it lacks for `kv_len` positions.
    #[inline]
    pub(super) fn grow(&mut self, kv: &mut KvCacheManager, kv_len: Tokens) {
        kv.grow(&mut self.blocks, kv_len);
    }

    /// The same, where it shares its blocks with other beams: the one that it writes next becomes its own.
    pub(super) fn grow_own(&mut self, kv: &mut KvCacheManager, computed: Tokens, kv_len: Tokens) {
        kv.own_next(&mut self.blocks, computed);
        kv.grow(&mut self.blocks, kv_len);
    }

    /// From now on, its blocks are not registered for reuse.
    pub(super) fn stop_registering(&mut self, kv: &mut KvCacheManager) {
        kv.stop_registering(&mut self.blocks);
    }

    /// Releases its blocks.
    pub(super) fn release(&mut self, kv: &mut KvCacheManager) {
        kv.release(&mut self.blocks);
    }

    /// Another beam with the same tokens, which shares all blocks.
    pub(super) fn fork(&self, kv: &mut KvCacheManager) -> Self {
        let blocks = BlockTable::with_capacity(self.blocks.capacity());
        let mut beam = Self::new(self.tokens().fork(), blocks);
        beam.share(self, kv);
        beam
    }

    /// Shares all blocks of `other`, which has computed what both begin with. It must hold none.
    pub(super) fn share(&mut self, other: &Self, kv: &mut KvCacheManager) {
        kv.fork(&other.blocks, &mut self.blocks);
    }

    /// Places in its block table, of all groups of layers.
    #[inline]
    pub(super) fn num_blocks(&self) -> Blocks {
        self.blocks.total_len()
    }
}
