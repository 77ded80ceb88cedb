//! The requests in flight: what the driver knows of each, by our id, by Triton's and by the client's.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::driver::correlation::CorrelationKey;
use crate::driver::service::Service;
use crate::driver::turn::Turn;
use crate::request::admission::Prepared;
use crate::request::branches::{Branches, NewBranches};
use crate::request::preparer::Preparation;
use crate::response::answer::Answer;
use inflight_base::{RequestError, RequestId, SequenceId};
use inflight_guidance::Compilation;
use inflight_manager::{AdapterLoad, UploadWriter};
use inflight_sampling::FinishReason;
use inflight_triton::{Error, ResponseFactory, Timestamps, now_ns};

/// A request between its first Execute call and its final response.
pub struct InFlight {
    /// Triton's name of its sequence.
    pub correlation_id: CorrelationKey,
    /// Whether it is part of a warm-up.
    pub is_warm_up: bool,
    /// The client's name of the request; empty if it gave none.
    pub client_request_id: String,
    /// Of a conversation.
    pub turn: Option<Turn>,
    /// Which of Triton's objects it is: a second request may carry the same correlation id.
    pub identity: usize,
    /// Sends its responses, and tells whether it was cancelled.
    pub factory: ResponseFactory,
    /// Takes the adapter that it brings, until all of that is copied.
    pub adapter_writer: Option<UploadWriter>,
    /// Where in its life it is.
    pub stage: Stage,
    /// Its answer: `None` until the request is prepared, and while the responder has it.
    pub answer: Option<Box<Answer>>,
    /// The sequences that the engine has been given for it; none before that.
    pub sequences: Branches,
    /// Whether its client has asked for its end.
    pub is_stopped: bool,
    /// When its own time limit passes.
    pub deadline: Option<Instant>,
    /// Where the request itself is.
    pub presence: Presence,
}

/// The life of a request in flight, from top to bottom. What cannot be prepared, or be given to the engine, is
/// `Refused`.
pub enum Stage {
    /// Its options are being parsed and its prompt tokenised.
    Preparing(Preparation<Result<Prepared, Error>>),
    /// Its guide is being compiled, or its adapter loaded.
    Waiting(Box<Waiting>),
    /// The engine has its sequences, waiting or running.
    Generating,
    /// All of its answer has ended, which leaves when the request is released.
    Ended,
    /// The request is answered with this error when it is released.
    Refused(Error),
}

/// A request that waits for its guide, its adapter, or both.
pub struct Waiting {
    /// Its sequences, still without what they wait for.
    pub sequences: NewBranches,
    /// The guide, until the sequences have it.
    pub compilation: Option<Compilation>,
    /// The adapter, until the sequences have it.
    pub adapter: Option<AdapterLoad>,
}

impl Waiting {
    /// Whether there is a guide or an adapter to take.
    pub fn has_news(&self) -> bool {
        let mut compilation = self.compilation.iter();
        let mut adapter = self.adapter.iter();
        compilation.any(Compilation::is_done) || adapter.any(AdapterLoad::is_done)
    }

    /// Gives the sequences what has become ready. Returns whether they have all.
    ///
    /// # Errors
    /// The guide cannot be compiled, or the adapter cannot be loaded.
    pub fn advance(&mut self, now: Instant) -> Result<bool, RequestError> {
        if let Some(compilation) = &self.compilation
            && let Some(guide) = compilation.poll(now)
        {
            self.sequences.set_guide(guide?);
            self.compilation = None;
        }
        if let Some(load) = &self.adapter
            && let Some(adapter) = load.poll()
        {
            self.sequences.set_adapter(&adapter?);
            self.adapter = None;
        }
        Ok(self.compilation.is_none() && self.adapter.is_none())
    }
}

/// Where a request in flight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// In this Execute call's batch.
    Here,
    /// With Triton, which will hand it to a later call.
    Rescheduled,
    /// With Triton, which has not handed it over since then.
    MissingSince(Instant),
}

impl InFlight {
    /// Whether it belongs to no sequence. Such a request cannot be rescheduled: it stays until it has ended.
    pub fn is_alone(&self) -> bool {
        matches!(self.correlation_id, CorrelationKey::Alone(_))
    }

    /// The times of its last step, for the whole request. Triton gives a request that stays only once, and its time in
    /// the queue ends when its generation begins.
    pub fn timestamps(&self, last_step: &Timestamps) -> Timestamps {
        let admission = self
            .answer
            .as_ref()
            .and_then(|answer| answer.times.admission);
        match admission.filter(|_| self.is_alone()) {
            None => *last_step,
            Some(admission) => {
                let start = now_ns().saturating_sub(admission.elapsed().as_nanos() as u64);
                Timestamps {
                    exec_start: start,
                    compute_start: start,
                    ..*last_step
                }
            }
        }
    }

    /// Whether nothing more happens to it until it is released.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Ended | Stage::Refused(_))
    }

    /// Ends everything that has not ended.
    pub fn end(&mut self, reason: FinishReason) {
        if let Some(answer) = &mut self.answer {
            answer.end(reason);
        }
        self.stage = Stage::Ended;
    }

    /// Ends one of its sequences; an error ends all. Returns the sequences that are to be cancelled because of it.
    pub fn end_sequence(&mut self, sequence: SequenceId, reason: FinishReason) -> Option<Branches> {
        let sequences = self.sequences;
        if sequences.len() == 1 || matches!(reason, FinishReason::Error(_)) {
            self.end(reason);
            return (sequences.len() > 1).then_some(sequences);
        }
        if let Some(answer) = &mut self.answer {
            answer.end_row(sequences.row_of(sequence), reason);
            if answer.has_ended() {
                self.stage = Stage::Ended;
            }
        }
        None
    }

    /// Why it ends early, with its output so far, if it does. A request that is being prepared ends when it is
    /// prepared.
    pub fn early_end(&self, now: Instant, service: &Service) -> Option<FinishReason> {
        match self.stage {
            Stage::Waiting(_) | Stage::Generating => self.due_end(now, service),
            Stage::Preparing(_) | Stage::Ended | Stage::Refused(_) => None,
        }
    }

    /// Why it has to end early, if it has to: its client has stopped it, or its own time limit or the model's
    /// has passed.
    pub fn due_end(&self, now: Instant, service: &Service) -> Option<FinishReason> {
        if self.is_stopped {
            return Some(FinishReason::Cancelled);
        }
        let mut limits = self.deadline.into_iter().chain(service.deadline());
        let is_late = limits.any(|limit| limit <= now);
        is_late.then_some(FinishReason::TimedOut)
    }

    /// Whether it will not come back: its client cancelled it while Triton held it, or Triton has not handed it over
    /// for longer than it keeps a sequence.
    pub fn is_lost(&self, now: Instant, max_absence: Duration) -> bool {
        let is_cancelled = || self.factory.is_cancelled();
        self.presence.is_lost(is_cancelled, now, max_absence)
    }
}

impl Presence {
    /// Where a request is that a batch does not have, or that no step has had for a while.
    pub fn absent(self, now: Instant) -> Self {
        match self {
            Self::Rescheduled => Self::MissingSince(now),
            Self::Here | Self::MissingSince(_) => self,
        }
    }

    fn is_lost(
        self,
        is_cancelled: impl FnOnce() -> bool,
        now: Instant,
        max_absence: Duration,
    ) -> bool {
        match self {
            Self::Here => false,
            Self::Rescheduled => is_cancelled(),
            Self::MissingSince(since) => {
                is_cancelled() || now.saturating_duration_since(since) > max_absence
            }
        }
    }
}

/// All requests in flight.
#[derive(Default)]
pub struct InFlightTable {
    // Each request of a step is looked up several times. A client can choose its correlation id so that it collides
    // with others, but there are never more of them than Triton has slots.
    requests: FxHashMap<RequestId, InFlight>,
    by_correlation: FxHashMap<CorrelationKey, RequestId>,
    by_client: HashMap<String, RequestId>,
    by_sequence: FxHashMap<SequenceId, RequestId>,
}

impl InFlightTable {
    /// Adds a request. The caller has checked that neither of its names is in flight.
    pub fn insert(&mut self, id: RequestId, in_flight: InFlight) {
        self.by_correlation
            .insert(in_flight.correlation_id.clone(), id);
        if !in_flight.client_request_id.is_empty() {
            self.by_client
                .insert(in_flight.client_request_id.clone(), id);
        }
        self.requests.insert(id, in_flight);
    }

    /// Removes a request, with its names and its sequences.
    pub fn remove(&mut self, id: RequestId) -> Option<InFlight> {
        let in_flight = self.requests.remove(&id)?;
        self.by_correlation.remove(&in_flight.correlation_id);
        self.by_client.remove(&in_flight.client_request_id);
        for sequence in in_flight.sequences.ids() {
            self.by_sequence.remove(&sequence);
        }
        Some(in_flight)
    }

    /// Says that the engine has been given these sequences for a request.
    pub fn generate(&mut self, id: RequestId, sequences: Branches) {
        if let Some(in_flight) = self.requests.get_mut(&id) {
            in_flight.sequences = sequences;
            in_flight.stage = Stage::Generating;
            self.by_sequence
                .extend(sequences.ids().map(|sequence| (sequence, id)));
        }
    }

    /// The request that Triton calls `correlation_id`.
    pub fn find(&self, correlation_id: &CorrelationKey) -> Option<RequestId> {
        self.by_correlation.get(correlation_id).copied()
    }

    /// The request that a client calls `client_request_id`.
    pub fn find_client(&self, client_request_id: &str) -> Option<RequestId> {
        self.by_client.get(client_request_id).copied()
    }

    /// The request `id`.
    pub fn get(&self, id: RequestId) -> Option<&InFlight> {
        self.requests.get(&id)
    }

    /// The request `id`.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut InFlight> {
        self.requests.get_mut(&id)
    }

    /// The request that `sequence` belongs to.
    fn owner_mut(&mut self, sequence: SequenceId) -> Option<&mut InFlight> {
        let id = self.by_sequence.get(&sequence)?;
        self.requests.get_mut(id)
    }

    /// The answer that `sequence` adds to, unless the responder has it, and its row there. `None` if the row has ended:
    /// tokens that a step computes after a stop word are dropped.
    pub fn row_mut(&mut self, sequence: SequenceId) -> Option<(&mut Answer, usize)> {
        let in_flight = self.owner_mut(sequence)?;
        let row = in_flight.sequences.row_of(sequence);
        let answer = in_flight.answer.as_deref_mut()?;
        match answer.rows()[row].finish() {
            Some(_) => None,
            None => Some((answer, row)),
        }
    }

    /// Ends a sequence; an error ends its request. Returns the sequences that are to be cancelled because of it.
    pub fn end_sequence(&mut self, sequence: SequenceId, reason: FinishReason) -> Option<Branches> {
        self.owner_mut(sequence)?.end_sequence(sequence, reason)
    }

    /// All requests, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &InFlight> {
        self.requests.values()
    }

    /// All requests, in no order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (RequestId, &mut InFlight)> {
        self.requests
            .iter_mut()
            .map(|(id, in_flight)| (*id, in_flight))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_begins_when_it_is_first_noticed() {
        let first = Instant::now();
        let later = first + Duration::from_secs(1);
        let missing = Presence::MissingSince(first);
        assert_eq!(Presence::Rescheduled.absent(first), missing);
        assert_eq!(missing.absent(later), missing);
        assert_eq!(Presence::Here.absent(later), Presence::Here);
    }

    #[test]
    fn a_request_is_lost_that_triton_holds_and_that_is_cancelled_or_absent_for_too_long() {
        let since = Instant::now();
        let max_absence = Duration::from_secs(60);
        for (presence, is_cancelled, seconds, is_lost) in [
            (Presence::Here, true, 100, false),
            (Presence::Rescheduled, false, 100, false),
            (Presence::Rescheduled, true, 0, true),
            (Presence::MissingSince(since), false, 59, false),
            (Presence::MissingSince(since), false, 60, false),
            (Presence::MissingSince(since), false, 61, true),
            (Presence::MissingSince(since), true, 0, true),
        ] {
            let now = since + Duration::from_secs(seconds);
            assert_eq!(
                presence.is_lost(|| is_cancelled, now, max_absence),
                is_lost,
                "{presence:?} after {seconds} s"
            );
        }
    }
}
