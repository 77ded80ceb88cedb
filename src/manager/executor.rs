//! A batch manager in the shape of TensorRT-LLM's `Executor`, the successor of its callbacks: requests are enqueued,
//! and their responses awaited, from any thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::base::{RequestError, SequenceId, StepError, TokenId};
use crate::engine::{ExtraOutputs, NewRequest, StepStats};
use crate::manager::{
    BatchManager, Callbacks, ManagerThread, Response, Submission, statistics_json,
};
use crate::sampling::{FinishReason, Hypothesis};

/// What an executor keeps for those who have not come for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorOptions {
    /// Requests that wait besides those that the batch manager holds; one more is refused.
    pub max_queue_size: usize,
    /// The latest statistics records that are kept; 0 keeps none.
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

/// A [`Response`] that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedResponse {
    /// Whose.
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
    /// A final response with nothing but the end.
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

/// A batch manager with a thread of its own, to which requests are given and which is asked for their responses.
///
/// Dropping it is [`Executor::shutdown`].
pub struct Executor {
    shared: Arc<ExecutorShared>,
    thread: Option<ManagerThread>,
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
            thread: Some(thread),
        })
    }

    /// Gives a request to the executor, which names it: `request.id` is of no account.
    ///
    /// # Errors
    /// It is shut down, or `max_queue_size` requests wait. What the batch manager refuses comes as a response.
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

    /// The responses that are there, of `id` or of all requests; waits for the first one, up to `timeout` or,
    /// without one, as long as it takes. Those of a request come in order, the final one last; after it, its id
    /// is unknown. Empty: the time has passed, or there is nobody whose responses could come.
    pub fn await_responses(
        &self,
        id: Option<SequenceId>,
        timeout: Option<Duration>,
    ) -> Vec<OwnedResponse> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.shared.state.lock();
        loop {
            let responses = state.take_responses(id);
            let is_awaited = match id {
                Some(id) => state.responses.contains_key(&id),
                None => !state.responses.is_empty(),
            };
            if !responses.is_empty() || !is_awaited {
                return responses;
            }
            match deadline {
                None => self.shared.has_news.wait(&mut state),
                Some(deadline) => {
                    let waited = self.shared.has_news.wait_until(&mut state, deadline);
                    if waited.timed_out() {
                        return state.take_responses(id);
                    }
                }
            }
        }
    }

    /// Responses that are there, of `id` or of all requests.
    pub fn num_responses_ready(&self, id: Option<SequenceId>) -> usize {
        let state = self.shared.state.lock();
        match id {
            Some(id) => state.responses.get(&id).map_or(0, VecDeque::len),
            None => state.responses.values().map(VecDeque::len).sum(),
        }
    }

    /// Ends a request, with what it has: its final response says so. Nothing, if it has ended.
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

    /// The statistics records since the last time, as the Batch Manager's JSON; of more than
    /// `max_num_statistics`, the latest.
    pub fn take_statistics(&self) -> Vec<String> {
        let statistics = std::mem::take(&mut self.shared.state.lock().statistics);
        statistics.into()
    }

    /// Takes no more requests, and waits until all that were enqueued have ended. Their responses are there
    /// afterwards.
    ///
    /// # Errors
    /// A step failed as a whole: the requests have ended with that error.
    pub fn shutdown(&mut self) -> Result<(), StepError> {
        self.shared.state.lock().is_open = false;
        self.shared.has_work.notify_all();
        self.thread.take().map_or(Ok(()), ManagerThread::join)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // The requests have ended with the error, if there was one.
        let _ = self.shutdown();
    }
}

struct ExecutorShared {
    options: ExecutorOptions,
    state: Mutex<ExecutorState>,
    /// Something waits, or it is closed.
    has_work: Condvar,
    /// A response is there.
    has_news: Condvar,
}

#[derive(Default)]
struct ExecutorState {
    is_open: bool,
    num_enqueued: u64,
    waiting: VecDeque<Submission>,
    stops: Vec<SequenceId>,
    /// Of each request that somebody may still ask for, what nobody has come for.
    responses: BTreeMap<SequenceId, VecDeque<OwnedResponse>>,
    statistics: VecDeque<String>,
}

impl ExecutorState {
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

/// The executor's end of the callbacks.
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
        // Every id is the executor's own, and given once.
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
    /// The thread has ended. Nobody waits for ever, whatever it has ended by.
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
