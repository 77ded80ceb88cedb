//! Sampling that needs nothing of a request but a few numbers, so that a device can do it.

use crate::processors::has_penalties;
use crate::{SamplingInput, SamplingParams};

/// How the next token is chosen from logits that no processor changes: the last steps of
/// [`Sampler`](crate::Sampler).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlainSampling {
    /// The key of the random number.
    pub seed: u64,
    /// Its counter: how many tokens the sequence has generated.
    pub num_generated: u64,
    /// Divides the logits; `0`: the most likely token.
    pub temperature: f32,
    /// Keeps this many tokens; `0`: all.
    pub top_k: u32,
    /// Keeps the tokens with this share of the probability, as it has decayed by now; `1`: all.
    pub top_p: f32,
    /// Keeps the tokens that are at least so likely relative to the most likely one; `0`: all.
    pub min_p: f32,
}

impl PlainSampling {
    /// The numbers for the next token of a sequence. `None` if its options change logits, or cut by `typical_p`.
    pub fn of(input: SamplingInput<'_>) -> Option<Self> {
        let plain = Self::after_changes(input)?;
        (!has_changes(input.params, input.generated().len())).then_some(plain)
    }

    /// The same, from logits that were changed as [`LogitChanges`](crate::LogitChanges) say.
    pub(super) fn after_changes(input: SamplingInput<'_>) -> Option<Self> {
        let plain = Self::new(input.params, input.generated().len())?;
        Some(Self {
            top_p: input.top_p(),
            ..plain
        })
    }

    /// The same for a sequence that has generated `num_generated` tokens, whichever these are. `None` also if they
    /// matter.
    pub fn without_tokens(params: &SamplingParams, num_generated: usize) -> Option<Self> {
        let matter = params.top_p_decay.is_some() || has_changes(params, num_generated);
        Self::new(params, num_generated).filter(|_| !matter)
    }

    fn new(params: &SamplingParams, num_generated: usize) -> Option<Self> {
        // All fields are named, so that a new option is decided upon here.
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            top_p_decay: _,
            min_p,
            typical_p,
            seed,
            repetition_penalty: _,
            presence_penalty: _,
            frequency_penalty: _,
            prompt_ignore_length: _,
            no_repeat_ngram_size,
            min_tokens: _,
            end_ids: _,
            stop_token_ids: _,
            allowed_token_ids,
            bad_words: _,
            logit_bias: _,
            guide,
            logits_processor,
            beam_search,
            stop_text: _,
        } = params;
        let is_plain = *temperature >= 0.0
            && (*typical_p >= 1.0 || params.is_greedy())
            && *no_repeat_ngram_size == 0
            && allowed_token_ids.is_none()
            && guide.is_none()
            && logits_processor.is_none()
            && beam_search.is_none();
        is_plain.then_some(Self {
            seed: *seed,
            num_generated: num_generated as u64,
            temperature: *temperature,
            top_k: *top_k,
            top_p: *top_p,
            min_p: *min_p,
        })
    }
}

/// Whether options change the logits of the next token.
fn has_changes(params: &SamplingParams, num_generated: usize) -> bool {
    let has_end_ids = !(params.end_ids.is_empty() && params.stop_token_ids.is_empty());
    has_penalties(params)
        || (has_end_ids && num_generated < params.min_tokens as usize)
        || !params.bad_words.is_empty()
        || !params.logit_bias.is_empty()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Owner, TopPDecay};

    fn plain(change: impl FnOnce(&mut SamplingParams)) -> Option<PlainSampling> {
        let mut params = SamplingParams {
            temperature: 0.5,
            seed: 7,
            end_ids: vec![1],
            ..SamplingParams::default()
        };
        change(&mut params);
        PlainSampling::of(SamplingInput {
            params: &params,
            tokens: &[5, 6, 7, 8],
            num_prompt_tokens: 1,
            beam: 0,
            owner: Owner::default(),
        })
    }

    #[test]
    fn the_numbers_are_those_of_the_next_token() {
        let decay = TopPDecay {
            factor: 0.5,
            min: 0.0,
            reset_ids: vec![6],
        };
        let sampling = plain(|params| {
            (params.top_p, params.top_p_decay) = (0.8, Some(decay));
            (params.top_k, params.min_p, params.min_tokens) = (3, 0.1, 3);
        });
        let expected = PlainSampling {
            seed: 7,
            num_generated: 3,
            temperature: 0.5,
            top_k: 3,
            top_p: 0.2,
            min_p: 0.1,
        };
        assert_eq!(sampling, Some(expected));
    }

    #[test]
    fn the_tokens_may_be_unknown_if_no_option_looks_at_them() {
        let without_tokens = |params: SamplingParams| PlainSampling::without_tokens(&params, 3);
        let params = SamplingParams {
            temperature: 0.5,
            seed: 7,
            ..SamplingParams::default()
        };
        let sampling = without_tokens(params.clone());
        assert_eq!(sampling, plain(|_| ()));
        let decay = TopPDecay {
            factor: 0.5,
            min: 0.0,
            reset_ids: Vec::new(),
        };
        let decaying = SamplingParams {
            top_p_decay: Some(decay),
            ..params.clone()
        };
        let biased = SamplingParams {
            logit_bias: Arc::from([(3, 1.0)]),
            ..params
        };
        assert_eq!([decaying, biased].map(without_tokens), [None, None]);
    }

    #[test]
    fn options_that_change_logits_are_not_plain() {
        let changes: [fn(&mut SamplingParams); 9] = [
            |params| params.typical_p = 0.9,
            |params| params.repetition_penalty = 1.1,
            |params| params.presence_penalty = 0.1,
            |params| params.frequency_penalty = 0.1,
            |params| params.no_repeat_ngram_size = 2,
            |params| params.min_tokens = 4,
            |params| params.allowed_token_ids = Some(Arc::from([3])),
            |params| params.bad_words = Arc::from([vec![3]]),
            |params| params.logit_bias = Arc::from([(3, 1.0)]),
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert_eq!(plain(change), None, "change {index}");
        }
        // Greedy sampling has no use for typical_p.
        assert!(plain(|params| (params.typical_p, params.temperature) = (0.9, 0.0)).is_some());
    }
}
