//! One message of each rank to all ranks of its stage, and messages to the next stage.

use std::ops::Range;
use std::time::Duration;

use super::error::CollectiveError;
use super::grid::Grid;
use super::label::Label;

/// The messages that a rank may have sent and the next stage not read.
pub(super) const NUM_UNREAD: usize = 2;

/// Rounds in which each rank publishes a message of 32-bit words, and reads the messages of all ranks of its stage; and
/// messages that it sends to the next stage.
///
/// There are two buffers for the messages of a rank. Who reads a round has published in it, and so has read the round
/// before: a rank may publish in the next round while others still read this one. There are as many for the messages to
/// the next stage, so that a rank may send one while the one before has not been read.
pub trait Exchange: Send {
    /// All ranks.
    fn grid(&self) -> Grid;

    /// This rank among all.
    fn rank(&self) -> usize;

    /// Whether ranks read each other's messages where they were written.
    fn is_shared(&self) -> bool;

    /// The most words of a message in a round.
    fn max_words(&self) -> usize;

    /// The most words of a message to the next stage.
    fn max_sent_words(&self) -> usize;

    /// Has no later round take longer.
    fn set_time_limit(&mut self, limit: Duration);

    /// Publishes this rank's message of a round of its stage. `write` is called with its `len` words, which have the
    /// contents of an earlier message, and must overwrite all of them.
    ///
    /// # Errors
    /// A rank has failed.
    ///
    /// # Panics
    /// The message is too long.
    fn publish_with(
        &mut self,
        label: Label,
        len: usize,
        write: &mut dyn FnMut(&mut [u32]),
    ) -> Result<(), CollectiveError>;

    /// Publishes a copy of `words` as this rank's message of a round of its stage.
    ///
    /// # Errors
    /// A rank has failed.
    ///
    /// # Panics
    /// The message is too long.
    fn publish(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        self.publish_with(label, words.len(), &mut |message| {
            message.copy_from_slice(words);
        })
    }

    /// Publishes a copy of `words`, of which each rank of the stage reads its `part`, by its place there, and nothing
    /// else. Where messages are not shared, that part is the message that it gets.
    ///
    /// # Errors
    /// A rank has failed.
    ///
    /// # Panics
    /// The message is too long.
    fn publish_parts(
        &mut self,
        label: Label,
        words: &[u32],
        _part: &dyn Fn(usize) -> Range<usize>,
    ) -> Result<(), CollectiveError> {
        self.publish(label, words)
    }

    /// Waits for the messages of all ranks of its stage, and calls `visit` with them, in the order of the ranks.
    ///
    /// # Errors
    /// A rank has failed, ended, published something else, or not published in time.
    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError>;

    /// Sends a message to the next stage, to the rank at this one's place; from the last stage to the first one. Waits
    /// until the last but one before it was read.
    ///
    /// # Errors
    /// A rank has failed, or the next stage has not read in time.
    ///
    /// # Panics
    /// The message is too long.
    fn send(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError>;

    /// Waits for the next message of the previous stage, and calls `visit` with it.
    ///
    /// # Errors
    /// A rank has failed, ended, sent something else, or not sent in time.
    fn receive(
        &mut self,
        label: Label,
        visit: &mut dyn FnMut(&[u32]),
    ) -> Result<(), CollectiveError>;

    /// Looks whether the other ranks live and have not failed.
    ///
    /// # Errors
    /// One has failed or ended.
    fn check(&mut self) -> Result<(), CollectiveError>;

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
