//! The callbacks that an application implements. TensorRT-LLM's Batch Manager has the same, in
//! `batch_manager/callbacks.h`.
//!
//! ```text
//! start of a step    get_requests                     new requests
//! end of a step      send_response                    for each request with new outputs
//!                    poll_stop_signals                requests to stop
//!                    return_stats                     unless nothing was active
//! for each token     logits post-processors           see `SamplingParams::logits_processor`
//! ```

use inflight_base::{RequestError, SequenceId, TokenId};
use inflight_engine::{ExtraOutputs, NewRequest, StepStats};
use inflight_sampling::{FinishReason, Hypothesis};

/// A request, and how its outputs are returned.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The request.
    pub request: NewRequest,
    /// Whether the outputs of each step are sent at once. If not, there is one response, at the end.
    pub is_streaming: bool,
}

impl From<NewRequest> for Submission {
    /// A request with one response, at the end.
    fn from(request: NewRequest) -> Self {
        Self {
            request,
            is_streaming: false,
        }
    }
}

/// The callbacks that an application implements.
pub trait Callbacks {
    /// Returns new requests, at most `max_num_requests`, which is what the manager has room for. Called at the start of
    /// every step. May block if `is_idle`, since nothing is active then. The id of a request in flight must not be
    /// used again before its final response.
    ///
    /// `None` ends the loop once all active requests have ended.
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>>;

    /// Takes new outputs of a request. After the final response, the manager does not know the request any more.
    fn send_response(&mut self, response: Response<'_>);

    /// Takes back a request whose id is in use. The request in flight continues. An application that does not implement
    /// this gets a final response with the error, as for any other request that is refused: all other responses with
    /// the id belong to the request in flight.
    fn reject_duplicate(&mut self, duplicate: Submission) {
        let id = duplicate.request.id;
        self.send_response(Response {
            id,
            tokens: &[],
            extra_outputs: &[],
            hypotheses: &[],
            end: Some(Err(RequestError::InFlight(id.to_string()))),
        });
    }

    /// Returns the requests to stop. Each that is still in flight gets a final response.
    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        Vec::new()
    }

    /// Takes the record of a step or, in lockstep (V1), of a batch that has ended. Not called if nothing was active.
    /// [`statistics_json`](crate::statistics_json) formats it like the Batch Manager.
    fn return_stats(&mut self, stats: &StepStats) {
        let _ = stats;
    }
}

/// The new outputs of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Response<'a> {
    /// The request.
    pub id: SequenceId,
    /// Tokens since the last response; all of them if the request does not stream.
    pub tokens: &'a [TokenId],
    /// Its extra outputs, step by step: see [`NewRequest::outputs`].
    pub extra_outputs: &'a [ExtraOutputs],
    /// With beam search, instead of tokens: in the final response the best hypotheses, the best first; before it the
    /// current ones, if it streams and asks for them.
    pub hypotheses: &'a [Hypothesis],
    /// Why it has ended, or the error with which it was refused; `None` while it continues.
    pub end: Option<Result<FinishReason, RequestError>>,
}

impl Response<'_> {
    /// Whether it is the last response of its request.
    pub fn is_final(&self) -> bool {
        self.end.is_some()
    }
}
