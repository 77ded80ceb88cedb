//! Requests that end: answered, refused, forgotten, or left to Triton, and the slots of their sequences.

use std::ffi::CStr;
use std::time::Instant;

use crate::driver::correlation::CorrelationKey;
use crate::driver::in_flight::{Presence, Stage};
use crate::driver::step_clock::{StepClock, instant_timestamps};
use crate::driver::step_driver::{Batch, StepDriver};
use crate::driver::turn::Turn;
use crate::response::answer::Answer;
use inflight_base::{RequestId, StepError};
use inflight_config::InputKind;
use inflight_triton::{DataType, Error, ErrorCode, Request, Timestamps};

impl StepDriver {
    /// Ends the requests that were stopped, or whose time limit has passed, with what they have. One that
    /// only waits for the rest of its lockstep batch is complete: it waits no longer.
    pub(super) fn end_early(&mut self, now: Instant) -> Result<(), StepError> {
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

    /// Whether the request `id` will not come back from Triton.
    pub(crate) fn is_lost(&mut self, id: RequestId, now: Instant) -> bool {
        let max_absence = self.max_absence;
        self.in_flight
            .get_mut(id)
            .is_some_and(|in_flight| in_flight.is_lost(now, max_absence))
    }

    /// Releases the ended requests of this batch, and reschedules the others.
    pub(super) fn finish(
        &mut self,
        batch: &mut Batch,
        clock: &mut StepClock,
    ) -> Result<(), StepError> {
        let timestamps = clock.finish();
        let mut finals = Vec::new();
        let mut staying = Batch::new();
        let mut is_any_rescheduled = false;
        for (id, request) in batch.drain(..) {
            let Some(in_flight) = self.in_flight.get_mut(id) else {
                continue;
            };
            in_flight.presence = Presence::Rescheduled;
            if request.is_cancelled() {
                // Triton would not show it again, and a release would not free its slot.
                self.forget(id);
                self.leave(request);
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
                _ => match request.reschedule() {
                    Ok(()) => is_any_rescheduled = true,
                    Err((request, error)) => {
                        self.forget(id);
                        self.fail(request, error);
                    }
                },
            }
        }
        let is_last = staying.is_empty() && !is_any_rescheduled;
        *batch = staying;
        if let Some(num_sequences) = clock.num_computed()
            && let Err(error) = self.instance.report_batch(num_sequences, &timestamps)
        {
            log::debug!("a step could not be counted: {error}");
        }
        if !finals.is_empty() {
            self.responder.finish(finals)?;
        }
        self.record(clock)?;
        match is_last {
            true => self.let_all_leave(),
            false => self.let_leave(Instant::now()),
        }
        Ok(())
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
        self.slots_in_doubt
            .note(gone.correlation_id, gone.factory.is_cancelled());
        Some(*answer)
    }

    /// Notes that Triton may not free the slot of a request that was cancelled.
    pub(crate) fn doubt_slot(&mut self, id: RequestId) {
        if let Some(lost) = self.in_flight.get(id) {
            self.slots_in_doubt
                .note(lost.correlation_id.clone(), lost.factory.is_cancelled());
        }
    }

    /// Drops a request from all tables, without answering it.
    pub(crate) fn forget(&mut self, id: RequestId) {
        if let Some(gone) = self.in_flight.remove(id) {
            gone.sequences.cancel(&mut self.manager);
            self.ended_turns.extend(gone.turn.map(Turn::abandon));
            match gone.answer {
                Some(answer) => self.responder.discard(answer),
                // As for a request that is refused. Without a responder the instance has failed.
                None => drop(self.responder.refused(gone.factory)),
            }
        }
    }

    /// Answers the requests of the batch, and those that were not read yet, with the step's error. Those that Triton
    /// holds are answered when it hands them over again.
    pub(crate) fn fail_all(
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
        self.let_all_leave();
    }

    /// Refuses a request; a cancelled one is Triton's to answer.
    pub(crate) fn refuse(&mut self, request: Request, error: Error) {
        if request.is_warm_up() {
            request.fail(error);
        } else if request.is_cancelled() {
            self.leave(request);
        } else {
            self.end(request, error);
        }
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
            self.slots_in_doubt.note(key, factory.is_cancelled());
        }
    }

    /// Ends, with an error, a request whose sequence Triton has already ended.
    fn fail(&mut self, mut request: Request, error: Error) {
        self.keep_model(&mut request);
        self.report(&request, false, &instant_timestamps());
        request.fail(error);
    }

    /// Takes a cancelled request that is not in flight any more, until Triton gets it.
    pub(crate) fn leave(&mut self, request: Request) {
        self.leaving.push(request.keep(), Instant::now());
    }

    /// Hands cancelled requests to Triton whose frontends have had time to notice.
    fn let_leave(&mut self, now: Instant) {
        while let Some(request) = self.leaving.pop(now) {
            self.hand_to_triton(request.receive());
        }
    }

    /// Hands all cancelled requests to Triton. Waits for that until their frontends have had time to notice.
    fn let_all_leave(&mut self) {
        if let Some(due) = self.leaving.last_due() {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            self.let_leave(due);
        }
    }

    /// Lets Triton answer a cancelled request of a sequence: it frees the slot at once, where a release would leave
    /// it taken until the sequence idles out. Another is answered here.
    fn hand_to_triton(&mut self, request: Request) {
        if let Err((request, _)) = request.reschedule() {
            self.fail(request, cancelled());
        }
    }

    /// Answers the cancelled requests that no step has handed to Triton, and has their slots freed: of those that were
    /// to come back, Triton has ended all.
    pub(crate) fn end_leaving(&mut self, now: Instant) {
        while let Some(request) = self.leaving.pop(now) {
            log::debug!("a cancelled request is ended between two steps");
            self.end(request.receive(), cancelled());
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
    pub(crate) fn report(&self, request: &Request, success: bool, timestamps: &Timestamps) {
        if let Err(error) = self.instance.report_request(request, success, timestamps) {
            log::debug!("a request could not be counted: {error}");
        }
    }

    /// Frees the slots of sequences that have ended in an earlier call, if Triton has not.
    pub(crate) fn free_slots(&mut self) {
        for key in self.slots_in_doubt.take_ripe() {
            if self.in_flight.find(&key).is_some() {
                // A client has taken the sequence's id again, and with it the slot.
                continue;
            }
            let (name, data_type, shape) = self.smallest_input();
            let freed =
                key.tell(|sequence| self.served.end_sequence(sequence, name, data_type, shape));
            if let Some(Err(error)) = freed {
                log::debug!("the sequence of a cancelled request could not be ended: {error}");
            }
        }
    }

    /// Ends a sequence that is not iterative, by a request of our own. Returns whether that is on its way.
    pub(crate) fn close_sequence(&self, key: &CorrelationKey) -> bool {
        let (name, data_type, shape) = self.smallest_input();
        let closed =
            key.tell(|sequence| self.served.close_sequence(sequence, name, data_type, shape));
        if let Some(Err(error)) = &closed {
            log::debug!("an open conversation could not be ended: {error}");
        }
        matches!(closed, Some(Ok(())))
    }

    /// The input of a request of our own: its name, its type, and its shape.
    fn smallest_input(&self) -> (&'static CStr, DataType, &'static [i64]) {
        let (name, data_type) = match self.admission.config.input {
            InputKind::Text => (c"text_input", DataType::Bytes),
            InputKind::Ids => (c"input_ids", DataType::Int32),
        };
        let shape: &[i64] = match self.admission.config.has_batch_dim {
            true => &[1, 1],
            false => &[1],
        };
        (name, data_type, shape)
    }
}

fn cancelled() -> Error {
    Error::new(ErrorCode::Cancelled, "the request was cancelled")
}
