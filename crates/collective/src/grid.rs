//! Where the ranks of a model are.

use std::ops::Range;

/// The most ranks of a model.
pub const MAX_RANKS: usize = 16;

/// The ranks of a model: stages of its layers, each of which has equally many. Those of the first stage come first.
///
/// ```text
/// 2 stages of 3 ranks     stage 0: 0 1 2
///                         stage 1: 3 4 5
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// One after the other: the last one sends to the first.
    pub num_stages: usize,
    /// The ranks of each stage, which have parts of the same layers.
    pub ranks_per_stage: usize,
}

impl Grid {
    /// All ranks; `None` if there are none, or more than [`MAX_RANKS`].
    pub fn checked_num_ranks(self) -> Option<usize> {
        let num_ranks = self.num_stages.checked_mul(self.ranks_per_stage)?;
        (1..=MAX_RANKS).contains(&num_ranks).then_some(num_ranks)
    }

    /// All ranks.
    pub fn num_ranks(self) -> usize {
        self.num_stages * self.ranks_per_stage
    }

    /// The stage of a rank.
    pub fn stage(self, rank: usize) -> usize {
        rank / self.ranks_per_stage
    }

    /// The ranks of the stage of a rank.
    pub(super) fn stage_of(self, rank: usize) -> Range<usize> {
        let first = self.stage(rank) * self.ranks_per_stage;
        first..first + self.ranks_per_stage
    }

    /// The rank that reads what a rank sends.
    pub(super) fn next(self, rank: usize) -> usize {
        (rank + self.ranks_per_stage) % self.num_ranks()
    }

    /// The rank that sends to a rank.
    pub(super) fn previous(self, rank: usize) -> usize {
        (rank + self.num_ranks() - self.ranks_per_stage) % self.num_ranks()
    }
}

impl From<usize> for Grid {
    /// Ranks that all have parts of the same layers.
    fn from(ranks_per_stage: usize) -> Self {
        Self {
            num_stages: 1,
            ranks_per_stage,
        }
    }
}
