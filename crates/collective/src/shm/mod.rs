//! Ranks that are processes of one host.
//!
//! ```text
//! area.rs     the shared memory: who has published and sent what
//! awaited.rs  what a rank waits for, so that who does not go on can be named
//! counter.rs  a number in it that others wait for
//! futex.rs    waiting for a word of it
//! link.rs     a connection between two of the processes
//! place.rs    the place of a rank, which the system frees when its process ends
//! ```
//!
//! A rank publishes a message by writing it to its own buffer, and then its number of rounds; a message to the next
//! stage in the same way. Others look at that number for a moment, and then sleep until it changes. While they sleep
//! they look now and then whether its process still lives, so that killing it is an error for the others and no hang.

mod area;
mod awaited;
mod counter;
mod futex;
mod link;
mod place;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

pub use self::link::{Link, follow_parent, leave_signals_to_rank_0};

use self::area::{Area, Buffer, MAX_SENT_WORDS, MAX_WORDS};
use self::awaited::{Awaited, Kind};
use self::place::Place;
use super::error::CollectiveError;
use super::exchange::{Exchange, NUM_UNREAD, check_label};
use super::grid::{Grid, MAX_RANKS};
use super::label::Label;

/// How long a rank sleeps at most until it looks whether the other process still lives.
const NAP: Duration = Duration::from_millis(20);

/// Shared memory for the ranks of a model: a file without a name, which lives as long as a process has it.
pub struct ShmWorld {
    file: File,
    grid: Grid,
}

/// A rank that is a process of this host.
pub struct Shm {
    area: Area,
    place: Place,
    rank: usize,
    time_limit: Duration,
    /// What this rank has published in the current round.
    label: Option<Label>,
    /// The rounds that it has read, and the messages that it has sent and received: modulo 2^32, as are the numbers in
    /// shared memory.
    round: u32,
    num_sent: u32,
    num_received: u32,
}

impl ShmWorld {
    /// Reserves memory for the ranks of a model.
    ///
    /// # Errors
    ///
    /// The system refuses it, or there are no ranks or more than [`MAX_RANKS`].
    pub fn new(grid: impl Into<Grid>) -> Result<Self, CollectiveError> {
        let grid = grid.into();
        if grid.checked_num_ranks().is_none() {
            return Err(CollectiveError::TooManyRanks(grid));
        }
        let file = area::create(grid)?;
        Ok(Self { file, grid })
    }

    /// All ranks.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// Takes part as a rank, see [`Shm::attach`].
    ///
    /// # Errors
    ///
    /// As [`Shm::attach`].
    pub fn attach(&self, rank: usize, time_limit: Duration) -> Result<Shm, CollectiveError> {
        Shm::attach(self.as_fd(), rank, time_limit)
    }
}

impl AsFd for ShmWorld {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Shm {
    /// Takes part as a rank, in the memory of a [`ShmWorld`] of any process. No operation takes longer than
    /// `time_limit`.
    ///
    /// # Errors
    ///
    /// It is not such memory, there is no such rank, or another process is this rank.
    pub fn attach(
        memory: BorrowedFd<'_>,
        rank: usize,
        time_limit: Duration,
    ) -> Result<Self, CollectiveError> {
        let file = place::open_again(memory)?;
        let area = Area::map(&file)?;
        if rank >= area.num_ranks() {
            return Err(CollectiveError::Memory(format!(
                "rank {rank} is not below {}, the number of ranks",
                area.num_ranks()
            )));
        }
        let place = Place::take(file, rank)?;
        let control = area.control(rank);
        if !control.attach() {
            return Err(CollectiveError::Memory(format!(
                "rank {rank} has been taken before, and its process has ended"
            )));
        }
        Ok(Self {
            area,
            place,
            rank,
            time_limit,
            label: None,
            round: 0,
            num_sent: 0,
            num_received: 0,
        })
    }

    /// Waits for another rank.
    fn wait_for(&self, awaited: Awaited, since: Instant) -> Result<(), CollectiveError> {
        let Awaited { rank, kind, value } = awaited;
        let counter = self.area.control(rank).counter(kind);
        if counter.spin_until_beyond(value, since) {
            return Ok(());
        }
        let own = self.area.control(self.rank);
        own.set_waiting_for(Some(awaited));
        self.sleep_until(awaited, since)?;
        // After an error it stands: another rank whose time ends now is to know it before the error is noticed.
        own.set_waiting_for(None);
        Ok(())
    }

    fn sleep_until(&self, awaited: Awaited, since: Instant) -> Result<(), CollectiveError> {
        let Awaited { rank, kind, value } = awaited;
        let control = self.area.control(rank);
        let counter = control.counter(kind);
        loop {
            self.check_failures()?;
            let left = self.time_limit.saturating_sub(since.elapsed());
            counter.sleep(value, NAP.min(left));
            // Before it ends, a rank may have done what this one waits for.
            let has_ended = control.has_attached() && !self.place.is_taken(rank);
            if counter.is_beyond(value) {
                return Ok(());
            }
            if has_ended {
                self.check_failures()?;
                return Err(CollectiveError::Ended {
                    rank: self.rank,
                    missing: rank,
                });
            }
            if left.is_zero() {
                return Err(CollectiveError::TimedOut {
                    rank: self.rank,
                    missing: self.culprit(rank),
                    limit: self.time_limit,
                });
            }
        }
    }

    /// The rank that does not go on, where `rank` is waited for: that one, unless it waits for another one itself.
    fn culprit(&self, mut rank: usize) -> usize {
        for _ in 0..self.area.num_ranks() {
            match self.area.control(rank).waiting_for() {
                Some(next) if self.is_missing(next) => rank = next.rank,
                _ => break,
            }
        }
        rank
    }

    /// Whether another rank waits for what is not there: if it were, that rank could go on.
    fn is_missing(&self, awaited: Awaited) -> bool {
        let Awaited { rank, kind, value } = awaited;
        rank < self.area.num_ranks()
            && rank != self.rank
            && !self.area.control(rank).counter(kind).is_beyond(value)
    }

    /// Compares the label of another rank's message with this one's.
    fn check_label(
        &self,
        own: Label,
        other: usize,
        buffer: &Buffer<'_>,
    ) -> Result<(), CollectiveError> {
        let theirs = buffer.label().ok_or_else(|| {
            CollectiveError::Memory(format!("an operation of rank {other} is unknown"))
        })?;
        check_label(self.rank, own, other, theirs)
    }

    fn read_all(
        &self,
        own: Label,
        visit: &mut dyn FnMut(&[&[u32]]),
    ) -> Result<(), CollectiveError> {
        let since = Instant::now();
        let stage = self.area.grid().stage_of(self.rank);
        let num_ranks = stage.len();
        let mut messages: [&[u32]; MAX_RANKS] = [&[]; MAX_RANKS];
        for (other, message) in stage.zip(&mut messages) {
            if other != self.rank {
                let published = Awaited {
                    rank: other,
                    kind: Kind::Published,
                    value: self.round,
                };
                self.wait_for(published, since)?;
            }
            let buffer = self.area.published(other, parity(self.round));
            self.check_label(own, other, &buffer)?;
            // SAFETY: the rank has published in this round. It writes to this buffer again in the round after the next,
            // which it reaches when this rank has published in the next one: after `visit`.
            *message = unsafe { buffer.message() };
        }
        visit(&messages[..num_ranks]);
        Ok(())
    }

    /// Waits until there is room for another message to the next stage.
    fn wait_for_room(&self) -> Result<(), CollectiveError> {
        let received = Awaited {
            rank: self.area.grid().next(self.rank),
            kind: Kind::Received,
            value: self.num_sent.wrapping_sub(NUM_UNREAD as u32),
        };
        self.wait_for(received, Instant::now())
    }

    fn read_sent(&self, own: Label, visit: &mut dyn FnMut(&[u32])) -> Result<(), CollectiveError> {
        let sender = self.area.grid().previous(self.rank);
        let sent = Awaited {
            rank: sender,
            kind: Kind::Sent,
            value: self.num_received,
        };
        self.wait_for(sent, Instant::now())?;
        let buffer = self.area.sent(sender, parity(self.num_received));
        self.check_label(own, sender, &buffer)?;
        // SAFETY: the rank has sent it. It writes to this buffer again when this rank has told that it has received:
        // after `visit`.
        visit(unsafe { buffer.message() });
        Ok(())
    }

    fn check_failures(&self) -> Result<(), CollectiveError> {
        let failed =
            (0..self.area.num_ranks()).find_map(|by| Some((by, self.area.control(by).failure()?)));
        match failed {
            None => Ok(()),
            Some((by, reason)) => Err(CollectiveError::Aborted { by, reason }),
        }
    }

    /// Has the others know of a failure.
    fn noticed<T>(&mut self, result: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        if let Err(error) = &result {
            Exchange::abort(self, &error.to_string());
        }
        result
    }
}

impl Exchange for Shm {
    fn grid(&self) -> Grid {
        self.area.grid()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn max_words(&self) -> usize {
        MAX_WORDS
    }

    fn max_sent_words(&self) -> usize {
        MAX_SENT_WORDS
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.time_limit = limit;
    }

    fn publish_with(
        &mut self,
        label: Label,
        len: usize,
        write: &mut dyn FnMut(&mut [u32]),
    ) -> Result<(), CollectiveError> {
        self.check_failures()?;
        let buffer = self.area.published(self.rank, parity(self.round));
        // SAFETY: whoever has read the buffer two rounds ago has published in the round after it, and this rank has
        // waited for that.
        write(unsafe { buffer.message_mut(label, len) });
        self.label = Some(label);
        let control = self.area.control(self.rank);
        control.published.raise(self.round.wrapping_add(1));
        Ok(())
    }

    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let own = self.label.take().expect("a rank publishes, then reads");
        let read = self.read_all(own, visit);
        self.noticed(read)?;
        self.round = self.round.wrapping_add(1);
        Ok(())
    }

    fn send(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        self.check_failures()?;
        let has_room = self.wait_for_room();
        self.noticed(has_room)?;
        let buffer = self.area.sent(self.rank, parity(self.num_sent));
        // SAFETY: the last but one message, which was in this buffer, was received.
        let message = unsafe { buffer.message_mut(label, words.len()) };
        message.copy_from_slice(words);
        self.num_sent = self.num_sent.wrapping_add(1);
        self.area.control(self.rank).sent.raise(self.num_sent);
        Ok(())
    }

    fn receive(
        &mut self,
        label: Label,
        visit: &mut dyn FnMut(&[u32]),
    ) -> Result<(), CollectiveError> {
        let read = self.read_sent(label, visit);
        self.noticed(read)?;
        self.num_received = self.num_received.wrapping_add(1);
        let control = self.area.control(self.rank);
        control.received.raise(self.num_received);
        Ok(())
    }

    fn check(&mut self) -> Result<(), CollectiveError> {
        self.check_failures()?;
        let has_ended = |other: &usize| {
            let control = self.area.control(*other);
            *other != self.rank && control.has_attached() && !self.place.is_taken(*other)
        };
        match (0..self.area.num_ranks()).find(has_ended) {
            None => Ok(()),
            Some(missing) => Err(CollectiveError::Ended {
                rank: self.rank,
                missing,
            }),
        }
    }

    fn abort(&mut self, reason: &str) {
        if self.check_failures().is_ok() {
            self.area.control(self.rank).fail(reason);
        }
        for other in 0..self.area.num_ranks() {
            self.area.control(other).wake();
        }
    }
}

/// The buffer of a round or of a message: even and odd ones take turns.
fn parity(number: u32) -> usize {
    (number % 2) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_whose_time_has_ended_tells_for_whom_it_has_waited() {
        let stages = Grid {
            num_stages: 3,
            ranks_per_stage: 1,
        };
        let world = ShmWorld::new(stages).expect("shared memory");
        let [first, stopped, last] = [0, 1, 2].map(|rank| {
            let attached = world.attach(rank, Duration::from_millis(20));
            attached.expect("it is free")
        });
        let sent = |rank| Awaited {
            rank,
            kind: Kind::Sent,
            value: 0,
        };
        for rank in [&last, &first] {
            let before = rank.area.grid().previous(rank.rank);
            let waited = rank.wait_for(sent(before), Instant::now());
            let expected = CollectiveError::TimedOut {
                rank: rank.rank,
                missing: stopped.rank,
                limit: rank.time_limit,
            };
            assert_eq!(waited, Err(expected));
        }
    }
}
