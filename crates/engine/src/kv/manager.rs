//! The blocks of all sequences, and the rule that maps positions to blocks.
//!
//! `find` and `probe` ask and change nothing. `reserve` takes the first blocks of a context, those that are found and
//! new ones; `grow` takes the next ones; `commit` records what is computed; `release` gives all back. `fork` lets a
//! second beam share all blocks of the first, and `own_next` gives each the block that it writes. Whoever calls
//! `reserve`, `grow` or `own_next` has asked before: a lack of blocks is a decision of the capacity policy, never an
//! error here.

use std::ops::Range;
use std::sync::Arc;

use super::lookup::{Lookup, PrefixMatch};
use super::prefix::{Content, PrefixIndex, PrefixWalk};
use super::table::{Chain, TakenSnapshot};
use super::tiers::Tiers;
use super::{
    BlockTable, KeptBlock, KvCacheConfig, KvUsage, MAX_KV_GROUPS, NextBlock, RetainedPrefix,
    ReuseOptions, ReuseTotals,
};
use crate::{BlockCopy, BlockMove, StateMove};
use inflight_base::{BlockId, Blocks, HostBlockId, SnapshotId, StateRow, TokenId, Tokens};

/// Manages the blocks of the KV cache: who holds them, and which content can be reused.
pub(crate) struct KvCacheManager {
    config: KvCacheConfig,
    tiers: Tiers,
    /// Changes of all tables, to number their versions.
    num_changes: u64,
}

impl KvCacheManager {
    /// A cache of blank blocks.
    pub(crate) fn new(config: KvCacheConfig) -> Self {
        assert!(config.max_chunk > Tokens::ZERO, "a step computes something");
        let mut windows = config.groups.windows().iter().flatten();
        assert!(
            windows.all(|window| window.size > Tokens::ZERO),
            "a query sees its own position"
        );
        assert!(
            config.enable_reuse || config.num_host_blocks == Blocks::ZERO,
            "host blocks are for reuse"
        );
        assert!(
            config.num_snapshots > 0 || config.num_host_snapshots == 0,
            "snapshots in host memory are those that the device gives up"
        );
        Self {
            config,
            tiers: Tiers::new(config),
            num_changes: 0,
        }
    }

    /// How full it is.
    pub(crate) fn usage(&self) -> KvUsage {
        let (device, host) = (self.tiers.device(), self.tiers.host());
        let [num_snapshots, num_host_snapshots] = self.tiers.snapshots.num_all();
        let [num_snapshots_used, num_host_snapshots_used] = self.tiers.snapshots.num_attached();
        KvUsage {
            num_blocks: device.num_blocks(),
            num_used: device.num_blocks() - device.num_free(),
            num_host_blocks: host.num_blocks(),
            num_host_used: host.num_cached(),
            num_snapshots,
            num_snapshots_used,
            num_host_snapshots,
            num_host_snapshots_used,
            block_size: self.config.block_size,
        }
    }

    /// The totals of reuse since the beginning.
    pub(crate) fn totals(&self) -> ReuseTotals {
        self.tiers.totals
    }

    /// The most blocks that a sequence of `kv_len` positions holds at once.
    pub(crate) fn max_blocks(&self, kv_len: Tokens) -> Blocks {
        self.config.max_blocks(kv_len)
    }

    /// The most blocks of the groups of layers without a window.
    pub(crate) fn max_whole_blocks(&self, kv_len: Tokens) -> Blocks {
        self.config.max_whole_blocks(kv_len)
    }

    /// Blocks that sequences hold for the groups without a window.
    pub(crate) fn num_used_whole(&self) -> Blocks {
        self.usage().num_used - self.tiers.device().num_windowed()
    }

    /// The blocks that `table` holds for the groups with a window.
    pub(crate) fn num_windowed(&self, table: &BlockTable) -> Blocks {
        let groups = self.config.groups.num_whole()..self.config.groups.num_groups();
        groups.map(|group| table.num_held_of(group)).sum()
    }

    /// The blocks that `table` lacks to hold `kv_len` positions, or as many of them as it may hold at once.
    pub(crate) fn probe(&self, table: &BlockTable, kv_len: Tokens) -> Blocks {
        let groups = 0..self.config.groups.num_groups();
        groups
            .map(|group| self.lacking_of(table, group, kv_len))
            .sum()
    }

    /// The blocks that one group lacks.
    fn lacking_of(&self, table: &BlockTable, group: usize, kv_len: Tokens) -> Blocks {
        let (len, num_held) = (table.len_of(group), table.num_held_of(group));
        self.config.lacking(group, len, num_held, kv_len)
    }

    /// The blocks that beams lack, all together, to hold `kv_len` positions each: those that `tables` lack, and a copy
    /// of the block of the next position, `computed`, for all beams but one of those that share it.
    pub(crate) fn probe_beams<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        computed: Tokens,
        kv_len: Tokens,
    ) -> Blocks {
        let mut lacking = Blocks::ZERO;
        let mut shared = Vec::new();
        for table in tables {
            lacking += self.probe(table, kv_len);
            shared.extend(self.shared_next(table, computed));
        }
        let num_shared = shared.len();
        shared.sort_unstable();
        shared.dedup();
        lacking + Blocks((num_shared - shared.len()) as u32)
    }

    /// What `reserve` would find for a context of `tokens`, of which at most `max_reusable` may be reused.
    pub(crate) fn find(
        &self,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
    ) -> PrefixMatch {
        match self.tiers.prefix() {
            Some(prefix) => self.lookup(prefix).find(tokens, reuse, max_reusable),
            None => PrefixMatch::nothing(self.max_blocks(Tokens(tokens.len() as u32))),
        }
    }

    /// The first full block of `tokens` that the sequence of `table` has still to write, if others will find it then.
    pub(crate) fn next_block(&self, table: &BlockTable, tokens: &[TokenId]) -> Option<NextBlock> {
        let prefix = self.tiers.prefix()?;
        if self.tiers.snapshots.is_enabled() {
            // The state behind it may not be kept.
            return None;
        }
        self.lookup(prefix).next_block(table.chain()?, tokens)
    }

    /// Takes the first blocks of a sequence, for its whole context or as much as it may hold at once. Returns how many
    /// of `tokens` are in them already, once `moves` are made.
    ///
    /// ```text
    /// tokens   |      found      | copied | to be computed |
    /// table    | shared | shared |  its own   |  its own   |
    /// ```
    ///
    /// At most `max_reusable` tokens are found, and never the last, because its logits give the next one.
    pub(crate) fn reserve(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
    ) -> Tokens {
        assert!(table.len() == Blocks::ZERO, "a context is reserved once");
        let known = Tokens(tokens.len() as u32);
        table.begin(self.config.groups.num_groups());
        let walk = match reuse.enabled {
            true => self.share_found(table, tokens, &reuse.salt, max_reusable),
            false => None,
        };
        let block_size = self.config.block_size;
        let num_found = walk.map_or(Tokens::ZERO, |(walk, _)| walk.num_tokens(block_size));
        let config = self.config;
        self.slide(table, |group| config.hidden(group, num_found));
        self.onboard(table);
        if let Some((walk, sources)) = walk
            && let Some((_, num_positions)) = walk.partial
        {
            for (group, &source) in sources[..self.config.groups.num_groups()]
                .iter()
                .enumerate()
            {
                let num_needed = self.probe(table, known);
                let target = self.take_with_content_of(source, group, num_positions, num_needed);
                table.push(group, target);
            }
        }
        self.grow(table, known);
        self.mark_changed(table);
        num_found
    }

    /// Plans to restore the states behind the first `computed` tokens, which `reserve` has just found, to `row`.
    pub(crate) fn restore_states(
        &mut self,
        table: &mut BlockTable,
        computed: Tokens,
        row: StateRow,
    ) {
        if let Some(found) = table.states_mut().found.take() {
            self.tiers.restore_states(found, row, computed);
        }
    }

    /// Takes snapshots of the states that a step leaves within `chunk`, a part of the `len` tokens of a context or the
    /// token of an answer, where they are worth it. Each has the tokens of `chunk` that it sums up.
    ///
    /// ```text
    /// block_size = 4, snapshot_interval = 8, 6 tokens found further than any snapshot; and each full block of an answer
    ///
    /// context   |0      |4      |8      |12     |16 17       answer   ...|12     |16     |20
    /// snapshots         ^ fork  ^       -       ^ end                    ^       ^       ^
    /// ```
    pub(crate) fn take_snapshots<'t>(
        &mut self,
        table: &'t mut BlockTable,
        chunk: Range<Tokens>,
        context: Option<Tokens>,
    ) -> impl Iterator<Item = (Tokens, SnapshotId)> + use<'t> {
        let block_size = self.config.block_size;
        let num_before = table.states().taken.len();
        if self.tiers.snapshots.is_enabled() && table.chain().is_some_and(|it| it.tail().is_some())
        {
            let places = Blocks(chunk.start.0 / block_size.tokens().0 + 1).0
                ..=chunk.end.0 / block_size.tokens().0;
            for num_places in places.map(Blocks) {
                self.take_snapshot(table, num_places, context);
            }
        }
        let taken = table.states().taken.get(num_before..).unwrap_or_default();
        let with_tokens =
            move |it: &TakenSnapshot| (it.num_places.tokens(block_size) - chunk.start, it.id);
        taken.iter().map(with_tokens)
    }

    /// Takes the next blocks of a sequence, if `kv_len` positions need any, and it may hold them.
    #[inline]
    pub(crate) fn grow(&mut self, table: &mut BlockTable, kv_len: Tokens) {
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
    pub(crate) fn commit(&mut self, table: &mut BlockTable, tokens: &[TokenId], computed: Tokens) {
        if computed >= table.next_commit() {
            self.commit_blocks(table, &tokens[..computed.index()]);
        }
    }

    /// Gives all blocks of `table` back.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        // From the end, so that the ends of prefixes are evicted before their beginnings.
        for block in table.held_from_the_end() {
            self.tiers.give_back(block);
        }
        self.stop_registering(table);
        for taken in &table.states().taken {
            self.tiers.snapshots.give_back(taken.id);
        }
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
    pub(crate) fn fork(&mut self, from: &BlockTable, to: &mut BlockTable) {
        to.copy_from(from);
        self.mark_changed(to);
        for block in from.held_from_the_end() {
            self.tiers.hold(block);
        }
    }

    /// Makes sure that only this sequence holds the block of the next position, `computed`: if others hold it, its
    /// beginning is copied to a new block by `moves`. So the last sequence that writes to a shared block keeps it.
    pub(crate) fn own_next(&mut self, table: &mut BlockTable, computed: Tokens) {
        for group in 0..self.config.groups.num_groups() {
            let Some(place) = self.shared_place(table, group, computed) else {
                continue;
            };
            let target = self.tiers.take(group);
            let source = table.replace(place, group, target);
            self.mark_changed(table);
            self.tiers.give_back(source);
            self.tiers.push_copy(BlockCopy {
                source,
                target,
                num_positions: computed.0 % self.config.block_size.tokens().0,
            });
        }
    }

    /// What the sequence of `table` computes from now on is not registered.
    pub(crate) fn stop_registering(&mut self, table: &mut BlockTable) {
        if let Some(chain) = table.take_chain() {
            let prefix = self.tiers.prefix_mut();
            prefix.expect("a chain is in an index").leave(chain.root());
        }
    }

    /// The blocks of groups without a window that only `tables` hold, without those at their first `num_skipped`
    /// places.
    pub(crate) fn num_own<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        num_skipped: Blocks,
    ) -> Blocks {
        let (num_groups, num_whole) = (
            self.config.groups.num_groups(),
            self.config.groups.num_whole(),
        );
        let places = tables.flat_map(|table| {
            let places = table.blocks().chunks(num_groups).skip(num_skipped.index());
            places.flat_map(|place| &place[..num_whole])
        });
        let mut held: Vec<_> = places.filter(|&&id| id != BlockId::NONE).collect();
        held.sort_unstable();
        let is_own =
            |same: &&[&BlockId]| self.tiers.device().num_holders(*same[0]) as usize == same.len();
        let num_own = held.chunk_by(|a, b| a == b).filter(is_own).count();
        Blocks(num_own as u32)
    }

    /// What has to be moved before the next step is computed, in this order.
    pub(crate) fn moves(&self) -> &[BlockMove] {
        self.tiers.moves()
    }

    /// How states have to be moved before the next step is computed, in this order.
    pub(crate) fn state_moves(&self) -> &[StateMove] {
        self.tiers.state_moves()
    }

    /// Forgets the moves of blocks and states: the planned step has them.
    pub(crate) fn clear_moves(&mut self) {
        self.tiers.clear_moves();
    }

    /// Moves what is cached to host memory, as far as there is room, while no sequence has blocks. Returns what is
    /// there once `moves` are made.
    pub(crate) fn keep(&mut self) -> Vec<KeptBlock> {
        self.tiers.offload_all();
        self.tiers.kept()
    }

    /// Takes contents into blank host blocks. Returns for each that has found a place where it was, and where it is
    /// now.
    pub(crate) fn restore(&mut self, kept: &[KeptBlock]) -> Vec<(HostBlockId, HostBlockId)> {
        self.tiers.restore(kept)
    }

    /// Retains the full blocks in which `tokens` are cached: they are evicted only when no other block is free.
    pub(crate) fn retain(
        &mut self,
        tokens: Arc<[TokenId]>,
        salt: Option<Arc<str>>,
    ) -> RetainedPrefix {
        RetainedPrefix {
            contents: self.tiers.retain(&tokens, &salt),
            tokens,
            salt,
        }
    }

    /// Retains these blocks no longer.
    pub(crate) fn release_retained(&mut self, retained: &RetainedPrefix) {
        let RetainedPrefix {
            tokens,
            salt,
            contents,
        } = retained;
        self.tiers.release(tokens, salt, contents);
    }

    /// Panics unless every block is free or held by as many of `tables` as it says, and the index agrees.
    pub(crate) fn check_integrity<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let tables: Vec<_> = tables.collect();
        for table in &tables {
            for group in 0..self.config.groups.num_groups() {
                let blocks = table.blocks().chunks(self.config.groups.num_groups());
                let held = blocks.filter(|place| place[group] != BlockId::NONE);
                let num_held = table.num_held_of(group).index();
                assert_eq!(num_held, held.count(), "held in {table:?}");
            }
        }
        let chains = tables.iter().filter_map(|table| table.chain());
        let roots: Vec<_> = chains.map(|chain| chain.root()).collect();
        let held = tables.iter().flat_map(|table| table.held_from_the_end());
        let taken = tables.iter().flat_map(|table| &table.states().taken);
        let snapshots = taken.map(|taken| taken.id);
        self.tiers.check_integrity(held, snapshots, &roots);
    }

    /// The number of free blocks whose content can be found.
    #[cfg(test)]
    pub(super) fn num_cached(&self) -> usize {
        let ids = (0..self.config.num_blocks.0).map(BlockId);
        let free = ids.filter(|&id| self.tiers.device().num_holders(id) == 0);
        free.filter(|&id| self.tiers.has_content(id)).count()
    }

    /// The number of blocks, here or in host memory, that are retained.
    #[cfg(test)]
    pub(super) fn num_retained(&self) -> usize {
        let num_all = self.config.num_blocks.0 + self.config.num_host_blocks.0;
        let ids = (0..num_all).map(BlockId);
        ids.filter(|&id| self.tiers.is_retained(id)).count()
    }

    fn lookup<'a>(&'a self, prefix: &'a PrefixIndex) -> Lookup<'a> {
        Lookup::new(&self.config, &self.tiers, prefix)
    }

    /// Shares the blocks that are found for `tokens`, and holds those that are found in part, of each group, which it
    /// returns. `None` without reuse.
    ///
    /// Until [`onboard`](Self::onboard) has been called, `table` has blocks that are in host memory.
    fn share_found(
        &mut self,
        table: &mut BlockTable,
        tokens: &[TokenId],
        salt: &Option<Arc<str>>,
        max_reusable: Tokens,
    ) -> Option<(PrefixWalk, [BlockId; MAX_KV_GROUPS])> {
        let root = self.tiers.prefix_mut()?.enter(salt);
        let prefix = self.tiers.prefix()?;
        let lookup = self.lookup(prefix);
        let num_groups = self.config.groups.num_groups();
        let walk = lookup.walk(prefix.root(root), tokens, max_reusable);
        let num_tokens = walk.num_tokens(self.config.block_size);
        // The path of the first group as a whole: it was of use, and is evicted from its end. Of other groups, what is
        // far behind the window may not be there, and is of no use.
        let path = (0..walk.num_blocks).rev().zip(prefix.path_up(walk.tail));
        for (place, block) in path {
            table.put(place, 0, block);
        }
        for group in 1..num_groups {
            for (place, block) in lookup.seen(&walk, group) {
                table.put(place, group, block);
            }
            let hidden = self.config.hidden(group, num_tokens);
            if !hidden.is_empty() {
                table.set_hidden_to(group, hidden.end);
            }
        }
        let mut sources = [BlockId::NONE; MAX_KV_GROUPS];
        if let Some((source, _)) = walk.partial {
            for (group, block) in sources[..num_groups].iter_mut().enumerate() {
                let found = lookup.block(source, group);
                *block = found.expect("what is found in part is found for all groups");
            }
        }
        for group in 0..num_groups {
            table.end_at(group, walk.num_blocks);
        }
        table.set_chain(Chain::new(root, walk.tail, walk.num_blocks));
        let last = walk.tail.block();
        let found = last.and_then(|last| self.tiers.snapshots.of(last));
        let fork = lookup.num_blocks_without_state(prefix.root(root), tokens);
        let states = table.states_mut();
        (states.found, states.fork) = (found, fork);
        let partial = sources.into_iter().filter(|&block| block != BlockId::NONE);
        for block in table.held_from_the_end().chain(partial) {
            self.tiers.hold(block);
        }

        if let Some(found) = found {
            self.tiers.snapshots.reuse(found);
        }
        let num_blocks = Tokens(tokens.len() as u32).blocks_ceil(self.config.block_size);
        let num_reused = walk.num_blocks as u64 + u64::from(walk.partial.is_some());
        let num_missed = u64::from(num_blocks.0) - num_reused;
        self.tiers.totals.num_reused_blocks += num_groups as u64 * num_reused;
        self.tiers.totals.num_missed_blocks += num_groups as u64 * num_missed;
        self.tiers.totals.num_reused_tokens += u64::from(num_tokens.0);
        Some((walk, sources))
    }

    /// Takes the content of the blocks of `table` that are in host memory to blocks of the device. Sequences hold only
    /// these.
    fn onboard(&mut self, table: &mut BlockTable) {
        let num_groups = self.config.groups.num_groups();
        for index in 0..table.blocks().len() {
            let host = table.blocks()[index];
            if host == BlockId::NONE || !self.tiers.is_on_host(host) {
                continue;
            }
            let (place, group) = (index / num_groups, index % num_groups);
            let block = self.tiers.onboard(host, group);
            table.replace(place, group, block);
            let (blocks, chain, _) = table.blocks_chain_and_states();
            let (Some(chain), Some(prefix)) = (chain, self.tiers.prefix()) else {
                unreachable!("what is found has a chain in an index");
            };
            let is_last = group == 0 && index + num_groups == blocks.len();
            if is_last && prefix.is_registered(block) {
                chain.set_tail(prefix.content_of(block));
            }
        }
    }

    /// Takes the blocks that `table` lacks for `kv_len` positions.
    // Once a block: kept out of the callers' loops over all sequences.
    #[cold]
    fn extend(&mut self, table: &mut BlockTable, kv_len: Tokens) {
        table.begin(self.config.groups.num_groups());
        for group in 0..self.config.groups.num_groups() {
            for _ in 0..self.lacking_of(table, group, kv_len).0 {
                table.push(group, self.tiers.take(group));
            }
        }
        self.mark_changed(table);
    }

    /// Registers the blocks that `computed` fills, and frees those that are out of the window.
    // As `extend`.
    #[cold]
    fn commit_blocks(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        self.register_full_blocks(table, computed);
        let computed = Tokens(computed.len() as u32);
        let (groups, block_size) = (self.config.groups, self.config.block_size);
        self.slide(table, |group| groups.freed(group, computed, block_size));
        table.set_next_commit(self.next_commit(table, computed));
    }

    /// Takes a snapshot at the end of `num_places` if it is worth keeping: in a context of `context` tokens, or in an
    /// answer if that is `None`.
    fn take_snapshot(
        &mut self,
        table: &mut BlockTable,
        num_places: Blocks,
        context: Option<Tokens>,
    ) {
        let config = &self.config;
        let states = table.states();
        let is_worth_it = context.is_none_or(|len| {
            let interval = config.snapshot_interval.blocks_ceil(config.block_size).0;
            // The last token is always computed, because its logits give the next one.
            let end = (len - Tokens(1)).floor_to_block(config.block_size);
            num_places.tokens(config.block_size) == end
                || num_places == states.fork
                // Nothing but 0 is a multiple of 0, which is no interval.
                || num_places.0.is_multiple_of(interval)
        });
        if !is_worth_it || states.has_taken(num_places) {
            return;
        }
        let is_rolling = context.is_none();
        let rolling = states.rolling.filter(|_| is_rolling);
        if let Some(id) = self.tiers.take_snapshot(rolling) {
            self.tiers.totals.num_saved_states += 1;
            table.states_mut().taken.push(TakenSnapshot {
                id,
                num_places,
                is_rolling,
            });
        }
    }

    /// Gives `table` a new version.
    fn mark_changed(&mut self, table: &mut BlockTable) {
        self.num_changes += 1;
        table.set_version(self.num_changes);
    }

    /// Takes a block of `group` that will begin with `num_positions` of `source`, which is held, when `num_needed`
    /// blocks are about to be taken in all.
    fn take_with_content_of(
        &mut self,
        source: BlockId,
        group: usize,
        num_positions: u32,
        num_needed: Blocks,
    ) -> BlockId {
        let device = self.tiers.device();
        let was_free = !self.tiers.is_on_host(source) && device.num_holders(source) == 1;
        if was_free && device.num_free() < num_needed {
            // All that are free are needed: it becomes the sequence's own.
            self.tiers.evict(source);
            self.tiers.totals.num_taken_blocks += 1;
            return source;
        }
        let target = self.tiers.take(group);
        match self.tiers.is_on_host(source) {
            true => self.tiers.push_onboard(source, target),
            false => self.tiers.push_copy(BlockCopy {
                source,
                target,
                num_positions,
            }),
        }
        // If it came from the free list, it goes back to its end: it was of use just now.
        self.tiers.give_back(source);
        target
    }

    /// Registers the blocks that `computed` fills.
    fn register_full_blocks(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        let block_size = self.config.block_size.tokens().index();
        let num_groups = self.config.groups.num_groups();
        let (blocks, chain, states) = table.blocks_chain_and_states();
        let Some(chain) = chain else { return };
        while let Some(tail) = chain.tail()
            && (chain.num_committed() + 1) * block_size <= computed.len()
        {
            let Some(prefix) = self.tiers.prefix() else {
                return;
            };
            if !prefix.is_there(tail) {
                chain.retreat(|place| blocks[place * num_groups], prefix);
                continue;
            }
            let place = chain.num_committed();
            let [block, beside @ ..] = &blocks[place * num_groups..][..num_groups] else {
                unreachable!("there is a first group");
            };
            let tokens = &computed[place * block_size..][..block_size];
            let content = self.tiers.register(tail, tokens, *block);
            let node = content.and_then(Content::block);
            if content.is_none() {
                // Nothing behind it can be found either.
                for taken in states.taken.drain(..) {
                    self.tiers.snapshots.give_back(taken.id);
                }
            }
            if let Some(taken) = states.pop(Blocks(place as u32 + 1)) {
                self.tiers.attach_snapshot(taken, node, &mut states.rolling);
            }
            if let Some(node) = node {
                let beside = (1..).zip(beside).filter(|(_, it)| **it != BlockId::NONE);
                for (group, block) in beside {
                    self.tiers.put_beside(node, group, *block);
                }
            }
            chain.advance(content);
        }
    }

    /// Frees the blocks of each group at the places that `hidden` tells.
    fn slide(&mut self, table: &mut BlockTable, hidden: impl Fn(usize) -> Range<usize>) {
        for group in self.config.groups.num_whole()..self.config.groups.num_groups() {
            let hidden = hidden(group);
            let first = hidden.start.max(table.hidden_to(group));
            if hidden.is_empty() || first > hidden.end {
                continue;
            }
            table.hide(group, first..hidden.end, |block| {
                self.tiers.give_back(block);
            });
            self.mark_changed(table);
        }
    }

    /// The first number of computed positions after `computed` that fills a block, or hides one.
    fn next_commit(&self, table: &BlockTable, computed: Tokens) -> Tokens {
        let never = Tokens(u32::MAX);
        let open = table.chain().filter(|chain| chain.tail().is_some());
        let next_full = open.map_or(never, |chain| {
            Blocks(chain.num_committed() as u32 + 1).tokens(self.config.block_size)
        });
        let groups = &self.config.groups;
        let next_freed = groups.next_freed(computed, self.config.block_size);
        next_full.min(next_freed.unwrap_or(never))
    }

    /// The blocks of position `computed` in `table` that are partly filled and that others hold.
    pub(super) fn shared_next(
        &self,
        table: &BlockTable,
        computed: Tokens,
    ) -> impl Iterator<Item = BlockId> {
        let groups = 0..self.config.groups.num_groups();
        groups.filter_map(move |group| {
            let place = self.shared_place(table, group, computed)?;
            Some(table.at(place, group))
        })
    }

    /// The place of position `computed` in `table`, if the block of `group` is partly filled and others hold it.
    fn shared_place(&self, table: &BlockTable, group: usize, computed: Tokens) -> Option<usize> {
        let block_size = self.config.block_size.tokens().0;
        let place = (computed.0 / block_size) as usize;
        let is_begun = !computed.0.is_multiple_of(block_size);
        let is_shared = || self.tiers.device().num_holders(table.at(place, group)) > 1;
        (is_begun && is_shared()).then_some(place)
    }
}
