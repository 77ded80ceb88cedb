//! Sums and messages between ranks.

use std::ops::Range;
use std::time::Duration;

use super::error::CollectiveError;
use super::exchange::{Exchange, NUM_UNREAD};
use super::grid::Grid;
use super::label::{Label, Operation};
use super::sums::add_ranks;

/// From so many ranks on, large messages are summed in parts. Each of `n` ranks reads `n` times the message otherwise,
/// and twice with parts. Of messages that are not shared it sends `n - 1` otherwise, and two times `1 - 1 / n` with
/// parts.
const MIN_SPLIT_RANKS: usize = 3;

/// From so many values on it pays to meet twice.
const MIN_SPLIT_LEN: usize = 8 * 1024;

/// Operations of the ranks of a model. Sums, gatherings and broadcasts join the ranks of a stage: each is called by all
/// of them, in the same order, with the same `step`. What a stage sends, the next one receives in the same order.
///
/// # Errors
///
/// Every operation fails if a rank has failed, has ended, does another operation or another step, or does not take part
/// within the time limit. Later ones fail, too.
pub trait Collective: Send {
    /// All ranks.
    fn grid(&self) -> Grid;

    /// The stage of this rank.
    fn stage(&self) -> usize;

    /// This rank's number in its stage.
    fn rank(&self) -> usize;

    /// The ranks of its stage.
    fn num_ranks(&self) -> usize;

    /// Has no later operation take longer.
    fn set_time_limit(&mut self, limit: Duration);

    /// Sums values over all ranks of the stage. All get the same bits: each value is summed in pairs of ranks, `(0 +
    /// 1) + (2 + 3)`.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    fn all_reduce(&mut self, step: u64, values: &mut [f32]) -> Result<(), CollectiveError>;

    /// Sums values over all ranks of the stage without a copy of this rank's: `write` writes them into the message to
    /// the others. It is called once with a slice as long as `sums`, and must fill it; after an error it may not have
    /// been called.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    fn all_reduce_of(
        &mut self,
        step: u64,
        sums: &mut [f32],
        write: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), CollectiveError>;

    /// On `root`, calls `write(rank, first, values)` for pieces of what each rank has, this one included; `first` is
    /// the index of the first value of a piece. `lens` are the numbers of values of all ranks.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    ///
    /// # Panics
    ///
    /// If `own` has another length than `lens` says.
    fn gather(
        &mut self,
        step: u64,
        root: usize,
        own: &[f32],
        lens: &[usize],
        write: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), CollectiveError>;

    /// Replaces the words of all ranks by `root`'s. All have equally many.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    fn broadcast(
        &mut self,
        step: u64,
        root: usize,
        words: &mut [u32],
    ) -> Result<(), CollectiveError>;

    /// Sends values to the next stage, to the rank at this one's place; from the last stage to the first one. Waits for
    /// it only if there are more than [`Collective::max_unread`], or earlier ones that it has not received.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    fn send(&mut self, step: u64, values: &[f32]) -> Result<(), CollectiveError>;

    /// Replaces values by those that the previous stage has sent, of which there are equally many.
    ///
    /// # Errors
    ///
    /// See [`Collective`].
    fn receive(&mut self, step: u64, values: &mut [f32]) -> Result<(), CollectiveError>;

    /// The values that can be sent at once before the next stage has received some.
    fn max_unread(&self) -> usize;

    /// Looks whether the other ranks live and have not failed, without waiting for them.
    ///
    /// # Errors
    ///
    /// One has failed or ended.
    fn check(&mut self) -> Result<(), CollectiveError>;

    /// Ends the operations of all ranks of all stages with an error, for this rank has failed.
    fn abort(&mut self, reason: &str);
}

impl<E: Exchange> Collective for E {
    fn grid(&self) -> Grid {
        Exchange::grid(self)
    }

    fn stage(&self) -> usize {
        Exchange::grid(self).stage(Exchange::rank(self))
    }

    fn rank(&self) -> usize {
        Exchange::rank(self) % Exchange::grid(self).ranks_per_stage
    }

    fn num_ranks(&self) -> usize {
        Exchange::grid(self).ranks_per_stage
    }

    fn set_time_limit(&mut self, limit: Duration) {
        Exchange::set_time_limit(self, limit);
    }

    fn all_reduce(&mut self, step: u64, values: &mut [f32]) -> Result<(), CollectiveError> {
        if self.num_ranks() == 1 {
            return Ok(());
        }
        let label = label_of_sum(step, values.len());
        let max_words = self.max_words();
        for piece in values.chunks_mut(max_words) {
            let len = piece.len();
            let words = bytemuck::cast_slice(piece);
            match num_parts(self, len) {
                1 => self.publish(label, words)?,
                num_parts => {
                    self.publish_parts(label, words, &|rank| part_of(len, num_parts, rank))?;
                }
            }
            sum_published(self, label, piece)?;
        }
        Ok(())
    }

    fn all_reduce_of(
        &mut self,
        step: u64,
        sums: &mut [f32],
        write: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), CollectiveError> {
        let is_sent_in_parts = !self.is_shared() && num_parts(self, sums.len()) > 1;
        if self.num_ranks() == 1 || sums.len() > self.max_words() || is_sent_in_parts {
            write(sums);
            return self.all_reduce(step, sums);
        }
        let label = label_of_sum(step, sums.len());
        self.publish_with(label, sums.len(), &mut |words| {
            write(bytemuck::cast_slice_mut(words));
        })?;
        sum_published(self, label, sums)
    }

    fn gather(
        &mut self,
        step: u64,
        root: usize,
        own: &[f32],
        lens: &[usize],
        write: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), CollectiveError> {
        let rank = Collective::rank(self);
        assert_eq!(lens.len(), self.num_ranks(), "a length per rank");
        assert_eq!(own.len(), lens[rank], "the values of rank {rank}");
        let label = Label {
            operation: Operation::Gather,
            step,
            len: lens.iter().sum(),
        };
        let is_root = rank == root;
        let max_words = self.max_words();
        let longest = lens.iter().copied().max().unwrap_or(0);
        for first in (0..longest).step_by(max_words) {
            let piece = |len: usize| first.min(len)..(first + max_words).min(len);
            let own = &own[piece(own.len())];
            // Nobody else reads the root's words.
            let published = if is_root { &[] } else { own };
            self.publish(label, bytemuck::cast_slice(published))?;
            if is_root && !own.is_empty() {
                write(rank, first, own);
            }
            self.read(&mut |messages| {
                for (other, (words, &len)) in messages.iter().zip(lens).enumerate() {
                    let values = &words[..words.len().min(piece(len).len())];
                    if is_root && other != rank && !values.is_empty() {
                        write(other, first, bytemuck::cast_slice(values));
                    }
                }
            })?;
        }
        Ok(())
    }

    fn broadcast(
        &mut self,
        step: u64,
        root: usize,
        words: &mut [u32],
    ) -> Result<(), CollectiveError> {
        let label = Label {
            operation: Operation::Broadcast,
            step,
            len: words.len(),
        };
        let is_root = Collective::rank(self) == root;
        let max_words = self.max_words();
        for piece in words.chunks_mut(max_words) {
            self.publish(label, if is_root { piece } else { &[] })?;
            self.read(&mut |messages| {
                let len = piece.len().min(messages[root].len());
                piece[..len].copy_from_slice(&messages[root][..len]);
            })?;
        }
        Ok(())
    }

    fn send(&mut self, step: u64, values: &[f32]) -> Result<(), CollectiveError> {
        let label = label_of_sent(step, values.len());
        let mut pieces = values.chunks(self.max_sent_words());
        pieces.try_for_each(|piece| Exchange::send(self, label, bytemuck::cast_slice(piece)))
    }

    fn receive(&mut self, step: u64, values: &mut [f32]) -> Result<(), CollectiveError> {
        let label = label_of_sent(step, values.len());
        let mut pieces = values.chunks_mut(self.max_sent_words());
        pieces.try_for_each(|piece| {
            Exchange::receive(self, label, &mut |words| {
                let len = piece.len().min(words.len());
                piece[..len].copy_from_slice(bytemuck::cast_slice(&words[..len]));
            })
        })
    }

    fn max_unread(&self) -> usize {
        NUM_UNREAD * self.max_sent_words()
    }

    fn check(&mut self) -> Result<(), CollectiveError> {
        Exchange::check(self)
    }

    fn abort(&mut self, reason: &str) {
        Exchange::abort(self, reason);
    }
}

/// The number of parts in which a message is summed.
fn num_parts(exchange: &impl Exchange, len: usize) -> usize {
    let num_ranks = exchange.num_ranks();
    let is_split = num_ranks >= MIN_SPLIT_RANKS && len >= MIN_SPLIT_LEN;
    if is_split { num_ranks } else { 1 }
}

/// One of the parts of a message.
fn part_of(len: usize, num_parts: usize, index: usize) -> Range<usize> {
    len * index / num_parts..len * (index + 1) / num_parts
}

/// Sums the values that all ranks have published. In one part each rank reads all messages; with a part for each rank
/// it sums its part of all messages, and reads the sums of the others.
///
/// ```text
///            one part                       a part for each of 4 ranks
/// publish    0123  0123  0123  0123         0123  0123  0123  0123
/// sum        0123  0123  0123  0123         0      1      2      3
/// publish                                   0      1      2      3
/// read                                       123  0 23  01 3  012
/// ```
fn sum_published(
    exchange: &mut impl Exchange,
    label: Label,
    sums: &mut [f32],
) -> Result<(), CollectiveError> {
    let len = sums.len();
    let num_parts = num_parts(exchange, len);
    let part = |index: usize| part_of(len, num_parts, index);
    let own = match num_parts {
        1 => 0..len,
        _ => part(Collective::rank(exchange)),
    };
    // What is not shared has come without the other parts.
    let first = if exchange.is_shared() { own.start } else { 0 };
    exchange.read(&mut |messages| add_ranks(messages, first, &mut sums[own.clone()]))?;
    if num_parts > 1 {
        exchange.publish(label, bytemuck::cast_slice(&sums[own]))?;
        exchange.read(&mut |messages| {
            for (index, message) in messages.iter().enumerate() {
                let sums = &mut sums[part(index)];
                let len = sums.len().min(message.len());
                sums[..len].copy_from_slice(bytemuck::cast_slice(&message[..len]));
            }
        })?;
    }
    Ok(())
}

fn label_of_sum(step: u64, len: usize) -> Label {
    Label {
        operation: Operation::AllReduce,
        step,
        len,
    }
}

fn label_of_sent(step: u64, len: usize) -> Label {
    Label {
        operation: Operation::Send,
        step,
        len,
    }
}
