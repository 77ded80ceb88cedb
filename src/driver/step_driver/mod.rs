//! A step over the requests of a driver: what both drivers share.
//!
//! ```text
//! join         requests that are prepared, and have their guide and adapter, go to the engine
//! respond      the output of the previous step goes to the responder
//! step         plan, run, apply
//! finish       ended requests are released and answered; requests of a sequence are rescheduled, and others stay
//! ```
//!
//! ```text
//! arrivals.rs  requests that arrive
//! joining.rs   requests that join the engine
//! endings.rs   requests that end
//! ```
//!
//! The drivers differ in what starts a step: an Execute call (`iterative.rs`), or the end of the step before
//! (`queued.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::driver::in_flight::{InFlightTable, Stage};
use crate::driver::leaving::Leaving;
use crate::driver::service::Service;
use crate::driver::slots_in_doubt::SlotsInDoubt;
use crate::driver::step_clock::StepClock;
use crate::driver::stops::Stops;
use crate::driver::turn::EndedTurn;
use crate::observe::observer::StepRecord;
use crate::request::admission::{Admission, Prepared};
use crate::request::incoming::Arrival;
use crate::request::preparer::Preparer;
use crate::response::answer::Answer;
use crate::response::responder::{Responder, StreamAnswer};
use inflight_base::{RequestId, StepError, Tokens};
use inflight_engine::{Event, Room};
use inflight_manager::BatchManager;
use inflight_sampling::FinishReason;
use inflight_triton::{Error, Instance, MovingRequest, Request, ServedModel};

mod arrivals;
mod endings;
mod joining;

/// The requests of a step, in Triton's order.
pub(super) type Batch = Vec<(RequestId, Request)>;

/// Prepares the requests of one instance.
pub type RequestPreparer = Preparer<Arrival, Result<Prepared, Error>>;

/// One instance's requests and their batch manager.
pub struct StepDriver {
    instance: Instance,
    served: ServedModel,
    admission: Arc<Admission>,
    preparer: RequestPreparer,
    pub(super) manager: BatchManager,
    responder: Responder,
    pub(super) in_flight: InFlightTable,
    /// Requests that are being prepared, in order of arrival. Some may have been forgotten.
    preparing: VecDeque<RequestId>,
    /// Requests whose adapters are being copied from them. Some may have been forgotten, or have ended.
    receiving: Vec<RequestId>,
    /// Requests that wait for their guides or adapters. Some may have been forgotten, or have ended.
    waiting: Vec<RequestId>,
    events: Vec<Event>,
    /// The answers that go to the responder. It returns the list with them, so that a step allocates nothing.
    streams: Vec<StreamAnswer>,
    num_requests_seen: u64,
    num_sequences_seen: u64,
    pub(super) slots_in_doubt: SlotsInDoubt,
    /// Turns of conversations that have ended, in this order.
    ended_turns: VecDeque<EndedTurn>,
    /// The first request since the last step, if one has arrived.
    first_newcomer: RequestId,
    /// Requests that were cancelled, and are not in flight any more.
    leaving: Leaving<MovingRequest>,
    /// Whether sequences were cancelled that may be in a step that is still running.
    must_settle: bool,
    /// Whether the metrics say that nothing is active.
    shown_idle: bool,
    started: Instant,
    /// Triton drops a sequence that is this long without a step.
    pub(super) max_absence: Duration,
    pub(super) service: Service,
    /// Of the model's other instances.
    stops: Stops,
}

/// The threads that prepare requests, and that send responses.
pub struct Helpers {
    /// Parses options and tokenises prompts.
    pub preparer: RequestPreparer,
    /// Sends the responses of streams.
    pub responder: Responder,
}

impl StepDriver {
    /// A driver without requests, of sequences that Triton never drops.
    pub fn new(
        instance: Instance,
        served: ServedModel,
        admission: Arc<Admission>,
        helpers: Helpers,
        manager: BatchManager,
        service: Service,
        stops: Stops,
    ) -> Self {
        let Helpers {
            preparer,
            responder,
        } = helpers;
        Self {
            instance,
            served,
            admission,
            preparer,
            manager,
            responder,
            in_flight: InFlightTable::default(),
            preparing: VecDeque::new(),
            receiving: Vec::new(),
            waiting: Vec::new(),
            events: Vec::new(),
            streams: Vec::new(),
            num_requests_seen: 0,
            num_sequences_seen: 0,
            slots_in_doubt: SlotsInDoubt::default(),
            ended_turns: VecDeque::new(),
            first_newcomer: RequestId::default(),
            leaving: Leaving::default(),
            must_settle: false,
            shown_idle: false,
            started: Instant::now(),
            max_absence: Duration::MAX,
            service,
            stops,
        }
    }

    /// Sets after how long without a step Triton drops a sequence.
    pub fn with_max_absence(self, max_absence: Duration) -> Self {
        Self {
            max_absence,
            ..self
        }
    }

    /// How many further requests could start in the next step, beside those that will soon be prepared: what follows a
    /// large prompt does not wait until it is tokenised. At most as many as the engine has rows are in flight, so that
    /// those that are prepared, or wait for guides and adapters, are not without number.
    pub(super) fn num_startable(&self) -> usize {
        let of_engine = self.manager.num_startable();
        let max_in_flight = self.manager.max_num_requests();
        of_engine
            .saturating_sub(self.num_small_preparing())
            .min(max_in_flight.saturating_sub(self.in_flight.len()))
    }

    fn num_small_preparing(&self) -> usize {
        let stages = self
            .preparing
            .iter()
            .filter_map(|id| self.in_flight.get(*id));
        let small =
            stages.filter(|it| matches!(&it.stage, Stage::Preparing(input) if !input.is_large()));
        small.count()
    }

    /// What the engine has room for.
    pub(super) fn room(&self) -> Room {
        self.manager.room()
    }

    /// Begins to accept requests for the next steps.
    pub(super) fn begin(&mut self) {
        self.slots_in_doubt.ripen();
        self.first_newcomer = RequestId(self.num_requests_seen);
        for client_request_id in self.stops.take() {
            self.stop_own(&client_request_id);
        }
    }

    /// One step over the batch, which keeps the requests that have not ended and cannot be rescheduled.
    pub(super) fn step_over(
        &mut self,
        batch: &mut Batch,
        clock: &mut StepClock,
    ) -> Result<(), StepError> {
        self.end_early(clock.start)?;
        self.receive_adapters(batch);
        self.join_prepared(batch);
        self.join_waiting(batch);
        self.respond(batch)?;
        self.step(clock)?;
        self.finish(batch, clock)
    }

    /// The next turn that has ended, if any has since the last call.
    pub(super) fn take_ended_turn(&mut self) -> Option<EndedTurn> {
        self.ended_turns.pop_front()
    }

    /// Passes the streams of this batch that have enough for a response to the responder.
    fn respond(&mut self, batch: &Batch) -> Result<(), StepError> {
        for &(id, _) in batch {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            // The last tokens of an ended one are in its final response.
            let is_due = |answer: &&mut Box<Answer>| answer.format.stream && answer.is_due();
            if !in_flight.is_over() && in_flight.answer.as_mut().filter(is_due).is_some() {
                self.streams
                    .extend(in_flight.answer.take().map(|answer| (id, answer)));
            }
        }
        if self.streams.is_empty() {
            return Ok(());
        }
        self.responder.send(std::mem::take(&mut self.streams))
    }

    /// Plan, run, apply.
    fn step(&mut self, clock: &mut StepClock) -> Result<(), StepError> {
        clock.model_started();
        let launched = self.manager.launch();
        self.collect_streams()?;
        launched?;
        let landed = self.manager.land(&mut self.events)?;
        self.settle()?;
        clock.model_ended(landed);
        self.read_events(clock.start);
        if self.must_settle {
            self.settle()?;
            self.read_events(clock.start);
        }
        Ok(())
    }

    /// Waits for the steps that are still running, if they may hold sequences that were cancelled.
    fn settle(&mut self) -> Result<(), StepError> {
        if std::mem::take(&mut self.must_settle) {
            self.manager.settle(&mut self.events)?;
        }
        Ok(())
    }

    fn collect_streams(&mut self) -> Result<(), StepError> {
        let Some(mut streams) = self.responder.collect()? else {
            return Ok(());
        };
        for (id, answer) in streams.drain(..) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            let has_failed = answer.has_failed();
            in_flight.answer = Some(answer);
            if has_failed {
                in_flight.sequences.cancel(&mut self.manager);
                // It is answered in this call, and holds no blocks then.
                self.must_settle = true;
                in_flight.end(FinishReason::Cancelled);
            }
        }
        self.streams = streams;
        Ok(())
    }

    fn read_events(&mut self, step_start: Instant) {
        let now = Instant::now();
        for event in self.events.drain(..) {
            match event {
                Event::Admitted(id, num_cached) => {
                    if let Some((answer, row)) = self.in_flight.row_mut(id) {
                        answer.times.admission.get_or_insert(step_start);
                        answer.admit(row, num_cached);
                    }
                }
                Event::ExtraOutputs(id, extra_outputs) => {
                    if let Some((answer, row)) = self.in_flight.row_mut(id) {
                        answer.add_extra_outputs(row, *extra_outputs);
                    }
                }
                Event::Token(id, token) => {
                    let Some((answer, row)) = self.in_flight.row_mut(id) else {
                        continue;
                    };
                    if answer.push(row, token, now) {
                        let num_output_tokens = Tokens(answer.rows()[row].tokens().len() as u32);
                        let reason = FinishReason::StopWords;
                        if self.manager.finish(id, num_output_tokens, reason) {
                            self.in_flight.end_sequence(id, reason);
                        }
                    }
                }
                Event::Hypotheses(id, found) => {
                    if let Some((answer, _)) = self.in_flight.row_mut(id) {
                        answer.take_found(found, now);
                    }
                }
                Event::Finished(id, reason) => {
                    if let Some(failed) = self.in_flight.end_sequence(id, reason) {
                        failed.cancel(&mut self.manager);
                        // As above.
                        self.must_settle = true;
                    }
                }
                Event::Paused(id) => log::debug!("request {id} is paused for want of KV blocks"),
            }
        }
    }

    /// Records the step, and if it was the last one, that nothing is active.
    fn record(&mut self, clock: &mut StepClock) -> Result<(), StepError> {
        if let Some(landed) = clock.landed.take() {
            self.responder.record(StepRecord {
                landed,
                ended_at: SystemTime::now(),
                start: clock.start.duration_since(self.started),
                step: clock.start.elapsed(),
            })?;
            self.shown_idle = false;
        }
        self.show_idle()
    }

    /// Shows, once, that nothing is active any more.
    pub(super) fn show_idle(&mut self) -> Result<(), StepError> {
        if self.manager.is_idle() && !self.shown_idle {
            // There may be no later call in which cancelled sequences could come back.
            self.manager.settle(&mut self.events)?;
            self.events.clear();
            self.responder.idle(self.manager.kv_usage())?;
            self.shown_idle = true;
        }
        Ok(())
    }
}
