//! The blocks of all sequences, and the rule that maps positions to blocks.
//!
//! `find` and `probe` ask and change nothing. `reserve` takes the first blocks of a context, those that are found and
//! new ones; `grow` takes the next ones; `commit` records what is computed; `release` gives all back. `fork` lets a
//! second beam share all blocks of the first, and `own_next` gives each the block that it writes. Whoever calls
//! `reserve`, `grow` or `own_next` has asked before: a lack of blocks is a decision of the capacity policy, never an
//! error here.

use std::sync::Arc;

use super::lookup::{Lookup, PrefixMatch};
use super::pool::BlockPool;
use super::prefix::{PrefixIndex, PrefixWalk};
use super::table::Chain;
use super::{BlockTable, KvCacheConfig, KvUsage, NextBlock, ReuseOptions, ReuseTotals};
use crate::base::{BlockId, Blocks, TokenId, Tokens};
use crate::engine::BlockCopy;

/// Manages the blocks of the KV cache: who holds them, and which content can be reused.
pub(in crate::engine) struct KvCacheManager {
    config: KvCacheConfig,
    pool: BlockPool,
    /// `None` without reuse.
    prefix: Option<PrefixIndex>,
    copies: Vec<BlockCopy>,
    /// Changes of all tables, to number their versions.
    num_changes: u64,
    totals: ReuseTotals,
}

impl KvCacheManager {
    /// A cache of blank blocks.
    pub(in crate::engine) fn new(config: KvCacheConfig) -> Self {
        assert!(config.max_chunk > Tokens::ZERO, "a step computes something");
        assert!(
            config
                .window
                .is_none_or(|window| window.size > Tokens::ZERO),
            "a query sees its own position"
        );
        let prefix = config
            .enable_reuse
            .then(|| PrefixIndex::new(config.num_blocks, config.block_size));
        Self {
            config,
            pool: BlockPool::new(config.num_blocks),
            prefix,
            copies: Vec::new(),
            num_changes: 0,
            totals: ReuseTotals::default(),
        }
    }

    /// How full it is.
    pub(in crate::engine) fn usage(&self) -> KvUsage {
        KvUsage {
            num_blocks: self.pool.num_blocks(),
            num_used: self.pool.num_blocks() - self.pool.num_free(),
            block_size: self.config.block_size,
        }
    }

    /// The totals of reuse since the beginning.
    pub(in crate::engine) fn totals(&self) -> ReuseTotals {
        self.totals
    }

    /// The most blocks that a sequence of `kv_len` positions holds at once.
    pub(in crate::engine) fn max_blocks(&self, kv_len: Tokens) -> Blocks {
        self.config.max_blocks(kv_len)
    }

    /// The blocks that `table` lacks to hold `kv_len` positions, or as many of them as it may hold at once.
    pub(in crate::engine) fn probe(&self, table: &BlockTable, kv_len: Tokens) -> Blocks {
        self.config.lacking(table.len(), table.num_held(), kv_len)
    }

    /// What `reserve` would find for a context of `tokens`, of which at most `max_reusable` may be reused.
    pub(in crate::engine) fn find(
        &self,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
    ) -> PrefixMatch {
        match &self.prefix {
            Some(prefix) => self.lookup(prefix).find(tokens, reuse, max_reusable),
            None => PrefixMatch::nothing(self.max_blocks(Tokens(tokens.len() as u32))),
        }
    }

    /// The first full block of `tokens` that the sequence of `table` has still to write, if others will find it then.
    pub(in crate::engine) fn next_block(
        &self,
        table: &BlockTable,
        tokens: &[TokenId],
    ) -> Option<NextBlock> {
        let prefix = self.prefix.as_ref()?;
        self.lookup(prefix).next_block(table.chain()?, tokens)
    }

    /// Takes the first blocks of a sequence, for its whole context or as much as it may hold at once. Returns how many
    /// of `tokens` are in them already, once `copies` are made.
    ///
    /// ```text
    /// tokens   |      found      | copied | to be computed |
    /// table    | shared | shared |  its own   |  its own   |
    /// ```
    ///
    /// At most `max_reusable` tokens are found, and never the last, because its logits give the next one.
    pub(in crate::engine) fn reserve(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
    ) -> Tokens {
        assert!(table.len() == Blocks::ZERO, "a context is reserved once");
        let known = Tokens(tokens.len() as u32);
        let walk = match reuse.enabled {
            true => self.share_found(table, tokens, &reuse.salt, max_reusable),
            false => None,
        };
        let block_size = self.config.block_size;
        let num_found = walk.map_or(Tokens::ZERO, |walk| walk.num_tokens(block_size));
        self.slide(table, num_found);
        if let Some((source, num_positions)) = walk.and_then(|walk| walk.partial) {
            let target = self.take_with_content_of(source, num_positions, self.probe(table, known));
            table.push(target);
        }
        self.grow(table, known);
        self.mark_changed(table);
        num_found
    }

    /// Takes the next blocks of a sequence, if `kv_len` positions need any, and it may hold them.
    #[inline]
    pub(in crate::engine) fn grow(&mut self, table: &mut BlockTable, kv_len: Tokens) {
        if kv_len > table.len().tokens(self.config.block_size) {
            self.extend(table, kv_len);
        }
    }

    /// Records that the first `computed` of `tokens` are computed: full blocks can be found from now on, and those that
    /// no later query sees are freed.
    ///
    /// ```text
    /// table   | freed      | registered | registered | filled in part | empty |
    ///                      ^ first seen                         ^ computed
    /// ```
    #[inline]
    pub(in crate::engine) fn commit(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        computed: Tokens,
    ) {
        if computed >= table.next_commit() {
            self.commit_blocks(table, &tokens[..computed.index()]);
        }
    }

    /// Gives all blocks of `table` back.
    pub(in crate::engine) fn release(&mut self, table: &mut BlockTable) {
        // From the end, so that the ends of prefixes are evicted before their beginnings.
        for block in table.held_from_the_end() {
            self.pool.give_back(block);
        }
        self.stop_registering(table);
        table.clear();
    }

    /// Lets `to`, which is empty, hold all blocks of `from`. What it computes later is not registered.
    ///
    /// ```text
    /// block_size = 4; both have computed 6 positions and write the next one
    ///
    /// from   [ Block 7 , Block 2 ]     own_next      [ Block 7 , Block 9 ]     copy 2 -> 9, 2 positions
    /// to     [ Block 7 , Block 2 ]    --------->     [ Block 7 , Block 2 ]
    /// ```
    pub(in crate::engine) fn fork(&mut self, from: &BlockTable, to: &mut BlockTable) {
        to.copy_from(from);
        self.mark_changed(to);
        for block in from.held_from_the_end() {
            self.pool.hold(block);
        }
    }

    /// Makes sure that only this sequence holds the block of the next position, `computed`: if others hold it, its
    /// beginning is copied to a new block by `copies`. So the last sequence that writes to a shared block keeps it.
    pub(in crate::engine) fn own_next(&mut self, table: &mut BlockTable, computed: Tokens) {
        let Some(place) = self.shared_next(table, computed) else {
            return;
        };
        let target = self.take();
        let source = table.replace(place, target);
        self.mark_changed(table);
        self.pool.give_back(source);
        self.copies.push(BlockCopy {
            source,
            target,
            num_positions: computed.0 % self.config.block_size.tokens().0,
        });
    }

    /// What the sequence of `table` computes from now on is not registered.
    pub(in crate::engine) fn stop_registering(&mut self, table: &mut BlockTable) {
        if let Some(chain) = table.take_chain() {
            let prefix = self.prefix.as_mut();
            prefix.expect("a chain is in an index").leave(chain.root());
        }
    }

    /// The blocks that only `tables` hold, without those at their first `num_skipped` places.
    pub(in crate::engine) fn num_own<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        num_skipped: Blocks,
    ) -> Blocks {
        let places = tables.flat_map(|table| table.blocks().iter().skip(num_skipped.index()));
        let mut held: Vec<_> = places.filter(|&&id| id != BlockId::NONE).collect();
        held.sort_unstable();
        let is_own = |same: &&[&BlockId]| self.pool.num_holders(*same[0]) as usize == same.len();
        let num_own = held.chunk_by(|a, b| a == b).filter(is_own).count();
        Blocks(num_own as u32)
    }

    /// What has to be copied before the next step is computed, in this order.
    pub(in crate::engine) fn copies(&self) -> &[BlockCopy] {
        &self.copies
    }

    /// Forgets the copies: the planned step has them.
    pub(in crate::engine) fn clear_copies(&mut self) {
        self.copies.clear();
    }

    /// Panics unless every block is free or held by as many of `tables` as it says, and the index agrees.
    pub(in crate::engine) fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
    ) {
        let tables: Vec<_> = tables.collect();
        let held = tables.iter().flat_map(|table| table.held_from_the_end());
        self.pool.check_integrity(held, |block| {
            let prefix = self.prefix.as_ref();
            prefix.is_some_and(|prefix| prefix.is_registered(block))
        });
        for table in &tables {
            let num_held = table.held_from_the_end().count();
            assert_eq!(table.num_held().index(), num_held, "held in {table:?}");
        }
        let chains = tables.iter().filter_map(|table| table.chain());
        let roots: Vec<_> = chains.map(|chain| chain.root()).collect();
        match &self.prefix {
            Some(prefix) => prefix.check_integrity(&roots),
            None => assert!(roots.is_empty(), "a chain without an index"),
        }
    }

    /// The number of free blocks whose content can be found.
    #[cfg(test)]
    pub(super) fn num_cached(&self) -> usize {
        let ids = (0..self.config.num_blocks.0).map(BlockId);
        let free = ids.filter(|&id| self.pool.num_holders(id) == 0);
        let prefix = self.prefix.as_ref().expect("reuse is on");
        free.filter(|&id| prefix.is_registered(id)).count()
    }

    fn lookup<'a>(&'a self, prefix: &'a PrefixIndex) -> Lookup<'a> {
        Lookup::new(&self.config, &self.pool, prefix)
    }

    /// Shares the blocks that are found for `tokens`. `None` without reuse.
    fn share_found(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        salt: &Option<Arc<str>>,
        max_reusable: Tokens,
    ) -> Option<PrefixWalk> {
        let root = self.prefix.as_mut()?.enter(salt);
        let prefix = self.prefix.as_ref()?;
        let walk = self
            .lookup(prefix)
            .walk(prefix.root(root), tokens, max_reusable);
        let found = prefix.path_up(walk.tail);
        table.fill_from_the_end(
            walk.num_blocks,
            found.inspect(|&block| self.pool.hold(block)),
            Chain::new(root, walk.tail, walk.num_blocks),
        );

        let num_blocks = Tokens(tokens.len() as u32).blocks_ceil(self.config.block_size);
        let num_reused = walk.num_blocks as u64 + u64::from(walk.partial.is_some());
        self.totals.num_reused_blocks += num_reused;
        self.totals.num_missed_blocks += u64::from(num_blocks.0) - num_reused;
        self.totals.num_reused_tokens += u64::from(walk.num_tokens(self.config.block_size).0);
        Some(walk)
    }

    /// Takes the blocks that `table` lacks for `kv_len` positions.
    // Once a block: kept out of the callers' loops over all sequences.
    #[cold]
    fn extend(&mut self, table: &mut BlockTable, kv_len: Tokens) {
        for _ in 0..self.probe(table, kv_len).0 {
            table.push(self.take());
        }
        self.mark_changed(table);
    }

    /// Registers the blocks that `computed` fills, and frees those that are out of the window.
    // As `extend`.
    #[cold]
    fn commit_blocks(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        self.register_full_blocks(table, computed);
        let computed = Tokens(computed.len() as u32);
        self.slide(table, computed);
        table.set_next_commit(self.next_commit(table, computed));
    }

    /// Gives `table` a new version.
    fn mark_changed(&mut self, table: &mut BlockTable) {
        self.num_changes += 1;
        table.set_version(self.num_changes);
    }

    /// Takes a block that will begin with `num_positions` of `source`, when `num_needed` blocks are about to be taken in
    /// all.
    fn take_with_content_of(
        &mut self,
        source: BlockId,
        num_positions: u32,
        num_needed: Blocks,
    ) -> BlockId {
        self.pool.hold(source);
        if self.pool.num_free() < num_needed {
            // `source` was free, and all that are free are needed: it becomes the sequence's own.
            self.forget(source);
            self.totals.num_taken_blocks += 1;
            return source;
        }
        let target = self.take();
        self.copies.push(BlockCopy {
            source,
            target,
            num_positions,
        });
        // If it came from the free list, it goes back to its end: it was of use just now.
        self.pool.give_back(source);
        target
    }

    /// Takes a free block. If it is a cached one, it is evicted.
    fn take(&mut self) -> BlockId {
        let block = self.pool.take();
        self.forget(block);
        self.totals.num_taken_blocks += 1;
        block
    }

    /// Removes the content of `block`, and all below it, from the index.
    fn forget(&mut self, block: BlockId) {
        if let Some(prefix) = &mut self.prefix {
            prefix.forget(block, |forgotten| self.pool.set_cached(forgotten, false));
        }
    }

    /// Registers the blocks that `computed` fills.
    fn register_full_blocks(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        let block_size = self.config.block_size.tokens().index();
        let (blocks, chain) = table.blocks_and_chain();
        let (Some(prefix), Some(chain)) = (&mut self.prefix, chain) else {
            return;
        };
        while let Some(tail) = chain.tail()
            && (chain.num_committed() + 1) * block_size <= computed.len()
        {
            if !prefix.is_there(tail) {
                chain.retreat(blocks, prefix);
                continue;
            }
            let place = chain.num_committed();
            let block = blocks[place];
            let tokens = &computed[place * block_size..][..block_size];
            chain.advance(prefix.register(tail, tokens, block));
            if prefix.is_registered(block) {
                self.pool.set_cached(block, true);
            }
        }
    }

    /// Frees the blocks that no query at or after `computed` sees.
    fn slide(&mut self, table: &mut BlockTable, computed: Tokens) {
        let hidden = self.config.hidden(computed);
        if hidden.is_empty() {
            return;
        }
        let first = hidden.start.max(table.hidden_to());
        table.hide(first..hidden.end, |block| self.pool.give_back(block));
        self.mark_changed(table);
    }

    /// The first number of computed positions after `computed` that fills a block, or hides one.
    fn next_commit(&self, table: &BlockTable, computed: Tokens) -> Tokens {
        let never = Tokens(u32::MAX);
        let open = table.chain().filter(|chain| chain.tail().is_some());
        let next_full = open.map_or(never, |chain| {
            Blocks(chain.num_committed() as u32 + 1).tokens(self.config.block_size)
        });
        let window = self.config.window.as_ref();
        let next_hidden =
            window.map_or(never, |it| it.next_hidden(computed, self.config.block_size));
        next_full.min(next_hidden)
    }

    /// The place of position `computed` in `table`, if its block is partly filled and others hold it.
    pub(super) fn shared_next(&self, table: &BlockTable, computed: Tokens) -> Option<usize> {
        let block_size = self.config.block_size.tokens().0;
        let place = (computed.0 / block_size) as usize;
        let is_begun = !computed.0.is_multiple_of(block_size);
        let is_shared = || self.pool.num_holders(table.blocks()[place]) > 1;
        (is_begun && is_shared()).then_some(place)
    }
}
