//! A persistent pool of threads for operations of a few microseconds.
//!
//! The calling thread takes part as worker 0. Workers spin for a moment after each run, because within
//! a step the next one follows at once, and sleep when none does, so that an idle model costs nothing.
//! Each worker has a share of the tasks, the same in every run, so that what it reads may still be in its
//! core's cache; done with it, it helps the others. One that loses its core for a while holds nobody up.
//!
//! ```text
//! tasks      0 1 2 3 4 5 6 7 8 9
//! worker 0   |-------> <-|           from the front of its own share ...
//! worker 1               |-------->  ... and from the back of another's
//! ```

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long a thread looks for work, or for the others to be done, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Threads that run the tasks of one operation at a time. They end when it is dropped.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What all workers do in a run, each with its own number.
type Job = dyn Fn(usize) + Sync;

struct Shared {
    /// Counts runs; a worker that sees a new number takes the job.
    epoch: Line<AtomicUsize>,
    /// Workers, besides the caller, that have not finished the run.
    pending: Line<AtomicUsize>,
    /// Threads that sleep or are about to, the caller included.
    num_sleepers: Line<AtomicUsize>,
    stop: AtomicBool,
    /// What is left of each worker's tasks.
    shares: Box<[Line<Share>]>,
    /// The job of the current run. Written by the caller while no run is on, read by workers in one.
    job: UnsafeCell<Option<*const Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    bed: Mutex<()>,
    alarm: Condvar,
}

/// Keeps a counter on a cache line of its own.
#[repr(align(128))]
struct Line<T>(T);

/// A range of tasks, begin and end in one word.
#[derive(Default)]
struct Share(AtomicU64);

impl Share {
    fn set(&self, tasks: Range<u32>) {
        // Ordered by the epoch that announces the run.
        self.0
            .store(Self::word(tasks.start, tasks.end), Ordering::Relaxed);
    }

    fn pop_front(&self) -> Option<u32> {
        let old = self.update(|start, end| (start + 1, end))?;
        Some((old >> 32) as u32)
    }

    fn pop_back(&self) -> Option<u32> {
        let old = self.update(|start, end| (start, end - 1))?;
        Some(old as u32 - 1)
    }

    /// Replaces a range that is not empty; returns what it was.
    fn update(&self, change: impl Fn(u32, u32) -> (u32, u32)) -> Option<u64> {
        let change = |word: u64| {
            let (start, end) = ((word >> 32) as u32, word as u32);
            let (new_start, new_end) = (start < end).then(|| change(start, end))?;
            Some(Self::word(new_start, new_end))
        };
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, change)
            .ok()
    }

    fn word(start: u32, end: u32) -> u64 {
        u64::from(start) << 32 | u64::from(end)
    }
}

// SAFETY: `job` is the only field that is not Sync and Send by itself. It is written only by
// `Pool::run`, which holds the pool exclusively, before `epoch` announces it and after `pending` has
// come back to zero; workers read it only in between. What it points to is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is used only while the job that it points to is borrowed by `run`.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `num_threads - 1` threads; the caller of each run is the remaining one.
    ///
    /// # Errors
    ///
    /// The system refuses a thread. Those started before are ended.
    pub fn new(num_threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            pending: Line(AtomicUsize::new(0)),
            num_sleepers: Line(AtomicUsize::new(0)),
            stop: AtomicBool::new(false),
            shares: (0..num_threads).map(|_| Line(Share::default())).collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
        };
        for worker in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("inflight-cpu-{worker}"))
                .spawn(move || shared.work(worker))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Threads that take part in a run, the caller included.
    pub fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `body(state, task)` once for each task below `num_tasks`, on all threads, and returns when
    /// the last is done. Each thread has one of `states` to itself; which thread gets which task is
    /// open, so a result must not depend on it. As a rule a thread gets tasks that follow each other.
    ///
    /// # Panics
    ///
    /// A panic of a task is passed on once all threads have stopped; tasks not begun by then may be
    /// left out. The pool stays usable.
    pub fn for_each<S: Send>(
        &mut self,
        states: &mut [S],
        num_tasks: usize,
        body: impl Fn(&mut S, usize) + Sync,
    ) {
        let num_threads = self.num_threads();
        assert_eq!(states.len(), num_threads, "one state a thread");
        if num_tasks <= 1 || self.threads.is_empty() {
            for task in 0..num_tasks {
                body(&mut states[0], task);
            }
            return;
        }
        let num_tasks = u32::try_from(num_tasks).expect("tasks are counted in 32 bits");
        let bound =
            |worker: usize| (u64::from(num_tasks) * worker as u64 / num_threads as u64) as u32;
        for (worker, share) in self.shared.shares.iter().enumerate() {
            share.0.set(bound(worker)..bound(worker + 1));
        }
        let shared = Arc::clone(&self.shared);
        let states = States(states.as_mut_ptr());
        self.run(&|worker| {
            // SAFETY: `worker` is below the number of states, and every worker of a run has a number
            // of its own, so nobody else has this state.
            let state = unsafe { &mut *states.get().add(worker) };
            while let Some(task) = shared.next_task(worker) {
                let done = catch_unwind(AssertUnwindSafe(|| body(state, task as usize)));
                if let Err(panic) = done {
                    for share in &shared.shares {
                        share.0.set(0..0);
                    }
                    resume_unwind(panic);
                }
            }
        });
    }

    /// Runs `job` once on every thread.
    fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer before they count themselves out
        // of `pending`, and this function does not return before all have.
        let job_ptr =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        // SAFETY: `&mut self` and `pending == 0` (the end of the run before): nobody reads the cell.
        unsafe { *shared.job.get() = Some(job_ptr) };
        shared
            .pending
            .0
            .store(self.threads.len(), Ordering::Relaxed);
        // Sequentially consistent with `sleep_unless`: either the sleeper sees the new epoch, or this
        // thread sees the sleeper.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        shared.wake();
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared.wait_until(|| shared.pending.0.load(Ordering::SeqCst) == 0);
        let others = shared.panic.lock().take();
        if let Some(panic) = own.err().or(others) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.shared.wake();
        for thread in self.threads.drain(..) {
            // A worker catches what its jobs throw, so it ends in no other way than by returning.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The next task of a worker: of its own share, or else of another's.
    fn next_task(&self, worker: usize) -> Option<u32> {
        let (before, from) = self.shares.split_at(worker);
        let mut others = from[1..].iter().chain(before);
        from[0]
            .0
            .pop_front()
            .or_else(|| others.find_map(|share| share.0.pop_back()))
    }

    /// A worker's life.
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.wait_until(|| self.epoch.0.load(Ordering::SeqCst) != seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen += 1;
            // SAFETY: the epoch announced a run and this worker is still counted in `pending`, so the
            // cell is not written and the job is alive.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker)))
            {
                self.panic.lock().get_or_insert(panic);
            }
            if self.pending.0.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.wake();
            }
        }
    }

    /// Returns when `done` holds: looks for a while, then sleeps until woken.
    fn wait_until(&self, done: impl Fn() -> bool) {
        let mut start = None;
        loop {
            for _ in 0..64 {
                if done() {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
                break;
            }
        }
        let mut bed = self.bed.lock();
        self.num_sleepers.0.fetch_add(1, Ordering::SeqCst);
        while !done() {
            self.alarm.wait(&mut bed);
        }
        self.num_sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes whoever sleeps. Called after the store that the sleepers wait for.
    fn wake(&self) {
        if self.num_sleepers.0.load(Ordering::SeqCst) > 0 {
            let _bed = self.bed.lock();
            self.alarm.notify_all();
        }
    }
}

/// The states' address, which may go to other threads.
struct States<S>(*mut S);

impl<S> States<S> {
    fn get(&self) -> *mut S {
        self.0
    }
}

// SAFETY: each worker takes only the state with its own number, and `S` is Send.
unsafe impl<S: Send> Sync for States<S> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for num_threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(num_threads).expect("threads");
            let mut counts = vec![0_u64; num_threads];
            let hits: Vec<_> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            for run in 1..=50 {
                pool.for_each(&mut counts, hits.len(), |count, task| {
                    *count += 1;
                    hits[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == run));
            }
            assert_eq!(counts.iter().sum::<u64>(), 97 * 50);
        }
    }

    #[test]
    fn a_thread_that_is_done_helps_one_that_is_not() {
        let mut pool = Pool::new(2).expect("threads");
        let mut slow_tasks = [0, 0];
        // The first half is one thread's share, and each of its tasks takes a while.
        pool.for_each(&mut slow_tasks, 40, |count, task| {
            if task < 20 {
                std::thread::sleep(Duration::from_millis(5));
                *count += 1;
            }
        });
        assert_eq!(slow_tasks.iter().sum::<i32>(), 20);
        assert!(slow_tasks.iter().all(|&count| count > 0), "{slow_tasks:?}");
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(3).expect("threads");
        for round in 0..50 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(&mut [(); 3], 64, |(), task| assert_ne!(task, round));
            }));
            assert!(caught.is_err());
            let done = AtomicUsize::new(0);
            pool.for_each(&mut [(); 3], 8, |(), _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 8);
        }
    }

    #[test]
    fn sleeping_workers_wake_for_the_next_run() {
        let mut pool = Pool::new(3).expect("threads");
        for pause in [0, 1, 20, 49, 50, 51, 60, 200, 1000, 3000] {
            for _ in 0..20 {
                let done = AtomicUsize::new(0);
                pool.for_each(&mut [(); 3], 3, |(), _| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(done.into_inner(), 3);
                std::thread::sleep(Duration::from_micros(pause));
            }
        }
    }

    #[test]
    fn a_caller_sleeps_while_a_task_is_long() {
        let mut pool = Pool::new(2).expect("threads");
        pool.for_each(&mut [(); 2], 2, |(), task| {
            std::thread::sleep(Duration::from_millis(5 * task as u64));
        });
    }

    #[test]
    fn dropping_ends_the_threads_awake_or_asleep() {
        for pause_us in [0, 500] {
            let pool = Pool::new(4).expect("threads");
            std::thread::sleep(Duration::from_micros(pause_us));
            let shared = Arc::clone(&pool.shared);
            drop(pool);
            assert_eq!(Arc::strong_count(&shared), 1);
        }
    }
}
