//! What an application does for the batch manager that serves it (TensorRT-LLM's Batch Manager has the same
//! callbacks, `batch_manager/callbacks.h`).
//!
//! ```text
//! start of a step    get_requests                     as many as can be taken
//! end of a step      send_response                    for each request with something new
//!                    poll_stop_signals                who is to be stopped
//!                    return_stats                     not when nothing was active
//! for each token     logits post-processors           see `SamplingParams::logits_processor`
//! ```

use crate::base::{RequestError, SequenceId, TokenId};
use crate::engine::{ExtraOutputs, NewRequest, StepStats};
use crate::sampling::{FinishReason, Hypothesis};

/// A request, and how it wants its answer.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The request.
    pub request: NewRequest,
    /// Whether each step's news are sent at once. If not, there is one response, the whole one at the end.
    pub is_streaming: bool,
}

impl From<NewRequest> for Submission {
    /// One that wants its answer whole.
    fn from(request: NewRequest) -> Self {
        Self {
            request,
            is_streaming: false,
        }
    }
}

/// What an application does for the batch manager that serves it.
pub trait Callbacks {
    /// Requests that join now, at most `max_num_requests`: as many as the manager can hold besides those that it
    /// has. Called at the start of every step. May block while nothing is active, which `is_idle` says. An id
    /// must not be that of a request that is in flight; it can be used again after the request's final response.
    ///
    /// To return `None` ends the loop when all that is active has ended.
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>>;

    /// Takes what is new of a request. On the final response, all that the manager knew of it is freed.
    fn send_response(&mut self, response: Response<'_>);

    /// Takes a request back whose id is that of one in flight. The one in flight goes on, and every response with
    /// that id is its own: there is none for this one.
    fn reject_duplicate(&mut self, duplicate: Submission);

    /// Requests that are to be stopped. Each gets a final response, if it is still in flight.
    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        Vec::new()
    }

    /// The record of a step; in lockstep (V1), of a batch that has ended. Not called when nothing was active.
    /// [`statistics_json`](crate::manager::statistics_json) makes the Batch Manager's text of it.
    fn return_stats(&mut self, stats: &StepStats) {
        let _ = stats;
    }
}

/// What is new of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Response<'a> {
    /// Whose.
    pub id: SequenceId,
    /// Tokens since the last response; all of them where the request does not stream.
    pub tokens: &'a [TokenId],
    /// Its extra outputs, step by step: see [`NewRequest::outputs`].
    pub extra_outputs: &'a [ExtraOutputs],
    /// What it has found with beams, the best first: with its final response, in the place of tokens; before
    /// that its beams as they are, if it streams and wants to know them.
    pub hypotheses: &'a [Hypothesis],
    /// Why it has ended, or the error for which it was refused; `None`: it goes on.
    pub end: Option<Result<FinishReason, RequestError>>,
}

impl Response<'_> {
    /// Whether it is the request's last.
    pub fn is_final(&self) -> bool {
        self.end.is_some()
    }
}
