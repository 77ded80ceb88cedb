//! The batch manager's loop for an application that has none: it is called back (TensorRT-LLM's Batch
//! Manager has the same five callbacks, `batch_manager/callbacks.h`).
//!
//! ```text
//! start of a step    get_requests                     as many as can be taken
//! end of a step      send_response                    for each request with something new
//!                    poll_stop_signals                who is to be stopped
//!                    return_stats                     not when nothing was active
//! for each token     logits post-processors           see `SamplingParams::logits_processor`
//! ```

use std::collections::BTreeMap;

use crate::base::{RequestError, RequestId, StepError, TokenId};
use crate::engine::{Event, Gathered, NewRequest, StepStats};
use crate::manager::{BatchManager, LandedStep};
use crate::sampling::{FinishReason, Hypothesis};

/// What an application does for the batch manager that serves it.
pub trait Callbacks {
    /// Requests that join now, at most `max_num_requests`; `None` is unbounded. Called at the start of
    /// every step. May block while nothing is active, which `is_idle` says. An id must not be that of a
    /// request that is in flight; it can be used again after the request's final response.
    ///
    /// To return `None` ends the loop when all that is active has ended.
    fn get_requests(
        &mut self,
        max_num_requests: Option<usize>,
        is_idle: bool,
    ) -> Option<Vec<NewRequest>>;

    /// Takes what is new of a request. On the final response, all that the manager knew of it is freed.
    fn send_response(&mut self, response: Response<'_>);

    /// Requests that are to be stopped. Each gets a final response, if it is still in flight.
    fn poll_stop_signals(&mut self) -> Vec<RequestId> {
        Vec::new()
    }

    /// The record of a step; in lockstep (V1), of a batch that has ended. Not called when nothing was active.
    fn return_stats(&mut self, stats: &StepStats) {
        let _ = stats;
    }
}

/// What is new of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Response<'a> {
    /// Whose.
    pub id: RequestId,
    /// Tokens since the last response.
    pub tokens: &'a [TokenId],
    /// What it wanted to know besides, step by step: see [`NewRequest::gather`].
    pub gathered: &'a [Gathered],
    /// What it has found with beams, the best first: with its final response, in the place of tokens; before
    /// that its beams as they are, if it wants to know them.
    pub hypotheses: &'a [Hypothesis],
    /// Why it has ended, or the error for which it was refused; `None`: it goes on.
    pub end: Option<Result<FinishReason, RequestError>>,
}

impl Response<'_> {
    /// Whether it is the request's last.
    pub fn is_final(&self) -> bool {
        self.end.is_some()
    }
}

/// Serves an application until it has no more requests and all have ended.
///
/// `max_num_requests` bounds how many are taken in at a time, waiting ones included; `None` takes all.
///
/// # Errors
/// A step failed as a whole. Every request in flight has had its final response.
pub fn serve(
    manager: &mut BatchManager,
    max_num_requests: Option<usize>,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let mut in_flight = InFlight::new();
    let result = serve_all(manager, max_num_requests, &mut in_flight, callbacks);
    if let Err(error) = &result {
        for (id, news) in in_flight {
            let error = RequestError::Internal(error.to_string());
            send(callbacks, id, &news, Some(Err(error)));
        }
    }
    result
}

/// What has not been sent of a request.
#[derive(Default)]
struct News {
    tokens: Vec<TokenId>,
    gathered: Vec<Gathered>,
    hypotheses: Box<[Hypothesis]>,
}

impl News {
    fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.gathered.is_empty() && self.hypotheses.is_empty()
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.gathered.clear();
        self.hypotheses = Box::default();
    }
}

/// What has not been sent of the requests in flight.
type InFlight = BTreeMap<RequestId, News>;

fn serve_all(
    manager: &mut BatchManager,
    max_num_requests: Option<usize>,
    in_flight: &mut InFlight,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let mut events = Vec::new();
    let mut is_open = true;
    while is_open || !in_flight.is_empty() {
        if is_open {
            let room = max_num_requests.map(|max| max.saturating_sub(manager.num_active()));
            match callbacks.get_requests(room, manager.is_idle()) {
                Some(requests) => join(manager, in_flight, requests, callbacks),
                None => is_open = false,
            }
        }
        manager.launch()?;
        let landed = manager.land(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Gathered(id, gathered) => {
                    if let Some(news) = in_flight.get_mut(&id) {
                        news.gathered.push(*gathered);
                    }
                }
                Event::Token(id, token) => {
                    if let Some(news) = in_flight.get_mut(&id) {
                        news.tokens.push(token);
                    }
                }
                Event::Hypotheses(id, hypotheses) => {
                    if let Some(news) = in_flight.get_mut(&id) {
                        news.hypotheses = hypotheses;
                    }
                }
                Event::Finished(id, reason) => {
                    if let Some(news) = in_flight.remove(&id) {
                        send(callbacks, id, &news, Some(Ok(reason)));
                    }
                }
                Event::Admitted(_) | Event::Paused(_) => {}
            }
        }
        for (&id, news) in in_flight.iter_mut().filter(|(_, news)| !news.is_empty()) {
            send(callbacks, id, news, None);
            news.clear();
        }
        stop(manager, in_flight, &mut events, callbacks)?;
        for stats in landed.iter().flat_map(LandedStep::records) {
            callbacks.return_stats(stats);
        }
    }
    Ok(())
}

/// Ends the requests that are to be stopped. Their blocks are free before they are told.
fn stop(
    manager: &mut BatchManager,
    in_flight: &mut InFlight,
    events: &mut Vec<Event>,
    callbacks: &mut impl Callbacks,
) -> Result<(), StepError> {
    let mut stopped = callbacks.poll_stop_signals();
    stopped.retain(|id| in_flight.remove(id).is_some());
    if stopped.is_empty() {
        return Ok(());
    }
    for &id in &stopped {
        manager.cancel(id);
    }
    manager.settle(events)?;
    for id in stopped {
        send(
            callbacks,
            id,
            &News::default(),
            Some(Ok(FinishReason::Cancelled)),
        );
    }
    Ok(())
}

/// Takes requests in. One with an id that is in flight is refused, and the one in flight goes on.
fn join(
    manager: &mut BatchManager,
    in_flight: &mut InFlight,
    requests: Vec<NewRequest>,
    callbacks: &mut impl Callbacks,
) {
    for request in requests {
        let id = request.id;
        if in_flight.contains_key(&id) {
            let error = RequestError::InFlight(id.to_string());
            send(callbacks, id, &News::default(), Some(Err(error)));
            continue;
        }
        match manager.add(request) {
            Ok(()) => {
                in_flight.insert(id, News::default());
            }
            Err(error) => send(callbacks, id, &News::default(), Some(Err(error))),
        }
    }
}

fn send(
    callbacks: &mut impl Callbacks,
    id: RequestId,
    news: &News,
    end: Option<Result<FinishReason, RequestError>>,
) {
    callbacks.send_response(Response {
        id,
        tokens: &news.tokens,
        gathered: &news.gathered,
        hypotheses: &news.hypotheses,
        end,
    });
}
