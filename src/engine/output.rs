//! What comes back from a step, and what the engine makes of it.

use crate::base::{SeqSlot, SequenceId, TokenId};
use crate::engine::ExtraOutputs;
use crate::sampling::{BeamCandidate, FinishReason, Hypothesis, SampleError, TokenLogProbs};

/// What the runner made of one sequence that samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Its next token.
    Token(TokenId),
    /// What could follow a beam: the next of the step's `beam_candidates`.
    Candidates,
    /// No token could be chosen: this sequence ends, see [`FinishReason::of`], the others do not.
    Failed(SampleError),
}

/// What could follow a beam.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BeamCandidates {
    /// The most likely tokens, the likeliest first, as many as the plan says, or all that are allowed.
    pub candidates: Vec<BeamCandidate>,
    /// The model's logits, `[vocab_size]`, if they are wanted; else empty.
    pub generation_logits: Vec<f32>,
    /// What the model says of each candidate, if that is wanted; else empty.
    pub log_probs: Vec<TokenLogProbs>,
}

impl AsRef<[BeamCandidate]> for BeamCandidates {
    fn as_ref(&self) -> &[BeamCandidate] {
        &self.candidates
    }
}

/// A step's results, each with the row that it is of, in the order of the step's sequences.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One for each planned sequence with `samples`, and one more for each of its drafts that was chosen.
    pub sampled: Vec<(SeqSlot, Sampled)>,
    /// One for each [`Sampled::Candidates`].
    pub beam_candidates: Vec<BeamCandidates>,
    /// One for each planned sequence with extra outputs in this step, or for each of its new tokens if it has
    /// drafts; a beam's are in `beam_candidates`. They are moved into the event, never copied.
    pub extra_outputs: Vec<(SeqSlot, ExtraOutputs)>,
}

impl StepOutput {
    /// Makes it the output of a step that has not been computed; its memory stays.
    pub fn clear(&mut self) {
        self.sampled.clear();
        self.beam_candidates.clear();
        self.extra_outputs.clear();
    }
}

/// What happened to a request in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It was planned for the first time: it is no longer queued.
    Admitted(SequenceId),
    /// It has extra outputs. Comes before the `Token` that they belong to.
    ExtraOutputs(SequenceId, Box<ExtraOutputs>),
    /// It has a new token. With drafts there may be several in a step.
    Token(SequenceId, TokenId),
    /// It gave its blocks back and will be computed again by itself.
    Paused(SequenceId),
    /// It searches with beams, and these are the best texts so far: the best first, as many as it wanted. Just
    /// before its `Finished` they are what it has found, unless it fails or has found nothing; before that, only if it
    /// wants to know its beams. It has no `Token`.
    Hypotheses(SequenceId, Box<[Hypothesis]>),
    /// It has ended: its blocks are free, the engine has forgotten it. After its last `Token`.
    Finished(SequenceId, FinishReason),
}

impl Event {
    /// The sequence that it happened to.
    pub fn sequence_id(&self) -> SequenceId {
        match *self {
            Event::Admitted(id)
            | Event::ExtraOutputs(id, _)
            | Event::Token(id, _)
            | Event::Paused(id)
            | Event::Hypotheses(id, _)
            | Event::Finished(id, _) => id,
        }
    }
}
