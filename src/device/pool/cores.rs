//! The cores that the pools of a process share, and whose turn it is to use them.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};

use super::affinity::CpuSet;
use super::team::ThreadTeam;

/// All that some pool of this process uses, one for each set of cpus that threads were found to be allowed.
static ALL: Mutex<Vec<Weak<Cores>>> = Mutex::new(Vec::new());

/// A set of cpus, and threads for it. No more threads of it compute at a time than the process may run.
pub(super) struct Cores {
    cpus: CpuSet,
    /// Threads that may compute at a time: the cpus, or less if a control group's quota is less.
    capacity: usize,
    /// Pools that wait for their turn.
    num_waiting: AtomicUsize,
    state: Mutex<TeamSchedule>,
    /// Somebody's turn may have come.
    changed: Condvar,
}

#[derive(Default)]
struct TeamSchedule {
    /// Threads whose turn it is, callers included.
    num_busy: usize,
    /// Who waits, by ticket, the first in front.
    queue: VecDeque<u64>,
    next_ticket: u64,
    /// Teams that nobody has.
    idle: Vec<ThreadTeam>,
    /// Sizes of all teams.
    team_sizes: Vec<usize>,
}

impl Cores {
    /// Those that the calling thread may use.
    pub(super) fn of_caller() -> Arc<Self> {
        let cpus = CpuSet::of_caller();
        let mut all = ALL.lock();
        all.retain(|cores| cores.strong_count() > 0);
        let found = all.iter().filter_map(Weak::upgrade);
        if let Some(cores) = found.into_iter().find(|cores| cores.cpus == cpus) {
            return cores;
        }
        let cores = Arc::new(Self {
            cpus,
            capacity: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            num_waiting: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        all.push(Arc::downgrade(&cores));
        cores
    }

    /// Sees to it that there are teams for another pool of `num_threads`: as many as pools can have their turn
    /// at a time.
    ///
    /// # Errors
    ///
    /// The system refuses a thread.
    pub(super) fn reserve_team(&self, num_threads: usize) -> io::Result<()> {
        let mut state = self.state.lock();
        let is_of_size = |size: &&usize| **size == num_threads;
        let num_teams = state.team_sizes.iter().filter(is_of_size).count();
        if num_threads > 1 && num_teams < (self.capacity / num_threads).max(1) {
            let team = ThreadTeam::start(num_threads, &self.cpus)?;
            state.idle.push(team);
            state.team_sizes.push(num_threads);
            // Whoever waits for a team of this size need not any more.
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits until `num_threads` may compute, the calling one among them, first come, first served. Gives the
    /// others; one alone has none.
    pub(super) fn take(&self, num_threads: usize) -> Option<ThreadTeam> {
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.queue.push_back(ticket);
        self.num_waiting.fetch_add(1, Ordering::Relaxed);
        loop {
            let has_room = state.num_busy == 0 || state.num_busy + num_threads <= self.capacity;
            let team = state
                .idle
                .iter()
                .position(|team| team.num_threads() == num_threads);
            let is_next = state.queue.front() == Some(&ticket);
            if is_next && has_room && (team.is_some() || num_threads == 1) {
                state.queue.pop_front();
                self.num_waiting.fetch_sub(1, Ordering::Relaxed);
                state.num_busy += num_threads;
                // There may be room for the next as well.
                if !state.queue.is_empty() {
                    self.changed.notify_all();
                }
                return team.map(|index| state.idle.swap_remove(index));
            }
            self.changed.wait(&mut state);
        }
    }

    /// Gives back what was taken.
    pub(super) fn give_back(&self, num_threads: usize, team: Option<ThreadTeam>) {
        let mut state = self.state.lock();
        state.num_busy -= num_threads;
        state.idle.extend(team);
        if !state.queue.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Whether somebody waits for a turn. Only a hint: it may change at any moment.
    pub(super) fn is_wanted(&self) -> bool {
        self.num_waiting.load(Ordering::Relaxed) > 0
    }
}
