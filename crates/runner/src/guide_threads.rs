//! The threads that compute what guides allow, beside the steps.
//!
//! ```text
//! the device       |---- forward pass ----| sampling |---- forward pass ----| sampling |
//! a guide thread   |- mask -|- mask -|        |           |----------- mask of another --------
//!                                          waits for those that are nearly done, and no longer than `MAX_WAIT`;
//!                                          the others sit the step out
//! ```
//!
//! All models of the process share them, and they yield to the threads of steps. The guide that has had the least of
//! their time comes first, and one of them takes only guides that have been quick: so a guide that is slow delays
//! others by one token at most.

use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use inflight_base::TokenId;
use inflight_sampling::Guide;
use inflight_threads::yield_to_others;

/// How long a step waits for the masks that may soon be done: for all of them together.
const MAX_WAIT: Duration = Duration::from_micros(500);

/// How long a step waits for any mask if it is for nothing else: otherwise each step would compute what the one before
/// has computed. Other requests join after that.
const MAX_WAIT_ALONE: Duration = Duration::from_millis(5);

/// A guide whose last token took longer is not waited for.
const QUICK: Duration = Duration::from_millis(1);

/// The most time for one token. The limits of guides end them long before; they count work, and this does not depend on
/// what they count.
const MAX_TIME: Duration = Duration::from_secs(20);

/// Threads that compute masks; one takes only cheap guides.
const NUM_THREADS: usize = 3;

/// What may follow an output, to be computed.
pub(super) struct MaskRequest<'a> {
    pub(super) guide: &'a Guide,
    pub(super) generated: &'a [TokenId],
    pub(super) drafts: &'a [TokenId],
}

/// The threads, for one runner. They start with the first guide of the process, and end with the last runner that had
/// one.
#[derive(Default)]
pub(super) struct GuideThreads {
    threads: Option<Arc<Threads>>,
}

/// The threads of the process.
struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

static THREADS: Mutex<Weak<Threads>> = Mutex::new(Weak::new());

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals new jobs, or the end.
    work: Condvar,
    /// Signals that a job is done.
    done: Condvar,
}

#[derive(Default)]
struct State {
    queue: Vec<Job>,
    /// The guides that are being computed, each with when it began.
    running: Vec<(Guide, Instant)>,
    is_closed: bool,
}

struct Job {
    guide: Guide,
    generated: Vec<TokenId>,
    drafts: Vec<TokenId>,
}

impl GuideThreads {
    /// Has what may follow computed, if it is neither known nor being computed.
    ///
    /// # Errors
    /// The system refuses the threads.
    pub(super) fn request<'a>(
        &mut self,
        requests: impl Iterator<Item = MaskRequest<'a>>,
    ) -> io::Result<()> {
        let mut requests = requests
            .filter(|it| !it.drafts.is_empty() || !it.guide.0.is_ready(it.generated))
            .peekable();
        if requests.peek().is_none() {
            return Ok(());
        }
        if self.threads.is_none() {
            self.threads = Some(threads()?);
        }
        let Some(threads) = &self.threads else {
            return Ok(());
        };
        let mut state = threads.shared.state.lock();
        state.give_up_overdue(Instant::now());
        for request in requests {
            if !state.has(request.guide) {
                state.queue.push(Job {
                    guide: request.guide.clone(),
                    generated: request.generated.to_vec(),
                    drafts: request.drafts.to_vec(),
                });
            }
        }
        drop(state);
        threads.shared.work.notify_all();
        Ok(())
    }

    /// Waits for a moment until what may follow is known, if the guides that it is not known of have been quick so far.
    /// If nothing else is in the step (`is_alone`), waits somewhat longer for the first of any guides.
    pub(super) fn wait<'a>(
        &self,
        requests: impl Iterator<Item = MaskRequest<'a>> + Clone,
        is_alone: bool,
    ) {
        let Some(threads) = &self.threads else {
            return;
        };
        let is_nearly_done = |request: MaskRequest<'a>| {
            let guide = &request.guide.0;
            !guide.is_ready(request.generated) && guide.cost().last <= QUICK
        };
        let is_ready = |request: MaskRequest<'a>| request.guide.0.is_ready(request.generated);
        let start = Instant::now();
        let mut state = threads.shared.state.lock();
        let mut wait = |until| threads.shared.done.wait_until(&mut state, until);
        if is_alone && requests.clone().next().is_some() {
            while !requests.clone().any(is_ready) {
                if wait(start + MAX_WAIT_ALONE).timed_out() {
                    return;
                }
            }
        }
        while requests.clone().any(is_nearly_done) {
            if wait(start + MAX_WAIT).timed_out() {
                return;
            }
        }
    }
}

impl State {
    fn has(&self, guide: &Guide) -> bool {
        let queued = self.queue.iter().map(|job| &job.guide);
        let running = self.running.iter().map(|(guide, _)| guide);
        queued.chain(running).any(|it| it == guide)
    }

    /// Ends what takes too long, and what nobody waits for any more.
    fn give_up_overdue(&mut self, now: Instant) {
        self.queue.retain(|job| Arc::strong_count(&job.guide.0) > 1);
        for (guide, since) in &self.running {
            // The job has one.
            let is_left = Arc::strong_count(&guide.0) == 2;
            if is_left || now.saturating_duration_since(*since) > MAX_TIME {
                guide.0.give_up();
            }
        }
    }

    /// The next job: of the guide that has had the least time. `quick`: only if it was quick so far.
    fn next(&mut self, quick: bool) -> Option<Job> {
        let costs = self.queue.iter().map(|job| job.guide.0.cost()).enumerate();
        let costs = costs.filter(|(_, cost)| !quick || cost.last <= QUICK);
        let (index, _) = costs.min_by_key(|(_, cost)| cost.total)?;
        Some(self.queue.remove(index))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        state.queue.clear();
        for (guide, _) in &state.running {
            guide.0.give_up();
        }
        drop(state);
        self.shared.work.notify_all();
        for handle in self.handles.drain(..) {
            // If a guide has panicked, sampling with it reports that too.
            let _ = handle.join();
        }
    }
}

/// The threads of the process, which are started if there are none.
fn threads() -> io::Result<Arc<Threads>> {
    let mut kept = THREADS.lock();
    if let Some(threads) = kept.upgrade() {
        return Ok(threads);
    }
    let mut threads = Threads {
        shared: Arc::default(),
        handles: Vec::new(),
    };
    for index in 0..NUM_THREADS {
        let shared = Arc::clone(&threads.shared);
        let thread = thread::Builder::new().name("inflight-guides".into());
        let handle = thread.spawn(move || work(&shared, index == 0))?;
        threads.handles.push(handle);
    }
    let threads = Arc::new(threads);
    *kept = Arc::downgrade(&threads);
    Ok(threads)
}

fn work(shared: &Shared, quick: bool) {
    yield_to_others();
    let mut state = shared.state.lock();
    loop {
        if state.is_closed {
            return;
        }
        let Some(job) = state.next(quick) else {
            shared.work.wait(&mut state);
            continue;
        };
        state.running.push((job.guide.clone(), Instant::now()));
        drop(state);
        job.guide.0.prepare(&job.generated, &job.drafts);
        state = shared.state.lock();
        state.running.retain(|(guide, _)| *guide != job.guide);
        shared.done.notify_all();
    }
}

#[cfg(test)]
mod tests;
