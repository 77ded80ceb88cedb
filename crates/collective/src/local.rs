//! Ranks that are threads of one process.

use std::array;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use super::error::CollectiveError;
use super::exchange::{Exchange, NUM_UNREAD, check_label};
use super::grid::{Grid, MAX_RANKS};
use super::label::Label;

/// The most words of a message.
const MAX_WORDS: usize = 64 * 1024;

/// A rank that is a thread of this process.
pub struct Local {
    world: Arc<World>,
    rank: usize,
    time_limit: Duration,
    /// What this rank has published in the current round.
    label: Option<Label>,
    /// The rounds that it has read, and the messages that it has sent and received.
    round: u64,
    num_sent: u64,
    num_received: u64,
}

/// What the ranks share.
struct World {
    grid: Grid,
    state: Mutex<State>,
    changed: Condvar,
    /// For each rank the messages of even and of odd rounds.
    slots: Vec<[RwLock<Message>; 2]>,
    /// For each rank the messages to the next stage.
    sent: Vec<[RwLock<Message>; NUM_UNREAD]>,
}

struct State {
    ranks: Vec<RankState>,
    /// Who has failed first, and why.
    failure: Option<(usize, String)>,
}

/// How far a rank is.
#[derive(Clone, Default)]
struct RankState {
    /// The number of rounds in which it has published.
    num_published: u64,
    /// The messages that it has sent to the next stage, and received from the previous one.
    num_sent: u64,
    num_received: u64,
    has_ended: bool,
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
    pub fn world(grid: impl Into<Grid>, time_limit: Duration) -> Vec<Self> {
        let grid = grid.into();
        let num_ranks = grid.checked_num_ranks();
        let num_ranks = num_ranks.unwrap_or_else(|| panic!("{grid:?}: 1 to {MAX_RANKS} ranks"));
        let world = Arc::new(World {
            grid,
            state: Mutex::new(State {
                ranks: vec![RankState::default(); num_ranks],
                failure: None,
            }),
            changed: Condvar::new(),
            slots: buffers(num_ranks),
            sent: buffers(num_ranks),
        });
        let ranks = (0..num_ranks).map(|rank| Self {
            world: Arc::clone(&world),
            rank,
            time_limit,
            label: None,
            round: 0,
            num_sent: 0,
            num_received: 0,
        });
        ranks.collect()
    }

    /// Waits until `has_come` says that each of some ranks has come far enough.
    fn wait_for(
        &self,
        mut ranks: impl Iterator<Item = usize>,
        has_come: impl Fn(&RankState) -> bool,
    ) -> Result<(), CollectiveError> {
        let World { state, changed, .. } = &*self.world;
        let deadline = Instant::now() + self.time_limit;
        let mut state = state.lock();
        let Some(mut missing) = ranks.next() else {
            return Ok(());
        };
        loop {
            if has_come(&state.ranks[missing]) {
                match ranks.next() {
                    Some(next) => missing = next,
                    None => return Ok(()),
                }
                continue;
            }
            state.check()?;
            if state.ranks[missing].has_ended {
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
        let stage = self.world.grid.stage_of(self.rank);
        self.wait_for(stage.clone(), |state| state.num_published > self.round)?;
        let slots = self.world.slots[stage.clone()].iter();
        let messages: Vec<RwLockReadGuard<'_, Message>> =
            slots.map(|slots| slots[turn(self.round)].read()).collect();
        for (other, message) in stage.zip(&messages) {
            message.check(self.rank, own, other)?;
        }
        let words: Vec<_> = messages.iter().map(|message| &message.words[..]).collect();
        visit(&words);
        Ok(())
    }

    fn read_sent(
        &self,
        label: Label,
        visit: &mut dyn FnMut(&[u32]),
    ) -> Result<(), CollectiveError> {
        let sender = self.world.grid.previous(self.rank);
        self.wait_for([sender].into_iter(), |state| {
            state.num_sent > self.num_received
        })?;
        let message = self.world.sent[sender][turn(self.num_received)].read();
        message.check(self.rank, label, sender)?;
        visit(&message.words);
        Ok(())
    }

    /// Tells the others how far this rank is.
    fn come(&self, change: impl FnOnce(&mut RankState)) {
        change(&mut self.world.state.lock().ranks[self.rank]);
        self.world.changed.notify_all();
    }

    /// Has the others know of a failure.
    fn noticed<T>(&mut self, result: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        if let Err(error) = &result {
            Exchange::abort(self, &error.to_string());
        }
        result
    }
}

impl Exchange for Local {
    fn grid(&self) -> Grid {
        self.world.grid
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
        MAX_WORDS
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
        self.world.state.lock().check()?;
        self.world.slots[self.rank][turn(self.round)]
            .write()
            .set(label, len, write);
        self.label = Some(label);
        self.come(|state| state.num_published = self.round + 1);
        Ok(())
    }

    fn read(&mut self, visit: &mut dyn FnMut(&[&[u32]])) -> Result<(), CollectiveError> {
        let read = self.read_all(visit);
        self.noticed(read)?;
        self.round += 1;
        Ok(())
    }

    fn send(&mut self, label: Label, words: &[u32]) -> Result<(), CollectiveError> {
        self.world.state.lock().check()?;
        let reader = self.world.grid.next(self.rank);
        let has_room = self.wait_for([reader].into_iter(), |state| {
            state.num_received + NUM_UNREAD as u64 > self.num_sent
        });
        self.noticed(has_room)?;
        self.world.sent[self.rank][turn(self.num_sent)].write().set(
            label,
            words.len(),
            |message| message.copy_from_slice(words),
        );
        self.num_sent += 1;
        self.come(|state| state.num_sent = self.num_sent);
        Ok(())
    }

    fn receive(
        &mut self,
        label: Label,
        visit: &mut dyn FnMut(&[u32]),
    ) -> Result<(), CollectiveError> {
        let read = self.read_sent(label, visit);
        self.noticed(read)?;
        self.num_received += 1;
        self.come(|state| state.num_received = self.num_received);
        Ok(())
    }

    fn check(&mut self) -> Result<(), CollectiveError> {
        let mut state = self.world.state.lock();
        state.check()?;
        match state.ranks.iter().position(|rank| rank.has_ended) {
            None => Ok(()),
            Some(missing) => Err(CollectiveError::Ended {
                rank: self.rank,
                missing,
            }),
        }
    }

    fn abort(&mut self, reason: &str) {
        let failure = &mut self.world.state.lock().failure;
        failure.get_or_insert_with(|| (self.rank, reason.to_owned()));
        self.world.changed.notify_all();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.come(|state| state.has_ended = true);
    }
}

impl State {
    fn check(&mut self) -> Result<(), CollectiveError> {
        match &self.failure {
            None => Ok(()),
            Some((by, reason)) => Err(CollectiveError::Aborted {
                by: *by,
                reason: reason.clone(),
            }),
        }
    }
}

impl Message {
    fn set(&mut self, label: Label, len: usize, write: impl FnOnce(&mut [u32])) {
        assert!(len <= MAX_WORDS, "{len} words");
        self.label = Some(label);
        self.words.resize(len, 0);
        write(&mut self.words);
    }

    /// Compares the label of another rank's message.
    fn check(&self, rank: usize, own: Label, other: usize) -> Result<(), CollectiveError> {
        check_label(rank, own, other, self.label.expect("it was written"))
    }
}

/// Empty ones for each rank.
fn buffers<const N: usize>(num_ranks: usize) -> Vec<[RwLock<Message>; N]> {
    (0..num_ranks)
        .map(|_| array::from_fn(|_| RwLock::default()))
        .collect()
}

/// The buffer of a message: they take turns.
fn turn(number: u64) -> usize {
    (number % 2) as usize
}
