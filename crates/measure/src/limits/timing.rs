//! Timing on a machine shared with other processes.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit for measuring one figure.
const BUDGET: Duration = Duration::from_millis(300);
const MIN_SAMPLES: usize = 9;
const MAX_SAMPLES: usize = 2000;

/// Source of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Monotonic wall-clock time.
    Wall,
    /// CPU time of this thread. For single-threaded work: other processes disturb it less.
    Thread,
}

impl Clock {
    /// The clock for work on `num_threads` threads.
    pub const fn of(num_threads: usize) -> Self {
        match num_threads {
            1 => Self::Thread,
            _ => Self::Wall,
        }
    }

    /// Seconds since an arbitrary origin.
    fn now(self) -> f64 {
        let clock = match self {
            Self::Wall => libc::CLOCK_MONOTONIC,
            Self::Thread => libc::CLOCK_THREAD_CPUTIME_ID,
        };
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: a valid place for the result.
        unsafe { libc::clock_gettime(clock, &mut time) };
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }
}

/// Time of one call in seconds: the tenth percentile of many samples.
pub fn seconds_of(clock: Clock, mut body: impl FnMut()) -> f64 {
    body();
    let started = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < MIN_SAMPLES || (started.elapsed() < BUDGET && samples.len() < MAX_SAMPLES)
    {
        let start = clock.now();
        body();
        samples.push(clock.now() - start);
    }
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 10]
}

/// Time in seconds of calling `body` once on every thread at the same time, until the last thread finishes.
/// `body` gets the thread's number.
pub(crate) fn seconds_on(num_threads: usize, body: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(num_threads);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 1..num_threads {
            let (barrier, is_over, body) = (&barrier, &is_over, &body);
            scope.spawn(move || {
                loop {
                    barrier.wait();
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    body(thread);
                    barrier.wait();
                }
            });
        }
        let seconds = seconds_of(Clock::of(num_threads), || {
            barrier.wait();
            body(0);
            barrier.wait();
        });
        is_over.store(true, Ordering::Relaxed);
        barrier.wait();
        seconds
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_thread_runs_and_the_slowest_determines_the_time() {
        let calls = [const { AtomicUsize::new(0) }; 3];
        let seconds = seconds_on(3, |thread| {
            calls[thread].fetch_add(1, Ordering::Relaxed);
            if thread == 2 {
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        assert!(seconds >= 0.002, "{seconds}");
        let calls = calls.map(AtomicUsize::into_inner);
        assert!(
            calls[0] > MIN_SAMPLES && calls == [calls[0]; 3],
            "{calls:?}"
        );
    }
}
