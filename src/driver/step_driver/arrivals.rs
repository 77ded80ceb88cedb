//! Requests that arrive: read, and handed to the threads that prepare them.

use std::time::Instant;

use crate::driver::correlation::CorrelationKey;
use crate::driver::in_flight::{InFlight, Presence, Stage};
use crate::driver::step_driver::{Batch, StepDriver};
use crate::driver::turn::Turn;
use crate::request::admission::Prepared;
use crate::request::branches::Branches;
use crate::request::incoming::{Arrival, Incoming, StopRequest, TurnPrompt};
use crate::request::preparer::Preparation;
use crate::response::answer::Answer;
use inflight_base::{RequestError, RequestId, catch_panic};
use inflight_sampling::FinishReason;
use inflight_triton::{Error, Request, ResponseFactory};

/// A request with at most this many bytes to parse and tokenise is prepared at once. That takes less time than a step
/// may wait for, and a thread need not be woken.
const MAX_BYTES_AT_ONCE: usize = 512;

impl StepDriver {
    /// Takes in a request that belongs to no sequence of Triton's: it stays until it has ended.
    pub(crate) fn admit_alone(&mut self, request: Request, batch: &mut Batch, now: Instant) {
        let key = CorrelationKey::Alone(self.num_requests_seen);
        self.admit(request, key, batch, now);
    }

    /// Takes in a turn of a conversation, which stays until it has ended.
    pub(crate) fn admit_turn(
        &mut self,
        request: Request,
        turn: Turn,
        batch: &mut Batch,
        now: Instant,
    ) {
        let key = CorrelationKey::Alone(self.num_requests_seen);
        self.admit_with(request, key, Some(turn), batch, now);
    }

    /// Takes in a request that starts.
    pub(crate) fn admit(
        &mut self,
        request: Request,
        key: CorrelationKey,
        batch: &mut Batch,
        now: Instant,
    ) {
        self.admit_with(request, key, None, batch, now);
    }

    fn admit_with(
        &mut self,
        mut request: Request,
        key: CorrelationKey,
        mut turn: Option<Turn>,
        batch: &mut Batch,
        now: Instant,
    ) {
        if request.is_cancelled() {
            self.ended_turns.extend(turn.map(Turn::abandon));
            return self.leave(request);
        }
        match self.new_in_flight(&mut request, key, &mut turn, now) {
            Ok(in_flight) => {
                let id = RequestId(self.num_requests_seen);
                self.num_requests_seen += 1;
                if matches!(in_flight.stage, Stage::Preparing(_)) {
                    self.preparing.push_back(id);
                }
                if in_flight.adapter_writer.is_some() {
                    self.receiving.push(id);
                }
                self.in_flight.insert(id, in_flight);
                batch.push((id, request));
            }
            Err(error) => {
                self.ended_turns.extend(turn.map(Turn::abandon));
                self.refuse(request, error);
            }
        }
    }

    /// Reads a request. It takes `turn`, unless it is refused.
    fn new_in_flight(
        &mut self,
        request: &mut Request,
        correlation_id: CorrelationKey,
        turn: &mut Option<Turn>,
        now: Instant,
    ) -> Result<InFlight, Error> {
        let incoming = alone(|| self.admission.read(request, now))?;
        let mut in_flight = InFlight {
            correlation_id,
            is_warm_up: request.is_warm_up(),
            client_request_id: String::new(),
            turn: None,
            identity: request.identity(),
            factory: request.response_factory()?,
            adapter_writer: None,
            stage: Stage::Ended,
            answer: None,
            sequences: Branches::none(),
            is_stopped: false,
            deadline: None,
            presence: Presence::Here,
        };
        match incoming {
            // It ends in this step, and so does the request that it stops, which keeps their request id.
            Incoming::Stop(stop) => {
                let factory = in_flight.factory.clone();
                let answer = in_flight.answer.insert(self.stop(&stop, factory, now)?);
                answer.end(FinishReason::Cancelled);
            }
            Incoming::EndConversation(outputs) => {
                let factory = in_flight.factory.clone();
                let plan = alone(|| self.admission.empty_answer(&outputs))?;
                let answer = Answer::new(factory, now, plan);
                let answer = in_flight.answer.insert(Box::new(answer));
                answer.end(FinishReason::Cancelled);
            }
            Incoming::Generate(mut arrival) => {
                arrival.turn = turn.as_ref().map(|turn| TurnPrompt {
                    context: turn.context.clone(),
                    is_last: turn.flags.is_end(),
                });
                self.claim_client_request_id(&arrival.client_request_id, now)?;
                in_flight
                    .client_request_id
                    .clone_from(&arrival.client_request_id);
                in_flight.adapter_writer = arrival.adapter_writer.take();
                in_flight.stage = Stage::Preparing(self.prepare(*arrival)?);
            }
        }
        in_flight.turn = turn.take();
        Ok(in_flight)
    }

    /// Stops the request in flight that the client names. Returns the answer to the request that stops it.
    fn stop(
        &mut self,
        stop: &StopRequest,
        factory: ResponseFactory,
        now: Instant,
    ) -> Result<Box<Answer>, Error> {
        let plan = alone(|| self.admission.empty_answer(&stop.outputs))?;
        if stop.client_request_id.is_empty() {
            return Err(Error::invalid(
                "option 'stop' stops the request with the same request id, and this request has none",
            ));
        }
        if !self.stop_own(&stop.client_request_id) {
            self.stops.send(&stop.client_request_id);
        }
        Ok(Box::new(Answer::new(factory, now, plan)))
    }

    /// Stops a request of this instance. Returns whether it has that request.
    pub(super) fn stop_own(&mut self, client_request_id: &str) -> bool {
        let stopped = self.in_flight.find_client(client_request_id);
        let stopped = stopped.and_then(|id| self.in_flight.get_mut(id));
        stopped.map(|it| it.is_stopped = true).is_some()
    }

    /// Has a request prepared: a small one at once.
    fn prepare(&self, arrival: Arrival) -> Result<Preparation<Result<Prepared, Error>>, Error> {
        if arrival.num_bytes_to_read() <= MAX_BYTES_AT_ONCE {
            let prepared = alone(|| self.admission.prepare(arrival))?;
            return Ok(Preparation::done(Ok(prepared)));
        }
        let num_bytes = arrival.num_bytes();
        let client = arrival.client();
        self.preparer.submit(arrival, num_bytes, client)
    }

    /// Refuses the request id of a new request if a request in flight has it.
    fn claim_client_request_id(
        &mut self,
        client_request_id: &str,
        now: Instant,
    ) -> Result<(), Error> {
        if let Some(other) = self.in_flight.find_client(client_request_id) {
            if !self.is_lost(other, now) {
                return Err(RequestError::InFlight(client_request_id.to_owned()).into());
            }
            self.forget(other);
        }
        Ok(())
    }
}

/// Reads or prepares a request. A panic there is that request's own: nothing else has been touched.
pub(super) fn alone<T>(read: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_panic(read).unwrap_or_else(|panic| Err(unreadable(&panic)))
}

/// The error of a request that a panic ended.
pub(super) fn unreadable(panic: &str) -> Error {
    let error = format!("the request could not be read: {panic}");
    log::error!("{error}");
    Error::internal(error)
}
