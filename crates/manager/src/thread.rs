//! A batch manager on a thread of its own, like TensorRT-LLM's `GptManager`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{BatchManager, Callbacks, Response, Submission, serve};
use inflight_base::{SequenceId, StepError, catch_panic, panic_message};
use inflight_engine::StepStats;

/// How long an idle thread waits before it asks for requests again.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// A batch manager that serves an application from a thread of its own.
///
/// Dropping it asks for no more requests, and waits until all active ones have ended.
pub struct ManagerThread {
    /// `None` only while it is dropped.
    thread: Option<JoinHandle<Result<(), StepError>>>,
    is_closing: Arc<AtomicBool>,
}

impl ManagerThread {
    /// Serves `callbacks`, see [`serve()`]. While it is idle and gets no requests, it asks again every millisecond, or
    /// when it is woken. `get_requests` may also block, until the [`ManagerThread`] is dropped.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub fn spawn(
        mut manager: BatchManager,
        max_num_requests: Option<usize>,
        callbacks: impl Callbacks + Send + 'static,
    ) -> std::io::Result<Self> {
        let is_closing = Arc::new(AtomicBool::new(false));
        let mut polled = Polled {
            callbacks,
            is_closing: Arc::clone(&is_closing),
        };
        let work = move || {
            // A panic, of a callback for instance, becomes the result of `join`.
            let served = || serve(&mut manager, max_num_requests, &mut polled);
            catch_panic(served).unwrap_or_else(|panic| Err(StepError(panic)))
        };
        let thread = thread::Builder::new().name("inflight-manager".into());
        Ok(Self {
            thread: Some(thread.spawn(work)?),
            is_closing,
        })
    }

    /// Makes it ask for requests at once, if it is idle.
    pub fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Asks for no more requests, and waits until all active ones have ended.
    ///
    /// # Errors
    /// A step failed as a whole, or a callback panicked.
    pub fn close(mut self) -> Result<(), StepError> {
        self.is_closing.store(true, Ordering::Release);
        self.wait()
    }

    /// Waits until `get_requests` has no more requests, and all have ended.
    ///
    /// # Errors
    /// As [`ManagerThread::close`].
    pub fn join(mut self) -> Result<(), StepError> {
        self.wait()
    }

    fn wait(&mut self) -> Result<(), StepError> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        thread.thread().unpark();
        let ended = thread.join();
        ended.unwrap_or_else(|panic| Err(StepError(panic_message(panic))))
    }
}

impl Drop for ManagerThread {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Release);
        // If there was an error, each request has had it in its final response.
        let _ = self.wait();
    }
}

/// The application's callbacks, until no more requests are wanted.
struct Polled<C> {
    callbacks: C,
    is_closing: Arc<AtomicBool>,
}

impl<C: Callbacks> Callbacks for Polled<C> {
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>> {
        if self.is_closing.load(Ordering::Acquire) {
            return None;
        }
        let submissions = self.callbacks.get_requests(max_num_requests, is_idle);
        if is_idle && submissions.as_ref().is_some_and(Vec::is_empty) {
            thread::park_timeout(IDLE_PAUSE);
        }
        submissions
    }

    fn send_response(&mut self, response: Response<'_>) {
        self.callbacks.send_response(response);
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        self.callbacks.reject_duplicate(duplicate);
    }

    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        self.callbacks.poll_stop_signals()
    }

    fn return_stats(&mut self, stats: &StepStats) {
        self.callbacks.return_stats(stats);
    }
}
