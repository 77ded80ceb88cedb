//! Ranks that are threads of one process.

use std::array;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use super::error::CollectiveError;
use super::exchange::{Exchange, MAX_RANKS, check_label};
use super::label::Label;

/// The most words of a message.
const MAX_WORDS: usize = 64 * 1024;

/// A rank that is a thread of this process.
pub struct Local {
    world: Arc<World>,
    rank: usize,
    round: u64,
    time_limit: Duration,
    /// What this rank has published in the current round.
    label: Option<Label>,
}

/// What the ranks share.
struct World {
    state: Mutex<State>,
    changed: Condvar,
    /// For each rank the messages of even and of odd rounds.
    slots: Vec<[RwLock<Message>; 2]>,
}

struct State {
    /// For each rank, the number of rounds in which it has published.
    num_published: Vec<u64>,
    has_ended: Vec<bool>,
    /// Who has failed first, and why.
    failure: Option<(usize, String)>,
}

#[derive(Default)]
struct Message {
    label: Option<Label>,
    words: Vec<u32>,
}

impl Local {
    /// All ranks of a model, from 0 on. No operation takes longer than `time_limit`.
    ///
    /// # Panics
    ///
    /// If there are no ranks, or more than [`MAX_RANKS`].
    pub fn world(num_ranks: usize, time_limit: Duration) -> Vec<Self> {
        assert!((1..=MAX_RANKS).contains(&num_ranks), "{num_ranks} ranks");
        let world = Arc::new(World {
            state: Mutex::new(State {
                num_published: vec![0; num_ranks],
                has_ended: vec![false; num_ranks],
                failure: None,
            }),
            changed: Condvar::new(),
            slots: (0..num_ranks)
                .map(|_| array::from_fn(|_| RwLock::default()))
                .collect(),
        });
        let ranks = (0..num_ranks).map(|rank| Self {
            world: Arc::clone(&world),
            rank,
            round: 0,
            time_limit,
            label: None,
        });
        ranks.collect()
    }

    fn wait_for_all(&self) -> Result<(), CollectiveError> {
        let World { state, changed, .. } = &*self.world;
        let deadline = Instant::now() + self.time_limit;
        let mut state = state.lock();
        loop {
            let mut published = state.num_published.iter();
            let Some(missing) = published.position(|&published| published <= self.round) else {
                return Ok(());
            };
            state.check()?;
            if state.has_ended[missing] {
                return Err(CollectiveError::Ended {
                    rank: self.rank,
                    missing,
                });
            }
            if changed.wait_until(&mut state, deadline).timed_out() {
                return Err(CollectiveError::TimedOut {
                    rank: self.rank,
                    missing,
                    limit: self.time_limit,
                });
            }
        }
    }

    fn read_all(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let own = self.label.take().expect("a rank publishes, then reads");
        self.wait_for_all()?;
        let slots = self.world.slots.iter();
        let messages: Vec<RwLockReadGuard<'_, Message>> =
            slots.map(|slots| slots[self.parity()].read()).collect();
        for (other, message) in messages.iter().enumerate() {
            let theirs = message.label.expect("it was published");
            check_label(self.rank, own, other, theirs)?;
        }
        let words: Vec<_> = messages.iter().map(|message| &message.words[..]).collect();
        visit(&words);
        Ok(())
    }

    fn parity(&self) -> usize {
        (self.round % 2) as usize
    }
}

impl Exchange for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.world.slots.len()
    }

    fn max_words(&self) -> usize {
        MAX_WORDS
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.time_limit = limit;
    }

    fn publish(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        assert!(words.len() <= MAX_WORDS, "{} words", words.len());
        let World {
            state,
            changed,
            slots,
        } = &*self.world;
        state.lock().check()?;
        let mut message = slots[self.rank][self.parity()].write();
        message.label = Some(label);
        message.words.clear();
        message.words.extend_from_slice(words);
        drop(message);
        self.label = Some(label);
        state.lock().num_published[self.rank] = self.round + 1;
        changed.notify_all();
        Ok(())
    }

    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let read = self.read_all(visit);
        match &read {
            Ok(()) => self.round += 1,
            Err(error) => Exchange::abort(self, &error.to_string()),
        }
        read
    }

    fn abort(&mut self, reason: &str) {
        let failure = &mut self.world.state.lock().failure;
        failure.get_or_insert_with(|| (self.rank, reason.to_owned()));
        self.world.changed.notify_all();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.world.state.lock().has_ended[self.rank] = true;
        self.world.changed.notify_all();
    }
}

impl State {
    fn check(&self) -> Result<(), CollectiveError> {
        match &self.failure {
            None => Ok(()),
            Some((by, reason)) => Err(CollectiveError::Aborted {
                by: *by,
                reason: reason.clone(),
            }),
        }
    }
}
