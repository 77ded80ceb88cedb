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
//! first where nobody retains the content. That one goes to host memory, where the least recently used one makes room
//! for it, and comes back when a sequence begins with it.
//!
//! ```text
//! ids       0 .. num_snapshots                                   snapshots of the device
//!           num_snapshots .. num_snapshots + num_host_snapshots  those in host memory: each is of a content
//! ```

use std::ops::Range;

use inflight_base::{BlockId, SnapshotId};

/// All snapshots, by id.
pub(super) struct Snapshots {
    entries: Vec<Entry>,
    /// Snapshots of the device, which come first.
    num_on_device: u32,
    /// The snapshot of each content, by its block. Empty without snapshots.
    of_content: Vec<Option<SnapshotId>>,
    /// Snapshots of contents, on the device and in host memory.
    num_attached: [u32; 2],
    num_uses: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    holder: Holder,
    /// When it was taken or of use, by `num_uses`: no other snapshot has this number.
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

/// A snapshot of an answer that goes on, as its sequence remembers it: its number of uses then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RollingSnapshot(u64);

/// A snapshot whose memory was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TakenMemory {
    /// On the device.
    pub(super) id: SnapshotId,
    /// Where the one that was there goes in host memory; `None` if there was none, or if it is forgotten.
    pub(super) offloaded_to: Option<SnapshotId>,
}

const FREE: Entry = Entry {
    holder: Holder::Nobody,
    last_use: 0,
    is_rolling: false,
};

impl Snapshots {
    /// So many on the device and in host memory, for contents of `num_blocks`.
    pub(super) fn new(num_on_device: u32, num_on_host: u32, num_blocks: usize) -> Self {
        Self {
            entries: vec![FREE; num_on_device as usize + num_on_host as usize],
            num_on_device,
            of_content: match num_on_device {
                0 => Vec::new(),
                _ => vec![None; num_blocks],
            },
            num_attached: [0; 2],
            num_uses: 0,
        }
    }

    /// Whether there are any.
    pub(super) fn is_enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// All of the device and of host memory, free ones included.
    pub(super) fn num_all(&self) -> [u32; 2] {
        let num_all = self.entries.len() as u32;
        [self.num_on_device, num_all - self.num_on_device]
    }

    /// Snapshots of the device and of host memory that sequences can begin with.
    pub(super) fn num_attached(&self) -> [u32; 2] {
        self.num_attached
    }

    /// Whether `id` is in host memory.
    pub(super) fn is_on_host(&self, id: SnapshotId) -> bool {
        id.0 >= self.num_on_device
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

    /// Takes memory of the device for a snapshot of a sequence, whose last one was `rolling` if its answer goes on.
    /// `None` if sequences have all of it.
    pub(super) fn take(
        &mut self,
        rolling: Option<RollingSnapshot>,
        is_retained: impl Fn(BlockId) -> bool,
    ) -> Option<TakenMemory> {
        let free = self.first_free(self.on_device());
        let rolling = || {
            let rolling = rolling.and_then(|it| self.still(it));
            rolling.filter(|&id| !self.is_on_host(id))
        };
        let taken = match free.or_else(rolling) {
            Some(id) => {
                self.free(id);
                TakenMemory {
                    id,
                    offloaded_to: None,
                }
            }
            None => {
                let id = self.least_recently_used(self.on_device(), &is_retained)?;
                let offloaded_to = self.free_on_host(&is_retained);
                match offloaded_to {
                    Some(host) => self.move_to(id, host),
                    None => self.free(id),
                }
                TakenMemory { id, offloaded_to }
            }
        };
        let last_use = self.next_use();
        self.entries[taken.id.index()] = Entry {
            holder: Holder::Sequence,
            last_use,
            is_rolling: false,
        };
        Some(taken)
    }

    /// Takes memory of the device for the snapshot `host`, which goes there. `None` if sequences have all of it, or if
    /// the content of the snapshot is forgotten.
    pub(super) fn onboard(
        &mut self,
        host: SnapshotId,
        is_retained: impl Fn(BlockId) -> bool,
    ) -> Option<TakenMemory> {
        let entry = self.entries[host.index()];
        if !matches!(entry.holder, Holder::Content(_)) {
            return None;
        }
        // It makes no room for the one that it replaces.
        self.entries[host.index()].holder = Holder::Sequence;
        let taken = self.take(None, is_retained);
        self.entries[host.index()] = entry;
        let taken = taken?;
        self.entries[taken.id.index()] = FREE;
        self.move_to(host, taken.id);
        Some(taken)
    }

    /// Gives a snapshot back that a sequence has taken.
    pub(super) fn give_back(&mut self, id: SnapshotId) {
        debug_assert_eq!(self.entries[id.index()].holder, Holder::Sequence);
        self.free(id);
    }

    /// Lets others find a snapshot, which a sequence has taken, behind the content of `block`, unless another one is on
    /// the device.
    pub(super) fn attach(&mut self, id: SnapshotId, block: BlockId) {
        debug_assert_eq!(self.entries[id.index()].holder, Holder::Sequence);
        match self.of(block) {
            Some(other) if !self.is_on_host(other) => self.free(id),
            other => {
                if let Some(on_host) = other {
                    self.free(on_host);
                }
                self.of_content[block.index()] = Some(id);
                self.num_attached[0] += 1;
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
        Some(RollingSnapshot(entry.last_use))
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
        let all = 0..self.entries.len() as u32;
        let of_sequences: Vec<_> = self.ids_of(all, |it| it == Holder::Sequence).collect();
        assert_eq!(of_sequences, held, "snapshots of sequences");
        let mut num_attached = [0; 2];
        for (block, id) in (0..).map(BlockId).zip(&self.of_content) {
            let Some(id) = id else { continue };
            num_attached[usize::from(self.is_on_host(*id))] += 1;
            assert!(is_registered(block), "{id:?} is of {block:?}");
            let holder = self.entries[id.index()].holder;
            assert_eq!(holder, Holder::Content(block), "{id:?}");
        }
        assert_eq!(num_attached, self.num_attached, "snapshots of contents");
    }

    /// The snapshot, wherever it is, if no sequence has begun with it.
    fn still(&self, RollingSnapshot(last_use): RollingSnapshot) -> Option<SnapshotId> {
        let is_it = |entry: &Entry| entry.is_rolling && entry.last_use == last_use;
        let place = self.entries.iter().position(is_it);
        place.map(|place| SnapshotId(place as u32))
    }

    /// The snapshot of a content, of these ids, that is taken for another one first. It looks at all of them, once for
    /// each snapshot that a step takes.
    fn least_recently_used(
        &self,
        ids: Range<u32>,
        is_retained: impl Fn(BlockId) -> bool,
    ) -> Option<SnapshotId> {
        let ids = self.ids_of(ids, |holder| matches!(holder, Holder::Content(_)));
        ids.min_by_key(|id| {
            let entry = &self.entries[id.index()];
            let is_retained = match entry.holder {
                Holder::Content(block) => is_retained(block),
                Holder::Nobody | Holder::Sequence => false,
            };
            (is_retained, entry.last_use)
        })
    }

    /// A free snapshot in host memory: the least recently used one is forgotten for it.
    fn free_on_host(&mut self, is_retained: impl Fn(BlockId) -> bool) -> Option<SnapshotId> {
        let on_host = self.num_on_device..self.entries.len() as u32;
        let free = self.first_free(on_host.clone());
        let id = free.or_else(|| self.least_recently_used(on_host, is_retained))?;
        self.free(id);
        Some(id)
    }

    /// Moves the snapshot `from` of a content to `to`, which is free.
    fn move_to(&mut self, from: SnapshotId, to: SnapshotId) {
        let entry = self.entries[from.index()];
        let Holder::Content(block) = entry.holder else {
            unreachable!("what moves is of a content");
        };
        self.free(from);
        self.entries[to.index()] = entry;
        self.of_content[block.index()] = Some(to);
        self.num_attached[usize::from(self.is_on_host(to))] += 1;
    }

    fn on_device(&self) -> Range<u32> {
        0..self.num_on_device
    }

    fn first_free(&self, ids: Range<u32>) -> Option<SnapshotId> {
        self.ids_of(ids, |holder| holder == Holder::Nobody).next()
    }

    fn ids_of(
        &self,
        ids: Range<u32>,
        has: impl Fn(Holder) -> bool,
    ) -> impl Iterator<Item = SnapshotId> {
        let ids = ids.map(SnapshotId);
        ids.filter(move |id| has(self.entries[id.index()].holder))
    }

    fn free(&mut self, id: SnapshotId) {
        let entry = std::mem::replace(&mut self.entries[id.index()], FREE);
        if let Holder::Content(block) = entry.holder {
            self.of_content[block.index()] = None;
            self.num_attached[usize::from(self.is_on_host(id))] -= 1;
        }
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

    fn take(snapshots: &mut Snapshots, rolling: Option<RollingSnapshot>) -> SnapshotId {
        let taken = snapshots.take(rolling, NOBODY).expect("not all are taken");
        assert_eq!(taken.offloaded_to, None, "without host memory");
        taken.id
    }

    fn taken(snapshots: &mut Snapshots, is_retained: fn(BlockId) -> bool) -> Option<u32> {
        snapshots.take(None, is_retained).map(|it| it.id.0)
    }

    #[test]
    fn the_one_that_was_of_use_last_is_taken_last_and_a_retained_one_behind_it() {
        let mut snapshots = Snapshots::new(3, 0, 9);
        for block in [5, 6, 7].map(BlockId) {
            let id = take(&mut snapshots, None);
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
        let mut snapshots = Snapshots::new(4, 0, 9);
        let mut rolling = None;
        for block in [1, 2, 3].map(BlockId) {
            let id = take(&mut snapshots, rolling);
            rolling = snapshots.attach_rolling(id, block, rolling);
        }
        assert_eq!(snapshots.num_attached(), [1, 0]);
        let id = snapshots.of(BlockId(3)).expect("the last one");
        snapshots.reuse(id);
        let next = take(&mut snapshots, rolling);
        snapshots.attach_rolling(next, BlockId(4), rolling);
        assert_eq!(snapshots.of(BlockId(3)), Some(id));
        assert_eq!(snapshots.num_attached(), [2, 0]);
    }

    #[test]
    fn an_answer_that_goes_on_takes_its_own_before_that_of_others() {
        let mut snapshots = Snapshots::new(2, 0, 9);
        let other = take(&mut snapshots, None);
        snapshots.attach(other, BlockId(1));
        let own = take(&mut snapshots, None);
        let rolling = snapshots.attach_rolling(own, BlockId(2), None);
        assert_eq!(take(&mut snapshots, rolling), own);
        assert_eq!(snapshots.of(BlockId(1)), Some(other));
        assert_eq!(snapshots.of(BlockId(2)), None);
    }

    #[test]
    fn an_answer_whose_snapshot_another_has_taken_leaves_it_to_that() {
        let mut snapshots = Snapshots::new(2, 0, 9);
        let own = take(&mut snapshots, None);
        let rolling = snapshots.attach_rolling(own, BlockId(1), None);
        let other = take(&mut snapshots, None);
        snapshots.attach(other, BlockId(2));
        // Another answer goes on with the one that was not of use for longest.
        assert_eq!(take(&mut snapshots, None), own);
        snapshots.attach_rolling(own, BlockId(3), None);
        assert_eq!(take(&mut snapshots, rolling), other);
        assert_eq!(snapshots.of(BlockId(3)), Some(own));
    }

    #[test]
    fn a_snapshot_goes_where_its_content_goes() {
        let mut snapshots = Snapshots::new(1, 0, 9);
        let id = take(&mut snapshots, None);
        snapshots.attach(id, BlockId(1));
        snapshots.relocate(BlockId(1), BlockId(8));
        assert_eq!(
            (snapshots.of(BlockId(1)), snapshots.of(BlockId(8))),
            (None, Some(id))
        );
        snapshots.forget(BlockId(8));
        assert_eq!(snapshots.num_attached(), [0, 0]);
        assert_eq!(taken(&mut snapshots, NOBODY), Some(0));
        snapshots.give_back(id);
        snapshots.check_integrity(std::iter::empty(), |_| false);
    }

    /// Attaches a snapshot to each of `blocks`, in this order.
    fn attached(num_snapshots: [u32; 2], blocks: &[u32]) -> Snapshots {
        let mut snapshots = Snapshots::new(num_snapshots[0], num_snapshots[1], 9);
        for &block in blocks {
            let taken = snapshots.take(None, NOBODY).expect("no sequence has one");
            snapshots.attach(taken.id, BlockId(block));
        }
        snapshots
    }

    fn of(snapshots: &Snapshots, blocks: [u32; 3]) -> [Option<u32>; 3] {
        blocks.map(|block| snapshots.of(BlockId(block)).map(|id| id.0))
    }

    #[test]
    fn the_least_recently_used_one_goes_to_host_memory_and_comes_back() {
        let mut snapshots = attached([1, 2], &[1, 2, 3]);
        assert_eq!(of(&snapshots, [1, 2, 3]), [Some(1), Some(2), Some(0)]);
        assert_eq!(snapshots.num_attached(), [1, 2]);
        let back = snapshots.onboard(SnapshotId(1), NOBODY);
        // It is still there when the one that it replaces needs a place, so another one is forgotten.
        let taken = TakenMemory {
            id: SnapshotId(0),
            offloaded_to: Some(SnapshotId(2)),
        };
        assert_eq!(back, Some(taken));
        assert_eq!(of(&snapshots, [1, 2, 3]), [Some(0), None, Some(2)]);
        assert_eq!(snapshots.num_attached(), [1, 1]);
        snapshots.check_integrity(std::iter::empty(), |_| true);
    }

    #[test]
    fn a_full_host_memory_forgets_the_least_recently_used_one_and_a_retained_one_last() {
        let mut snapshots = attached([1, 2], &[1, 2, 3]);
        let is_retained = |block| block == BlockId(1);
        let taken = snapshots.take(None, is_retained).expect("of a content");
        assert_eq!(taken.offloaded_to, Some(SnapshotId(2)));
        assert_eq!(of(&snapshots, [1, 2, 3]), [Some(1), None, Some(2)]);
        snapshots.forget(BlockId(1));
        assert_eq!(snapshots.num_attached(), [0, 1]);
    }

    #[test]
    fn one_in_host_memory_stays_there_while_sequences_have_those_of_the_device() {
        let mut snapshots = attached([1, 1], &[1, 2]);
        let taken = snapshots.take(None, NOBODY).expect("of a content");
        assert_eq!(snapshots.onboard(SnapshotId(1), NOBODY), None);
        assert_eq!(of(&snapshots, [1, 2, 3]), [None, Some(1), None]);
        snapshots.check_integrity([taken.id].into_iter(), |_| true);
    }

    #[test]
    fn one_in_host_memory_stays_there_if_its_content_is_forgotten() {
        let mut snapshots = attached([1, 1], &[1, 2]);
        snapshots.forget(BlockId(1));
        assert_eq!(snapshots.onboard(SnapshotId(1), NOBODY), None);
        assert_eq!(of(&snapshots, [1, 2, 3]), [None, Some(0), None]);
        snapshots.check_integrity(std::iter::empty(), |_| true);
    }

    #[test]
    fn an_answer_that_goes_on_has_one_snapshot_in_host_memory_too() {
        let mut snapshots = Snapshots::new(1, 2, 9);
        let own = snapshots.take(None, NOBODY).expect("one is free").id;
        let rolling = snapshots.attach_rolling(own, BlockId(1), None);
        let other = snapshots.take(None, NOBODY).expect("of a content").id;
        snapshots.attach(other, BlockId(2));
        let next = snapshots.take(rolling, NOBODY).expect("of a content");
        assert_eq!(next.offloaded_to, Some(SnapshotId(2)), "of the other one");
        let rolling = snapshots.attach_rolling(next.id, BlockId(3), rolling);
        assert!(rolling.is_some());
        assert_eq!(of(&snapshots, [1, 2, 3]), [None, Some(2), Some(0)]);
    }

    #[test]
    fn a_content_that_is_computed_again_leaves_host_memory() {
        let mut snapshots = attached([1, 1], &[1, 2]);
        let taken = snapshots.take(None, NOBODY).expect("of a content").id;
        snapshots.attach(taken, BlockId(2));
        assert_eq!(of(&snapshots, [1, 2, 3]), [None, Some(0), None]);
        assert_eq!(snapshots.num_attached(), [1, 0]);
    }
}
