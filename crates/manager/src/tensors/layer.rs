//! Callbacks with tensors, on top of the typed callbacks.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::model::{TensorModel, TensorRequest};
use super::request::read;
use super::response::{PendingResponse, write};
use super::tensor::HostTensors;
use crate::{Callbacks, Response, Submission, statistics_json};
use inflight_base::{RequestError, SequenceId};
use inflight_engine::StepStats;

/// [`Callbacks`] of an application whose requests and responses are tensors.
pub trait TensorCallbacks {
    /// As [`Callbacks::get_requests`].
    fn get_requests(
        &mut self,
        max_num_requests: usize,
        is_idle: bool,
    ) -> Option<Vec<TensorRequest>>;

    /// Takes the new outputs of a request; the last time with `is_final`. If `error` is not empty, there are no
    /// tensors, and the response is final.
    fn send_response(&mut self, id: SequenceId, tensors: &HostTensors, is_final: bool, error: &str);

    /// As [`Callbacks::reject_duplicate`].
    fn reject_duplicate(&mut self, duplicate: TensorRequest) {
        let error = RequestError::InFlight(duplicate.id.to_string()).to_string();
        self.send_response(duplicate.id, &HostTensors::new(), true, &error);
    }

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
    fn accept(&mut self, request: TensorRequest) -> Option<Submission> {
        if self.in_flight.contains_key(&request.id) {
            self.callbacks.reject_duplicate(request);
            return None;
        }
        let read = match read(&request, &self.model) {
            Ok(read) => read,
            Err(error) => {
                let error = error.to_string();
                let none = HostTensors::new();
                self.callbacks
                    .send_response(request.id, &none, true, &error);
                return None;
            }
        };
        let in_flight = PendingResponse::new(&read);
        self.in_flight.insert(request.id, in_flight);
        Some(read.submission)
    }
}

impl<C: TensorCallbacks> Callbacks for TensorLayer<C> {
    fn get_requests(&mut self, max_num_requests: usize, is_idle: bool) -> Option<Vec<Submission>> {
        let requests = self.callbacks.get_requests(max_num_requests, is_idle)?;
        let accepted = requests
            .into_iter()
            .filter_map(|request| self.accept(request));
        Some(accepted.collect())
    }

    fn send_response(&mut self, response: Response<'_>) {
        let id = response.id;
        let (tensors, error) = write(&response, self.in_flight.get_mut(&id), &self.model);
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
