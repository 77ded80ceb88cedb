//! The blocks of one sequence in order of position, and how far others can find them.

use super::MAX_KV_GROUPS;
use super::prefix::{Content, PrefixIndex};
use super::roots::RootId;
use super::snapshots::RollingSnapshot;
use inflight_base::{BlockId, Blocks, SnapshotId, Tokens};

/// The block table of a sequence: position `p` is at place `p / block_size`, at offset `p % block_size` of the block
/// that each group of layers has there.
///
/// It grows at its end, by groups: what has a window may end earlier. A block that is freed because of the attention
/// window leaves [`BlockId::NONE`] at its place.
///
/// What every step reads is here, the rest behind a pointer: most steps change nothing in most tables.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    version: u64,
    len: Blocks,
    next_commit: Tokens,
    places: Box<Places>,
}

/// The content of a [`BlockTable`].
#[derive(Debug, Default)]
struct Places {
    /// `[num_places, num_groups]`.
    blocks: Vec<BlockId>,
    /// 0 if the table is empty.
    num_groups: usize,
    groups: [GroupPlaces; MAX_KV_GROUPS],
    /// `None` if others cannot reuse the sequence's blocks.
    chain: Option<Chain>,
    states: StateSnapshots,
}

/// Snapshots of the recurrent states of a sequence.
#[derive(Debug, Default)]
pub(super) struct StateSnapshots {
    /// Snapshots that a step takes or has taken, and that nobody finds yet, by the places that they sum up.
    pub(super) taken: Vec<TakenSnapshot>,
    /// The one that it begins with, until that is planned.
    pub(super) found: Option<SnapshotId>,
    /// The last one of the answer.
    pub(super) rolling: Option<RollingSnapshot>,
    /// The places whose content another sequence has computed, further than any snapshot: prompts part behind them.
    pub(super) fork: Blocks,
}

/// A snapshot that nobody finds yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenSnapshot {
    pub(super) id: SnapshotId,
    pub(super) num_places: Blocks,
    /// Whether it is of an answer.
    pub(super) is_rolling: bool,
}

/// What a table has of one group of layers.
#[derive(Clone, Copy, Debug, Default)]
struct GroupPlaces {
    /// The number of places: blocks held, and blocks freed.
    len: Blocks,
    /// Places that are not `NONE`.
    num_held: Blocks,
    /// The places before it, except the window's sinks, are `NONE`.
    hidden_to: usize,
}

/// The path of a sequence's full blocks in the prefix index.
#[derive(Debug)]
pub(super) struct Chain {
    root: RootId,
    /// The content below which its next block is registered; `None` if no lookup could find it there.
    tail: Option<Content>,
    /// The number of blocks above that.
    num_committed: usize,
}

impl BlockTable {
    /// An empty table that takes `max_blocks`, of all groups, without allocating.
    pub(crate) fn with_capacity(max_blocks: Blocks) -> Self {
        let mut table = Self::default();
        table.places.blocks.reserve_exact(max_blocks.index());
        table
    }

    /// Blocks that it has room for.
    pub(crate) fn capacity(&self) -> Blocks {
        Blocks(self.places.blocks.capacity() as u32)
    }

    /// A number that changes whenever a place does and that no other table has, so that a copy can be compared by
    /// it. 0 if the table is empty.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The number of places that every group has: blocks held, and blocks freed.
    #[inline]
    pub(crate) fn len(&self) -> Blocks {
        self.len
    }

    /// The number of places that `group` has.
    pub(crate) fn len_of(&self, group: usize) -> Blocks {
        self.places.groups[group].len
    }

    /// The places of all groups together.
    pub(crate) fn total_len(&self) -> Blocks {
        self.places.groups.iter().map(|group| group.len).sum()
    }

    /// The number of blocks of `group` held.
    pub(crate) fn num_held_of(&self, group: usize) -> Blocks {
        self.places.groups[group].num_held
    }

    /// The blocks of all places; at a place, the blocks of its groups one after the other.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.places.blocks
    }

    /// The block of `group` at `place`.
    #[inline]
    pub(crate) fn at(&self, place: usize, group: usize) -> BlockId {
        self.places.blocks[place * self.places.num_groups + group]
    }

    /// The blocks held, the last first.
    pub(super) fn held_from_the_end(&self) -> impl Iterator<Item = BlockId> + '_ {
        let places = self.blocks().iter().rev().copied();
        places.filter(|&block| block != BlockId::NONE)
    }

    /// Sets its [`version`](Self::version), because a place has changed.
    pub(super) fn set_version(&mut self, version: u64) {
        self.version = version;
    }

    /// The number of computed positions below which there is nothing to commit.
    #[inline]
    pub(super) fn next_commit(&self) -> Tokens {
        self.next_commit
    }

    pub(super) fn set_next_commit(&mut self, next_commit: Tokens) {
        self.next_commit = next_commit;
    }

    /// The place up to which blocks of `group` were freed, except the window's sinks.
    pub(super) fn hidden_to(&self, group: usize) -> usize {
        self.places.groups[group].hidden_to
    }

    /// Makes an empty table one for so many groups.
    pub(super) fn begin(&mut self, num_groups: usize) {
        if self.places.blocks.is_empty() {
            self.places.num_groups = num_groups;
        }
    }

    /// Appends a block to `group`.
    pub(super) fn push(&mut self, group: usize, block: BlockId) {
        let place = self.len_of(group).index();
        self.put(place, group, block);
        self.end_at(group, place + 1);
    }

    /// Puts a block of `group` at a place that has none.
    pub(super) fn put(&mut self, place: usize, group: usize, block: BlockId) {
        let Places {
            blocks,
            num_groups,
            groups,
            ..
        } = &mut *self.places;
        let end = (place + 1) * *num_groups;
        if end > blocks.len() {
            blocks.resize(end, BlockId::NONE);
        }
        blocks[end - *num_groups + group] = block;
        groups[group].num_held += Blocks(1);
    }

    /// Lets `group` have `num_places` places.
    pub(super) fn end_at(&mut self, group: usize, num_places: usize) {
        let Places {
            num_groups, groups, ..
        } = &mut *self.places;
        groups[group].len = Blocks(num_places as u32);
        let lens = groups[..*num_groups].iter().map(|group| group.len);
        self.len = lens.min().unwrap_or(Blocks::ZERO);
    }

    /// Says that the places of `group` before this one, except the window's sinks, are `NONE`.
    pub(super) fn set_hidden_to(&mut self, group: usize, place: usize) {
        self.places.groups[group].hidden_to = place;
    }

    /// Copies `other`, without its chain, into an empty table.
    pub(super) fn copy_from(&mut self, other: &Self) {
        debug_assert!(self.len == Blocks::ZERO && self.places.chain.is_none());
        self.places.blocks.extend_from_slice(other.blocks());
        self.places.num_groups = other.places.num_groups;
        self.places.groups = other.places.groups;
        self.len = other.len;
    }

    /// Puts another block of `group` in `place`. Returns the one that was there.
    pub(super) fn replace(&mut self, place: usize, group: usize, block: BlockId) -> BlockId {
        let index = place * self.places.num_groups + group;
        std::mem::replace(&mut self.places.blocks[index], block)
    }

    /// Removes the blocks of `group` at `places`, and passes each to `give_back`: from the last block in the first
    /// group, because a content is evicted before the one above it, and from the first block in other groups, which is
    /// furthest behind the window.
    pub(super) fn hide(
        &mut self,
        group: usize,
        places: std::ops::Range<usize>,
        mut give_back: impl FnMut(BlockId),
    ) {
        self.places.groups[group].hidden_to = places.end;
        let (start, end) = (places.start, places.end);
        for place in places {
            let place = match group {
                0 => start + end - 1 - place,
                _ => place,
            };
            self.places.groups[group].num_held -= Blocks(1);
            give_back(self.replace(place, group, BlockId::NONE));
        }
    }

    /// Empties it and keeps its memory.
    pub(super) fn clear(&mut self) {
        self.places.blocks.clear();
        self.places.num_groups = 0;
        self.places.groups = Default::default();
        self.places.chain = None;
        self.places.states.clear();
        (self.version, self.len, self.next_commit) = (0, Blocks::ZERO, Tokens::ZERO);
    }

    /// The path of its blocks in the prefix index; `None` if others cannot reuse them.
    pub(super) fn chain(&self) -> Option<&Chain> {
        self.places.chain.as_ref()
    }

    /// The blocks of all places, their path, and snapshots of the recurrent states behind them.
    pub(super) fn blocks_chain_and_states(
        &mut self,
    ) -> (&[BlockId], Option<&mut Chain>, &mut StateSnapshots) {
        let Places {
            blocks,
            chain,
            states,
            ..
        } = &mut *self.places;
        (blocks, chain.as_mut(), states)
    }

    /// Snapshots of its recurrent states.
    pub(super) fn states(&self) -> &StateSnapshots {
        &self.places.states
    }

    /// The same, to be changed.
    pub(super) fn states_mut(&mut self) -> &mut StateSnapshots {
        &mut self.places.states
    }

    /// Sets the path of its blocks.
    pub(super) fn set_chain(&mut self, chain: Chain) {
        self.places.chain = Some(chain);
    }

    /// Takes the path out: what the sequence computes from now on is not registered.
    pub(super) fn take_chain(&mut self) -> Option<Chain> {
        self.places.chain.take()
    }
}

impl StateSnapshots {
    /// Whether a snapshot behind `num_places` was taken, and nobody finds it yet.
    pub(super) fn has_taken(&self, num_places: Blocks) -> bool {
        self.taken.iter().any(|it| it.num_places == num_places)
    }

    /// Takes the snapshot behind `num_places` out.
    pub(super) fn pop(&mut self, num_places: Blocks) -> Option<TakenSnapshot> {
        let index = self.taken.iter().position(|it| it.num_places == num_places);
        index.map(|index| self.taken.swap_remove(index))
    }

    fn clear(&mut self) {
        self.taken.clear();
        (self.found, self.rolling) = (None, None);
        self.fork = Blocks::ZERO;
    }
}

impl Chain {
    /// The path of `num_committed` blocks from `root` to `tail`.
    pub(super) fn new(root: RootId, tail: Content, num_committed: usize) -> Self {
        Self {
            root,
            tail: Some(tail),
            num_committed,
        }
    }

    /// Where it begins.
    pub(super) fn root(&self) -> RootId {
        self.root
    }

    /// The content below which the next block is registered; `None` if no lookup could find it there.
    pub(super) fn tail(&self) -> Option<Content> {
        self.tail
    }

    /// Sets it, because the content of the last block has moved.
    pub(super) fn set_tail(&mut self, tail: Option<Content>) {
        self.tail = tail;
    }

    /// The number of blocks in it.
    pub(super) fn num_committed(&self) -> usize {
        self.num_committed
    }

    /// Appends a block, whose content is at `tail`.
    pub(super) fn advance(&mut self, tail: Option<Content>) {
        self.tail = tail;
        self.num_committed += 1;
    }

    /// Goes back to the last of `blocks`, of the first group, that can still be found, because the tail is gone: it was
    /// in another sequence's block, or below one, that was evicted. The blocks of this sequence after it can be
    /// registered instead, unless one between was freed.
    pub(super) fn retreat(&mut self, blocks: impl Fn(usize) -> BlockId, prefix: &PrefixIndex) {
        let is_last = |place: &usize| {
            let block = blocks(*place);
            block == BlockId::NONE || prefix.is_registered(block)
        };
        let last = (0..self.num_committed).rev().find(is_last);
        self.num_committed = last.map_or(0, |last| last + 1);
        self.tail = match last.map(&blocks) {
            None => Some(prefix.root(self.root)),
            Some(BlockId::NONE) => None,
            Some(block) => prefix.content_of(block),
        };
    }
}
