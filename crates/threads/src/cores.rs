//! The cores that the pools of a process share, and the queue for them.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};

use crate::affinity::cpus_of_caller;
use crate::team::{ThreadTeam, cpus_of_worker};
use inflight_base::CpuSet;

/// One entry for each set of CPUs that pools of this process were created with.
static ALL: Mutex<Vec<Weak<Cores>>> = Mutex::new(Vec::new());

/// A set of CPUs and the threads for it. At any time, at most as many of them compute as the process may run.
pub(super) struct Cores {
    cpus: CpuSet,
    /// Threads that may compute at a time: the number of CPUs, or less if the control group has a lower quota.
    capacity: usize,
    /// Pools that are waiting for their turn.
    num_waiting: AtomicUsize,
    state: Mutex<TeamSchedule>,
    /// A turn may have begun for one of the waiting pools.
    changed: Condvar,
}

#[derive(Default)]
struct TeamSchedule {
    /// Threads that may compute now, including callers.
    num_busy: usize,
    /// Tickets of the waiting pools, first come, first served.
    queue: VecDeque<u64>,
    next_ticket: u64,
    /// Teams that are not in use.
    idle: Vec<ThreadTeam>,
    /// The sizes of all teams.
    team_sizes: Vec<usize>,
}

impl Cores {
    /// Some cores, or all that the calling thread may use.
    pub(super) fn of(cpus: Option<&CpuSet>) -> Arc<Self> {
        let allowed = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let capacity = cpus.map_or(allowed, |cpus| cpus.cpus().len().min(allowed));
        let cpus = cpus.cloned().unwrap_or_else(cpus_of_caller);
        let mut all = ALL.lock();
        all.retain(|cores| cores.strong_count() > 0);
        let found = all.iter().filter_map(Weak::upgrade);
        if let Some(cores) = found.into_iter().find(|cores| cores.cpus == cpus) {
            return cores;
        }
        let cores = Arc::new(Self {
            cpus,
            capacity,
            num_waiting: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        all.push(Arc::downgrade(&cores));
        cores
    }

    /// The CPUs of one of `num_threads` threads.
    pub(super) fn cpus_of_worker(&self, num_threads: usize, worker: usize) -> &[usize] {
        cpus_of_worker(&self.cpus, num_threads, worker)
    }

    /// Makes sure that there are enough teams for another pool of `num_threads`: as many as there can be pools of that
    /// size computing at the same time.
    ///
    /// # Errors
    ///
    /// If the system refuses a thread.
    pub(super) fn reserve_team(&self, num_threads: usize) -> io::Result<()> {
        let mut state = self.state.lock();
        let is_of_size = |size: &&usize| **size == num_threads;
        let num_teams = state.team_sizes.iter().filter(is_of_size).count();
        if num_threads > 1 && num_teams < (self.capacity / num_threads).max(1) {
            let team = ThreadTeam::start(num_threads, &self.cpus)?;
            state.idle.push(team);
            state.team_sizes.push(num_threads);
            // A pool may be waiting for a team of this size.
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits until `num_threads` may compute, including the caller, first come, first served. Returns the
    /// team of the others, or `None` for a single thread.
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
                // There may be room for the next one too.
                if !state.queue.is_empty() {
                    self.changed.notify_all();
                }
                return team.map(|index| state.idle.swap_remove(index));
            }
            self.changed.wait(&mut state);
        }
    }

    /// Ends a turn, and returns its team.
    pub(super) fn end_turn(&self, num_threads: usize, team: Option<ThreadTeam>) {
        let mut state = self.state.lock();
        state.num_busy -= num_threads;
        state.idle.extend(team);
        if !state.queue.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Whether a pool is waiting for its turn. Only a hint: it may change at any moment.
    pub(super) fn is_wanted(&self) -> bool {
        self.num_waiting.load(Ordering::Relaxed) > 0
    }
}
