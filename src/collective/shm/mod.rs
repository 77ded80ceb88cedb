//! Ranks that are processes of one host.
//!
//! ```text
//! area.rs     the shared memory: who has published what
//! futex.rs    waiting for a word of it
//! link.rs     a connection between two of the processes
//! place.rs    the place of a rank, which the system frees when its process ends
//! ```
//!
//! A rank publishes a message by writing it to its own buffer, and then its number of rounds. Others look at that number for
//! a moment, and then sleep until it changes. While they sleep they look now and then whether its process still lives, so
//! that killing it is an error for the others and no hang.

mod area;
mod futex;
mod link;
mod place;

use std::fs::File;
use std::hint;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub use self::link::{Link, follow_parent};

use self::area::{Area, Control, MAX_WORDS};
use self::place::Place;
use super::error::CollectiveError;
use super::exchange::{Exchange, MAX_RANKS, check_label};
use super::label::{Label, Operation};

/// How long a rank looks for the message of another one before it sleeps. Shares of a step differ by less, and a core that
/// sleeps takes some 50 us to wake up.
const SPIN: Duration = Duration::from_micros(500);
/// How often it looks between two readings of the clock.
const NUM_LOOKS: usize = 64;
/// How long it sleeps at most until it looks whether the other process still lives.
const NAP: Duration = Duration::from_millis(20);

/// Shared memory for the ranks of a model: a file without a name, which lives as long as a process has it.
pub struct ShmWorld {
    file: File,
    num_ranks: usize,
}

/// A rank that is a process of this host.
pub struct Shm {
    area: Area,
    place: Place,
    rank: usize,
    /// Modulo 2^32, as are the numbers in shared memory.
    round: u32,
    time_limit: Duration,
    /// What this rank has published in the current round.
    label: Option<Label>,
}

impl ShmWorld {
    /// Reserves memory for `num_ranks` ranks.
    ///
    /// # Errors
    ///
    /// The system refuses it, or there are no ranks or more than [`MAX_RANKS`].
    pub fn new(num_ranks: usize) -> Result<Self, CollectiveError> {
        if !(1..=MAX_RANKS).contains(&num_ranks) {
            return Err(CollectiveError::Memory(format!(
                "{num_ranks} ranks: 1 to {MAX_RANKS} are possible"
            )));
        }
        let file = area::create(num_ranks)?;
        Ok(Self { file, num_ranks })
    }

    /// All ranks.
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
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
    /// Takes part as a rank, in the memory of a [`ShmWorld`] of any process. No operation takes longer than `time_limit`.
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
            round: 0,
            time_limit,
            label: None,
        })
    }

    fn wait_for(&self, other: usize, since: Instant) -> Result<(), CollectiveError> {
        let control = self.area.control(other);
        let is_there = |order| has_reached(control.num_published.load(order), self.round);
        loop {
            for _ in 0..NUM_LOOKS {
                if is_there(Ordering::Acquire) {
                    return Ok(());
                }
                hint::spin_loop();
            }
            if since.elapsed() > SPIN {
                break;
            }
        }
        loop {
            self.check_failures()?;
            let waited = since.elapsed();
            let left = self.time_limit.saturating_sub(waited);
            control.num_waiting.fetch_add(1, Ordering::SeqCst);
            let seen = control.num_published.load(Ordering::SeqCst);
            if !has_reached(seen, self.round) && !left.is_zero() {
                futex::wait(&control.num_published, seen, NAP.min(left));
            }
            control.num_waiting.fetch_sub(1, Ordering::SeqCst);
            // Before it ends, a rank may have published what this one waits for.
            let has_ended = control.has_attached() && !self.place.is_taken(other);
            if is_there(Ordering::Acquire) {
                return Ok(());
            }
            if has_ended {
                self.check_failures()?;
                return Err(CollectiveError::Ended {
                    rank: self.rank,
                    missing: other,
                });
            }
            if left.is_zero() {
                return Err(CollectiveError::TimedOut {
                    rank: self.rank,
                    missing: other,
                    limit: self.time_limit,
                });
            }
        }
    }

    fn read_all(
        &self,
        own: Label,
        visit: &mut dyn FnMut(&[&[u32]]),
    ) -> Result<(), CollectiveError> {
        let since = Instant::now();
        let num_ranks = self.area.num_ranks();
        let parity = self.parity();
        let mut messages: [&[u32]; MAX_RANKS] = [&[]; MAX_RANKS];
        for (other, message) in messages[..num_ranks].iter_mut().enumerate() {
            if other != self.rank {
                self.wait_for(other, since)?;
            }
            let header = self.area.header(other, parity);
            let operation = header.operation.load(Ordering::Relaxed);
            let operation = Operation::from_number(operation).ok_or_else(|| {
                CollectiveError::Memory(format!("operation {operation} of rank {other} is unknown"))
            })?;
            let theirs = Label {
                operation,
                step: header.step.load(Ordering::Relaxed),
                len: header.len.load(Ordering::Relaxed) as usize,
            };
            check_label(self.rank, own, other, theirs)?;
            // SAFETY: the rank has published in this round. It writes to this buffer again in the round after the next,
            // which it reaches when this rank has published in the next one: after `visit`.
            *message = unsafe { self.area.message(other, parity) };
        }
        visit(&messages[..num_ranks]);
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

    fn parity(&self) -> usize {
        (self.round % 2) as usize
    }
}

impl Exchange for Shm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.area.num_ranks()
    }

    fn max_words(&self) -> usize {
        MAX_WORDS
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.time_limit = limit;
    }

    fn publish(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        assert!(words.len() <= MAX_WORDS, "{} words", words.len());
        self.check_failures()?;
        let parity = self.parity();
        let header = self.area.header(self.rank, parity);
        let operation = label.operation as u32;
        header.operation.store(operation, Ordering::Relaxed);
        header.step.store(label.step, Ordering::Relaxed);
        header.len.store(label.len as u64, Ordering::Relaxed);
        // SAFETY: whoever has read the buffer two rounds ago has published in the round after it, and this rank has waited
        // for that.
        unsafe { self.area.write(self.rank, parity, words) };
        self.label = Some(label);
        let control = self.area.control(self.rank);
        let num_published = self.round.wrapping_add(1);
        control.num_published.store(num_published, Ordering::SeqCst);
        if control.num_waiting.load(Ordering::SeqCst) > 0 {
            futex::wake_all(&control.num_published);
        }
        Ok(())
    }

    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let own = self.label.take().expect("a rank publishes, then reads");
        let read = self.read_all(own, visit);
        match &read {
            Ok(()) => self.round = self.round.wrapping_add(1),
            Err(error) => Exchange::abort(self, &error.to_string()),
        }
        read
    }

    fn abort(&mut self, reason: &str) {
        if self.check_failures().is_ok() {
            self.area.control(self.rank).fail(reason);
        }
        for other in 0..self.area.num_ranks() {
            let control: &Control = self.area.control(other);
            futex::wake_all(&control.num_published);
        }
    }
}

/// Whether a rank has published in a round.
fn has_reached(num_published: u32, round: u32) -> bool {
    // It may be one round ahead.
    num_published.wrapping_sub(round).wrapping_sub(1) < u32::MAX / 2
}
