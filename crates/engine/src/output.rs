//! The outputs of a runner's step, and the events that the engine derives from them.

use crate::ExtraOutputs;
use inflight_base::{SeqSlot, SequenceId, TokenId, Tokens};
use inflight_sampling::{BeamCandidate, FinishReason, Hypothesis, SampleError, TokenLogProbs};

/// The runner's choice for one planned sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// Its next token.
    Token(TokenId),
    /// Candidates for the next token of a beam: the next entry of [`StepOutput::beam_candidates`].
    Candidates,
    /// None: the state that stands for its prompt is in its [`ExtraOutputs`], and the sequence ends.
    Pooled,
    /// No token could be chosen. The sequence ends, see [`FinishReason::of`]; the others continue.
    Failed(SampleError),
    /// The token is not known, and the sequence is computed again from its last token. Its guide has not worked out yet
    /// what may come next; or, where steps are planned ahead, the step was computed too early for it: it went on from a
    /// token that only the host can choose, or only the host can choose this one and the next step has replaced the
    /// logits.
    Missed,
}

impl Sampled {
    /// Whether a token was generated, or the candidates for one.
    #[inline]
    pub(super) fn is_generated(result: Option<Self>) -> bool {
        matches!(result, Some(Self::Token(_) | Self::Candidates))
    }

    /// Whether a sequence has failed, or missed its token. Its keys and values may be NaN, or belong to another token,
    /// so no other sequence may use them.
    #[inline]
    pub(super) fn is_failure(result: Option<Self>) -> bool {
        matches!(result, Some(Self::Failed(_) | Self::Missed))
    }
}

/// The candidates for the next token of a beam.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BeamCandidates {
    /// The most likely tokens, the best first: as many as the plan asks for, or all that are allowed.
    pub candidates: Vec<BeamCandidate>,
    /// The model's logits, `[vocab_size]`, if they are requested; else empty.
    pub generation_logits: Vec<f32>,
    /// The model's log-probabilities at each candidate, if they are requested; else empty.
    pub log_probs: Vec<TokenLogProbs>,
}

impl AsRef<[BeamCandidate]> for BeamCandidates {
    fn as_ref(&self) -> &[BeamCandidate] {
        &self.candidates
    }
}

/// The results of a step, each with the row of its sequence, in the order of the step's sequences.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One for each planned sequence with `samples`, and one more for each of its accepted drafts.
    pub sampled: Vec<(SeqSlot, Sampled)>,
    /// One for each [`Sampled::Candidates`].
    pub beam_candidates: Vec<BeamCandidates>,
    /// One for each planned sequence with extra outputs in this step, or for each of its new tokens if it has
    /// drafts. Those of beams are in `beam_candidates`. They are moved into the event, never copied.
    pub extra_outputs: Vec<(SeqSlot, ExtraOutputs)>,
}

impl StepOutput {
    /// Empties the output and keeps its memory.
    pub fn clear(&mut self) {
        self.sampled.clear();
        self.beam_candidates.clear();
        self.extra_outputs.clear();
    }
}

/// A change of a sequence in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The sequence was planned for the first time: it is no longer queued. That many of its tokens were found in the
    /// KV cache, and are not computed.
    Admitted(SequenceId, Tokens),
    /// The sequence has extra outputs. Comes before the `Token` that they belong to.
    ExtraOutputs(SequenceId, Box<ExtraOutputs>),
    /// The sequence has a new token. With drafts there may be several in a step.
    Token(SequenceId, TokenId),
    /// The sequence has freed its blocks, and will be resumed by the engine.
    Paused(SequenceId),
    /// The best hypotheses of a beam search, best first, as many as requested. They come just before
    /// `Finished`, unless the search failed or found nothing; and during the search if
    /// [`OutputOptions::beams`](crate::OutputOptions::beams) asks for them. A beam search has no `Token`.
    Hypotheses(SequenceId, Box<[Hypothesis]>),
    /// It has ended: its blocks are free, and the engine has forgotten it. Comes after its last `Token`. Where steps
    /// are planned ahead, the step behind may still be computed for it: its blocks are free when that has been applied.
    Finished(SequenceId, FinishReason),
}

impl Event {
    /// The sequence that it happened to.
    pub fn sequence_id(&self) -> SequenceId {
        match *self {
            Event::Admitted(id, _)
            | Event::ExtraOutputs(id, _)
            | Event::Token(id, _)
            | Event::Paused(id)
            | Event::Hypotheses(id, _)
            | Event::Finished(id, _) => id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_a_token_or_a_failure_or_neither() {
        for (result, is_generated, is_failure) in [
            (Some(Sampled::Token(1)), true, false),
            (Some(Sampled::Candidates), true, false),
            (Some(Sampled::Pooled), false, false),
            (Some(Sampled::Failed(SampleError::NotFinite)), false, true),
            (Some(Sampled::Missed), false, true),
            (None, false, false),
        ] {
            assert_eq!(Sampled::is_generated(result), is_generated, "{result:?}");
            assert_eq!(Sampled::is_failure(result), is_failure, "{result:?}");
        }
    }

    #[test]
    fn a_cleared_output_is_empty() {
        let mut output = StepOutput {
            sampled: vec![(SeqSlot(0), Sampled::Pooled)],
            beam_candidates: vec![BeamCandidates::default()],
            extra_outputs: vec![(SeqSlot(0), ExtraOutputs::default())],
        };
        output.clear();
        assert!(output.sampled.is_empty());
        assert!(output.beam_candidates.is_empty());
        assert!(output.extra_outputs.is_empty());
    }
}
