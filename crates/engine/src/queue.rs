//! The queue: by priority, then paused sequences before requests that have not started.
//!
//! ```text
//! priority 0   | paused, in order of admission | waiting, in order of arrival |
//! priority 1   | paused ...                    | waiting ...                  |
//! ```

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::NewRequest;
use crate::sequence::Rank;
use inflight_base::{SeqSlot, SequenceId};

/// Paused sequences and waiting requests.
pub(super) struct Queue {
    /// Admitted sequences without blocks, in order of rank.
    paused: Vec<(Rank, SeqSlot)>,
    /// Requests that have not started, in order of priority, then arrival.
    waiting: BTreeMap<Arrival, NewRequest>,
    num_arrivals: u64,
}

/// The place of a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Arrival {
    priority: i32,
    number: u64,
}

/// An entry of the queue, which could start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueEntry {
    /// A paused sequence.
    Paused(SeqSlot),
    /// A request that has not started.
    Waiting(Arrival),
}

/// The entries that one pass over the queue has skipped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueueCursor {
    num_paused: usize,
    last: Option<Arrival>,
}

impl QueueCursor {
    /// Skips `entry`, which `next` has returned last.
    pub(super) fn skip(&mut self, entry: QueueEntry) {
        match entry {
            QueueEntry::Paused(_) => self.num_paused += 1,
            QueueEntry::Waiting(arrival) => self.last = Some(arrival),
        }
    }
}

impl Queue {
    /// An empty queue that takes `max_paused` sequences without allocating.
    pub(super) fn new(max_paused: usize) -> Self {
        Self {
            paused: Vec::with_capacity(max_paused),
            waiting: BTreeMap::new(),
            num_arrivals: 0,
        }
    }

    /// Queues a request behind the others of its priority.
    pub(super) fn push(&mut self, request: NewRequest) {
        let arrival = Arrival {
            priority: request.priority,
            number: self.num_arrivals,
        };
        self.num_arrivals += 1;
        self.waiting.insert(arrival, request);
    }

    /// Queues a paused sequence.
    pub(super) fn push_paused(&mut self, rank: Rank, slot: SeqSlot) {
        let place = self.paused.partition_point(|&(other, _)| other < rank);
        self.paused.insert(place, (rank, slot));
    }

    /// The next entry that `cursor` has not skipped. Waiting requests are left out unless `with_waiting`.
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

    /// A waiting request.
    pub(super) fn waiting(&self, arrival: Arrival) -> &NewRequest {
        &self.waiting[&arrival]
    }

    /// Takes a waiting request out.
    pub(super) fn take_waiting(&mut self, arrival: Arrival) -> NewRequest {
        self.waiting.remove(&arrival).expect("it waits")
    }

    /// Takes a paused sequence out, if it is there.
    pub(super) fn take_paused(&mut self, slot: SeqSlot) {
        self.paused.retain(|&(_, paused)| paused != slot);
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

    /// The ids of the waiting requests.
    pub(super) fn waiting_ids(&self) -> impl Iterator<Item = SequenceId> {
        self.waiting.values().map(|request| request.id)
    }

    /// The paused sequences, in order, each with the rank by which it is queued.
    pub(super) fn paused(&self) -> impl Iterator<Item = (Rank, SeqSlot)> {
        self.paused.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use inflight_base::Tokens;

    use super::*;

    /// A queue with these waiting requests, each with its priority, and these paused sequences, each with its priority
    /// and its number.
    fn queue(waiting: &[(u64, i32)], paused: &[(u32, i32, u64)]) -> Queue {
        let mut queue = Queue::new(8);
        for &(id, priority) in waiting {
            let request = NewRequest::new(SequenceId(id), vec![1], Tokens(1));
            queue.push(NewRequest {
                priority,
                ..request
            });
        }
        for &(slot, priority, start) in paused {
            queue.push_paused(Rank { priority, start }, SeqSlot(slot));
        }
        queue
    }

    /// One pass over the queue that skips every entry: slots of paused sequences, and ids of requests from 100.
    fn pass(queue: &Queue, with_waiting: bool) -> Vec<u64> {
        let mut cursor = QueueCursor::default();
        let mut found = Vec::new();
        while let Some(entry) = queue.next(&cursor, with_waiting) {
            assert!(found.len() < 8, "a pass that does not end: {found:?}");
            cursor.skip(entry);
            found.push(match entry {
                QueueEntry::Paused(slot) => u64::from(slot.0),
                QueueEntry::Waiting(arrival) => queue.waiting(arrival).id.0,
            });
        }
        found
    }

    #[test]
    fn smaller_priorities_come_first_and_paused_sequences_before_requests() {
        let waiting = [(101, 1), (102, 0), (103, 1), (104, 2)];
        let paused = [(5, 1, 7), (6, 1, 3), (7, 3, 1), (8, 0, 9)];
        let queue = queue(&waiting, &paused);
        assert_eq!(pass(&queue, true), [8, 102, 6, 5, 101, 103, 104, 7]);
        assert_eq!(pass(&queue, false), [8, 6, 5, 7]);
    }
}
