//! A batch manager with the interface of TensorRT-LLM's `Executor`, the successor of its callbacks: any thread can
//! enqueue requests and await their responses.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{BatchManager, Callbacks, ManagerThread, Response, Submission, statistics_json};
use inflight_base::{RequestError, SequenceId, StepError, TokenId};
use inflight_engine::{ExtraOutputs, NewRequest, StepStats};
use inflight_sampling::{FinishReason, Hypothesis};

/// Limits of an executor's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorOptions {
    /// The most requests that wait besides those in the batch manager. One more is refused.
    pub max_queue_size: usize,
    /// The most statistics records that are stored, the latest ones; 0 stores none.
    pub max_num_statistics: usize,
}

impl Default for ExecutorOptions {
    fn default() -> Self {
        Self {
            max_queue_size: 1 << 16,
            max_num_statistics: 1000,
        }
    }
}

/// A [`Response`] that is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedResponse {
    /// The request.
    pub id: SequenceId,
    /// As in [`Response`].
    pub tokens: Vec<TokenId>,
    /// As in [`Response`].
    pub extra_outputs: Vec<ExtraOutputs>,
    /// As in [`Response`].
    pub hypotheses: Vec<Hypothesis>,
    /// As in [`Response`].
    pub end: Option<Result<FinishReason, RequestError>>,
}

impl OwnedResponse {
    /// The response, borrowed.
    pub fn as_response(&self) -> Response<'_> {
        Response {
            id: self.id,
            tokens: &self.tokens,
            extra_outputs: &self.extra_outputs,
            hypotheses: &self.hypotheses,
            end: self.end.clone(),
        }
    }

    /// A final response without outputs.
    fn ending(id: SequenceId, end: Result<FinishReason, RequestError>) -> Self {
        Self {
            id,
            tokens: Vec::new(),
            extra_outputs: Vec::new(),
            hypotheses: Vec::new(),
            end: Some(end),
        }
    }
}

/// A batch manager on a separate thread. Requests are enqueued, and their responses awaited.
///
/// Dropping it calls [`Executor::shutdown`].
pub struct Executor {
    shared: Arc<ExecutorShared>,
    /// `None` after the shutdown.
    thread: Mutex<Option<ManagerThread>>,
}

impl Executor {
    /// An executor without requests.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub fn new(manager: BatchManager, options: ExecutorOptions) -> std::io::Result<Self> {
        let shared = Arc::new(ExecutorShared {
            options,
            state: Mutex::new(ExecutorState {
                is_open: true,
                ..ExecutorState::default()
            }),
            has_work: Condvar::new(),
            has_news: Condvar::new(),
        });
        let worker = ExecutorCallbacks(Arc::clone(&shared));
        let thread = ManagerThread::spawn(manager, None, worker)?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Enqueues a request. Returns the id that it gets; `request.id` is ignored.
    ///
    /// # Errors
    /// The executor is shut down, or `max_queue_size` requests wait. If the batch manager refuses the request, the
    /// error is its response.
    pub fn enqueue(
        &self,
        request: NewRequest,
        is_streaming: bool,
    ) -> Result<SequenceId, RequestError> {
        let mut state = self.shared.state.lock();
        if !state.is_open {
            let reason = "the executor is shut down, and takes no more requests";
            return Err(RequestError::Invalid(reason.to_owned()));
        }
        let max_queue_size = self.shared.options.max_queue_size;
        if state.waiting.len() >= max_queue_size {
            return Err(RequestError::Invalid(format!(
                "max_queue_size = {max_queue_size} requests wait already: enqueue it when some have ended"
            )));
        }
        let id = SequenceId(state.num_enqueued);
        state.num_enqueued += 1;
        state.waiting.push_back(Submission {
            request: NewRequest { id, ..request },
            is_streaming,
        });
        state.responses.insert(id, VecDeque::new());
        self.shared.has_work.notify_one();
        Ok(id)
    }

    /// Whether a request can be enqueued now.
    pub fn can_enqueue(&self) -> bool {
        let state = self.shared.state.lock();
        state.is_open && state.waiting.len() < self.shared.options.max_queue_size
    }

    /// Returns the stored responses of `id`, or of all requests. If there are none, it waits for the first, at most
    /// `timeout`. Those of a request come in order, the final one last; afterwards its id is unknown. Empty if the time
    /// has passed, or if no request is left that could have responses.
    pub fn await_responses(
        &self,
        id: Option<SequenceId>,
        timeout: Option<Duration>,
    ) -> Vec<OwnedResponse> {
        let mut state = self.shared.state.lock();
        self.shared.wait(&mut state, id, deadline_in(timeout));
        state.take_responses(id)
    }

    /// Waits like [`Executor::await_responses`], and leaves the responses stored. Returns whether there are any.
    pub(crate) fn wait_for_responses(
        &self,
        id: Option<SequenceId>,
        deadline: Option<Instant>,
    ) -> bool {
        let mut state = self.shared.state.lock();
        self.shared.wait(&mut state, id, deadline)
    }

    /// The number of stored responses, of `id` or of all requests.
    pub fn num_responses_ready(&self, id: Option<SequenceId>) -> usize {
        self.shared.state.lock().num_responses(id)
    }

    /// Ends a request with the tokens that it has, in its final response. Does nothing if it has ended.
    pub fn cancel(&self, id: SequenceId) {
        let mut state = self.shared.state.lock();
        let waiting = state.waiting.iter().position(|it| it.request.id == id);
        match waiting.and_then(|place| state.waiting.remove(place)) {
            Some(_) => {
                let end = OwnedResponse::ending(id, Ok(FinishReason::Cancelled));
                state.keep(end);
                self.shared.has_news.notify_all();
            }
            None if state.responses.contains_key(&id) => state.stops.push(id),
            None => {}
        }
    }

    /// Returns the statistics records since the last call, as the Batch Manager's JSON; at most the latest
    /// `max_num_statistics`.
    pub fn take_statistics(&self) -> Vec<String> {
        let statistics = std::mem::take(&mut self.shared.state.lock().statistics);
        statistics.into()
    }

    /// Accepts no more requests, and waits until all enqueued ones have ended. Their responses are still stored.
    ///
    /// # Errors
    /// A step failed as a whole: the requests have ended with that error. Only the first call returns it.
    pub fn shutdown(&self) -> Result<(), StepError> {
        self.shared.state.lock().is_open = false;
        self.shared.has_work.notify_all();
        // Locked until the thread has ended, so that every caller waits for it.
        let mut thread = self.thread.lock();
        thread.take().map_or(Ok(()), ManagerThread::join)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // If there was an error, the requests have ended with it.
        let _ = self.shutdown();
    }
}

struct ExecutorShared {
    options: ExecutorOptions,
    state: Mutex<ExecutorState>,
    /// A request waits, or the executor is shut down.
    has_work: Condvar,
    /// A response has been stored.
    has_news: Condvar,
}

#[derive(Default)]
struct ExecutorState {
    is_open: bool,
    num_enqueued: u64,
    waiting: VecDeque<Submission>,
    stops: Vec<SequenceId>,
    /// The stored responses of each request that may still be asked for.
    responses: BTreeMap<SequenceId, VecDeque<OwnedResponse>>,
    statistics: VecDeque<String>,
}

impl ExecutorShared {
    /// Waits until there are responses of `id`, or until none can come any more, or until `deadline`. Returns whether
    /// there are any.
    fn wait(
        &self,
        state: &mut MutexGuard<'_, ExecutorState>,
        id: Option<SequenceId>,
        deadline: Option<Instant>,
    ) -> bool {
        while state.num_responses(id) == 0 && state.is_awaited(id) {
            match deadline {
                None => self.has_news.wait(state),
                Some(deadline) => {
                    if self.has_news.wait_until(state, deadline).timed_out() {
                        break;
                    }
                }
            }
        }
        state.num_responses(id) > 0
    }
}

/// The moment at which a wait that starts now ends; `None` if it has no end.
pub(crate) fn deadline_in(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

impl ExecutorState {
    fn num_responses(&self, id: Option<SequenceId>) -> usize {
        match id {
            Some(id) => self.responses.get(&id).map_or(0, VecDeque::len),
            None => self.responses.values().map(VecDeque::len).sum(),
        }
    }

    /// Whether responses of `id` can still come.
    fn is_awaited(&self, id: Option<SequenceId>) -> bool {
        match id {
            Some(id) => self.responses.contains_key(&id),
            None => !self.responses.is_empty(),
        }
    }

    fn keep(&mut self, response: OwnedResponse) {
        let responses = self.responses.entry(response.id).or_default();
        responses.push_back(response);
    }

    fn take_responses(&mut self, id: Option<SequenceId>) -> Vec<OwnedResponse> {
        let mut taken = Vec::new();
        let is_wanted = |other: &SequenceId| id.is_none_or(|id| id == *other);
        self.responses.retain(|id, responses| {
            if !is_wanted(id) {
                return true;
            }
            taken.extend(responses.drain(..));
            let last = taken.last();
            !last.is_some_and(|last| last.id == *id && last.end.is_some())
        });
        taken
    }
}

/// The callbacks of the batch manager's thread.
struct ExecutorCallbacks(Arc<ExecutorShared>);

impl Callbacks for ExecutorCallbacks {
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>> {
        let mut state = self.0.state.lock();
        while is_idle && state.waiting.is_empty() && state.is_open {
            self.0.has_work.wait(&mut state);
        }
        if state.waiting.is_empty() && !state.is_open {
            return None;
        }
        let num = max_num_requests.min(state.waiting.len());
        Some(state.waiting.drain(..num).collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        self.0.state.lock().keep(OwnedResponse {
            id: response.id,
            tokens: response.tokens.to_vec(),
            extra_outputs: response.extra_outputs.to_vec(),
            hypotheses: response.hypotheses.to_vec(),
            end: response.end,
        });
        self.0.has_news.notify_all();
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        // The executor gives each id once.
        debug_assert!(false, "{} was given twice", duplicate.request.id);
    }

    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        std::mem::take(&mut self.0.state.lock().stops)
    }

    fn return_stats(&mut self, stats: &StepStats) {
        let max = self.0.options.max_num_statistics;
        if max == 0 {
            return;
        }
        let json = statistics_json(stats, SystemTime::now());
        let mut state = self.0.state.lock();
        if state.statistics.len() >= max {
            state.statistics.pop_front();
        }
        state.statistics.push_back(json);
    }
}

impl Drop for ExecutorCallbacks {
    /// The thread has ended, perhaps by a panic. Callers must not wait forever.
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_open = false;
        state.waiting.clear();
        let unended = state.responses.iter().filter(|(_, responses)| {
            let last = responses.back();
            last.is_none_or(|last| last.end.is_none())
        });
        let unended: Vec<_> = unended.map(|(&id, _)| id).collect();
        for id in unended {
            let error = RequestError::Internal("the batch manager's thread has ended".to_owned());
            state.keep(OwnedResponse::ending(id, Err(error)));
        }
        self.0.has_news.notify_all();
    }
}
