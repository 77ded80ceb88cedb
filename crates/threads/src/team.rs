//! A team of threads that runs one operation after another, together with the calling thread.

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

use crate::affinity::bind;
use inflight_base::CpuSet;

/// How long a thread spins while it waits for work, or for the others to finish, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Threads that run the tasks of one operation at a time. Dropping the team ends them.
pub(super) struct ThreadTeam {
    shared: Arc<TeamShared>,
    threads: Vec<JoinHandle<()>>,
}

/// The work of a run, which every worker does with its own index.
type Job = dyn Fn(usize) + Sync;

struct TeamShared {
    /// Counts runs. A worker that sees a new number runs the job.
    epoch: CacheLine<AtomicUsize>,
    /// Workers that have not finished the run, without the caller.
    pending: CacheLine<AtomicUsize>,
    /// Threads that sleep or are about to, including the caller.
    num_sleepers: CacheLine<AtomicUsize>,
    stop: AtomicBool,
    /// The tasks of each worker that have not begun.
    task_ranges: Box<[CacheLine<TaskRange>]>,
    /// The job of the current run. The caller writes it between runs, and workers read it during one.
    job: UnsafeCell<Option<*const Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleep_lock: Mutex<()>,
    wake_signal: Condvar,
}

/// Gives a value a cache line of its own, against false sharing.
#[repr(align(128))]
struct CacheLine<T>(T);

/// A range of tasks, start and end packed in one atomic word.
#[derive(Default)]
struct TaskRange(AtomicU64);

impl TaskRange {
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

    /// Replaces the range if it is not empty, and returns the old one.
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
// `ThreadTeam::run`, which has exclusive access to the team, before `epoch` announces it and after `pending`
// has returned to zero. Workers read it only in between. What it points to is Sync.
unsafe impl Sync for TeamShared {}
// SAFETY: as above; the pointer is used only while the job that it points to is borrowed by `run`.
unsafe impl Send for TeamShared {}

impl ThreadTeam {
    /// Starts `num_threads - 1` threads on these CPUs, see [`cpus_of_worker`]; the caller of each run is the first one.
    ///
    /// # Errors
    ///
    /// If the system refuses a thread. Threads that were already started are ended.
    pub(super) fn start(num_threads: usize, cpus: &CpuSet) -> io::Result<Self> {
        let shared = Arc::new(TeamShared {
            epoch: CacheLine(AtomicUsize::new(0)),
            pending: CacheLine(AtomicUsize::new(0)),
            num_sleepers: CacheLine(AtomicUsize::new(0)),
            stop: AtomicBool::new(false),
            task_ranges: (0..num_threads)
                .map(|_| CacheLine(TaskRange::default()))
                .collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            sleep_lock: Mutex::new(()),
            wake_signal: Condvar::new(),
        });
        let mut team = Self {
            shared,
            threads: Vec::new(),
        };
        for worker in 1..num_threads {
            let shared = Arc::clone(&team.shared);
            let cpus = cpus_of_worker(cpus, num_threads, worker).to_vec();
            let thread = std::thread::Builder::new()
                .name(format!("inflight-cpu-{worker}"))
                .spawn(move || {
                    if !cpus.is_empty() {
                        bind(&cpus);
                    }
                    shared.work(worker);
                })?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// Dropped together with the last thread.
    #[cfg(test)]
    pub(super) fn shared(&self) -> std::sync::Weak<impl Sized + use<>> {
        Arc::downgrade(&self.shared)
    }

    /// Threads that take part in a run, including the caller.
    pub(super) fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// See [`Pool::for_each`](super::Pool::for_each). There is one state per thread.
    pub(super) fn for_each<S: Send>(
        &mut self,
        states: &mut [S],
        num_tasks: usize,
        body: impl Fn(&mut S, usize) + Sync,
    ) {
        let num_threads = self.num_threads();
        assert_eq!(states.len(), num_threads, "one state per thread");
        let num_tasks = u32::try_from(num_tasks).expect("tasks are counted in 32 bits");
        let bound =
            |worker: usize| (u64::from(num_tasks) * worker as u64 / num_threads as u64) as u32;
        for (worker, share) in self.shared.task_ranges.iter().enumerate() {
            share.0.set(bound(worker)..bound(worker + 1));
        }
        let shared = Arc::clone(&self.shared);
        let states = States(states.as_mut_ptr());
        self.run(&|worker| {
            // SAFETY: `worker` is below the number of states, and no two workers of a run have the same
            // index, so nobody else has this state.
            let state = unsafe { &mut *states.get().add(worker) };
            while let Some(task) = shared.next_task(worker) {
                let done = catch_unwind(AssertUnwindSafe(|| body(state, task as usize)));
                if let Err(panic) = done {
                    for share in &shared.task_ranges {
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
        // SAFETY: only the lifetime changes. Workers use the pointer only until they decrement
        // `pending`, and this function does not return before all of them have.
        let job_ptr =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        // SAFETY: nobody reads the cell: `&mut self`, and `pending == 0` since the end of the last run.
        unsafe { *shared.job.get() = Some(job_ptr) };
        shared
            .pending
            .0
            .store(self.threads.len(), Ordering::Relaxed);
        // Sequentially consistent with `wait_until`: either the sleeper sees the new epoch, or this
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

/// The CPUs for a worker of `num_threads`: one of its own if there are as many as threads, or else all.
pub(super) fn cpus_of_worker(cpus: &CpuSet, num_threads: usize, worker: usize) -> &[usize] {
    let cpus = cpus.cpus();
    match cpus.len() == num_threads {
        true => &cpus[worker..=worker],
        false => cpus,
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.shared.wake();
        for thread in self.threads.drain(..) {
            // Workers catch the panics of their jobs, so a thread always ends by returning.
            let _ = thread.join();
        }
    }
}

impl TeamShared {
    /// The next task of a worker: the first of its own range, or else the last of another one's.
    fn next_task(&self, worker: usize) -> Option<u32> {
        let (before, from) = self.task_ranges.split_at(worker);
        let mut others = from[1..].iter().chain(before);
        from[0]
            .0
            .pop_front()
            .or_else(|| others.find_map(|share| share.0.pop_back()))
    }

    /// The loop of a worker thread.
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.wait_until(|| self.epoch.0.load(Ordering::SeqCst) != seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen += 1;
            // SAFETY: the epoch announced a run, and `pending` still counts this worker, so the cell is
            // not written and the job is alive.
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

    /// Returns when `done` holds: spins for a while, then sleeps until it is woken.
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
        let mut sleep_lock = self.sleep_lock.lock();
        self.num_sleepers.0.fetch_add(1, Ordering::SeqCst);
        while !done() {
            self.wake_signal.wait(&mut sleep_lock);
        }
        self.num_sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes all sleepers. Called after the store that they wait for.
    fn wake(&self) {
        if self.num_sleepers.0.load(Ordering::SeqCst) > 0 {
            let _sleep_lock = self.sleep_lock.lock();
            self.wake_signal.notify_all();
        }
    }
}

/// A pointer to the states that may be sent to other threads.
struct States<S>(*mut S);

impl<S> States<S> {
    fn get(&self) -> *mut S {
        self.0
    }
}

// SAFETY: each worker uses only the state with its own index, and `S` is Send.
unsafe impl<S: Send> Sync for States<S> {}
