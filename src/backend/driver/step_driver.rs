//! A step over the requests of a driver: what both drivers share.
//!
//! ```text
//! join         requests that are prepared, and have their guide and adapter, go to the engine in order of arrival
//! respond      the output of the previous step goes to the responder
//! step         plan, run, apply
//! finish       requests that have ended are released and answered; of the others, those of a sequence are rescheduled,
//!              and the rest stay
//! ```
//!
//! The drivers differ in what starts a step: an Execute call (`iterative.rs`), or the end of the step before
//! (`queued.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::backend::driver::correlation::CorrelationKey;
use crate::backend::driver::in_flight::{InFlight, InFlightTable, Presence, Stage, Waiting};
use crate::backend::driver::service::Service;
use crate::backend::driver::slots_in_doubt::SlotsInDoubt;
use crate::backend::driver::turn::{EndedTurn, Turn};
use crate::backend::observe::observer::StepRecord;
use crate::backend::request::admission::{Admission, Prepared};
use crate::backend::request::branches::{Branches, NewBranches};
use crate::backend::request::incoming::{Arrival, Incoming, StopRequest, TurnPrompt};
use crate::backend::request::preparer::{Preparation, Preparer};
use crate::backend::response::answer::Answer;
use crate::backend::response::responder::{Responder, StreamAnswer};
use crate::base::{RequestError, RequestId, SequenceId, StepError, Tokens};
use crate::config::InputKind;
use crate::engine::{Event, Room};
use crate::manager::{BatchManager, LandedStep};
use crate::sampling::FinishReason;
use crate::triton::lifecycle::catch;
use crate::triton::{
    DataType, Error, ErrorCode, Instance, Request, ResponseFactory, ServedModel, Timestamps, now_ns,
};

/// The requests of a step, in Triton's order.
pub(super) type Batch = Vec<(RequestId, Request)>;

/// Prepares the requests of one instance.
pub type RequestPreparer = Preparer<Arrival, Result<Prepared, Error>>;

/// How long a frontend is given to finish with a cancellation before Triton answers the request. The
/// gRPC frontend of server 2.51 releases a stream's state twice, and crashes, if the answer comes while
/// it is still at it; this makes that rare (13 crashes in 1280 cancellations became 1), not impossible.
const CANCELLATION_GRACE: Duration = Duration::from_millis(5);

/// How long an Execute call that has no other work waits for a prompt, a guide or an adapter: a client may cancel its request.
const IDLE_WAIT: Duration = Duration::from_millis(5);

/// How long a step with other work waits for the requests that arrived in its Execute call, so that most of them need
/// not wait for the next one.
const NEWCOMER_WAIT: Duration = Duration::from_micros(500);

/// A request with at most this many bytes to parse and tokenise is prepared at once. That takes less time than a step
/// may wait for, and a thread need not be woken.
const MAX_BYTES_AT_ONCE: usize = 512;

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
    /// Whether a frontend has been let finish with its cancellations since the last step.
    has_waited: bool,
    /// Whether sequences were cancelled that may be in a step that is still running.
    must_settle: bool,
    /// Whether the metrics say that nothing is active.
    shown_idle: bool,
    started: Instant,
    /// Triton drops a sequence that is this long without a step.
    pub(super) max_absence: Duration,
    pub(super) service: Service,
}

impl StepDriver {
    /// A driver without requests, of sequences that Triton never drops.
    pub fn new(
        instance: Instance,
        served: ServedModel,
        admission: Arc<Admission>,
        preparer: RequestPreparer,
        manager: BatchManager,
        responder: Responder,
        service: Service,
    ) -> Self {
        Self {
            instance,
            served,
            admission,
            preparer,
            manager,
            responder,
            in_flight: InFlightTable::default(),
            preparing: VecDeque::new(),
            waiting: Vec::new(),
            events: Vec::new(),
            streams: Vec::new(),
            num_requests_seen: 0,
            num_sequences_seen: 0,
            slots_in_doubt: SlotsInDoubt::default(),
            ended_turns: VecDeque::new(),
            first_newcomer: RequestId::default(),
            has_waited: false,
            must_settle: false,
            shown_idle: false,
            started: Instant::now(),
            max_absence: Duration::MAX,
            service,
        }
    }

    /// The same; Triton drops a sequence that is `max_absence` without a step.
    pub fn with_max_absence(self, max_absence: Duration) -> Self {
        Self {
            max_absence,
            ..self
        }
    }

    /// Begins to accept requests for the next steps.
    pub(super) fn begin(&mut self) {
        self.slots_in_doubt.ripen();
        self.has_waited = false;
        self.first_newcomer = RequestId(self.num_requests_seen);
    }

    /// One step over the batch, which keeps the requests that have not ended and cannot be rescheduled.
    pub(super) fn step_over(
        &mut self,
        batch: &mut Batch,
        clock: &mut StepClock,
    ) -> Result<(), StepError> {
        self.end_early(clock.start)?;
        self.join_prepared(batch);
        self.join_waiting(batch);
        self.respond(batch)?;
        self.step(clock)?;
        self.finish(batch, clock)
    }

    /// Takes in a request that belongs to no sequence of Triton's: it stays until it has ended.
    pub(super) fn admit_alone(&mut self, request: Request, batch: &mut Batch, now: Instant) {
        let key = CorrelationKey::Alone(self.num_requests_seen);
        self.admit(request, key, batch, now);
    }

    /// Takes in a turn of a conversation, which stays until it has ended.
    pub(super) fn admit_turn(
        &mut self,
        request: Request,
        turn: Turn,
        batch: &mut Batch,
        now: Instant,
    ) {
        let key = CorrelationKey::Alone(self.num_requests_seen);
        self.admit_with(request, key, Some(turn), batch, now);
    }

    /// The next turn that has ended, if any has since the last call.
    pub(super) fn take_ended_turn(&mut self) -> Option<EndedTurn> {
        self.ended_turns.pop_front()
    }

    /// Takes in a request that starts.
    pub(super) fn admit(
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
            return self.hand_to_triton(request);
        }
        match self.new_in_flight(&mut request, key, &mut turn, now) {
            Ok(in_flight) => {
                let id = RequestId(self.num_requests_seen);
                self.num_requests_seen += 1;
                if matches!(in_flight.stage, Stage::Preparing(_)) {
                    self.preparing.push_back(id);
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
        let stopped = self.in_flight.find_client(&stop.client_request_id);
        if let Some(stopped) = stopped.and_then(|id| self.in_flight.get_mut(id)) {
            stopped.is_stopped = true;
        }
        Ok(Box::new(Answer::new(factory, now, plan)))
    }

    /// Has a request prepared: a small one at once, unless others before it are still being prepared.
    fn prepare(&self, arrival: Arrival) -> Result<Preparation<Result<Prepared, Error>>, Error> {
        if arrival.num_bytes_to_read() <= MAX_BYTES_AT_ONCE && self.are_all_prepared() {
            let prepared = alone(|| self.admission.prepare(arrival))?;
            return Ok(Preparation::done(Ok(prepared)));
        }
        let num_bytes = arrival.num_bytes();
        self.preparer.submit(arrival, num_bytes)
    }

    /// How many further requests could start in the next step, beside those that are still being prepared. At most as
    /// many as the engine has rows are in flight, so that those that wait for guides and adapters are not without number.
    pub(super) fn num_startable(&self) -> usize {
        let of_engine = self.manager.num_startable();
        let max_in_flight = self.manager.max_num_requests();
        of_engine
            .saturating_sub(self.preparing.len())
            .min(max_in_flight.saturating_sub(self.in_flight.len()))
    }

    /// What the engine has room for.
    pub(super) fn room(&self) -> Room {
        self.manager.room()
    }

    /// Whether no request is being prepared: the last one is prepared last.
    fn are_all_prepared(&self) -> bool {
        let ids = self.preparing.iter().rev();
        let last = ids.filter_map(|id| self.in_flight.get(*id)).next();
        match last.map(|in_flight| &in_flight.stage) {
            Some(Stage::Preparing(preparation)) => preparation.is_done(),
            _ => true,
        }
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

    /// Whether the request `id` will not come back from Triton.
    pub(super) fn is_lost(&mut self, id: RequestId, now: Instant) -> bool {
        let max_absence = self.max_absence;
        self.in_flight
            .get_mut(id)
            .is_some_and(|in_flight| in_flight.is_lost(now, max_absence))
    }

    /// Ends the requests that were stopped, or whose time limit has passed, with what they have. One that
    /// only waits for the rest of its lockstep batch is complete: it waits no longer.
    fn end_early(&mut self, now: Instant) -> Result<(), StepError> {
        let are_beams_out = self.in_flight.iter_mut().any(|(_, in_flight)| {
            let mut sequences = in_flight.sequences.ids();
            in_flight.early_end(now, &self.service).is_some()
                && sequences.any(|sequence| self.manager.are_beams_out(sequence))
        });
        if are_beams_out {
            // The step that is still running has their latest hypotheses.
            self.manager.settle(&mut self.events)?;
            self.read_events(now);
        }
        for (_, in_flight) in self.in_flight.iter_mut() {
            let Some(reason) = in_flight.early_end(now, &self.service) else {
                continue;
            };
            for sequence in in_flight.sequences.ids() {
                let ended = self.manager.ended(sequence);
                let found = self.manager.best_so_far(sequence);
                self.manager.cancel(sequence);
                if let Some(answer) = in_flight.answer.as_mut().filter(|_| !found.is_empty()) {
                    answer.take_found(found, now);
                }
                in_flight.end_sequence(sequence, ended.unwrap_or(reason));
            }
            if let Stage::Waiting(_) = in_flight.stage {
                in_flight.end(reason);
            }
        }
        Ok(())
    }

    /// Gives the engine the requests that have been prepared, in order of arrival: none overtakes one that is still
    /// being prepared. Waits for a moment where that does not hold up others.
    fn join_prepared(&mut self, batch: &mut Batch) {
        let start = Instant::now();
        while let Some(&id) = self.preparing.front() {
            if let Some(InFlight {
                stage: Stage::Preparing(preparation),
                ..
            }) = self.in_flight.get(id)
            {
                if !preparation.is_done() {
                    let max_wait = match self.has_other_work() {
                        false => IDLE_WAIT,
                        true if id >= self.first_newcomer => NEWCOMER_WAIT,
                        true => return,
                    };
                    let max_wait = max_wait.saturating_sub(start.elapsed());
                    self.preparer.wait(preparation, max_wait);
                }
                let prepared = match preparation.take() {
                    None => return,
                    Some(prepared) => prepared.unwrap_or_else(|panic| Err(unreadable(&panic))),
                };
                if let Err(error) = prepared.and_then(|prepared| self.join(id, prepared)) {
                    self.refuse_in_flight(id, error, batch);
                }
            }
            self.preparing.pop_front();
        }
    }

    /// Gives the engine a request that has been prepared, or lets it wait for its guide and its adapter.
    fn join(&mut self, id: RequestId, prepared: Prepared) -> Result<(), Error> {
        let Some(in_flight) = self.in_flight.get_mut(id) else {
            return Ok(());
        };
        let sequences = Branches::new(SequenceId(self.num_sequences_seen), prepared.num_sequences);
        self.num_sequences_seen += u64::from(prepared.num_sequences);
        let factory = in_flight.factory.clone();
        let mut answer = Answer::new(factory, prepared.arrival, prepared.answer);
        answer.is_warm_up = in_flight.is_warm_up;
        in_flight.answer = Some(Box::new(answer));
        in_flight.deadline = prepared.deadline;
        if let Some(reason) = in_flight.due_end(Instant::now(), &self.service) {
            in_flight.end(reason);
            return Ok(());
        }
        if let Some(turn) = &mut in_flight.turn {
            turn.joins(&prepared.request);
        }
        let mut processors = Vec::new();
        if let Some(call) = &prepared.post_processor {
            let client_request_id = &in_flight.client_request_id;
            processors = alone(|| {
                let started = self
                    .admission
                    .start_processors(call, client_request_id, sequences);
                Ok(started?)
            })?;
            if let Some(answer) = &mut in_flight.answer {
                answer.set_processors(&processors);
            }
        }
        let new = NewBranches::new(sequences, prepared.request, processors);
        match (prepared.compilation, prepared.adapter) {
            (None, None) => self.generate(id, new)?,
            (compilation, adapter) => {
                in_flight.stage = Stage::Waiting(Box::new(Waiting {
                    sequences: new,
                    compilation,
                    adapter,
                }));
                self.waiting.push(id);
            }
        }
        Ok(())
    }

    /// Gives the engine the sequences of a request.
    fn generate(&mut self, id: RequestId, new: NewBranches) -> Result<(), RequestError> {
        let sequences = new.branches();
        add(&mut self.manager, new)?;
        self.in_flight.generate(id, sequences);
        Ok(())
    }

    /// Whether there is more to do than to wait for prompts, guides and adapters.
    fn has_other_work(&self) -> bool {
        let only_waits = |in_flight: &InFlight| {
            matches!(in_flight.stage, Stage::Preparing(_) | Stage::Waiting(_))
        };
        !self.manager.is_idle() || !self.in_flight.iter().all(only_waits)
    }

    /// Gives the engine the requests that have their guides and adapters, and refuses those that cannot have them. Where
    /// there is nothing else to do, it waits for a moment.
    fn join_waiting(&mut self, batch: &mut Batch) {
        if self.waiting.is_empty() {
            return;
        }
        if self.preparing.is_empty() && !self.has_other_work() {
            self.wait_for_news();
        }
        let now = Instant::now();
        for id in std::mem::take(&mut self.waiting) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            let Stage::Waiting(waiting) = &mut in_flight.stage else {
                continue;
            };
            let joined = match waiting.advance(now) {
                Ok(false) => {
                    self.waiting.push(id);
                    continue;
                }
                Ok(true) => {
                    if let Some(turn) = &mut in_flight.turn {
                        turn.joins(waiting.sequences.first());
                    }
                    match std::mem::replace(&mut in_flight.stage, Stage::Ended) {
                        Stage::Waiting(waiting) => self.generate(id, waiting.sequences),
                        _ => Ok(()),
                    }
                }
                Err(error) => Err(error),
            };
            if let Err(error) = joined {
                self.refuse_in_flight(id, error.into(), batch);
            }
        }
    }

    /// Waits for a moment until a guide or an adapter that a request waits for is ready.
    fn wait_for_news(&self) {
        let waiting = || {
            let ids = self.waiting.iter();
            ids.filter_map(|id| match &self.in_flight.get(*id)?.stage {
                Stage::Waiting(waiting) => Some(waiting),
                _ => None,
            })
        };
        let has_news = || waiting().any(|waiting| waiting.has_news());
        // Of two kinds that are waited for, guides take longer.
        let any_guide = waiting().any(|waiting| waiting.compilation.is_some());
        match (&self.admission.guides, &self.admission.adapters) {
            (Some(guides), _) if any_guide => guides.wait(has_news, IDLE_WAIT),
            (_, Some(adapters)) => adapters.wait(has_news, IDLE_WAIT),
            _ => {}
        }
    }

    /// Refuses a request that was taken in, now if it is in the batch.
    fn refuse_in_flight(&mut self, id: RequestId, error: Error, batch: &mut Batch) {
        match batch.iter().position(|(here, _)| *here == id) {
            Some(place) => {
                let (_, request) = batch.remove(place);
                self.forget(id);
                self.refuse(request, error);
            }
            None => {
                if let Some(in_flight) = self.in_flight.get_mut(id) {
                    in_flight.stage = Stage::Refused(error);
                }
            }
        }
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
                cancel(&mut self.manager, in_flight.sequences);
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
                Event::Admitted(id) => {
                    if let Some((answer, _)) = self.in_flight.row_mut(id) {
                        answer.times.admission.get_or_insert(step_start);
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
                        cancel(&mut self.manager, failed);
                        // As above.
                        self.must_settle = true;
                    }
                }
                Event::Paused(id) => log::debug!("request {id} is paused for want of KV blocks"),
            }
        }
    }

    /// Releases the ended requests of this batch, and reschedules the others.
    fn finish(&mut self, batch: &mut Batch, clock: &mut StepClock) -> Result<(), StepError> {
        let timestamps = clock.finish();
        let mut finals = Vec::new();
        let mut staying = Batch::new();
        for (id, request) in batch.drain(..) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            in_flight.presence = Presence::Rescheduled;
            if request.is_cancelled() {
                // Triton would not show it again, and a release would not free its slot.
                self.forget(id);
                self.hand_to_triton(request);
                continue;
            }
            match &in_flight.stage {
                Stage::Refused(error) => {
                    let error = error.clone();
                    self.forget(id);
                    self.refuse(request, error);
                }
                Stage::Ended => finals.extend(self.release(id, request, &timestamps)),
                _ if in_flight.is_alone() => {
                    in_flight.presence = Presence::Here;
                    staying.push((id, request));
                }
                _ => {
                    if let Err((request, error)) = request.reschedule() {
                        self.forget(id);
                        self.fail(request, error);
                    }
                }
            }
        }
        *batch = staying;
        if let Some(num_sequences) = clock.num_computed()
            && let Err(error) = self.instance.report_batch(num_sequences, &timestamps)
        {
            log::debug!("a step could not be counted: {error}");
        }
        if !finals.is_empty() {
            self.responder.finish(finals)?;
        }
        self.record(clock)
    }

    /// Releases a request that has ended. Returns its answer, to be sent.
    fn release(
        &mut self,
        id: RequestId,
        request: Request,
        timestamps: &Timestamps,
    ) -> Option<Answer> {
        let gone = self.in_flight.remove(id)?;
        let success = gone
            .answer
            .as_ref()
            .is_some_and(|answer| !answer.has_error());
        if !gone.is_warm_up {
            self.report(&request, success, &gone.timestamps(timestamps));
        }
        request.release();
        if let Some(turn) = gone.turn {
            let answer = gone.answer.as_deref();
            let answer = answer.filter(|answer| success && !answer.has_failed());
            let ended = match answer.map(Answer::rows) {
                Some([row, ..]) => turn.end(row.tokens()),
                _ => turn.abandon(),
            };
            self.ended_turns.push_back(ended);
        }
        let answer = gone.answer?;
        self.slots_in_doubt.note(gone.correlation_id, &gone.factory);
        Some(*answer)
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

    /// Answers the requests of the batch, and those that were not read yet, with the step's error. Those that Triton holds
    /// are answered when it hands them over again.
    pub(super) fn fail_all(
        &mut self,
        batch: &mut Batch,
        untaken: impl Iterator<Item = Request>,
        error: &StepError,
    ) {
        // The responder must be done with them first.
        if let Err(gone) = self.collect_streams() {
            log::error!("{gone}");
        }
        let taken = batch.drain(..).map(|(_, request)| request);
        for request in taken.chain(untaken) {
            self.refuse(request, error.clone().into());
        }
    }

    /// Drops a request from all tables, without answering it.
    pub(super) fn forget(&mut self, id: RequestId) {
        if let Some(gone) = self.in_flight.remove(id) {
            cancel(&mut self.manager, gone.sequences);
            self.ended_turns.extend(gone.turn.map(Turn::abandon));
            match gone.answer {
                Some(answer) => self.responder.discard(answer),
                // As for a request that is refused. Without a responder the instance has failed.
                None => drop(self.responder.refused(gone.factory)),
            }
        }
    }

    /// Lets Triton answer a cancelled request of a sequence: it frees the slot at once, where a release would leave
    /// it taken until the sequence idles out. Another is answered here.
    pub(super) fn hand_to_triton(&mut self, request: Request) {
        if !std::mem::replace(&mut self.has_waited, true) {
            std::thread::sleep(CANCELLATION_GRACE);
        }
        if let Err((request, _)) = request.reschedule() {
            self.fail(
                request,
                Error::new(ErrorCode::Cancelled, "the request was cancelled"),
            );
        }
    }

    /// Refuses a request; a cancelled one is Triton's to answer.
    pub(super) fn refuse(&mut self, request: Request, error: Error) {
        if request.is_warm_up() {
            request.fail(error);
        } else if request.is_cancelled() {
            self.hand_to_triton(request);
        } else {
            self.end(request, error);
        }
    }

    /// Ends, with an error, a request whose sequence Triton has already ended.
    fn fail(&mut self, mut request: Request, error: Error) {
        self.keep_model(&mut request);
        self.report(&request, false, &instant_timestamps());
        request.fail(error);
    }

    /// Ends a request, and its sequence, with an error.
    fn end(&mut self, mut request: Request, error: Error) {
        let key = match request.has_left_its_call() {
            false => request.correlation_id().ok().map(CorrelationKey::from),
            true => None,
        };
        let factory = request.response_factory();
        self.fail(request, error);
        if let (Some(key), Ok(factory)) = (key, factory) {
            self.slots_in_doubt.note(key, &factory);
        }
    }

    /// Frees the slots of sequences that have ended in an earlier call, if Triton has not.
    pub(super) fn free_slots(&mut self) {
        let (name, data_type) = match self.admission.config.input {
            InputKind::Text => (c"text_input", DataType::Bytes),
            InputKind::Ids => (c"input_ids", DataType::Int32),
        };
        let shape: &[i64] = match self.admission.config.max_batch_size > 0 {
            true => &[1, 1],
            false => &[1],
        };
        for key in self.slots_in_doubt.take_ripe() {
            if self.in_flight.find(&key).is_some() {
                // A client has taken the sequence's id again, and with it the slot.
                continue;
            }
            let freed =
                key.tell(|sequence| self.served.end_sequence(sequence, name, data_type, shape));
            if let Some(Err(error)) = freed {
                log::debug!("the sequence of a cancelled request could not be ended: {error}");
            }
        }
    }

    /// Keeps the model loaded a little longer than the request: Triton's clean-up after a release still uses it.
    fn keep_model(&mut self, request: &mut Request) {
        // Without a responder the instance has failed, and the model will be unloaded in any case.
        if let Ok(factory) = request.response_factory() {
            let _ = self.responder.refused(factory);
        }
    }

    /// Counts an ended request in Triton's statistics. Before its release, which ends our hold on it.
    pub(super) fn report(&self, request: &Request, success: bool, timestamps: &Timestamps) {
        if let Err(error) = self.instance.report_request(request, success, timestamps) {
            log::debug!("a request could not be counted: {error}");
        }
    }
}

/// Reads or prepares a request. A panic there is that request's own: nothing else has been touched.
fn alone<T>(read: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch(read).unwrap_or_else(|panic| Err(unreadable(&panic)))
}

/// The error of a request that a panic ended.
fn unreadable(panic: &str) -> Error {
    let error = format!("the request could not be read: {panic}");
    log::error!("{error}");
    Error::internal(error)
}

/// Gives the manager all sequences of a request, or none.
fn add(manager: &mut BatchManager, new: NewBranches) -> Result<(), RequestError> {
    let sequences = new.branches();
    let mut requests = new.requests();
    let added = requests.try_for_each(|request| manager.add(request));
    added.inspect_err(|_| cancel(manager, sequences))
}

/// Cancels all sequences of a request.
fn cancel(manager: &mut BatchManager, sequences: Branches) {
    for sequence in sequences.ids() {
        manager.cancel(sequence);
    }
}

/// The timestamps of a request that no model has seen.
pub(super) fn instant_timestamps() -> Timestamps {
    let now = now_ns();
    Timestamps {
        exec_start: now,
        compute_start: now,
        compute_end: now,
        exec_end: now,
    }
}

/// The times of a step, on the records' clock and on Triton's.
pub(super) struct StepClock {
    pub(super) start: Instant,
    timestamps: Timestamps,
    /// The step that landed in this call.
    landed: Option<LandedStep>,
}

impl StepClock {
    pub(super) fn start() -> Self {
        Self {
            start: Instant::now(),
            timestamps: instant_timestamps(),
            landed: None,
        }
    }

    fn model_started(&mut self) {
        self.timestamps.compute_start = now_ns();
    }

    fn model_ended(&mut self, landed: Option<LandedStep>) {
        self.timestamps.compute_end = now_ns();
        self.landed = landed;
    }

    /// Sequences of the step that landed; `None` if nothing was computed.
    fn num_computed(&self) -> Option<u64> {
        let landed = self.landed.as_ref()?;
        Some(landed.stats.num_scheduled as u64).filter(|num_sequences| *num_sequences > 0)
    }

    /// The timestamps for Triton; the step ends now.
    fn finish(&mut self) -> Timestamps {
        self.timestamps.exec_end = now_ns();
        self.timestamps
    }
}
