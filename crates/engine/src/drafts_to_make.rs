//! What a draft model needs to make the drafts of one sequence in a step.

use std::ops::Range;

use crate::plan::PlannedSequence;
use crate::sequence_tokens::SequenceTokens;
use inflight_base::TokenId;
use inflight_sampling::SamplingParams;

/// The drafts of one sequence in a step, to be made by the runner's draft model.
///
/// ```text
/// tokens of the sequence   |------ computed ------|-- tokens --| drafts ... |
/// KV of the draft model    |------------------ start + tokens.len() + num_drafts - 1 positions |
/// ```
#[derive(Clone)]
pub struct DraftsToMake<'a> {
    /// The position of the first of `tokens`: the draft model has computed those before it, or other sequences may
    /// have.
    pub start: u32,
    /// The tokens to compute before the first draft, not empty: those that the draft model has missed, and the last
    /// one.
    pub tokens: &'a [TokenId],
    /// The block table of the sequence, as a range of [`Step::block_tables`](super::Step::block_tables): enough blocks
    /// for the drafts, in order of position. There is one group of layers.
    pub block_table: Range<u32>,
    /// How many drafts to make; not zero.
    pub num_drafts: u32,
    sampling: &'a SamplingParams,
}

impl<'a> DraftsToMake<'a> {
    pub(super) fn new(planned: &PlannedSequence, start: u32, tokens: &'a SequenceTokens) -> Self {
        Self {
            start,
            tokens: &tokens.without_drafts()[start as usize..],
            block_table: planned.block_table.clone(),
            num_drafts: planned.num_drafts,
            sampling: tokens.sampling(),
        }
    }

    /// Whether `token` ends the sequence. Such a token is no use as a draft: the row of logits behind it would be
    /// wasted.
    pub fn is_end(&self, token: TokenId) -> bool {
        self.sampling.end_ids.contains(&token) || self.sampling.stop_token_ids.contains(&token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_and_stop_tokens_end_a_sequence() {
        let sampling = SamplingParams {
            end_ids: vec![2],
            stop_token_ids: vec![5, 7],
            ..SamplingParams::default()
        };
        let drafts = DraftsToMake {
            start: 0,
            tokens: &[1],
            block_table: 0..1,
            num_drafts: 1,
            sampling: &sampling,
        };
        let ends: Vec<_> = (0..9).filter(|&token| drafts.is_end(token)).collect();
        assert_eq!(ends, [2, 5, 7]);
    }
}
