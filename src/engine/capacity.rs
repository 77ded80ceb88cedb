//! The first pass: who may run, given the KV blocks there are.
//!
//! This file is the only place where the capacity policies differ. Order decides the rest: sequences
//! are paused from the end of those that run, and admitted from the head of the queue, and the first
//! that does not fit ends the walk - or a long request would wait for ever behind short ones.
//!
//! ```text
//! running, in order of rank     | S1  S2  S3  S4 |  S5  S6 |      two must pause
//!                                 go on             pause
//! queue                         | S7  S8 |  S9  S10 ...           there is room for two
//!                                 start
//! ```
//!
//! | policy | may start | is paused |
//! |---|---|---|
//! | `MaxUtilization` | what fits now, if nothing had to be paused | the last, until the others fit |
//! | `GuaranteedNoEvict` | what fits to its last token, next to all that run | nobody |
//! | `StaticBatch` | the same, once all that ran have ended | nobody |
//!
//! A sequence with beams starts under any policy with all that it may ever need, which is set aside for it
//! (`beam_room.rs`), and is not paused.
//!
//! The first of those that run is never paused, and the pool holds at least one sequence of the
//! largest length: so something always runs.

use crate::base::Blocks;
use crate::engine::CapacityPolicy;

/// What one sequence holds and needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Free blocks that it takes now.
    pub(super) now: Blocks,
    /// Free blocks that it takes until it has run to its last token, at worst, `now` included.
    pub(super) worst: Blocks,
    /// The most that it ever holds, shared or not.
    pub(super) alone: Blocks,
}

/// Whether the last of those that run must be paused, when they lack `lacking` blocks for the tokens
/// they have and `free` are free.
pub(super) fn must_pause(policy: CapacityPolicy, free: Blocks, lacking: Blocks) -> bool {
    policy == CapacityPolicy::MaxUtilization && lacking > free
}

/// Whether anybody may join in a step, when `any_runs` already, or `any_paused` in this step.
pub(super) fn may_join(policy: CapacityPolicy, any_runs: bool, any_paused: bool) -> bool {
    match policy {
        // What was just paused needs all that it gave back and more, and nobody overtakes it.
        CapacityPolicy::MaxUtilization => !any_paused,
        CapacityPolicy::GuaranteedNoEvict => true,
        CapacityPolicy::StaticBatch => !any_runs,
    }
}

/// The blocks that drafts may take, when `free` are free, `num_running` sequences run, and `any_waits` to
/// start.
///
/// What a sequence takes for its drafts it only takes earlier than it would have otherwise. Where every
/// block that it may ever need is set aside, that is nobody's loss; where blocks go to whoever comes, each
/// that runs must find its next one all the same.
pub(super) fn blocks_for_drafts(
    policy: CapacityPolicy,
    free: Blocks,
    num_running: usize,
    any_waits: bool,
) -> Blocks {
    match policy {
        CapacityPolicy::GuaranteedNoEvict | CapacityPolicy::StaticBatch => free,
        CapacityPolicy::MaxUtilization if any_waits => Blocks::ZERO,
        CapacityPolicy::MaxUtilization => free.saturating_sub(Blocks(num_running as u32)),
    }
}

/// The blocks that those who start may take.
pub(super) struct BlockBudget {
    left: Blocks,
    /// Whether one that starts takes what it will have taken at its end.
    to_the_end: bool,
}

impl BlockBudget {
    /// BlockBudget for what those that start take now.
    pub(super) fn of_now(free: Blocks) -> Self {
        Self {
            left: free,
            to_the_end: false,
        }
    }

    /// BlockBudget for what they will have taken at their ends, when those that run will take `promised` of the
    /// `free` blocks.
    pub(super) fn to_the_end(free: Blocks, promised: Blocks) -> Self {
        Self {
            left: free - promised,
            to_the_end: true,
        }
    }

    /// Takes what a sequence needs to start, if there is as much.
    pub(super) fn admit(&mut self, demand: Demand) -> bool {
        let needed = match self.to_the_end {
            false => demand.now,
            true => demand.worst,
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
            alone: Blocks(worst),
        });
        demands.take_while(|&demand| room.admit(demand)).count()
    }

    #[test]
    fn the_first_that_does_not_fit_now_or_to_its_end_ends_the_walk() {
        let queue = [(1, 3), (1, 2), (1, 1)];
        assert_eq!(num_admitted(BlockBudget::of_now(Blocks(2)), &queue), 2);
        for (free, promised, expected) in [(8, 5, 1), (8, 2, 3), (4, 2, 0)] {
            let room = BlockBudget::to_the_end(Blocks(free), Blocks(promised));
            assert_eq!(num_admitted(room, &queue), expected, "{promised} of {free}");
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
        for (policy, any_waits, expected) in [
            (CapacityPolicy::GuaranteedNoEvict, true, 5),
            (CapacityPolicy::StaticBatch, true, 5),
            (CapacityPolicy::MaxUtilization, true, 0),
            (CapacityPolicy::MaxUtilization, false, 2),
        ] {
            let blocks = blocks_for_drafts(policy, Blocks(5), 3, any_waits);
            assert_eq!(blocks, Blocks(expected), "{policy:?}");
        }
        let none = blocks_for_drafts(CapacityPolicy::MaxUtilization, Blocks(2), 3, false);
        assert_eq!(none, Blocks::ZERO);
    }

    #[test]
    fn a_static_batch_is_joined_before_it_runs_only() {
        assert!(may_join(CapacityPolicy::StaticBatch, false, false));
        assert!(!may_join(CapacityPolicy::StaticBatch, true, false));
        assert!(may_join(CapacityPolicy::GuaranteedNoEvict, true, false));
        assert!(may_join(CapacityPolicy::MaxUtilization, true, false));
        assert!(!may_join(CapacityPolicy::MaxUtilization, true, true));
    }
}
