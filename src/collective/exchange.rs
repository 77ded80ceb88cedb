//! One message of each rank to all ranks.

use std::time::Duration;

use super::error::CollectiveError;
use super::label::Label;

/// The most ranks of a model.
pub const MAX_RANKS: usize = 16;

/// Rounds in which each rank publishes a message of 32-bit words, and reads those of all.
///
/// There are two buffers for the messages of a rank. Who reads a round has published in it, and so has read the round
/// before: a rank may publish in the next round while others still read this one.
pub trait Exchange: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// All ranks.
    fn num_ranks(&self) -> usize;

    /// The most words of a message.
    fn max_words(&self) -> usize;

    /// Has no later round take longer.
    fn set_time_limit(&mut self, limit: Duration);

    /// Publishes this rank's message of a round.
    ///
    /// # Errors
    /// A rank has failed.
    ///
    /// # Panics
    /// The message is too long.
    fn publish(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError>;

    /// Waits for the messages of all ranks, and calls `visit` with them, in the order of the ranks.
    ///
    /// # Errors
    /// A rank has failed, ended, published something else, or not published in time.
    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError>;

    /// Ends the operations of all ranks with an error, for this rank has failed. Only the first call counts.
    fn abort(&mut self, reason: &str);
}

/// Compares what another rank has published with what this one has.
pub(super) fn check_label(
    rank: usize,
    own: Label,
    other: usize,
    theirs: Label,
) -> Result<(), CollectiveError> {
    match own == theirs {
        true => Ok(()),
        false => Err(CollectiveError::Diverged {
            rank,
            own,
            other,
            theirs,
        }),
    }
}
