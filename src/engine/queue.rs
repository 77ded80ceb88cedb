//! Who waits to start, in order: by priority, then what was paused before what never ran.
//!
//! ```text
//! priority 0   | paused, in order of first start | waiting, in order of arrival |
//! priority 1   | paused ...                      | waiting ...                  |
//! ```

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::base::{SeqSlot, SequenceId};
use crate::engine::NewRequest;
use crate::engine::sequence::{Rank, SequenceTable};

/// Paused sequences and waiting requests.
pub(super) struct Queue {
    /// Admitted, without blocks, in order of rank.
    paused: Vec<(Rank, SeqSlot)>,
    /// In order of priority, then arrival.
    waiting: BTreeMap<Arrival, NewRequest>,
    num_arrivals: u64,
}

/// The place of a request among those that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Arrival {
    priority: i32,
    number: u64,
}

/// Somebody who could start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueEntry {
    /// Was paused.
    Paused(SeqSlot),
    /// Never ran.
    Waiting(Arrival),
}

/// How far a cursor through the queue has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueueCursor {
    num_paused: usize,
    last: Option<Arrival>,
}

impl Queue {
    /// A queue that takes `max_paused` sequences without allocating.
    pub(super) fn new(max_paused: usize) -> Self {
        Self {
            paused: Vec::with_capacity(max_paused),
            waiting: BTreeMap::new(),
            num_arrivals: 0,
        }
    }

    /// Queues a request behind those of its priority.
    pub(super) fn push(&mut self, request: NewRequest) {
        let arrival = Arrival {
            priority: request.priority,
            number: self.num_arrivals,
        };
        self.num_arrivals += 1;
        self.waiting.insert(arrival, request);
    }

    /// Queues a sequence that was paused.
    pub(super) fn push_paused(&mut self, rank: Rank, slot: SeqSlot) {
        let place = self.paused.partition_point(|&(other, _)| other < rank);
        self.paused.insert(place, (rank, slot));
    }

    /// The next one that could start, without those that the cursor has passed over. Those that wait are
    /// left out where `with_waiting` is false.
    pub(super) fn next(&self, cursor: &QueueCursor, with_waiting: bool) -> Option<QueueEntry> {
        let paused = self.paused.get(cursor.num_paused);
        let after = cursor.last.map_or(Bound::Unbounded, Bound::Excluded);
        let waiting = with_waiting
            .then(|| self.waiting.range((after, Bound::Unbounded)).next())
            .flatten();
        match (paused, waiting) {
            (Some(&(rank, slot)), Some((arrival, _))) if rank.priority <= arrival.priority => {
                Some(QueueEntry::Paused(slot))
            }
            (_, Some((&arrival, _))) => Some(QueueEntry::Waiting(arrival)),
            (Some(&(_, slot)), None) => Some(QueueEntry::Paused(slot)),
            (None, None) => None,
        }
    }

    /// Leaves `entry`, whom `next` named last, where it is, and lets the cursor go on behind it.
    pub(super) fn pass_over(cursor: &mut QueueCursor, entry: QueueEntry) {
        match entry {
            QueueEntry::Paused(_) => cursor.num_paused += 1,
            QueueEntry::Waiting(arrival) => cursor.last = Some(arrival),
        }
    }

    /// A waiting request.
    pub(super) fn waiting(&self, arrival: Arrival) -> &NewRequest {
        &self.waiting[&arrival]
    }

    /// Takes a waiting request out.
    pub(super) fn take_waiting(&mut self, arrival: Arrival) -> NewRequest {
        self.waiting.remove(&arrival).expect("it waits")
    }

    /// Takes a paused sequence out. Returns whether it was there.
    pub(super) fn take_paused(&mut self, slot: SeqSlot) -> bool {
        let before = self.paused.len();
        self.paused.retain(|&(_, paused)| paused != slot);
        self.paused.len() < before
    }

    /// Drops the waiting request `id`. Returns whether it was there.
    pub(super) fn drop_waiting(&mut self, id: SequenceId) -> bool {
        let arrival = self.waiting.iter().find(|(_, request)| request.id == id);
        let Some((&arrival, _)) = arrival else {
            return false;
        };
        self.waiting.remove(&arrival);
        true
    }

    pub(super) fn num_paused(&self) -> usize {
        self.paused.len()
    }

    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.paused.is_empty() && self.waiting.is_empty()
    }

    /// Ids of the waiting requests.
    pub(super) fn waiting_ids(&self) -> impl Iterator<Item = SequenceId> {
        self.waiting.values().map(|request| request.id)
    }

    /// Rows of the paused sequences, in order.
    pub(super) fn paused_slots(&self) -> impl Iterator<Item = SeqSlot> {
        self.paused.iter().map(|&(_, slot)| slot)
    }

    /// Panics unless what is paused is in order of rank.
    pub(super) fn check_integrity(&self, sequences: &SequenceTable) {
        assert!(self.paused.is_sorted_by_key(|&(rank, _)| rank));
        for &(rank, slot) in &self.paused {
            assert_eq!(
                sequences[slot].details.rank, rank,
                "{slot:?} is queued by its rank"
            );
        }
    }
}
