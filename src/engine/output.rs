//! What comes back from a step, and what the engine makes of it.

use crate::base::{RequestId, SeqSlot, TokenId};
use crate::engine::Gathered;
use crate::sampling::{BeamCandidate, FinishReason, Hypothesis, SampleError};

/// What the runner made of one sequence that samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Its next token.
    Token(TokenId),
    /// What could follow a beam: the next of the step's `candidates`.
    Candidates,
    /// No token could be chosen: this sequence fails, the others do not.
    Failed(SampleError),
}

/// A step's results, each with the row that it is of, in the order of the step's sequences.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One for each planned sequence with `samples`, and one more for each of its drafts that was chosen.
    pub sampled: Vec<(SeqSlot, Sampled)>,
    /// One for each [`Sampled::Candidates`]: the most likely tokens, the likeliest first, as many as the
    /// plan says, or all that are allowed.
    pub candidates: Vec<Vec<BeamCandidate>>,
    /// One for each planned sequence of which something is gathered in this step, or for each of its
    /// tokens. It is moved from here into the event, never copied.
    pub gathered: Vec<(SeqSlot, Gathered)>,
}

impl StepOutput {
    /// Makes it the output of a step that has not been computed; its memory stays.
    pub fn clear(&mut self) {
        self.sampled.clear();
        self.candidates.clear();
        self.gathered.clear();
    }
}

/// What happened to a request in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It was planned for the first time: it is no longer queued.
    Admitted(RequestId),
    /// It has what it wanted to know besides a token. Before that `Token`.
    Gathered(RequestId, Box<Gathered>),
    /// It has a new token. With drafts there may be several in a step.
    Token(RequestId, TokenId),
    /// It gave its blocks back and will be computed again by itself.
    Paused(RequestId),
    /// It has searched with beams, and found these: the best first, as many as it wanted. Just before its
    /// `Finished`, in the place of tokens; not if it fails.
    Hypotheses(RequestId, Box<[Hypothesis]>),
    /// It has ended: its blocks are free, the engine has forgotten it. After its last `Token`.
    Finished(RequestId, FinishReason),
}

impl Event {
    /// Whom it happened to.
    pub fn request_id(&self) -> RequestId {
        match *self {
            Event::Admitted(id)
            | Event::Gathered(id, _)
            | Event::Token(id, _)
            | Event::Paused(id)
            | Event::Hypotheses(id, _)
            | Event::Finished(id, _) => id,
        }
    }
}
