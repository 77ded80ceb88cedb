//! What comes back from a step, and what the engine makes of it.

use crate::base::{RequestId, SeqSlot, TokenId};
use crate::sampling::{FinishReason, SampleError};

/// What the runner made of one sequence that samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Its next token.
    Token(TokenId),
    /// No token could be chosen: this sequence fails, the others do not.
    Failed(SampleError),
}

/// A step's results: one entry for each planned sequence with `samples`, in the plan's order.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// Row and result.
    pub sampled: Vec<(SeqSlot, Sampled)>,
}

/// What happened to a request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It was planned for the first time: it is no longer queued.
    Admitted(RequestId),
    /// It has a new token.
    Token(RequestId, TokenId),
    /// It gave its blocks back and will be computed again by itself.
    Paused(RequestId),
    /// It has ended: its blocks are free, the engine has forgotten it. After its last `Token`.
    Finished(RequestId, FinishReason),
}

impl Event {
    /// Whom it happened to.
    pub fn request_id(&self) -> RequestId {
        match *self {
            Event::Admitted(id)
            | Event::Token(id, _)
            | Event::Paused(id)
            | Event::Finished(id, _) => id,
        }
    }
}
