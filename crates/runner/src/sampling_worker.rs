//! One thread's part of sampling.

use inflight_base::TokenId;
use inflight_engine::{BeamCandidates, ExtraOutputs, Sampled, StepPlan};
use inflight_sampling::{LogProbs, SampleError, Sampler, TokenLogProbs};

/// A row from which a token is sampled.
pub(super) enum Row<'a> {
    /// Its logits.
    Logits(&'a mut [f32]),
    /// Its logits, changed as the options say. Nothing but the token is wanted then.
    Changed(&'a [f32]),
    /// What the device has sampled. The same holds.
    Sampled(Result<TokenId, SampleError>),
    /// Nothing, because the sequence was planned ahead and only the host can choose its token, or its guide is not
    /// ready.
    Missed,
}

/// Samples the rows of one sequence at a time, and holds what it has sampled until the step ends.
pub(super) struct SamplingWorker {
    sampler: Sampler,
    log_probs: LogProbs,
    /// The chosen tokens, each with its row of logits.
    pub chosen: Vec<(usize, Sampled)>,
    /// Extra outputs, each with the index of its sequence.
    pub extra_outputs: Vec<(usize, ExtraOutputs)>,
    /// The candidates of beams, each with its row of logits.
    pub candidates: Vec<(usize, BeamCandidates)>,
}

impl SamplingWorker {
    pub fn new(vocab_size: usize, max_rows: usize) -> Self {
        Self {
            sampler: Sampler::new(vocab_size),
            log_probs: LogProbs::new(vocab_size),
            chosen: Vec::with_capacity(max_rows),
            extra_outputs: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Samples the next tokens of the sequence at `index` of the plan: one from each of its rows, until the chosen
    /// token is not the draft that the next row follows, or its guide is not ready for it. `first_row` is the index of
    /// its first row, and `is_ready` tells whether its guide is ready with so many drafts.
    pub fn sample<'a>(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        first_row: usize,
        rows: impl Iterator<Item = Row<'a>>,
        is_ready: impl Fn(usize) -> bool,
    ) {
        let num_candidates = plan.num_candidates(index);
        let drafts = plan.drafts(&plan.sequences[index]);
        for (num_accepted, mut row) in rows.enumerate() {
            if matches!(row, Row::Logits(_)) && !is_ready(num_accepted) {
                if num_accepted > 0 {
                    return;
                }
                row = Row::Missed;
            }
            let sampled = match (row, num_candidates) {
                (Row::Sampled(Ok(token)), _) => Sampled::Token(token),
                (Row::Sampled(Err(error)), _) => Sampled::Failed(error),
                (Row::Changed(logits), _) => {
                    let input = plan.sampling_input_after(index, num_accepted);
                    let token = self.sampler.sample_changed(logits, input);
                    token.map_or_else(Sampled::Failed, Sampled::Token)
                }
                (Row::Missed, _) => Sampled::Missed,
                (Row::Logits(logits), None) => self.sample_token(plan, index, num_accepted, logits),
                (Row::Logits(logits), Some(num)) => {
                    self.find_candidates(plan, index, first_row, logits, num)
                }
            };
            self.chosen.push((first_row + num_accepted, sampled));
            let draft = drafts.get(num_accepted).copied();
            if draft.is_none_or(|draft| sampled != Sampled::Token(draft)) {
                return;
            }
        }
    }

    /// The log-probabilities of `token` and of the `num_top` most likely tokens in a row of logits.
    pub fn log_probs(&mut self, logits: &[f32], token: TokenId, num_top: u32) -> TokenLogProbs {
        self.log_probs.keep(logits);
        self.log_probs.of(token, num_top)
    }

    /// Samples the token that follows `num_accepted` drafts.
    fn sample_token(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        num_accepted: usize,
        logits: &mut [f32],
    ) -> Sampled {
        let outputs = plan.outputs(index);
        if outputs.is_any_per_token() {
            self.log_probs.keep(logits);
        }
        let input = plan.sampling_input_after(index, num_accepted);
        let token = match self.sampler.sample(logits, input) {
            Ok(token) => token,
            Err(error) => return Sampled::Failed(error),
        };
        if outputs.is_any_per_token() {
            let log_probs = &mut self.log_probs;
            let extra_outputs = ExtraOutputs {
                log_probs: outputs
                    .log_probs
                    .map(|num_top| log_probs.of(token, num_top)),
                generation_logits: match outputs.generation_logits {
                    true => log_probs.take(),
                    false => Vec::new(),
                },
                ..ExtraOutputs::default()
            };
            self.extra_outputs.push((index, extra_outputs));
        }
        Sampled::Token(token)
    }

    /// Finds the candidates for the next token of the beam at `index` of the plan, whose logits are in `row`.
    fn find_candidates(
        &mut self,
        plan: &StepPlan<'_>,
        index: usize,
        row: usize,
        logits: &mut [f32],
        num_candidates: usize,
    ) -> Sampled {
        let outputs = plan.outputs(index);
        if outputs.is_any_per_token() {
            self.log_probs.keep(logits);
        }
        let input = plan.sampling_input(index);
        let candidates = match self.sampler.candidates(logits, input, num_candidates) {
            Ok(candidates) => candidates,
            Err(error) => return Sampled::Failed(error),
        };
        let mut candidates = BeamCandidates {
            candidates,
            ..BeamCandidates::default()
        };
        if let Some(num_top) = outputs.log_probs {
            let tokens = candidates.candidates.iter().map(|it| it.token);
            candidates.log_probs = self.log_probs.of_each(tokens, num_top);
        }
        if outputs.generation_logits {
            candidates.generation_logits = self.log_probs.take();
        }
        self.candidates.push((row, candidates));
        Sampled::Candidates
    }
}
