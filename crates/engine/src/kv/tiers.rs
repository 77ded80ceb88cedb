//! The blocks of the device and those in host memory: which content is where.
//!
//! Content that is evicted from the device goes to a host block if one can be had, and keeps its place in the prefix
//! index. A context that finds it there takes it back to a block of the device.
//!
//! ```text
//! ids       0 .. num_blocks                              blocks of the device, in block tables
//!           num_blocks .. num_blocks + num_host_blocks   host blocks: only in the prefix index
//!
//!                 commit                           take, no host block left
//! device    held ------> registered, then cached --------------------------+
//!                           |            ^                                 |
//!              take: offload|            | onboard: found;                 v
//!                           |            | commit: computed again      forgotten, with all below it
//!                           v            |                                 ^
//! host                   cached ---------+                                 |
//!                           |          offload of another                  |
//!                           +----------------------------------------------+
//! ```
//!
//! Moves are decided in an order and made in this order, so a block may be read by one move and overwritten by the
//! next.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::pool::BlockPool;
use super::prefix::{Content, PrefixIndex};
use super::roots::RootId;
use super::snapshots::{RollingSnapshot, Snapshots, TakenMemory};
use super::table::TakenSnapshot;
use super::{KeptBlock, KeptParent, KvCacheConfig, ReuseTotals};
use crate::image_keys::is_of_image;
use crate::{BlockCopy, BlockMove, StateMove, StateRestore, StateSnapshot};
use inflight_base::{
    BlockId, Blocks, HostBlockId, HostSnapshotId, SnapshotId, StateRow, TokenId, Tokens,
};

/// All blocks, the prefix index over their contents, and the moves that the next step makes.
pub(super) struct Tiers {
    device: BlockPool,
    /// Host blocks, counted from 0. One is held only while a context is reserved.
    host: BlockPool,
    /// `None` without reuse.
    prefix: Option<PrefixIndex>,
    config: KvCacheConfig,
    moves: Vec<BlockMove>,
    state_moves: Vec<StateMove>,
    pub(super) snapshots: Snapshots,
    pub(super) totals: ReuseTotals,
}

impl Tiers {
    /// Blank blocks, and an index over them unless reuse is off.
    pub(super) fn new(config: KvCacheConfig) -> Self {
        let num_all = config.num_blocks + config.num_host_blocks;
        let new_index = || PrefixIndex::new(num_all, config.block_size, config.groups.num_groups());
        Self {
            device: BlockPool::new(config.num_blocks),
            host: BlockPool::new(config.num_host_blocks),
            prefix: config.enable_reuse.then(new_index),
            config,
            moves: Vec::new(),
            state_moves: Vec::new(),
            snapshots: Snapshots::new(
                config.num_snapshots,
                config.num_host_snapshots,
                num_all.index(),
            ),
            totals: ReuseTotals::default(),
        }
    }

    /// The blocks of the device.
    pub(super) fn device(&self) -> &BlockPool {
        &self.device
    }

    /// The blocks in host memory.
    pub(super) fn host(&self) -> &BlockPool {
        &self.host
    }

    /// The index; `None` without reuse.
    pub(super) fn prefix(&self) -> Option<&PrefixIndex> {
        self.prefix.as_ref()
    }

    /// The same, for sequences to enter and leave.
    pub(super) fn prefix_mut(&mut self) -> Option<&mut PrefixIndex> {
        self.prefix.as_mut()
    }

    /// Whether `id` is in host memory.
    pub(super) fn is_on_host(&self, id: BlockId) -> bool {
        id.index() >= self.device.num_blocks().index()
    }

    /// What has to be moved before the next step is computed, in this order.
    pub(super) fn moves(&self) -> &[BlockMove] {
        &self.moves
    }

    /// How states have to be moved before the next step is computed, in this order.
    pub(super) fn state_moves(&self) -> &[StateMove] {
        &self.state_moves
    }

    /// Forgets the moves: the planned step has them.
    pub(super) fn clear_moves(&mut self) {
        self.moves.clear();
        self.state_moves.clear();
    }

    /// Plans the copy of a beginning from one block of the device to another.
    pub(super) fn push_copy(&mut self, copy: BlockCopy) {
        self.moves.push(BlockMove::Copy(copy));
    }

    /// One more table holds `id`, or a context that is being reserved.
    pub(super) fn hold(&mut self, id: BlockId) {
        let (pool, local) = pool_of(&mut self.device, &mut self.host, id);
        pool.hold(local);
    }

    /// One fewer holds it.
    pub(super) fn give_back(&mut self, id: BlockId) {
        let (pool, local) = pool_of(&mut self.device, &mut self.host, id);
        pool.give_back(local);
    }

    /// Takes a free block of the device for `group`; its content is evicted.
    pub(super) fn take(&mut self, group: usize) -> BlockId {
        let is_windowed = group >= self.config.groups.num_whole();
        let block = self.device.take(is_windowed);
        self.evict(block);
        self.totals.num_taken_blocks += 1;
        block
    }

    /// Removes the content of a block of the device, which its holder is about to overwrite: to host memory, or for
    /// good.
    pub(super) fn evict(&mut self, block: BlockId) {
        if !self.has_content(block) {
            return;
        }
        let Some(host) = self.take_host() else {
            self.forget(block);
            return;
        };
        // The host block may have held a content above this one, or the one that it is beside.
        if self.has_content(block) {
            self.relocate(block, host);
            let (source, target) = (block, self.host_id(host));
            self.moves.push(BlockMove::Offload { source, target });
            self.totals.num_offloaded_blocks += 1;
        }
        self.give_back(host);
    }

    /// Takes the content of a host block, of `group`, which the caller holds and gives up, to a block of the device.
    pub(super) fn onboard(&mut self, host: BlockId, group: usize) -> BlockId {
        let target = self.take(group);
        self.push_onboard(host, target);
        // A block above it, outside of the window, may have been forgotten to take the target.
        if self.has_content(host) {
            self.relocate(host, target);
        }
        self.give_back(host);
        target
    }

    /// Plans to copy a host block to a block of the device, to which its content does not move.
    pub(super) fn push_onboard(&mut self, host: BlockId, target: BlockId) {
        let source = self.host_id(host);
        self.moves.push(BlockMove::Onboard { source, target });
        self.totals.num_onboarded_blocks += 1;
    }

    /// Registers `tokens`, which fill `block` of the device, below `parent`, see [`PrefixIndex::register`]. If the
    /// content is in host memory, it moves to `block`, which has it as well.
    pub(super) fn register(
        &mut self,
        parent: Content,
        tokens: &[TokenId],
        block: BlockId,
    ) -> Option<Content> {
        let prefix = self.prefix.as_mut()?;
        let content = prefix.register(parent, tokens, block)?;
        match content.block() {
            Some(host) if self.is_on_host(host) => {
                self.relocate(host, block);
                self.prefix.as_ref()?.content_of(block)
            }
            _ => {
                if content.block() == Some(block) {
                    self.device.set_cached(block, true);
                }
                Some(content)
            }
        }
    }

    /// Lets others find `block`, which a sequence has filled, as the block of `group` beside the content of `node`,
    /// unless another block is found there. If that one is in host memory, the content moves to `block`.
    pub(super) fn put_beside(&mut self, node: BlockId, group: usize, block: BlockId) {
        let Some(prefix) = &mut self.prefix else {
            return;
        };
        match prefix.beside(node, group) {
            None => {
                prefix.put_beside(node, group, block);
                self.device.set_cached(block, true);
                self.show_retained(block);
            }
            Some(found) if self.is_on_host(found) => self.relocate(found, block),
            Some(_) => {}
        }
    }

    /// Retains the full blocks that are found for `tokens` below the root of `salt`: those are the last to be evicted.
    /// Of the groups but the first, only those that a sequence which goes on sees. Returns the numbers of the contents,
    /// from the end.
    pub(super) fn retain(&mut self, tokens: &[TokenId], salt: &Option<Arc<str>>) -> Vec<u64> {
        let blocks = self.full_blocks(tokens, salt);
        let retain = |(place, &block): (usize, &BlockId)| {
            let content = self.prefix.as_mut().map(|prefix| prefix.retain(block));
            self.show_retained(block);
            self.for_each_seen_beside(tokens, place, block, |prefix, group| {
                prefix.retain_beside(block, group);
            });
            content
        };
        let from_the_end = (0..blocks.len()).rev().zip(&blocks);
        from_the_end.filter_map(retain).collect()
    }

    /// Calls `change` with each group but the first whose block at `place`, beside `node`, is seen behind `tokens`.
    fn for_each_seen_beside(
        &mut self,
        tokens: &[TokenId],
        place: usize,
        node: BlockId,
        mut change: impl FnMut(&mut PrefixIndex, usize),
    ) {
        let len = Tokens(tokens.len() as u32).floor_to_block(self.config.block_size);
        for group in 1..self.config.groups.num_groups() {
            let Some(prefix) = &mut self.prefix else {
                return;
            };
            if self.config.hidden(group, len).contains(&place) {
                continue;
            }
            change(prefix, group);
            if let Some(beside) = prefix.beside(node, group) {
                self.show_retained(beside);
            }
        }
    }

    /// Retains blocks no longer: those that were found for `tokens`, and still have the numbers of `contents`.
    pub(super) fn release(
        &mut self,
        tokens: &[TokenId],
        salt: &Option<Arc<str>>,
        contents: &[u64],
    ) {
        let blocks = self.full_blocks(tokens, salt);
        // Both begin at the end of their prefix, and some at the end may be gone, or be new.
        let from_the_root = blocks.iter().rev().zip(contents.iter().rev()).enumerate();
        for (place, (&block, &content)) in from_the_root.rev() {
            let prefix = self.prefix.as_mut();
            if prefix.is_some_and(|prefix| prefix.release(block, content)) {
                self.show_retained(block);
                self.for_each_seen_beside(tokens, place, block, |prefix, group| {
                    prefix.release_beside(block, group);
                });
            }
        }
    }

    /// The full blocks that are found for `tokens` below the root of `salt`, from the last to the first.
    fn full_blocks(&self, tokens: &[TokenId], salt: &Option<Arc<str>>) -> Vec<BlockId> {
        let found = self
            .prefix
            .as_ref()
            .and_then(|prefix| Some((prefix, prefix.find_root(salt)?)));
        let Some((prefix, root)) = found else {
            return Vec::new();
        };
        let walk = prefix.walk(root, tokens, tokens.len(), false);
        prefix.path_up(walk.tail).collect()
    }

    /// Tells the pool of `block` whether it is retained.
    fn show_retained(&mut self, block: BlockId) {
        let is_retained = self.is_retained(block);
        let (pool, local) = pool_of(&mut self.device, &mut self.host, block);
        pool.set_retained(local, is_retained);
    }

    /// Whether the content of `block` is retained.
    pub(super) fn is_retained(&self, block: BlockId) -> bool {
        let prefix = self.prefix.as_ref();
        prefix.is_some_and(|prefix| prefix.is_retained(block))
    }

    /// Moves all contents of the device, of which no block is held, to host memory, as far as there is room.
    pub(super) fn offload_all(&mut self) {
        let num_free = self.device.num_free().0;
        let taken: Vec<_> = (0..num_free).map(|_| self.take(0)).collect();
        for block in taken.into_iter().rev() {
            self.give_back(block);
        }
    }

    /// The contents in host memory that have all before them there, each after the one before it.
    pub(super) fn kept(&self) -> Vec<KeptBlock> {
        let Some(prefix) = &self.prefix else {
            return Vec::new();
        };
        let mut are_kept = BTreeSet::new();
        let mut kept = Vec::new();
        let registered = prefix.registered().into_iter();
        for block in registered.filter(|&block| self.is_on_host(block)) {
            // Their numbers mean other images in another engine.
            if prefix.tokens_of(block).iter().any(|&key| is_of_image(key)) {
                continue;
            }
            let parent = match prefix.above(block) {
                Err(salt) => KeptParent::Salt(salt),
                Ok(parent) if are_kept.contains(&parent) => KeptParent::Block(self.host_id(parent)),
                Ok(_) => continue,
            };
            are_kept.insert(block);
            let beside = (1..self.config.groups.num_groups()).map(|group| {
                let beside = prefix.beside(block, group);
                let on_host = beside.filter(|&beside| self.is_on_host(beside));
                on_host.map(|beside| self.host_id(beside))
            });
            kept.push(KeptBlock {
                block: self.host_id(block),
                parent,
                tokens: prefix.tokens_of(block).into(),
                beside: beside.collect(),
            });
        }
        kept
    }

    /// Takes contents, each after the one before it, into blank host blocks, as far as there is room. Returns for each
    /// that has found a place where it was, and where it is now.
    pub(super) fn restore(&mut self, kept: &[KeptBlock]) -> Vec<(HostBlockId, HostBlockId)> {
        let mut places = BTreeMap::new();
        let mut held = Vec::new();
        let mut entered = Vec::new();
        for KeptBlock {
            block,
            parent,
            tokens,
            beside,
        } in kept
        {
            let Some(prefix) = &mut self.prefix else {
                break;
            };
            let parent = match parent {
                KeptParent::Salt(salt) => {
                    let root = prefix.enter(salt);
                    entered.push(root);
                    Some(prefix.root(root))
                }
                KeptParent::Block(parent) => {
                    let place = places.get(parent).copied();
                    place.and_then(|place| prefix.content_of(place))
                }
            };
            let Some(parent) = parent else { continue };
            let Some(place) = self.take_host() else {
                break;
            };
            held.push(place);
            let prefix = self.prefix.as_mut();
            let content = prefix.and_then(|prefix| prefix.register(parent, tokens, place));
            if content.and_then(Content::block) != Some(place) {
                continue;
            }
            self.set_cached(place, true);
            places.insert(*block, place);
            for (group, block) in (1..self.config.groups.num_groups()).zip(beside) {
                let Some(block) = block else { continue };
                let Some(at) = self.take_host() else { break };
                held.push(at);
                if let Some(prefix) = &mut self.prefix {
                    prefix.put_beside(place, group, at);
                }
                self.set_cached(at, true);
                places.insert(*block, at);
            }
        }
        // From the end, so that the ends of prefixes are evicted before their beginnings.
        for place in held.into_iter().rev() {
            self.give_back(place);
        }
        for root in entered {
            if let Some(prefix) = &mut self.prefix {
                prefix.leave(root);
            }
        }
        let moved = places.into_iter();
        moved
            .map(|(before, now)| (before, self.host_id(now)))
            .collect()
    }

    /// Takes a snapshot for a sequence, see [`Snapshots::take`].
    pub(super) fn take_snapshot(&mut self, rolling: Option<RollingSnapshot>) -> Option<SnapshotId> {
        let prefix = self.prefix.as_ref();
        let is_retained = |block| prefix.is_some_and(|prefix| prefix.is_retained(block));
        let taken = self.snapshots.take(rolling, is_retained)?;
        self.push_offload_of_states(taken);
        Some(taken.id)
    }

    /// Plans to restore states to `row`, from the snapshot `found` behind the first `num_tokens` tokens of a sequence.
    /// One in host memory comes back first; if there is no place for it, or if its content was forgotten to make room
    /// for the blocks of the sequence, it is restored from there.
    pub(super) fn restore_states(&mut self, found: SnapshotId, row: StateRow, num_tokens: Tokens) {
        let mut snapshot = StateSnapshot::Device(found);
        if self.snapshots.is_on_host(found) {
            let source = self.host_snapshot_id(found);
            snapshot = match self.onboard_snapshot(found) {
                Some(target) => {
                    self.state_moves.push(StateMove::Onboard { source, target });
                    StateSnapshot::Device(target)
                }
                None => StateSnapshot::Host(source),
            };
            self.totals.num_onboarded_states += 1;
        }
        self.totals.num_restored_states += 1;
        self.state_moves.push(StateMove::Restore(StateRestore {
            snapshot,
            row,
            num_tokens,
        }));
    }

    /// Takes a snapshot of the device for the content of one in host memory, see [`Snapshots::onboard`].
    fn onboard_snapshot(&mut self, host: SnapshotId) -> Option<SnapshotId> {
        let prefix = self.prefix.as_ref();
        let is_retained = |block| prefix.is_some_and(|prefix| prefix.is_retained(block));
        let taken = self.snapshots.onboard(host, is_retained)?;
        self.push_offload_of_states(taken);
        Some(taken.id)
    }

    /// Plans to move the snapshot whose memory was taken to host memory, if it goes there.
    fn push_offload_of_states(&mut self, taken: TakenMemory) {
        let TakenMemory { id, offloaded_to } = taken;
        if let Some(target) = offloaded_to {
            let (source, target) = (id, self.host_snapshot_id(target));
            self.state_moves.push(StateMove::Offload { source, target });
            self.totals.num_offloaded_states += 1;
        }
    }

    /// Lets others find a snapshot behind the content of `node`, if that is in the index.
    pub(super) fn attach_snapshot(
        &mut self,
        taken: TakenSnapshot,
        node: Option<BlockId>,
        rolling: &mut Option<RollingSnapshot>,
    ) {
        let TakenSnapshot { id, is_rolling, .. } = taken;
        match node {
            None => self.snapshots.give_back(id),
            Some(node) if is_rolling => {
                *rolling = self.snapshots.attach_rolling(id, node, *rolling);
            }
            Some(node) => self.snapshots.attach(id, node),
        }
    }

    /// Panics unless every block of the device is free or held by as many as `held` says, no host block is held, and
    /// the index agrees. `entered` are the roots of all sequences that have entered, and `snapshots` are those that
    /// sequences hold.
    pub(super) fn check_integrity(
        &self,
        held: impl Iterator<Item = BlockId>,
        snapshots: impl Iterator<Item = SnapshotId>,
        entered: &[RootId],
    ) {
        let prefix = self.prefix.as_ref();
        let is_registered = |block| prefix.is_some_and(|prefix| prefix.is_registered(block));
        self.snapshots.check_integrity(snapshots, is_registered);
        let is_cached = |block| self.has_content(block);
        let is_retained = |block| self.is_retained(block);
        self.device.check_integrity(held, is_cached, is_retained);
        let is_cached = |block| self.has_content(self.on_host(block));
        let is_retained = |block| self.is_retained(self.on_host(block));
        self.host
            .check_integrity(std::iter::empty(), is_cached, is_retained);
        match &self.prefix {
            Some(prefix) => prefix.check_integrity(entered),
            None => assert!(entered.is_empty(), "a chain without an index"),
        }
    }

    /// Whether the content of `block` can be found.
    pub(super) fn has_content(&self, block: BlockId) -> bool {
        let prefix = self.prefix.as_ref();
        prefix.is_some_and(|prefix| prefix.has_content(block))
    }

    /// Takes a host block without content, if any is not held.
    fn take_host(&mut self) -> Option<BlockId> {
        if self.host.num_free() == Blocks::ZERO {
            return None;
        }
        let local = self.host.take(false);
        let block = self.on_host(local);
        self.forget(block);
        Some(block)
    }

    /// Moves a content in the index to a block that has, or is about to have, its keys and values.
    fn relocate(&mut self, from: BlockId, to: BlockId) {
        let prefix = self.prefix.as_mut().expect("a content is in an index");
        prefix.relocate(from, to);
        self.snapshots.relocate(from, to);
        self.set_cached(from, false);
        self.set_cached(to, true);
        self.show_retained(to);
    }

    /// Removes the content of `block`, and all below and beside it, from the index.
    fn forget(&mut self, block: BlockId) {
        let Self {
            device,
            host,
            prefix,
            snapshots,
            ..
        } = self;
        if let Some(prefix) = prefix {
            let mut set_blank = |forgotten| {
                snapshots.forget(forgotten);
                let (pool, local) = pool_of(device, host, forgotten);
                pool.set_cached(local, false);
            };
            match prefix.take_away(block) {
                true => set_blank(block),
                false => prefix.forget(block, set_blank),
            }
        }
    }

    fn set_cached(&mut self, id: BlockId, is_cached: bool) {
        let (pool, local) = pool_of(&mut self.device, &mut self.host, id);
        pool.set_cached(local, is_cached);
    }

    /// The id, among all blocks, of a block of the host pool.
    fn on_host(&self, local: BlockId) -> BlockId {
        BlockId(self.device.num_blocks().0 + local.0)
    }

    fn host_id(&self, id: BlockId) -> HostBlockId {
        HostBlockId(id.0 - self.device.num_blocks().0)
    }

    fn host_snapshot_id(&self, id: SnapshotId) -> HostSnapshotId {
        HostSnapshotId(id.0 - self.config.num_snapshots)
    }
}

/// The pool of a block, and its id there.
fn pool_of<'p>(
    device: &'p mut BlockPool,
    host: &'p mut BlockPool,
    id: BlockId,
) -> (&'p mut BlockPool, BlockId) {
    match id.0.checked_sub(device.num_blocks().0) {
        Some(local) => (host, BlockId(local)),
        None => (device, id),
    }
}
