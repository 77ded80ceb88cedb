//! The iterative driver: one Execute call is one step of the batch manager.
//!
//! ```text
//! take in      new requests join or are refused, cancelled ones leave, known ones are here again;
//!              a request with a guide joins when that is compiled
//! lend         what the last step generated goes to the responder
//! step         plan, run, apply
//! give back    the ended are released and answered, the others rescheduled
//! ```
//!
//! Triton never says that a sequence has ended on its side. So a request that is not in the batch is
//! looked after each step, and now and then while none comes: if its client gave it up, it is forgotten. With the `direct` strategy every
//! request is in every batch; with `oldest` a batch may lack some, which are computed all the same and
//! answered when they are here again.

use std::time::{Duration, Instant, SystemTime};

use crate::backend::driver::correlation::CorrelationKey;
use crate::backend::driver::in_flight::{InFlight, InFlightTable};
use crate::backend::observe::observer::StepRecord;
use crate::backend::request::admission::Admission;
use crate::backend::request::branches::{Branches, NewBranches};
use crate::backend::response::answer::Answer;
use crate::backend::response::responder::{Lent, Responder};
use crate::base::{RequestError, RequestId, StepError, Tokens};
use crate::config::InputKind;
use crate::engine::Event;
use crate::guidance::Compilation;
use crate::manager::{BatchManager, LandedStep};
use crate::sampling::FinishReason;
use crate::triton::lifecycle::catch;
use crate::triton::{
    DataType, Error, ErrorCode, Instance, Request, ResponseFactory, ServedModel, Timestamps, now_ns,
};

/// The requests of one Execute call that are in flight, in Triton's order.
type Batch = Vec<(RequestId, Request)>;

/// How long a frontend is given to finish with a cancellation before Triton answers the request. The
/// gRPC frontend of server 2.51 releases a stream's state twice, and crashes, if the answer comes while
/// it is still at it; this makes that rare (13 crashes in 1280 cancellations became 1), not impossible.
const CANCELLATION_GRACE: Duration = Duration::from_millis(5);

/// How long a step that has nothing else to do waits for a guide: a client may give its request up.
const GUIDE_WAIT: Duration = Duration::from_millis(5);

/// One instance's requests and their batch manager.
pub struct Driver {
    instance: Instance,
    served: ServedModel,
    admission: Admission,
    manager: BatchManager,
    responder: Responder,
    in_flight: InFlightTable,
    /// Requests in flight that the manager does not know yet.
    compiling: Vec<Compiling>,
    events: Vec<Event>,
    /// Comes back from the responder with every loan, so that lending takes no memory.
    loan: Vec<Lent>,
    num_requests_seen: u64,
    /// Whether a client's request has been here.
    has_served: bool,
    /// Whether this Execute call has let a frontend finish with its cancellations.
    has_waited: bool,
    /// Whether a request was given up that may be in a step that is on its way.
    must_settle: bool,
    /// Whether the metrics say that nothing is active.
    shown_idle: bool,
    started: Instant,
    /// When the last Execute call ended.
    last_step: Instant,
    max_absence: Duration,
}

/// A request whose guide is being compiled.
struct Compiling {
    id: RequestId,
    new_branches: NewBranches,
    compilation: Compilation,
}

impl Driver {
    /// A driver without requests. Triton drops a sequence that is `max_absence` without a step.
    pub fn new(
        instance: Instance,
        served: ServedModel,
        admission: Admission,
        manager: BatchManager,
        responder: Responder,
        max_absence: Duration,
    ) -> Self {
        Self {
            instance,
            served,
            admission,
            manager,
            responder,
            in_flight: InFlightTable::default(),
            compiling: Vec::new(),
            events: Vec::new(),
            loan: Vec::new(),
            num_requests_seen: 0,
            has_served: false,
            has_waited: false,
            must_settle: false,
            shown_idle: false,
            started: Instant::now(),
            last_step: Instant::now(),
            max_absence,
        }
    }

    /// One step over `requests` and all others in flight.
    ///
    /// # Errors
    /// The step failed. Every request has been answered with the error; the instance must take no more.
    pub fn execute(
        &mut self,
        mut requests: impl ExactSizeIterator<Item = Request>,
    ) -> Result<(), StepError> {
        let mut clock = StepClock::start();
        self.has_waited = false;
        let mut batch = Batch::with_capacity(requests.len());
        // A panic must not drop the batch here: that would answer requests whose answers are lent.
        let result = catch(|| {
            for request in requests.by_ref() {
                self.take_in(request, &mut batch, clock.start);
            }
            if batch.len() < self.in_flight.len() {
                self.forget_the_lost(clock.start);
            }
            self.step_over(&mut batch, &mut clock)?;
            // Triton waits in this call for the requests of a warm-up.
            while !batch.is_empty() {
                clock = StepClock::start();
                self.step_over(&mut batch, &mut clock)?;
            }
            Ok(())
        });
        self.last_step = Instant::now();
        result
            .unwrap_or_else(|panic| Err(StepError(panic)))
            .inspect_err(|error| self.fail_all(&mut batch, requests, error))
    }

    /// Forgets the requests that Triton has ended, where no step has come for as long as `max_silence`: a step looks
    /// after them itself.
    ///
    /// # Errors
    /// A step that was on its way failed. The instance must take no more.
    pub fn look_after(&mut self, now: Instant, max_silence: Duration) -> Result<(), StepError> {
        let silence = now.saturating_duration_since(self.last_step);
        if self.in_flight.is_empty() || silence < max_silence {
            return Ok(());
        }
        self.forget_the_lost(now);
        self.show_idle()
    }

    /// Whether a client's request has been here.
    pub fn has_served(&self) -> bool {
        self.has_served
    }

    /// Whether there has been no request for that long.
    pub fn is_idle_for(&self, silence: Duration, now: Instant) -> bool {
        self.in_flight.is_empty() && now.saturating_duration_since(self.last_step) >= silence
    }

    /// One step over the batch, from which all go but the requests of a warm-up that have not ended.
    fn step_over(&mut self, batch: &mut Batch, clock: &mut StepClock) -> Result<(), StepError> {
        self.end_early(clock.start)?;
        self.join_compiled();
        self.lend(batch)?;
        self.step(clock)?;
        self.give_back(batch, clock)
    }

    fn take_in(&mut self, request: Request, batch: &mut Batch, now: Instant) {
        let (correlation_id, flags) = match (request.correlation_id(), request.flags()) {
            (Ok(id), Ok(flags)) => (id, flags),
            (Err(error), _) | (_, Err(error)) => return self.refuse(request, error),
        };
        if correlation_id.is_none() {
            // A null request, which fills a gap of a direct batch, wants no outputs. One of a warm-up wants all.
            if request.wants_nothing() {
                return request.dismiss();
            }
            let key = CorrelationKey::WarmUp(self.num_requests_seen);
            return self.admit(request, key, batch, now);
        }
        let key = CorrelationKey::from(correlation_id);
        let known = self.in_flight.find(&key);
        if request.only_ends_its_sequence() {
            return match known {
                None => request.dismiss(),
                // A client has taken the sequence's id again.
                Some(_) => request.fail_beside_sequence(in_flight_already()),
            };
        }
        self.has_served = true;
        match (known, flags.is_start()) {
            (Some(id), false) => self.take_back(id, request, batch),
            (Some(id), true) if !self.is_lost(id, now) => self.refuse_beside(request),
            (Some(id), true) => {
                self.forget(id);
                self.admit(request, key, batch, now);
            }
            (None, true) => self.admit(request, key, batch, now),
            (None, false) => {
                let error = "the sequence of this request is not in flight: it has ended";
                self.refuse(request, Error::invalid(error));
            }
        }
    }

    /// A request that was rescheduled is here again.
    fn take_back(&mut self, id: RequestId, mut request: Request, batch: &mut Batch) {
        let Some(in_flight) = self.in_flight.get_mut(id) else {
            return;
        };
        if in_flight.identity != request.identity() {
            return self.refuse_beside(request);
        }
        if request.is_cancelled() {
            self.forget(id);
            return self.hand_to_triton(request);
        }
        if let Some(answer) = &in_flight.answer {
            request.answered_by(&answer.factory);
        }
        in_flight.is_here = true;
        in_flight.absent_since = None;
        batch.push((id, request));
    }

    /// A request that starts.
    fn admit(
        &mut self,
        mut request: Request,
        key: CorrelationKey,
        batch: &mut Batch,
        now: Instant,
    ) {
        if request.is_cancelled() {
            return self.hand_to_triton(request);
        }
        match alone(|| self.admission.asks_to_stop(&request)) {
            Ok(false) => {}
            Ok(true) => return self.stop(request, key, batch, now),
            Err(error) => return self.refuse(request, error),
        }
        let id = self.next_id();
        let admitted = self.claim_client_id(&request, now).and_then(|client_id| {
            let admitted = alone(|| self.admission.read(&mut request, id, now))?;
            let branches = admitted.new_branches.branches();
            self.num_requests_seen = id.0 + branches.len() as u64;
            match admitted.compilation {
                None => join(&mut self.manager, admitted.new_branches)?,
                Some(compilation) => self.compiling.push(Compiling {
                    id,
                    new_branches: admitted.new_branches,
                    compilation,
                }),
            }
            let mut in_flight = InFlight::new(key, &request, branches, admitted.answer);
            if let (true, Some(answer)) = (in_flight.is_warm_up(), &mut in_flight.answer) {
                answer.is_warm_up = true;
            }
            in_flight.client_id = client_id;
            in_flight.deadline = admitted.deadline;
            Ok(in_flight)
        });
        let in_flight = match admitted {
            Ok(in_flight) => in_flight,
            Err(error) => return self.refuse(request, error),
        };
        self.in_flight.insert(id, in_flight);
        batch.push((id, request));
    }

    /// A request that ends the one in flight with its request id. Both are answered in this step.
    fn stop(&mut self, mut request: Request, key: CorrelationKey, batch: &mut Batch, now: Instant) {
        let answer = alone(|| self.admission.answer_to_stop(&mut request, now));
        let client_id = request.client_id().map(Option::unwrap_or_default);
        let stopped = client_id.and_then(|client_id| match client_id {
            "" => Err(Error::invalid(
                "option 'stop': the request to be stopped is the one with the same request id, and \
                 this request has none",
            )),
            client_id => Ok(self.in_flight.find_client(client_id)),
        });
        match (answer, stopped) {
            (Err(error), _) | (_, Err(error)) => self.refuse(request, error),
            (Ok(answer), Ok(stopped)) => {
                if let Some(stopped) = stopped.and_then(|id| self.in_flight.get_mut(id)) {
                    stopped.is_stopped = true;
                }
                let id = self.next_id();
                let branches = Branches::new(id, 1);
                let mut in_flight = InFlight::new(key, &request, branches, answer);
                in_flight.end(FinishReason::Cancelled);
                self.in_flight.insert(id, in_flight);
                batch.push((id, request));
            }
        }
    }

    fn next_id(&mut self) -> RequestId {
        let id = RequestId(self.num_requests_seen);
        self.num_requests_seen += 1;
        id
    }

    /// The client's name of a new request, which nothing in flight may have. Before the prompt is read,
    /// which can take a while.
    fn claim_client_id(&mut self, request: &Request, now: Instant) -> Result<String, Error> {
        let client_id = request.client_id()?.unwrap_or_default();
        if let Some(other) = self.in_flight.find_client(client_id) {
            if !self.is_lost(other, now) {
                return Err(RequestError::InFlight(client_id.to_owned()).into());
            }
            self.forget(other);
        }
        Ok(client_id.to_owned())
    }

    /// Whether the request `id` will not come back.
    fn is_lost(&mut self, id: RequestId, now: Instant) -> bool {
        let max_absence = self.max_absence;
        self.in_flight
            .get_mut(id)
            .is_some_and(|in_flight| in_flight.is_lost(now, max_absence))
    }

    /// Looks after the requests that are not in this batch.
    fn forget_the_lost(&mut self, now: Instant) {
        let mut lost = Vec::new();
        for (id, in_flight) in self.in_flight.iter_mut() {
            if !in_flight.is_here {
                in_flight.absent_since.get_or_insert(now);
                if in_flight.is_lost(now, self.max_absence) {
                    lost.push(id);
                }
            }
        }
        for id in lost {
            log::debug!("request {id} was given up while Triton held it");
            self.forget(id);
        }
    }

    /// Ends the requests that were stopped, or whose own time limit has passed, with what they have. One that
    /// only waits for the rest of its lockstep batch is complete: it waits no longer.
    fn end_early(&mut self, now: Instant) -> Result<(), StepError> {
        let are_beams_out = self.in_flight.iter_mut().any(|(_, in_flight)| {
            let mut branches = in_flight.branches.ids();
            in_flight.early_end(now).is_some()
                && branches.any(|branch| self.manager.are_beams_out(branch))
        });
        if are_beams_out {
            // What they have is on its way.
            self.manager.settle(&mut self.events)?;
            self.hear_events(now);
        }
        for (_, in_flight) in self.in_flight.iter_mut() {
            let Some(reason) = in_flight.early_end(now) else {
                continue;
            };
            for branch in in_flight.branches.ids() {
                let ended = self.manager.ended(branch);
                let found = self.manager.best_so_far(branch);
                self.manager.cancel(branch);
                if let Some(answer) = in_flight.answer.as_mut().filter(|_| !found.is_empty()) {
                    answer.take_found(found, now);
                }
                in_flight.end_branch(branch, ended.unwrap_or(reason));
            }
        }
        Ok(())
    }

    /// Takes in the requests whose guides are compiled, and refuses those whose guides cannot be. Waits a
    /// moment for one where there is nothing else to do.
    fn join_compiled(&mut self) {
        if self.compiling.is_empty() {
            return;
        }
        let has_ended = |in_flight: &InFlight| in_flight.has_ended || in_flight.refused.is_some();
        let others_wait = self.compiling.len() < self.in_flight.len()
            || self
                .in_flight
                .iter_mut()
                .any(|(_, in_flight)| has_ended(in_flight));
        if let Some(guides) = &self.admission.guides
            && self.manager.is_idle()
            && !others_wait
        {
            let is_any_done = || self.compiling.iter().any(|one| one.compilation.is_done());
            guides.wait(is_any_done, GUIDE_WAIT);
        }
        let now = Instant::now();
        for compiling in std::mem::take(&mut self.compiling) {
            let id = compiling.id;
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            if in_flight.has_ended {
                continue;
            }
            let joined = match compiling.compilation.poll(now) {
                None => {
                    self.compiling.push(compiling);
                    continue;
                }
                Some(Err(error)) => Err(error),
                Some(Ok(guide)) => join(&mut self.manager, compiling.new_branches.guided(guide)),
            };
            in_flight.refused = joined.err().map(Error::from);
        }
    }

    /// Lends to the responder the streams of this batch that have enough for a response.
    fn lend(&mut self, batch: &Batch) -> Result<(), StepError> {
        for &(id, _) in batch {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            // What is new of an ended one goes with its final response.
            let is_due = |answer: &&mut Box<Answer>| answer.stream && answer.is_due();
            if !in_flight.has_ended && in_flight.answer.as_mut().filter(is_due).is_some() {
                self.loan
                    .extend(in_flight.answer.take().map(|answer| (id, answer)));
            }
        }
        if self.loan.is_empty() {
            return Ok(());
        }
        self.responder.lend(std::mem::take(&mut self.loan))
    }

    /// Plan, run, apply.
    fn step(&mut self, clock: &mut StepClock) -> Result<(), StepError> {
        clock.model_started();
        let launched = self.manager.launch();
        self.take_loan_back()?;
        launched?;
        let landed = self.manager.land(&mut self.events)?;
        self.settle()?;
        clock.model_ended(landed);
        self.hear_events(clock.start);
        if self.must_settle {
            self.settle()?;
            self.hear_events(clock.start);
        }
        Ok(())
    }

    /// Waits for the steps that are on their way, if what was given up may be in them.
    fn settle(&mut self) -> Result<(), StepError> {
        if std::mem::take(&mut self.must_settle) {
            self.manager.settle(&mut self.events)?;
        }
        Ok(())
    }

    fn take_loan_back(&mut self) -> Result<(), StepError> {
        let Some(mut loan) = self.responder.take_back()? else {
            return Ok(());
        };
        for (id, answer) in loan.drain(..) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            let has_failed = answer.has_failed();
            in_flight.answer = Some(answer);
            if has_failed {
                cancel(&mut self.manager, in_flight.branches);
                // It is answered in this call, and holds no blocks then.
                self.must_settle = true;
                in_flight.end(FinishReason::Cancelled);
            }
        }
        self.loan = loan;
        Ok(())
    }

    fn hear_events(&mut self, step_start: Instant) {
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
                            self.in_flight.end_branch(id, reason);
                        }
                    }
                }
                Event::Hypotheses(id, found) => {
                    if let Some((answer, _)) = self.in_flight.row_mut(id) {
                        answer.take_found(found, now);
                    }
                }
                Event::Finished(id, reason) => {
                    if let Some(failed) = self.in_flight.end_branch(id, reason) {
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
    fn give_back(&mut self, batch: &mut Batch, clock: &mut StepClock) -> Result<(), StepError> {
        let timestamps = clock.finish();
        let mut finals = Vec::new();
        let mut warming = Batch::new();
        for (id, request) in batch.drain(..) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            in_flight.is_here = false;
            if request.is_cancelled() {
                // Triton would not show it again, and a release would not free its slot.
                self.forget(id);
                self.hand_to_triton(request);
            } else if let Some(error) = in_flight.refused.take() {
                self.forget(id);
                self.refuse(request, error);
            } else if in_flight.has_ended {
                let is_warm_up = in_flight.is_warm_up();
                let key = in_flight.correlation_id.clone();
                let answer = self.in_flight.remove(id).and_then(|gone| gone.answer);
                let success = answer.as_ref().is_some_and(|answer| !answer.has_error());
                if !is_warm_up {
                    self.report(&request, success, &timestamps);
                }
                request.release();
                if let Some(answer) = answer {
                    self.free_slot(&key, &answer.factory);
                    finals.push(*answer);
                }
            } else if in_flight.is_warm_up() {
                in_flight.is_here = true;
                warming.push((id, request));
            } else if let Err((request, error)) = request.reschedule() {
                self.forget(id);
                self.fail(request, error);
            }
        }
        *batch = warming;
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

    /// Writes the step down, and that nothing is active any more where it was the last.
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

    /// Shows that nothing is active any more, once.
    fn show_idle(&mut self) -> Result<(), StepError> {
        if self.manager.is_idle() && !self.shown_idle {
            // There may be no other call in which what was given up could come back.
            self.manager.settle(&mut self.events)?;
            self.events.clear();
            self.responder.idle(self.manager.kv_usage())?;
            self.shown_idle = true;
        }
        Ok(())
    }

    /// Answers the requests of the batch, and those that were still to be taken in, with the step's error. Those
    /// that Triton holds are answered when they come here again.
    fn fail_all(
        &mut self,
        batch: &mut Batch,
        untaken: impl Iterator<Item = Request>,
        error: &StepError,
    ) {
        // The responder must be done with them first.
        if let Err(gone) = self.take_loan_back() {
            log::error!("{gone}");
        }
        let taken = batch.drain(..).map(|(_, request)| request);
        for request in taken.chain(untaken) {
            self.refuse(request, error.clone().into());
        }
    }

    /// Drops all that is known of a request, without a word to anybody.
    fn forget(&mut self, id: RequestId) {
        if let Some(gone) = self.in_flight.remove(id) {
            cancel(&mut self.manager, gone.branches);
            if let Some(answer) = gone.answer {
                self.responder.discard(answer);
            }
        }
    }

    /// Lets Triton answer a cancelled request: it frees the slot at once, where a release would leave
    /// it taken until the sequence idles out.
    fn hand_to_triton(&mut self, request: Request) {
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
    fn refuse(&mut self, request: Request, error: Error) {
        if request.correlation_id().is_ok_and(|id| id.is_none()) {
            // Server 2.51 crashes, more often than not, when a warm-up is answered with an error.
            log::warn!("a request of the model_warmup is not served: {error}");
            request.dismiss();
        } else if request.is_cancelled() {
            self.hand_to_triton(request);
        } else {
            self.end(request, error);
        }
    }

    /// Ends a request with an error whose sequence Triton does not know any more.
    fn fail(&mut self, mut request: Request, error: Error) {
        self.keep_model(&mut request);
        self.report(&request, false, &instant_timestamps());
        request.fail(error);
    }

    /// Ends a request, and its sequence, with an error.
    fn end(&mut self, mut request: Request, error: Error) {
        let key = request.correlation_id().ok().map(CorrelationKey::from);
        let factory = request.response_factory();
        self.fail(request, error);
        if let (Some(key), Ok(factory)) = (key, factory) {
            self.free_slot(&key, &factory);
        }
    }

    /// Frees the slot of a request that has been released, if it is in doubt whether the release has. Triton frees no
    /// slot of a request that was cancelled before its release, and it may have been since we have looked.
    fn free_slot(&self, key: &CorrelationKey, factory: &ResponseFactory) {
        if !factory.is_cancelled() {
            return;
        }
        let input = self.admission.config.input;
        let batches = self.admission.config.max_batch_size > 0;
        let freed = key.tell(|sequence| {
            let (name, data_type) = match input {
                InputKind::Text => (c"text_input", DataType::Bytes),
                InputKind::Ids => (c"input_ids", DataType::Int32),
            };
            let shape: &[i64] = if batches { &[1, 1] } else { &[1] };
            self.served.end_sequence(sequence, name, data_type, shape)
        });
        if let Some(Err(error)) = freed {
            log::debug!("the sequence of a cancelled request could not be ended: {error}");
        }
    }

    /// Ends a request with an error that shares its correlation id with one in flight, which goes on.
    fn refuse_beside(&self, request: Request) {
        self.report(&request, false, &instant_timestamps());
        request.fail_beside_sequence(in_flight_already());
    }

    /// What a release sets off in Triton needs the model a little longer than the request does.
    fn keep_model(&mut self, request: &mut Request) {
        // Without a responder the instance has failed, and the model will be unloaded in any case.
        if let Ok(factory) = request.response_factory() {
            let _ = self.responder.refused(factory);
        }
    }

    /// Counts an ended request in Triton's statistics. Before its release, which ends our hold on it.
    fn report(&self, request: &Request, success: bool, timestamps: &Timestamps) {
        if let Err(error) = self.instance.report_request(request, success, timestamps) {
            log::debug!("a request could not be counted: {error}");
        }
    }
}

/// Reads a request. A panic there is that request's own: nothing else has been touched yet.
fn alone<T>(read: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch(read).unwrap_or_else(|panic| {
        let error = format!("the request could not be read: {panic}");
        log::error!("{error}");
        Err(Error::internal(error))
    })
}

fn in_flight_already() -> Error {
    Error::new(
        ErrorCode::AlreadyExists,
        "another request of this sequence id is in flight; a generation is one request, and each \
         needs a sequence id of its own, or none",
    )
}

/// Gives the manager all branches of a request, or none.
fn join(manager: &mut BatchManager, new_branches: NewBranches) -> Result<(), RequestError> {
    let branches = new_branches.branches();
    let mut requests = new_branches.requests();
    let joined = requests.try_for_each(|request| manager.add(request));
    joined.inspect_err(|_| cancel(manager, branches))
}

/// Gives up all branches of a request.
fn cancel(manager: &mut BatchManager, branches: Branches) {
    for branch in branches.ids() {
        manager.cancel(branch);
    }
}

/// The timestamps of a request that no model has seen.
fn instant_timestamps() -> Timestamps {
    let now = now_ns();
    Timestamps {
        exec_start: now,
        compute_start: now,
        compute_end: now,
        exec_end: now,
    }
}

/// Where the time of a step goes, on the clock of the records and on Triton's.
struct StepClock {
    start: Instant,
    timestamps: Timestamps,
    /// The step that came back in this call.
    landed: Option<LandedStep>,
}

impl StepClock {
    fn start() -> Self {
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

    /// Sequences of the step that came back; `None` if nothing was computed.
    fn num_computed(&self) -> Option<u64> {
        let landed = self.landed.as_ref()?;
        Some(landed.stats.num_scheduled as u64).filter(|num_sequences| *num_sequences > 0)
    }

    /// Triton's view of the step, which ends now.
    fn finish(&mut self) -> Timestamps {
        self.timestamps.exec_end = now_ns();
        self.timestamps
    }
}
