//! The paged KV cache's bookkeeping: which sequence holds which block. No keys or values are here.
//!
//! One idea: memory is cut into blocks of `block_size` positions, and a sequence addresses its
//! positions through a table of block ids, so that any free block will do, and a full block can be in
//! several tables.
//!
//! ```text
//! block_size = 4; S1 has computed 10 positions, S2 began with the same 8 tokens
//!
//! position    0  1  2  3 | 4  5  6  7 | 8  9  -  -
//! table S1   [ Block 7   , Block 2    , Block 5 ]       position p lies in table[p / 4], at p % 4
//! table S2   [ Block 7   , Block 2    , Block 1 ]
//!
//! prefix index      root --- 7 --- 2 --- 0              full blocks, by their tokens and those before
//!                              \-- 6
//! free list         4, 3, | 6, 0                        nobody's: blank ones, then cached ones
//! ```
//!
//! A block's life:
//!
//! ```text
//!          reserve, grow               commit: it is full             release: the last holder
//! blank ------------------> held -----------------------> registered ----------------------> cached
//!   ^                        | release                      ^   | reserve: one more holder     |  |
//!   |                        v                              +---+<----- reserve: found --------+  |
//!   +------------------------+<----------------- taken for something else: evicted ---------------+
//! ```
//!
//! The verbs: `find` and `probe` ask and change nothing; `reserve` takes a context's first blocks, the
//! ones that are found and new ones; `grow` takes the next ones, `commit` says what is computed,
//! `release` gives all back. `fork` lets a second sequence hold all that one has, and `own_next` then
//! gives it the block that it writes. Whoever calls `reserve`, `grow` or `own_next` has asked before: no
//! room is a decision of the capacity policy, never an error here.

mod config;
mod fork;
mod lookup;
mod next_block;
mod pool;
mod prefix;
mod roots;
mod table;
mod usage;
mod window;

use std::ops::Range;
use std::sync::Arc;

pub(super) use config::KvCacheConfig;
pub use config::ReuseOptions;
pub(super) use next_block::NextBlock;
pub(super) use table::BlockTable;
pub use usage::{KvUsage, ReuseTotals};
pub use window::AttentionWindow;

use crate::base::{BlockId, Blocks, TokenId, Tokens};
use crate::engine::BlockCopy;
use pool::BlockPool;
use prefix::{PrefixIndex, PrefixWalk};
use table::Chain;

/// The pool, what is in it, and the rule that maps positions to blocks.
pub(super) struct KvCacheManager {
    config: KvCacheConfig,
    pool: BlockPool,
    /// `None` without reuse.
    prefix: Option<PrefixIndex>,
    copies: Vec<BlockCopy>,
    /// Of all tables.
    num_changes: u64,
    totals: ReuseTotals,
}

impl KvCacheManager {
    /// A cache of blank blocks.
    pub(super) fn new(config: KvCacheConfig) -> Self {
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
    pub(super) fn usage(&self) -> KvUsage {
        KvUsage {
            num_blocks: self.pool.num_blocks(),
            num_used: self.pool.num_blocks() - self.pool.num_free(),
            block_size: self.config.block_size,
        }
    }

    /// What reuse has come to since the beginning.
    pub(super) fn totals(&self) -> ReuseTotals {
        self.totals
    }

    /// The most blocks that a sequence of `kv_len` positions holds at once.
    pub(super) fn max_blocks(&self, kv_len: Tokens) -> Blocks {
        let all = kv_len.blocks_ceil(self.config.block_size);
        self.config.window.map_or(all, |window| {
            all.min(window.max_blocks(self.config.max_chunk, self.config.block_size))
        })
    }

    /// The blocks that `table` lacks to hold `kv_len` positions, or as many of them as it may hold at
    /// once.
    pub(super) fn probe(&self, table: &BlockTable, kv_len: Tokens) -> Blocks {
        self.lacking(table.len(), table.num_held(), kv_len)
    }

    /// Takes the first blocks of a sequence, for all of its context or as much as it may hold at once.
    /// Returns how many of `tokens` are in them already. They are computed when `copies` are made.
    ///
    /// ```text
    /// tokens   |      found      | copied | to be computed |
    /// table    | shared | shared |  its own   |  its own   |
    /// ```
    ///
    /// At most `max_reused` of them are found, and never the last, because its logits give the next one.
    pub(super) fn reserve(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reused: Tokens,
    ) -> Tokens {
        assert!(table.len() == Blocks::ZERO, "a context is reserved once");
        let known = Tokens(tokens.len() as u32);
        let walk = match reuse.enabled {
            true => self.share_found(table, tokens, &reuse.salt, max_reused),
            false => None,
        };
        let num_found = walk.map_or(Tokens::ZERO, |walk| self.num_found(&walk));
        self.slide(table, num_found);
        if let Some((source, num_positions)) = walk.and_then(|walk| walk.partial) {
            let target = self.take_with_content_of(source, num_positions, self.probe(table, known));
            table.push(target);
        }
        self.grow(table, known);
        self.has_changed(table);
        num_found
    }

    /// Takes the next blocks of a sequence, if `kv_len` positions need any, and it may hold them.
    #[inline]
    pub(super) fn grow(&mut self, table: &mut BlockTable, kv_len: Tokens) {
        if kv_len > table.len().tokens(self.config.block_size) {
            self.extend(table, kv_len);
        }
    }

    /// Says that the first `computed` of `tokens` are computed: the blocks that are full can be found
    /// from now on, and those that no later query sees are given back.
    ///
    /// ```text
    /// table   | given back | registered | registered | filled in part | empty |
    ///                      ^ first seen                         ^ computed
    /// ```
    #[inline]
    pub(super) fn commit(&mut self, table: &mut BlockTable, tokens: &[TokenId], computed: Tokens) {
        if computed >= table.next_commit {
            self.commit_blocks(table, &tokens[..computed.index()]);
        }
    }

    /// Gives all blocks of `table` back.
    pub(super) fn release(&mut self, table: &mut BlockTable) {
        // From the end, so that the ends of prefixes are evicted before their beginnings.
        for block in table.held_from_the_end() {
            self.pool.give_back(block);
        }
        self.stop_registering(table);
        table.clear();
    }

    /// What has to be copied before the next step is computed, in this order.
    pub(super) fn copies(&self) -> &[BlockCopy] {
        &self.copies
    }

    /// Forgets what was to be copied: the step is planned, and its successor begins.
    pub(super) fn clear_copies(&mut self) {
        self.copies.clear();
    }

    /// Panics unless every block is in the free list or held by as many of `tables` as it says, and the
    /// index agrees.
    pub(super) fn check_integrity<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
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
        let chains = tables
            .iter()
            .filter_map(|table| table.places.chain.as_ref());
        let roots: Vec<_> = chains.map(|chain| chain.root).collect();
        match &self.prefix {
            Some(prefix) => prefix.check_integrity(&roots),
            None => assert!(roots.is_empty(), "a chain without an index"),
        }
    }

    /// Shares the blocks that are found for `tokens`. `None` without reuse.
    fn share_found(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        salt: &Option<Arc<str>>,
        max_reused: Tokens,
    ) -> Option<PrefixWalk> {
        let root = self.prefix.as_mut()?.enter(salt);
        let prefix = self.prefix.as_ref()?;
        let max_reused = self.max_reused(tokens, max_reused);
        let walk = self.walk(prefix, prefix.root(root), tokens, max_reused);
        let found = prefix.path_up(walk.tail);
        table.fill_from_the_end(
            walk.num_blocks,
            found.inspect(|&block| self.pool.hold(block)),
        );
        table.places.chain = Some(Chain {
            root,
            tail: Some(walk.tail),
            num_committed: walk.num_blocks,
        });

        let num_blocks = Tokens(tokens.len() as u32).blocks_ceil(self.config.block_size);
        let num_reused = walk.num_blocks as u64 + u64::from(walk.partial.is_some());
        self.totals.num_reused_blocks += num_reused;
        self.totals.num_missed_blocks += u64::from(num_blocks.0) - num_reused;
        self.totals.num_reused_tokens += u64::from(self.num_found(&walk).0);
        Some(walk)
    }

    /// Takes the blocks that `table` lacks for `kv_len` positions.
    // Once a block: kept out of the callers' loops over all sequences.
    #[cold]
    fn extend(&mut self, table: &mut BlockTable, kv_len: Tokens) {
        for _ in 0..self.probe(table, kv_len).0 {
            table.push(self.take());
        }
        self.has_changed(table);
    }

    /// Does what there is to do when `computed` are the tokens that are.
    // As `extend`.
    #[cold]
    fn commit_blocks(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        self.register_full_blocks(table, computed);
        let computed = Tokens(computed.len() as u32);
        self.slide(table, computed);
        table.next_commit = self.next_commit(table, computed);
    }

    /// Says that places of `table` are others than before.
    fn has_changed(&mut self, table: &mut BlockTable) {
        self.num_changes += 1;
        table.version = self.num_changes;
    }

    /// Takes a block that will begin with `num_positions` of `source`, when `num_needed` blocks are
    /// about to be taken altogether.
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
        // Back at the end of the free list, if it came from there: it was of use just now.
        self.pool.give_back(source);
        target
    }

    /// Takes a free block; if it is a cached one, it is evicted.
    fn take(&mut self) -> BlockId {
        let block = self.pool.take();
        self.forget(block);
        self.totals.num_taken_blocks += 1;
        block
    }

    /// Sees to it that the content of `block` is found no more, nor anything below it.
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
        while let Some(tail) = chain.tail
            && (chain.num_committed + 1) * block_size <= computed.len()
        {
            if !prefix.is_there(tail) {
                chain.retreat(blocks, prefix);
                continue;
            }
            let place = chain.num_committed;
            let block = blocks[place];
            let tokens = &computed[place * block_size..][..block_size];
            chain.tail = prefix.register(tail, tokens, block);
            chain.num_committed += 1;
            if prefix.is_registered(block) {
                self.pool.set_cached(block, true);
            }
        }
    }

    /// Gives back the blocks that no query at or after `computed` sees.
    fn slide(&mut self, table: &mut BlockTable, computed: Tokens) {
        let hidden = self.hidden(computed);
        let first = hidden.start.max(table.places.hidden_to);
        for place in (first..hidden.end).rev() {
            self.pool.give_back(table.hide(place));
        }
        if !hidden.is_empty() {
            self.has_changed(table);
            table.places.hidden_to = hidden.end;
        }
    }

    /// The first number of computed positions after `computed` that fills a block, or hides one.
    fn next_commit(&self, table: &BlockTable, computed: Tokens) -> Tokens {
        let never = Tokens(u32::MAX);
        let open = table
            .places
            .chain
            .as_ref()
            .filter(|chain| chain.tail.is_some());
        let next_full = open.map_or(never, |chain| {
            Blocks(chain.num_committed as u32 + 1).tokens(self.config.block_size)
        });
        let window = self.config.window.as_ref();
        let next_hidden =
            window.map_or(never, |it| it.next_hidden(computed, self.config.block_size));
        next_full.min(next_hidden)
    }

    /// The places in a table that no query at or after `computed` sees.
    fn hidden(&self, computed: Tokens) -> Range<usize> {
        let window = self.config.window.as_ref();
        window.map_or(0..0, |it| it.hidden(computed, self.config.block_size))
    }

    /// The blocks to take for `kv_len` positions when `num_places` are covered and `num_held` held.
    fn lacking(&self, num_places: Blocks, num_held: Blocks, kv_len: Tokens) -> Blocks {
        let uncovered = kv_len
            .blocks_ceil(self.config.block_size)
            .saturating_sub(num_places);
        uncovered.min(self.max_blocks(kv_len).saturating_sub(num_held))
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod walks;
