//! Callbacks with tensors, on top of the typed callbacks.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::model::{TensorModel, TensorRequest};
use super::request::{Asked, read};
use super::response::PendingResponse;
use super::tensor::HostTensors;
use crate::base::SequenceId;
use crate::engine::StepStats;
use crate::manager::{Callbacks, Response, Submission, statistics_json};
use crate::sampling::FinishReason;

/// [`Callbacks`] of an application whose requests and responses are tensors.
pub trait TensorCallbacks {
    /// As [`Callbacks::get_requests`].
    fn get_requests(
        &mut self,
        max_num_requests: usize,
        is_idle: bool,
    ) -> Option<Vec<TensorRequest>>;

    /// Takes the new outputs of a request; the last time with `is_final`. If `error` is not empty, there are no tensors, and
    /// the response is final.
    fn send_response(&mut self, id: SequenceId, tensors: &HostTensors, is_final: bool, error: &str);

    /// As [`Callbacks::reject_duplicate`].
    fn reject_duplicate(&mut self, duplicate: TensorRequest);

    /// As [`Callbacks::poll_stop_signals`].
    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        Vec::new()
    }

    /// As [`Callbacks::return_stats`], as the Batch Manager's JSON.
    fn return_stats(&mut self, json: &str) {
        let _ = json;
    }
}

/// Serves an application whose requests and responses are tensors.
pub struct TensorLayer<C> {
    callbacks: C,
    model: TensorModel,
    in_flight: BTreeMap<SequenceId, PendingResponse>,
}

impl<C: TensorCallbacks> TensorLayer<C> {
    /// A layer over `callbacks`.
    pub fn new(callbacks: C, model: TensorModel) -> Self {
        Self {
            callbacks,
            model,
            in_flight: BTreeMap::new(),
        }
    }

    /// The request for the batch manager; `None` if it is refused.
    fn take_in(&mut self, request: TensorRequest) -> Option<Submission> {
        if self.in_flight.contains_key(&request.id) {
            self.callbacks.reject_duplicate(request);
            return None;
        }
        let Asked {
            submission,
            pad_id,
            beam_width,
        } = match read(&request, &self.model) {
            Ok(asked) => asked,
            Err(error) => {
                let error = error.to_string();
                let none = HostTensors::new();
                self.callbacks
                    .send_response(request.id, &none, true, &error);
                return None;
            }
        };
        let prompt = &submission.request.prompt;
        let in_flight = PendingResponse {
            num_prompt_tokens: prompt.len(),
            prompt: if request.is_streaming {
                Vec::new()
            } else {
                prompt.to_vec()
            },
            is_streaming: request.is_streaming,
            pad_id,
            beam_width,
            wants_log_probs: submission.request.outputs.log_probs.is_some(),
            num_generated: 0,
            cum_log_prob: 0.0,
        };
        self.in_flight.insert(request.id, in_flight);
        Some(submission)
    }
}

impl<C: TensorCallbacks> Callbacks for TensorLayer<C> {
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>> {
        let requests = self.callbacks.get_requests(max_num_requests, is_idle)?;
        let taken = requests
            .into_iter()
            .filter_map(|request| self.take_in(request));
        Some(taken.collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        let id = response.id;
        let error = match &response.end {
            Some(Err(error)) => error.to_string(),
            Some(Ok(FinishReason::Error(error))) => error.to_string(),
            _ => String::new(),
        };
        let tensors = match self.in_flight.get_mut(&id) {
            Some(in_flight) if error.is_empty() => in_flight.tensors(&response, &self.model),
            _ => HostTensors::new(),
        };
        let is_final = response.is_final();
        if is_final {
            self.in_flight.remove(&id);
        }
        self.callbacks.send_response(id, &tensors, is_final, &error);
    }

    fn reject_duplicate(&mut self, duplicate: Submission) {
        // Duplicates were rejected before they were read.
        debug_assert!(false, "{} was let through twice", duplicate.request.id);
    }

    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        self.callbacks.poll_stop_signals()
    }

    fn return_stats(&mut self, stats: &StepStats) {
        self.callbacks
            .return_stats(&statistics_json(stats, SystemTime::now()));
    }
}
