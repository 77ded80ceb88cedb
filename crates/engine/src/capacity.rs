//! The first pass: which sequences may run, given the available KV blocks.
//!
//! This file is the only place where the capacity policies differ. Sequences are paused from the end of the
//! running ones, and admitted from the head of the queue. The first that does not fit ends the pass; otherwise short
//! requests could overtake a long one forever.
//!
//! ```text
//! running, in order of rank     | S1  S2  S3  S4 |  S5  S6 |      two must pause
//!                                 continue          pause
//! queue                         | S7  S8 |  S9  S10 ...           there are blocks for two
//!                                 start
//! ```
//!
//! | policy | may start | is paused |
//! |---|---|---|
//! | `MaxUtilization` | what fits now, if nothing had to be paused | the last, until the others fit |
//! | `GuaranteedNoEvict` | what fits to its last token, beside all running ones | none |
//! | `StaticBatch` | what fits to its last token, once all running ones have ended | none |
//!
//! The first of those that run is never paused, and the pool holds at least one sequence of the largest length, or
//! all beams of any request, so something always runs.

use inflight_base::Blocks;
use inflight_config::CapacityPolicy;

/// The blocks that one sequence needs to start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Free blocks that admitting the sequence takes now.
    pub(super) now: Blocks,
    /// Free blocks that it takes until its last token at worst, `now` included.
    pub(super) worst: Blocks,
}

/// Which blocks a sequence must find free when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reservation {
    /// The blocks that it takes now.
    Now,
    /// All that it takes until its last token.
    ToTheEnd,
}

/// Whether sequences may be paused at all.
pub(super) fn pauses(policy: CapacityPolicy) -> bool {
    policy == CapacityPolicy::MaxUtilization
}

/// Whether the last sequence that runs must pause, when those that run lack `lacking` blocks for the tokens that
/// they have, and `free` are free.
pub(super) fn must_pause(policy: CapacityPolicy, free: Blocks, lacking: Blocks) -> bool {
    pauses(policy) && lacking > free
}

/// Which blocks a sequence must find free when it starts.
pub(super) fn reservation(policy: CapacityPolicy) -> Reservation {
    match policy {
        CapacityPolicy::MaxUtilization => Reservation::Now,
        CapacityPolicy::GuaranteedNoEvict | CapacityPolicy::StaticBatch => Reservation::ToTheEnd,
    }
}

/// Whether a sequence may start in a step, when `any_runs` already, or `any_paused` in this step.
pub(super) fn may_start(policy: CapacityPolicy, any_runs: bool, any_paused: bool) -> bool {
    match policy {
        // A sequence that was just paused needs more blocks than it freed, and no other may overtake it.
        CapacityPolicy::MaxUtilization => !any_paused,
        CapacityPolicy::GuaranteedNoEvict => true,
        CapacityPolicy::StaticBatch => !any_runs,
    }
}

/// Whether a sequence may stay in the queue for blocks that another is about to write, to reuse them.
pub(super) fn may_wait_for_reuse(policy: CapacityPolicy) -> bool {
    // A batch that cannot be joined later would run without it.
    policy != CapacityPolicy::StaticBatch
}

/// The blocks that drafts may take, when `free` are free, the texts that are generated take `num_next` with their next
/// token at most, and `any_queued`.
///
/// A draft takes a block earlier than its sequence would have. Where all the blocks that a sequence may need are
/// reserved for it, this costs nobody anything. Where blocks go to whoever comes first, each sequence that
/// runs must still find its next one.
pub(super) fn blocks_for_drafts(
    policy: CapacityPolicy,
    free: Blocks,
    num_next: u32,
    any_queued: bool,
) -> Blocks {
    match policy {
        CapacityPolicy::GuaranteedNoEvict | CapacityPolicy::StaticBatch => free,
        CapacityPolicy::MaxUtilization if any_queued => Blocks::ZERO,
        CapacityPolicy::MaxUtilization => free.saturating_sub(Blocks(num_next)),
    }
}

/// The blocks that the sequences which start in a step may take.
pub(super) struct BlockBudget {
    left: Blocks,
    reservation: Reservation,
}

impl BlockBudget {
    /// `left` blocks for sequences that take them by `reservation`.
    pub(super) fn new(left: Blocks, reservation: Reservation) -> Self {
        Self { left, reservation }
    }

    /// The blocks that are left.
    pub(super) fn left(&self) -> Blocks {
        self.left
    }

    /// Whether a sequence takes all that it may need when it starts.
    pub(super) fn reserves_to_the_end(&self) -> bool {
        self.reservation == Reservation::ToTheEnd
    }

    /// How many sequences could start that may need `largest` blocks each; one of another size can if any is left.
    pub(super) fn num_startable(&self, largest: Blocks) -> usize {
        let any_left = self.left > Blocks::ZERO;
        (self.left.0 / largest.0.max(1)).max(any_left.into()) as usize
    }

    /// Takes what a sequence needs to start, if it is there.
    pub(super) fn admit(&mut self, demand: Demand) -> bool {
        let needed = match self.reservation {
            Reservation::Now => demand.now,
            Reservation::ToTheEnd => demand.worst,
        };
        let fits = needed <= self.left;
        if fits {
            self.left -= needed;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `queue`, `(now, worst)` each, join.
    fn num_admitted(mut room: BlockBudget, queue: &[(u32, u32)]) -> usize {
        let demands = queue.iter().map(|&(now, worst)| Demand {
            now: Blocks(now),
            worst: Blocks(worst),
        });
        demands.take_while(|&demand| room.admit(demand)).count()
    }

    #[test]
    fn the_first_that_does_not_fit_now_or_to_its_end_ends_the_walk() {
        let queue = [(1, 3), (1, 2), (1, 1)];
        assert_eq!(
            num_admitted(BlockBudget::new(Blocks(2), Reservation::Now), &queue),
            2
        );
        for (free, promised, expected) in [(8, 5, 1), (8, 2, 3), (4, 2, 0)] {
            let room = BlockBudget::new(Blocks(free - promised), Reservation::ToTheEnd);
            assert_eq!(num_admitted(room, &queue), expected, "{promised} of {free}");
        }
    }

    #[test]
    fn a_block_that_is_left_may_do_for_one_more() {
        for (left, expected) in [(0, 0), (1, 1), (7, 1), (8, 2), (11, 2), (12, 3)] {
            let budget = BlockBudget::new(Blocks(left), Reservation::ToTheEnd);
            assert_eq!(budget.num_startable(Blocks(4)), expected, "{left} left");
        }
    }

    #[test]
    fn only_max_utilization_pauses_and_only_when_blocks_lack() {
        for (policy, free, lacking, expected) in [
            (CapacityPolicy::MaxUtilization, 1, 1, false),
            (CapacityPolicy::MaxUtilization, 1, 2, true),
            (CapacityPolicy::GuaranteedNoEvict, 1, 2, false),
            (CapacityPolicy::StaticBatch, 1, 2, false),
        ] {
            let pauses = must_pause(policy, Blocks(free), Blocks(lacking));
            assert_eq!(pauses, expected, "{policy:?}, {lacking} of {free}");
        }
    }

    #[test]
    fn drafts_take_no_block_that_another_may_want() {
        for (policy, any_queued, expected) in [
            (CapacityPolicy::GuaranteedNoEvict, true, 5),
            (CapacityPolicy::StaticBatch, true, 5),
            (CapacityPolicy::MaxUtilization, true, 0),
            (CapacityPolicy::MaxUtilization, false, 2),
        ] {
            let blocks = blocks_for_drafts(policy, Blocks(5), 3, any_queued);
            assert_eq!(blocks, Blocks(expected), "{policy:?}");
        }
        let none = blocks_for_drafts(CapacityPolicy::MaxUtilization, Blocks(2), 3, false);
        assert_eq!(none, Blocks::ZERO);
    }

    #[test]
    fn a_static_batch_is_joined_before_it_runs_only() {
        assert!(may_start(CapacityPolicy::StaticBatch, false, false));
        assert!(!may_start(CapacityPolicy::StaticBatch, true, false));
        assert!(may_start(CapacityPolicy::GuaranteedNoEvict, true, false));
        assert!(may_start(CapacityPolicy::MaxUtilization, true, false));
        assert!(!may_start(CapacityPolicy::MaxUtilization, true, true));
    }
}
