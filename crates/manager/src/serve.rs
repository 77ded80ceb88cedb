//! The loop of a batch manager that serves callbacks.

use std::collections::BTreeMap;

use crate::{BatchManager, Callbacks, LandedStep, Response, Submission};
use inflight_base::{RequestError, SequenceId, StepError, TokenId};
use inflight_engine::{Event, ExtraOutputs};
use inflight_sampling::{FinishReason, Hypothesis};

/// Serves an application until it has no more requests, and all of them have ended.
///
/// At most `max_num_requests` are in flight at a time, waiting ones included; `None`: as many as the manager can hold.
///
/// # Errors
/// A step failed as a whole. Every request in flight has had its final response.
pub fn serve(
    manager: &mut BatchManager,
    max_num_requests: Option<usize>,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let mut in_flight = UnsentOutputs::new();
    let result = serve_all(manager, max_num_requests, &mut in_flight, callbacks);
    if let Err(error) = &result {
        for (id, unsent) in in_flight {
            let error = RequestError::Internal(error.to_string());
            send(callbacks, id, &unsent, Some(Err(error)));
        }
    }
    result
}

/// The outputs of a request that have not been sent.
#[derive(Default)]
struct Unsent {
    is_streaming: bool,
    tokens: Vec<TokenId>,
    extra_outputs: Vec<ExtraOutputs>,
    hypotheses: Box<[Hypothesis]>,
}

impl Unsent {
    /// Whether there are outputs to be sent before the end.
    fn are_due(&self) -> bool {
        let is_empty =
            self.tokens.is_empty() && self.extra_outputs.is_empty() && self.hypotheses.is_empty();
        self.is_streaming && !is_empty
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.extra_outputs.clear();
        self.hypotheses = Box::default();
    }
}

/// The outputs that have not been sent, of all requests in flight.
type UnsentOutputs = BTreeMap<SequenceId, Unsent>;

fn serve_all(
    manager: &mut BatchManager,
    max_num_requests: Option<usize>,
    in_flight: &mut UnsentOutputs,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let max_num_active = manager.max_num_active();
    let max_num_requests = max_num_requests.map_or(max_num_active, |max| max.min(max_num_active));
    let mut events = Vec::new();
    let mut is_open = true;
    while is_open || !in_flight.is_empty() {
        if is_open {
            let room = max_num_requests.saturating_sub(manager.num_active());
            match callbacks.get_requests(room, manager.is_idle()) {
                Some(submissions) => join(manager, in_flight, submissions, callbacks),
                None => is_open = false,
            }
        }
        manager.launch()?;
        let landed = manager.land(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::ExtraOutputs(id, extra_outputs) => {
                    if let Some(unsent) = in_flight.get_mut(&id) {
                        unsent.extra_outputs.push(*extra_outputs);
                    }
                }
                Event::Token(id, token) => {
                    if let Some(unsent) = in_flight.get_mut(&id) {
                        unsent.tokens.push(token);
                    }
                }
                Event::Hypotheses(id, hypotheses) => {
                    if let Some(unsent) = in_flight.get_mut(&id) {
                        unsent.hypotheses = hypotheses;
                    }
                }
                Event::Finished(id, reason) => {
                    if let Some(unsent) = in_flight.remove(&id) {
                        send(callbacks, id, &unsent, Some(Ok(reason)));
                    }
                }
                Event::Admitted(..) | Event::Paused(_) => {}
            }
        }
        for (&id, unsent) in in_flight.iter_mut().filter(|(_, unsent)| unsent.are_due()) {
            send(callbacks, id, unsent, None);
            unsent.clear();
        }
        stop(manager, in_flight, &mut events, callbacks)?;
        for stats in landed.iter().flat_map(LandedStep::records) {
            callbacks.return_stats(stats);
        }
    }
    Ok(())
}

/// Ends the requests to stop with the outputs that they have. Their blocks are free before the responses are sent.
fn stop(
    manager: &mut BatchManager,
    in_flight: &mut UnsentOutputs,
    events: &mut Vec<Event>,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let signals = callbacks.poll_stop_signals();
    let stopped = signals
        .into_iter()
        .filter_map(|id| in_flight.remove_entry(&id));
    let stopped: Vec<_> = stopped.collect();
    if stopped.is_empty() {
        return Ok(());
    }
    for (id, _) in &stopped {
        manager.cancel(*id);
    }
    manager.settle(events)?;
    for (id, unsent) in stopped {
        send(callbacks, id, &unsent, Some(Ok(FinishReason::Cancelled)));
    }
    Ok(())
}

/// Adds requests. One with the id of a request in flight is rejected, and the one in flight continues.
fn join(
    manager: &mut BatchManager,
    in_flight: &mut UnsentOutputs,
    submissions: Vec<Submission>,
    callbacks: &mut impl Callbacks,
) {
    for submission in submissions {
        let id = submission.request.id;
        if in_flight.contains_key(&id) {
            callbacks.reject_duplicate(submission);
            continue;
        }
        let unsent = Unsent {
            is_streaming: submission.is_streaming,
            ..Unsent::default()
        };
        match manager.add(submission.request) {
            Ok(()) => {
                in_flight.insert(id, unsent);
            }
            Err(error) => send(callbacks, id, &unsent, Some(Err(error))),
        }
    }
}

fn send(
    callbacks: &mut impl Callbacks,
    id: SequenceId,
    unsent: &Unsent,
    end: Option<Result<FinishReason, RequestError>>,
) {
    callbacks.send_response(Response {
        id,
        tokens: &unsent.tokens,
        extra_outputs: &unsent.extra_outputs,
        hypotheses: &unsent.hypotheses,
        end,
    });
}
