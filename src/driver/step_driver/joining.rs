//! Requests that join the engine: prepared, with their guide and adapter.

use std::time::{Duration, Instant};

use crate::driver::in_flight::{InFlight, Stage, Waiting};
use crate::driver::step_driver::arrivals::{alone, unreadable};
use crate::driver::step_driver::{Batch, StepDriver};
use crate::request::adapter_tensors::copy_piece;
use crate::request::admission::Prepared;
use crate::request::branches::{Branches, NewBranches};
use crate::response::answer::Answer;
use inflight_base::{RequestError, RequestId, SequenceId};
use inflight_sampling::FinishReason;
use inflight_triton::Error;

/// How long an Execute call that has no other work waits for a prompt, a guide or an adapter: a client may cancel its
/// request.
const IDLE_WAIT: Duration = Duration::from_millis(5);

/// How long a step with other work waits for the requests that arrived in its Execute call, so that most of them need
/// not wait for the next one.
const NEWCOMER_WAIT: Duration = Duration::from_micros(500);

/// Bytes that a step copies of adapters that requests bring: less than half a millisecond's worth.
const MAX_COPIED_BYTES: usize = 1 << 20;

/// The same where nobody waits for the step.
const MAX_COPIED_BYTES_IDLE: usize = 16 << 20;

impl StepDriver {
    /// Copies the next pieces of the adapters that requests bring.
    pub(super) fn receive_adapters(&mut self, batch: &mut Batch) {
        if self.receiving.is_empty() {
            return;
        }
        let mut max_bytes = match self.has_other_work() {
            true => MAX_COPIED_BYTES,
            false => MAX_COPIED_BYTES_IDLE,
        };
        for id in std::mem::take(&mut self.receiving) {
            let Some(in_flight) = self.in_flight.get_mut(id).filter(|it| !it.is_over()) else {
                continue;
            };
            let here = batch.iter().find(|(here, _)| *here == id);
            let copied = match (&mut in_flight.adapter_writer, here) {
                (Some(writer), Some((_, request))) if max_bytes > 0 => {
                    copy_piece(request, writer, max_bytes)
                }
                _ => Ok((0, false)),
            };
            match copied {
                Ok((num_bytes, is_complete)) => {
                    max_bytes -= num_bytes;
                    match is_complete {
                        true => in_flight.adapter_writer = None,
                        false => self.receiving.push(id),
                    }
                }
                Err(error) => self.refuse_in_flight(id, error, batch),
            }
        }
    }

    /// Gives the engine the requests that have been prepared. A small one does not wait for a large one before it.
    /// Waits for a moment where that does not hold up others.
    pub(super) fn join_prepared(&mut self, batch: &mut Batch) {
        let start = Instant::now();
        loop {
            self.join_those_prepared(batch);
            let Some(&last) = self.preparing.back() else {
                return;
            };
            let (max_wait, first_awaited) = match self.has_other_work() {
                false => (IDLE_WAIT, RequestId(0)),
                true if last >= self.first_newcomer => (NEWCOMER_WAIT, self.first_newcomer),
                true => return,
            };
            let max_wait = max_wait.saturating_sub(start.elapsed());
            if max_wait.is_zero() {
                return;
            }
            let awaited = self.preparing.iter().filter(|id| **id >= first_awaited);
            let preparations = awaited.filter_map(|id| match &self.in_flight.get(*id)?.stage {
                Stage::Preparing(preparation) => Some(preparation),
                _ => None,
            });
            self.preparer.wait(preparations, max_wait);
        }
    }

    /// Gives the engine the requests that have been prepared, in order of arrival.
    fn join_those_prepared(&mut self, batch: &mut Batch) {
        for id in std::mem::take(&mut self.preparing) {
            let Some(InFlight {
                stage: Stage::Preparing(preparation),
                ..
            }) = self.in_flight.get(id)
            else {
                continue;
            };
            let Some(prepared) = preparation.take() else {
                self.preparing.push_back(id);
                continue;
            };
            let prepared = prepared.unwrap_or_else(|panic| Err(unreadable(&panic)));
            if let Err(error) = prepared.and_then(|prepared| self.join(id, prepared)) {
                self.refuse_in_flight(id, error, batch);
            }
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
        if prepared.is_prompt_only {
            in_flight.end(FinishReason::Length);
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
        let new = NewBranches::new(sequences, prepared.request, processors)
            .with_thought_budget(prepared.thought_budget);
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
        if let Some(guide) = &new.first().sampling.guide
            && let Some(in_flight) = self.in_flight.get_mut(id)
            && let Some(answer) = &mut in_flight.answer
        {
            answer.set_guide(guide);
        }
        new.add_to(&mut self.manager)?;
        self.in_flight.generate(id, sequences);
        Ok(())
    }

    /// Gives the engine the requests that have their guides and adapters, and refuses those that cannot have them.
    /// Where there is nothing else to do, it waits for a moment.
    pub(super) fn join_waiting(&mut self, batch: &mut Batch) {
        if self.waiting.is_empty() {
            return;
        }
        if self.preparing.is_empty() && self.receiving.is_empty() && !self.has_other_work() {
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

    /// Whether there is more to do than to wait for prompts, guides and adapters.
    fn has_other_work(&self) -> bool {
        let only_waits = |in_flight: &InFlight| {
            matches!(in_flight.stage, Stage::Preparing(_) | Stage::Waiting(_))
        };
        !self.manager.is_idle() || !self.in_flight.iter().all(only_waits)
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
}
