//! The iterative driver: one Execute call is one step of the batch manager.
//!
//! ```text
//! accept       new requests are read or refused, cancelled ones leave, known ones return
//! step over    see `step_driver/`
//! ```
//!
//! Triton never reports that it has ended a sequence. So each step checks the requests that are missing from its batch,
//! and a thread does so between steps: those cancelled by their clients are forgotten. With the `direct` strategy every
//! request is in every batch; with `oldest` some may be missing from a batch. These are computed too, and
//! answered when they return. The batcher of `oldest` answers a request that is cancelled in its queue and keeps the
//! slot, so that sequence is ended once more.

use std::time::{Duration, Instant};

use crate::driver::correlation::CorrelationKey;
use crate::driver::in_flight::Presence;
use crate::driver::step_clock::{StepClock, instant_timestamps};
use crate::driver::step_driver::{Batch, StepDriver};
use crate::driver::watched::Driver;
use inflight_base::{RequestId, StepError, catch_panic};
use inflight_triton::{Error, ErrorCode, Request};

/// The driver of a model with iterative sequences.
pub struct IterativeDriver {
    steps: StepDriver,
    /// Whether Triton's strategy is `oldest`.
    is_oldest: bool,
    /// When the last Execute call ended.
    last_step: Instant,
}

impl Driver for IterativeDriver {
    fn execute(&mut self, requests: &mut Vec<Request>) -> Result<(), StepError> {
        let mut clock = StepClock::start();
        self.steps.begin();
        let mut batch = Batch::with_capacity(requests.len());
        let mut requests = requests.drain(..);
        // A panic must not drop the batch here: that would answer requests whose answers the responder has.
        let result = catch_panic(|| {
            for request in requests.by_ref() {
                self.accept(request, &mut batch, clock.start);
            }
            self.steps.free_slots();
            if batch.len() < self.steps.in_flight.len() {
                self.forget_the_lost(clock.start);
            }
            self.steps.step_over(&mut batch, &mut clock)?;
            // Triton expects the requests of a warm-up to end in this call.
            while !batch.is_empty() {
                clock = StepClock::start();
                self.steps.step_over(&mut batch, &mut clock)?;
            }
            Ok(())
        });
        self.last_step = Instant::now();
        result
            .unwrap_or_else(|panic| Err(StepError(panic)))
            .inspect_err(|error| self.steps.fail_all(&mut batch, requests, error))
    }

    fn look_after(&mut self, now: Instant, max_silence: Duration) -> Result<(), StepError> {
        let silence = now.saturating_duration_since(self.last_step);
        if silence < max_silence {
            return Ok(());
        }
        self.steps.end_leaving(now);
        self.steps.free_slots();
        // For the next look: this one may come before the batcher's turn if the server was stopped (SIGSTOP).
        self.steps.slots_in_doubt.ripen();
        if self.steps.in_flight.is_empty() {
            return Ok(());
        }
        self.forget_the_lost(now);
        self.steps.show_idle()
    }

    fn is_idle_for(&self, silence: Duration, now: Instant) -> bool {
        self.steps.in_flight.is_empty() && now.saturating_duration_since(self.last_step) >= silence
    }
}

impl IterativeDriver {
    /// A driver without requests, of a model with the strategy `oldest` or `direct`.
    pub fn new(steps: StepDriver, is_oldest: bool) -> Self {
        Self {
            steps,
            is_oldest,
            last_step: Instant::now(),
        }
    }

    fn accept(&mut self, mut request: Request, batch: &mut Batch, now: Instant) {
        let (correlation_id, flags) = match (request.correlation_id(), request.flags()) {
            (Ok(id), Ok(flags)) => (id, flags),
            (Err(error), _) | (_, Err(error)) => return self.steps.refuse(request, error),
        };
        if correlation_id.is_none() {
            // A null request, which fills a gap of a direct batch, wants no outputs. One of a warm-up wants all.
            if request.wants_nothing() {
                return request.dismiss();
            }
            request.belongs_to_warm_up();
            return self.steps.admit_alone(request, batch, now);
        }
        let key = CorrelationKey::from(correlation_id);
        let known = self.steps.in_flight.find(&key);
        if request.only_ends_its_sequence() {
            return match known {
                None => request.dismiss(),
                // A client has taken the sequence's id again.
                Some(_) => request.fail_beside_sequence(in_flight_already()),
            };
        }
        self.steps.service.serves();
        match (known, flags.is_start()) {
            (Some(id), false) => self.accept_again(id, request, batch),
            (Some(id), true) if !self.steps.is_lost(id, now) => self.refuse_beside(request),
            (Some(id), true) => {
                self.steps.forget(id);
                self.steps.admit(request, key, batch, now);
            }
            (None, true) => self.steps.admit(request, key, batch, now),
            (None, false) => {
                let error = "the sequence of this request is not in flight: it has ended";
                self.steps.refuse(request, Error::invalid(error));
            }
        }
    }

    /// Accepts a request that was rescheduled.
    fn accept_again(&mut self, id: RequestId, mut request: Request, batch: &mut Batch) {
        let Some(in_flight) = self.steps.in_flight.get_mut(id) else {
            return;
        };
        if in_flight.identity != request.identity() {
            return self.refuse_beside(request);
        }
        if request.is_cancelled() {
            self.steps.forget(id);
            return self.steps.leave(request);
        }
        request.answered_by(&in_flight.factory);
        in_flight.presence = Presence::Here;
        batch.push((id, request));
    }

    /// Forgets the requests that are not in this batch and will not come back.
    fn forget_the_lost(&mut self, now: Instant) {
        let mut lost = Vec::new();
        for (id, in_flight) in self.steps.in_flight.iter_mut() {
            in_flight.presence = in_flight.presence.absent(now);
            if in_flight.is_lost(now, self.steps.max_absence) {
                lost.push(id);
            }
        }
        for id in lost {
            log::debug!("request {id} was given up while Triton held it");
            if self.is_oldest {
                self.steps.doubt_slot(id);
            }
            self.steps.forget(id);
        }
    }

    /// Ends, with an error, a request whose correlation id belongs to one in flight, which continues.
    fn refuse_beside(&self, request: Request) {
        self.steps.report(&request, false, &instant_timestamps());
        request.fail_beside_sequence(in_flight_already());
    }
}

fn in_flight_already() -> Error {
    Error::new(
        ErrorCode::AlreadyExists,
        "another request of this sequence id is in flight; a generation is one request, and each \
         needs a sequence id of its own, or none",
    )
}
