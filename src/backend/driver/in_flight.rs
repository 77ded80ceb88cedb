//! The requests in flight: what the driver knows of each, by our id, by Triton's and by the client's.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::backend::driver::correlation::CorrelationKey;
use crate::backend::request::branches::Branches;
use crate::backend::response::answer::Answer;
use crate::base::{RequestId, SequenceId};
use crate::sampling::FinishReason;
use crate::triton::{Error, Request};

/// A request between its first Execute call and its final response.
pub struct InFlight {
    /// Triton's name of the sequence.
    pub correlation_id: CorrelationKey,
    /// The client's name of the request; empty if it gave none.
    pub client_id: String,
    /// Which of Triton's objects it is: a second request may carry the same correlation id.
    pub identity: usize,
    /// Whether it is in this Execute call's batch.
    pub is_here: bool,
    /// Its answer in the making; lent to the responder while a step computes.
    pub answer: Option<Box<Answer>>,
    /// What the engine generates for it.
    pub branches: Branches,
    /// Whether all of its answer has ended, and waits for its request to be released.
    pub has_ended: bool,
    /// Why it was refused, if that was found after it was taken in.
    pub refused: Option<Error>,
    /// When its own time limit passes.
    pub deadline: Option<Instant>,
    /// Whether its client has asked for its end.
    pub is_stopped: bool,
    /// Since when Triton has not handed it over.
    pub absent_since: Option<Instant>,
}

impl InFlight {
    /// A request that is here for the first time.
    pub fn new(
        correlation_id: CorrelationKey,
        request: &Request,
        branches: Branches,
        answer: Box<Answer>,
    ) -> Self {
        Self {
            correlation_id,
            client_id: String::new(),
            identity: request.identity(),
            is_here: true,
            answer: Some(answer),
            branches,
            has_ended: false,
            refused: None,
            deadline: None,
            is_stopped: false,
            absent_since: None,
        }
    }

    /// Whether it is of a warm-up: such a request is served in one Execute call.
    pub fn is_warm_up(&self) -> bool {
        matches!(self.correlation_id, CorrelationKey::WarmUp(_))
    }

    /// Ends all that has not ended.
    pub fn end(&mut self, reason: FinishReason) {
        if let Some(answer) = &mut self.answer {
            answer.end(reason);
        }
        self.has_ended = true;
    }

    /// Ends what a branch of it generates. An error ends all. Returns whether its other branches have to be
    /// given up.
    pub fn end_branch(&mut self, branch: SequenceId, reason: FinishReason) -> bool {
        if self.branches.len() == 1 || matches!(reason, FinishReason::Error(_)) {
            self.end(reason);
            return self.branches.len() > 1;
        }
        if let Some(answer) = &mut self.answer {
            answer.end_row(self.branches.row_of(branch), reason);
            self.has_ended = answer.has_ended();
        }
        false
    }

    /// Why it is to end now with what it has, if it is.
    pub fn early_end(&self, now: Instant) -> Option<FinishReason> {
        if self.has_ended {
            None
        } else if self.is_stopped {
            Some(FinishReason::Cancelled)
        } else {
            let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
            is_late.then_some(FinishReason::TimedOut)
        }
    }

    /// Whether it will not come back: its client gave it up while Triton held it, or Triton has not
    /// handed it over for longer than it keeps a sequence.
    pub fn is_lost(&self, now: Instant, max_absence: Duration) -> bool {
        let cancelled = self
            .answer
            .as_ref()
            .is_some_and(|answer| answer.factory.is_cancelled());
        let absence = self
            .absent_since
            .map(|since| now.saturating_duration_since(since));
        !self.is_here && (cancelled || absence.is_some_and(|time| time > max_absence))
    }
}

/// All requests in flight.
#[derive(Default)]
pub struct InFlightTable {
    // Each of a step's requests is looked up here several times. A client can choose its correlation id
    // so that it collides with others, but there are never more than Triton has slots.
    requests: FxHashMap<RequestId, InFlight>,
    by_correlation: FxHashMap<CorrelationKey, RequestId>,
    by_client: HashMap<String, RequestId>,
    /// Of each branch but the first, whose it is: requests of one sequence are not in it, and while there
    /// are no others it costs nothing to look here.
    by_branch: FxHashMap<SequenceId, RequestId>,
}

impl InFlightTable {
    /// Adds a request. The caller has looked that neither of its names is in flight.
    pub fn insert(&mut self, id: RequestId, in_flight: InFlight) {
        self.by_correlation
            .insert(in_flight.correlation_id.clone(), id);
        if !in_flight.client_id.is_empty() {
            self.by_client.insert(in_flight.client_id.clone(), id);
        }
        for branch in in_flight.branches.ids().skip(1) {
            self.by_branch.insert(branch, id);
        }
        self.requests.insert(id, in_flight);
    }

    /// Takes a request out, with both its names.
    pub fn remove(&mut self, id: RequestId) -> Option<InFlight> {
        let in_flight = self.requests.remove(&id)?;
        self.by_correlation.remove(&in_flight.correlation_id);
        self.by_client.remove(&in_flight.client_id);
        for branch in in_flight.branches.ids().skip(1) {
            self.by_branch.remove(&branch);
        }
        Some(in_flight)
    }

    /// The request that Triton calls `correlation_id`.
    pub fn find(&self, correlation_id: &CorrelationKey) -> Option<RequestId> {
        self.by_correlation.get(correlation_id).copied()
    }

    /// The request that a client calls `client_id`.
    pub fn find_client(&self, client_id: &str) -> Option<RequestId> {
        self.by_client.get(client_id).copied()
    }

    /// The request `id`.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut InFlight> {
        self.requests.get_mut(&id)
    }

    /// The request that `branch` belongs to.
    fn branch_mut(&mut self, branch: SequenceId) -> Option<&mut InFlight> {
        // The first branch has its request's number.
        let request = self.by_branch.get(&branch).copied();
        self.requests
            .get_mut(&request.unwrap_or(RequestId(branch.0)))
    }

    /// The answer that `branch` adds to, while it is not lent, and the row, which has not ended: what a step
    /// brings behind a stop word is nothing.
    pub fn row_mut(&mut self, branch: SequenceId) -> Option<(&mut Answer, usize)> {
        let in_flight = self.branch_mut(branch)?;
        let row = in_flight.branches.row_of(branch);
        let answer = in_flight.answer.as_deref_mut()?;
        match answer.rows()[row].finish() {
            Some(_) => None,
            None => Some((answer, row)),
        }
    }

    /// Ends a branch, see [`InFlight::end_branch`]; returns what is to be given up because of it.
    pub fn end_branch(&mut self, branch: SequenceId, reason: FinishReason) -> Option<Branches> {
        let in_flight = self.branch_mut(branch)?;
        in_flight
            .end_branch(branch, reason)
            .then_some(in_flight.branches)
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
