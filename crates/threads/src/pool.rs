//! A persistent pool of threads for operations of a few microseconds, shared by all models of a process.
//!
//! The calling thread is worker 0. After a run, workers spin for a moment, because within a step the next run
//! follows at once; then they sleep, so that an idle model costs nothing. Each worker has the same share of
//! the tasks in every run, so that its data may still be in its core's cache. A worker that has finished its
//! share takes tasks from the others, so a worker that loses its core for a while does not delay the run.
//!
//! ```text
//! tasks      0 1 2 3 4 5 6 7 8 9
//! worker 0   |-------> <-|           from the front of its own share ...
//! worker 1               |-------->  ... and from the back of another one's
//! ```
//!
//! Pools take turns. Together they never compute on more threads than the process may run, so that the
//! spinning threads of one model do not slow down the step of another. A [`Turn`] is a step, or a part of a long
//! one. A pool that waits for its turn sleeps.
//!
//! ```text
//! a pool of all threads   | step | . . . . . . . | step ...
//! another of all          . . . .| first | . . . . . . .| rest of a long step ...
//! ```

#[cfg(test)]
mod tests;

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::affinity::Binding;
use crate::cores::Cores;
use crate::disjoint_slice::DisjointSlice;
use crate::team::ThreadTeam;
use inflight_base::{CpuSet, LoadError};

/// How long a turn lasts if another pool is waiting: long compared with the time to wake a thread.
const TURN: Duration = Duration::from_millis(2);

/// Threads that run the tasks of one operation at a time, during the turns of this pool.
pub struct Pool(Arc<PoolState>);

/// A pool and its current turn.
struct PoolState {
    cores: Arc<Cores>,
    num_threads: usize,
    /// Whether the caller of a turn uses only these cores, too.
    is_bound: bool,
    held: Mutex<Option<HeldTurn>>,
}

/// The current turn of a pool: its threads, and when it began.
struct HeldTurn {
    /// `None` if the caller is the only thread.
    team: Option<ThreadTeam>,
    since: Instant,
    /// Of the caller.
    _binding: Option<Binding>,
}

/// Keeps the turn of a pool between operations. Dropping it ends the turn.
#[must_use]
pub struct Turn(Arc<PoolState>);

impl Pool {
    /// A pool of `num_threads`, including the caller of each run, on the CPUs that the calling thread may use.
    ///
    /// # Errors
    ///
    /// If the system refuses a thread.
    pub fn new(num_threads: usize) -> io::Result<Self> {
        Self::on(num_threads, None)
    }

    /// A pool of `num_threads`, including the caller of each run, on `cpus` only.
    fn on(num_threads: usize, cpus: Option<&CpuSet>) -> io::Result<Self> {
        let cores = Cores::of(cpus);
        cores.reserve_team(num_threads)?;
        let state = PoolState {
            cores,
            num_threads,
            is_bound: cpus.is_some(),
            held: Mutex::new(None),
        };
        Ok(Self(Arc::new(state)))
    }

    /// The pool of a device: with `num_threads`, or else as many as there are `cpus`, and as the CPU affinity and the
    /// control group's quota of the process allow. With `cpus` all of them, the caller of each turn included, run there
    /// only, and so have the memory that they are the first to write nearby.
    ///
    /// # Errors
    ///
    /// If the system refuses a thread.
    pub fn of_device(
        num_threads: Option<NonZeroUsize>,
        cpus: Option<&CpuSet>,
    ) -> Result<Self, LoadError> {
        let allowed = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let num_cpus = cpus.map_or(allowed, |cpus| cpus.cpus().len());
        let num_threads = num_threads.map_or(num_cpus.min(allowed), NonZeroUsize::get);
        Self::on(num_threads, cpus).map_err(|error| {
            LoadError::Resource(format!("cannot start {num_threads} threads: {error}"))
        })
    }

    /// Threads that take part in a run, including the caller.
    pub fn num_threads(&self) -> usize {
        self.0.num_threads
    }

    /// Waits for the turn of this pool, to run several operations in it.
    ///
    /// # Panics
    ///
    /// If it has its turn already.
    pub fn turn(&mut self) -> Turn {
        let mut held = self.0.held.lock();
        assert!(held.is_none(), "one turn at a time");
        *held = Some(self.0.wait());
        Turn(Arc::clone(&self.0))
    }

    /// Runs `body(state, task)` once for each task below `num_tasks`, on all threads, and returns when
    /// the last one has finished. Each thread has one of `states` to itself. Which thread gets which task is
    /// unspecified, so results must not depend on it; usually a thread gets consecutive tasks. Outside of
    /// a [`Turn`], it waits for one, unless the caller runs the tasks alone.
    ///
    /// # Panics
    ///
    /// If a task panics, its panic is resumed after all threads have stopped; tasks that have not begun by then
    /// may be skipped. The pool stays usable.
    pub fn for_each<S: Send>(
        &mut self,
        states: &mut [S],
        num_tasks: usize,
        body: impl Fn(&mut S, usize) + Sync,
    ) {
        assert_eq!(states.len(), self.num_threads(), "one state per thread");
        if num_tasks <= 1 || self.num_threads() == 1 {
            for task in 0..num_tasks {
                body(&mut states[0], task);
            }
            return;
        }
        let has_turn = self.0.held.lock().is_some();
        let _turn = (!has_turn).then(|| self.turn());
        let mut held = self.0.held.lock();
        let held = held.as_mut().expect("it is this pool's turn");
        if self.0.cores.is_wanted() && held.since.elapsed() > TURN {
            self.0.cores.end_turn(self.num_threads(), held.team.take());
            held.team = self.0.cores.take(self.num_threads());
            held.since = Instant::now();
        }
        let team = held.team.as_mut().expect("more threads than one");
        team.for_each(states, num_tasks, body);
    }

    /// Calls `body(state, index, row)` once for each row of `rows`, `[_, row_len]`, on all threads. Each
    /// thread has one of `states` to itself; which thread gets which row is unspecified.
    ///
    /// # Panics
    ///
    /// If there is not one state per thread, or `rows` are not whole rows.
    pub fn for_each_row<S: Send, T: Send>(
        &mut self,
        states: &mut [S],
        rows: &mut [T],
        row_len: usize,
        body: impl Fn(&mut S, usize, &mut [T]) + Sync,
    ) {
        assert!(
            row_len > 0 && rows.len().is_multiple_of(row_len),
            "whole rows"
        );
        let num_rows = rows.len() / row_len;
        let rows = DisjointSlice::new(rows);
        self.for_each(states, num_rows, |state, index| {
            // SAFETY: each row belongs to one task.
            body(state, index, unsafe {
                rows.slice(index * row_len, row_len)
            });
        });
    }

    /// As [`Pool::for_each_row`], for groups of rows: calls `body(state, index, rows)` once for each of
    /// `groups`, which are the indices of their first rows. A group ends where the next one starts.
    ///
    /// # Panics
    ///
    /// As [`Pool::for_each_row`], or if `groups` do not ascend within the rows.
    pub fn for_each_group<S: Send, T: Send>(
        &mut self,
        states: &mut [S],
        rows: &mut [T],
        row_len: usize,
        groups: &[u32],
        body: impl Fn(&mut S, usize, &mut [T]) + Sync,
    ) {
        assert!(
            row_len > 0 && rows.len().is_multiple_of(row_len),
            "whole rows"
        );
        let num_rows = rows.len() / row_len;
        assert!(
            groups.is_sorted() && groups.last().is_none_or(|&last| last as usize <= num_rows),
            "ascending groups of these rows"
        );
        let rows = DisjointSlice::new(rows);
        self.for_each(states, groups.len(), |state, index| {
            let start = groups[index] as usize;
            let end = groups
                .get(index + 1)
                .map_or(num_rows, |&next| next as usize);
            // SAFETY: groups ascend within the rows, so each row belongs to one task.
            body(state, index, unsafe {
                rows.slice(start * row_len, (end - start) * row_len)
            });
        });
    }
}

impl PoolState {
    fn wait(&self) -> HeldTurn {
        let binding = self
            .is_bound
            .then(|| Binding::of_caller(self.cores.cpus_of_worker(self.num_threads, 0)));
        HeldTurn {
            team: self.cores.take(self.num_threads),
            since: Instant::now(),
            _binding: binding,
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(held) = self.0.held.lock().take() {
            self.0.cores.end_turn(self.0.num_threads, held.team);
        }
    }
}
