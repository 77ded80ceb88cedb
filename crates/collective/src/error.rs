//! Why a collective operation failed.

use std::time::Duration;

use thiserror::Error;

use super::grid::{Grid, MAX_RANKS};
use super::label::Label;

/// Why a collective operation failed. The ranks may be at different operations afterwards, so every later operation
/// fails, too.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CollectiveError {
    /// A rank has not taken part in time.
    #[error(
        "rank {rank} has waited for rank {missing} for {limit:?}, the time limit of an operation between ranks"
    )]
    TimedOut {
        /// The rank that waited.
        rank: usize,
        /// The rank that it waited for.
        missing: usize,
        /// How long.
        limit: Duration,
    },
    /// The process or the thread of a rank has ended.
    #[error("rank {missing} has ended, and rank {rank} waited for it")]
    Ended {
        /// The rank that waited.
        rank: usize,
        /// The rank that has ended.
        missing: usize,
    },
    /// A rank has failed.
    #[error("rank {by} has failed: {reason}")]
    Aborted {
        /// The rank that failed.
        by: usize,
        /// What it reported.
        reason: String,
    },
    /// Rank 0 has ended the model, and waits for nobody.
    #[error("rank 0 has ended the model")]
    Closed,
    /// Two ranks do different things.
    #[error(
        "rank {rank} does {own}, and rank {other} does {theirs}: the ranks have computed different steps"
    )]
    Diverged {
        /// The rank that noticed.
        rank: usize,
        /// What it does.
        own: Label,
        /// Another rank.
        other: usize,
        /// What that one does.
        theirs: Label,
    },
    /// No ranks, or more than there can be.
    #[error("{} stages of {} ranks: 1 to {MAX_RANKS} ranks are possible", .0.num_stages, .0.ranks_per_stage)]
    TooManyRanks(Grid),
    /// Shared memory that cannot be used.
    #[error("shared memory of ranks: {0}")]
    Memory(String),
    /// Processes of MPI that cannot be used.
    #[error("ranks over MPI: {0}")]
    World(String),
}
