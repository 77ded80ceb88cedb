//! The executor with tensors.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use super::model::{TensorModel, TensorRequest};
use super::request::read;
use super::response::{PendingResponse, write};
use super::tensor::HostTensors;
use crate::BatchManager;
use crate::executor::{Executor, ExecutorOptions, deadline_in};
use inflight_base::{RequestError, SequenceId, StepError};

/// A response as tensors by name.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorResponse {
    /// The request.
    pub id: SequenceId,
    /// Its new outputs; none if there is an error.
    pub tensors: HostTensors,
    /// Whether it is the last response of the request.
    pub is_final: bool,
    /// Why the request has failed; empty if it has not.
    pub error: String,
}

/// An [`Executor`] whose requests and responses are tensors.
pub struct TensorExecutor {
    executor: Executor,
    model: TensorModel,
    /// The requests whose final responses have not been returned. Locked while responses are taken and written, so that
    /// two threads that await the same request count its tokens in order. Locked before the executor's own state.
    in_flight: Mutex<BTreeMap<SequenceId, PendingResponse>>,
}

impl TensorExecutor {
    /// An executor without requests.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub fn new(
        manager: BatchManager,
        model: TensorModel,
        options: ExecutorOptions,
    ) -> std::io::Result<Self> {
        Ok(Self {
            executor: Executor::new(manager, options)?,
            model,
            in_flight: Mutex::default(),
        })
    }

    /// Enqueues a request. Returns the id that it gets; `request.id` is ignored.
    ///
    /// # Errors
    /// A tensor is invalid, or as for [`Executor::enqueue`].
    pub fn enqueue(&self, request: &TensorRequest) -> Result<SequenceId, RequestError> {
        let read = read(request, &self.model)?;
        let pending = PendingResponse::new(&read);
        let mut in_flight = self.in_flight.lock();
        let submission = read.submission;
        let id = self
            .executor
            .enqueue(submission.request, submission.is_streaming)?;
        in_flight.insert(id, pending);
        Ok(id)
    }

    /// As [`Executor::can_enqueue`].
    pub fn can_enqueue(&self) -> bool {
        self.executor.can_enqueue()
    }

    /// As [`Executor::await_responses`].
    pub fn await_responses(
        &self,
        id: Option<SequenceId>,
        timeout: Option<Duration>,
    ) -> Vec<TensorResponse> {
        let deadline = deadline_in(timeout);
        loop {
            let are_any = self.executor.wait_for_responses(id, deadline);
            let mut in_flight = self.in_flight.lock();
            let responses = self.executor.await_responses(id, Some(Duration::ZERO));
            if responses.is_empty() && are_any {
                // Another thread has taken them.
                continue;
            }
            let written = responses.iter().map(|response| {
                let response = response.as_response();
                let id = response.id;
                let (tensors, error) = write(&response, in_flight.get_mut(&id), &self.model);
                if response.is_final() {
                    in_flight.remove(&id);
                }
                TensorResponse {
                    id,
                    tensors,
                    is_final: response.is_final(),
                    error,
                }
            });
            return written.collect();
        }
    }

    /// As [`Executor::num_responses_ready`].
    pub fn num_responses_ready(&self, id: Option<SequenceId>) -> usize {
        self.executor.num_responses_ready(id)
    }

    /// As [`Executor::cancel`].
    pub fn cancel(&self, id: SequenceId) {
        self.executor.cancel(id);
    }

    /// As [`Executor::take_statistics`].
    pub fn take_statistics(&self) -> Vec<String> {
        self.executor.take_statistics()
    }

    /// As [`Executor::shutdown`].
    ///
    /// # Errors
    /// As for [`Executor::shutdown`].
    pub fn shutdown(&self) -> Result<(), StepError> {
        self.executor.shutdown()
    }
}
