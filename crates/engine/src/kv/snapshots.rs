//! Snapshots of recurrent states: which prefix of the index each one sums up.
//!
//! A state sums up all tokens before it, so a reused prefix needs the state behind its last token besides its blocks.
//! A snapshot is taken where a block ends, and belongs to the content of this block:
//!
//! ```text
//! block_size = 4; a prompt of 14 tokens, an answer of 7
//!
//! position   0       4       8       12      16      20
//! contents   |   1   |   2   |   3   |   4   |   5   |
//! snapshots                          ^       ^ -----> ^
//!                       end of the prompt    end of the answer: the last one is kept
//! ```
//!
//! A snapshot goes with its content. If none is free, the memory of the least recently used one is taken for another:
//! first where nobody retains the content.

use inflight_base::{BlockId, SnapshotId};

/// All snapshots, by id.
pub(super) struct Snapshots {
    entries: Vec<Entry>,
    /// The snapshot of each content, by its block. Empty without snapshots.
    of_content: Vec<Option<SnapshotId>>,
    num_attached: u32,
    num_uses: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    holder: Holder,
    /// When it was taken or of use, by `num_uses`.
    last_use: u64,
    /// Whether its sequence takes it back for a later snapshot: it is of an answer that goes on.
    is_rolling: bool,
}

/// Who has a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Nobody,
    /// A sequence that a step computes, or will.
    Sequence,
    Content(BlockId),
}

/// A snapshot of an answer that goes on, as its sequence remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RollingSnapshot {
    id: SnapshotId,
    /// Its number of uses then: another one may be there now.
    last_use: u64,
}

impl Snapshots {
    /// `num_snapshots`, for contents of `num_blocks`.
    pub(super) fn new(num_snapshots: u32, num_blocks: usize) -> Self {
        let free = Entry {
            holder: Holder::Nobody,
            last_use: 0,
            is_rolling: false,
        };
        Self {
            entries: vec![free; num_snapshots as usize],
            of_content: match num_snapshots {
                0 => Vec::new(),
                _ => vec![None; num_blocks],
            },
            num_attached: 0,
            num_uses: 0,
        }
    }

    /// Whether there are any.
    pub(super) fn is_enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// All of them, free ones included.
    pub(super) fn num_all(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Snapshots that sequences can begin with.
    pub(super) fn num_attached(&self) -> u32 {
        self.num_attached
    }

    /// The snapshot of the content of `block`.
    pub(super) fn of(&self, block: BlockId) -> Option<SnapshotId> {
        *self.of_content.get(block.index())?
    }

    /// A sequence begins with this one, so it is worth keeping.
    pub(super) fn reuse(&mut self, id: SnapshotId) {
        let last_use = self.next_use();
        let entry = &mut self.entries[id.index()];
        entry.last_use = last_use;
        entry.is_rolling = false;
    }

    /// Takes a snapshot for a sequence, whose last one was `rolling` if its answer goes on. `None` if all are taken.
    pub(super) fn take(
        &mut self,
        rolling: Option<RollingSnapshot>,
        is_retained: impl Fn(BlockId) -> bool,
    ) -> Option<SnapshotId> {
        let free = self.ids_of(|holder| holder == Holder::Nobody).next();
        let rolling = || rolling.and_then(|it| self.still(it));
        let id = free
            .or_else(rolling)
            .or_else(|| self.least_recently_used(is_retained))?;
        self.free(id);
        let last_use = self.next_use();
        self.entries[id.index()] = Entry {
            holder: Holder::Sequence,
            last_use,
            is_rolling: false,
        };
        Some(id)
    }

    /// Gives a snapshot back that a sequence has taken.
    pub(super) fn give_back(&mut self, id: SnapshotId) {
        debug_assert_eq!(self.entries[id.index()].holder, Holder::Sequence);
        self.free(id);
    }

    /// Lets others find a snapshot, which a sequence has taken, behind the content of `block`, unless another one is
    /// found there.
    pub(super) fn attach(&mut self, id: SnapshotId, block: BlockId) {
        debug_assert_eq!(self.entries[id.index()].holder, Holder::Sequence);
        let place = &mut self.of_content[block.index()];
        match place {
            Some(_) => self.free(id),
            None => {
                *place = Some(id);
                self.num_attached += 1;
                self.entries[id.index()].holder = Holder::Content(block);
            }
        }
    }

    /// Attaches the snapshot of an answer that goes on, in place of `before`, unless a sequence has begun with that.
    pub(super) fn attach_rolling(
        &mut self,
        id: SnapshotId,
        block: BlockId,
        before: Option<RollingSnapshot>,
    ) -> Option<RollingSnapshot> {
        if let Some(before) = before.and_then(|it| self.still(it)) {
            self.free(before);
        }
        self.attach(id, block);
        let entry = &mut self.entries[id.index()];
        if entry.holder != Holder::Content(block) {
            return None;
        }
        entry.is_rolling = true;
        let last_use = entry.last_use;
        Some(RollingSnapshot { id, last_use })
    }

    /// The content of `from` is in `to` now.
    pub(super) fn relocate(&mut self, from: BlockId, to: BlockId) {
        let Some(id) = self.of(from) else { return };
        self.of_content[from.index()] = None;
        self.of_content[to.index()] = Some(id);
        self.entries[id.index()].holder = Holder::Content(to);
    }

    /// The content of `block` is forgotten.
    pub(super) fn forget(&mut self, block: BlockId) {
        if let Some(id) = self.of(block) {
            self.free(id);
        }
    }

    /// Panics unless each snapshot is free, held by as many sequences as `held` says, or of a content.
    pub(super) fn check_integrity(
        &self,
        held: impl Iterator<Item = SnapshotId>,
        is_registered: impl Fn(BlockId) -> bool,
    ) {
        let mut held: Vec<_> = held.collect();
        held.sort_unstable();
        let of_sequences: Vec<_> = self.ids_of(|it| it == Holder::Sequence).collect();
        assert_eq!(of_sequences, held, "snapshots of sequences");
        let mut num_attached = 0;
        for (block, id) in (0..).map(BlockId).zip(&self.of_content) {
            let Some(id) = id else { continue };
            num_attached += 1;
            assert!(is_registered(block), "{id:?} is of {block:?}");
            let holder = self.entries[id.index()].holder;
            assert_eq!(holder, Holder::Content(block), "{id:?}");
        }
        assert_eq!(num_attached, self.num_attached, "snapshots of contents");
    }

    /// The snapshot, if no other is in its place, and no sequence has begun with it.
    fn still(&self, rolling: RollingSnapshot) -> Option<SnapshotId> {
        let RollingSnapshot { id, last_use } = rolling;
        let entry = &self.entries[id.index()];
        let is_same = entry.is_rolling && entry.last_use == last_use;
        is_same.then_some(id)
    }

    /// The snapshot of a content that is taken for another one first. It looks at all of them, once for each snapshot
    /// that a step takes.
    fn least_recently_used(&self, is_retained: impl Fn(BlockId) -> bool) -> Option<SnapshotId> {
        let ids = self.ids_of(|holder| matches!(holder, Holder::Content(_)));
        ids.min_by_key(|id| {
            let entry = &self.entries[id.index()];
            let is_retained = match entry.holder {
                Holder::Content(block) => is_retained(block),
                Holder::Nobody | Holder::Sequence => false,
            };
            (is_retained, entry.last_use)
        })
    }

    fn ids_of(&self, has: impl Fn(Holder) -> bool) -> impl Iterator<Item = SnapshotId> {
        let entries = (0..).map(SnapshotId).zip(&self.entries);
        entries.filter_map(move |(id, entry)| has(entry.holder).then_some(id))
    }

    fn free(&mut self, id: SnapshotId) {
        let entry = &mut self.entries[id.index()];
        if let Holder::Content(block) = entry.holder {
            self.of_content[block.index()] = None;
            self.num_attached -= 1;
        }
        entry.holder = Holder::Nobody;
        entry.is_rolling = false;
    }

    fn next_use(&mut self) -> u64 {
        self.num_uses += 1;
        self.num_uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: fn(BlockId) -> bool = |_| false;

    fn taken(snapshots: &mut Snapshots, is_retained: fn(BlockId) -> bool) -> Option<u32> {
        snapshots.take(None, is_retained).map(|id| id.0)
    }

    #[test]
    fn the_one_that_was_of_use_last_is_taken_last_and_a_retained_one_behind_it() {
        let mut snapshots = Snapshots::new(3, 9);
        for block in [5, 6, 7].map(BlockId) {
            let id = snapshots.take(None, NOBODY).expect("one is free");
            snapshots.attach(id, block);
        }
        snapshots.reuse(SnapshotId(0));
        let is_retained = |block| block == BlockId(6);
        assert_eq!(taken(&mut snapshots, is_retained), Some(2));
        assert_eq!(taken(&mut snapshots, is_retained), Some(0));
        assert_eq!(snapshots.of(BlockId(6)), Some(SnapshotId(1)));
        assert_eq!(taken(&mut snapshots, is_retained), Some(1));
        assert_eq!(taken(&mut snapshots, is_retained), None);
        snapshots.check_integrity([2, 1, 0].map(SnapshotId).into_iter(), |_| true);
    }

    #[test]
    fn an_answer_that_goes_on_has_one_snapshot_unless_another_sequence_begins_with_it() {
        let mut snapshots = Snapshots::new(4, 9);
        let mut rolling = None;
        for block in [1, 2, 3].map(BlockId) {
            let id = snapshots.take(rolling, NOBODY).expect("one is free");
            rolling = snapshots.attach_rolling(id, block, rolling);
        }
        assert_eq!(snapshots.num_attached(), 1);
        let id = snapshots.of(BlockId(3)).expect("the last one");
        snapshots.reuse(id);
        let next = snapshots.take(rolling, NOBODY).expect("one is free");
        snapshots.attach_rolling(next, BlockId(4), rolling);
        assert_eq!(snapshots.of(BlockId(3)), Some(id));
        assert_eq!(snapshots.num_attached(), 2);
    }

    #[test]
    fn an_answer_that_goes_on_takes_its_own_before_that_of_others() {
        let mut snapshots = Snapshots::new(2, 9);
        let other = snapshots.take(None, NOBODY).expect("one is free");
        snapshots.attach(other, BlockId(1));
        let own = snapshots.take(None, NOBODY).expect("one is free");
        let rolling = snapshots.attach_rolling(own, BlockId(2), None);
        assert_eq!(snapshots.take(rolling, NOBODY), Some(own));
        assert_eq!(snapshots.of(BlockId(1)), Some(other));
        assert_eq!(snapshots.of(BlockId(2)), None);
    }

    #[test]
    fn an_answer_whose_snapshot_another_has_taken_leaves_it_to_that() {
        let mut snapshots = Snapshots::new(2, 9);
        let own = snapshots.take(None, NOBODY).expect("one is free");
        let rolling = snapshots.attach_rolling(own, BlockId(1), None);
        let other = snapshots.take(None, NOBODY).expect("one is free");
        snapshots.attach(other, BlockId(2));
        // Another answer goes on with the one that was not of use for longest.
        assert_eq!(snapshots.take(None, NOBODY), Some(own));
        snapshots.attach_rolling(own, BlockId(3), None);
        assert_eq!(snapshots.take(rolling, NOBODY), Some(other));
        assert_eq!(snapshots.of(BlockId(3)), Some(own));
    }

    #[test]
    fn a_snapshot_goes_where_its_content_goes() {
        let mut snapshots = Snapshots::new(1, 9);
        let id = snapshots.take(None, NOBODY).expect("one is free");
        snapshots.attach(id, BlockId(1));
        snapshots.relocate(BlockId(1), BlockId(8));
        assert_eq!(
            (snapshots.of(BlockId(1)), snapshots.of(BlockId(8))),
            (None, Some(id))
        );
        snapshots.forget(BlockId(8));
        assert_eq!(snapshots.num_attached(), 0);
        assert_eq!(taken(&mut snapshots, NOBODY), Some(0));
        snapshots.give_back(id);
        snapshots.check_integrity(std::iter::empty(), |_| false);
    }
}
