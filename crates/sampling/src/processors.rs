//! The built-in logits processors: bias, forbidden tokens, penalties.
//!
//! None of them hides a logit that is not finite, and none makes one: values saturate at the ends of the range of
//! `f32`.

use crate::history::History;
use crate::{SamplingInput, SamplingParams};
use inflight_base::TokenId;

/// Applies every processor that the request uses, in the order that `Sampler` documents. Returns whether the last one,
/// `no_repeat_ngram_size`, has forbidden a token that the others allow.
pub(super) fn process(logits: &mut [f32], input: SamplingInput<'_>, history: &mut History) -> bool {
    let params = input.params;
    add_bias(logits, &params.logit_bias);
    bad_word_ends(input).for_each(|id| forbid(logits, id));
    if let Some(allowed) = &params.allowed_token_ids {
        forbid_all_but(logits, allowed);
    }
    if input.must_go_on() {
        let last = params.end_ids.iter().chain(&params.stop_token_ids);
        last.for_each(|&id| forbid(logits, id));
    }
    if has_penalties(params) {
        penalise(logits, input, history);
    }
    forbid_repeated_ngrams(logits, input)
}

fn add_bias(logits: &mut [f32], bias: &[(TokenId, f32)]) {
    for &(token, bias) in bias {
        match bias == f32::NEG_INFINITY {
            true => forbid(logits, token),
            false => change(logits, token, |logit| logit + bias),
        }
    }
}

/// The last token of each bad word whose other tokens end the sequence.
pub(super) fn bad_word_ends(input: SamplingInput<'_>) -> impl Iterator<Item = TokenId> {
    input.params.bad_words.iter().filter_map(move |word| {
        let (&last, prefix) = word.split_last()?;
        input.tokens.ends_with(prefix).then_some(last)
    })
}

/// Forbids each token that has followed, anywhere before, the n-gram that ends the sequence. Returns whether any of
/// them was allowed.
///
/// ```text
/// size 3   prompt and output   ... a b c ... a b d ... a b |    c and d are forbidden
/// ```
fn forbid_repeated_ngrams(logits: &mut [f32], input: SamplingInput<'_>) -> bool {
    let size = input.params.no_repeat_ngram_size as usize;
    if size == 0 || size > input.tokens.len() {
        return false;
    }
    let (_, prefix) = input.tokens.split_at(input.tokens.len() + 1 - size);
    let mut has_forbidden = false;
    for ngram in input.tokens.windows(size) {
        if let Some((&last, earlier)) = ngram.split_last()
            && earlier == prefix
        {
            let logit = logits.get(last as usize);
            has_forbidden |= logit.is_some_and(|logit| *logit > f32::NEG_INFINITY);
            forbid(logits, last);
        }
    }
    has_forbidden
}

/// Rules out every token that is not one of `allowed`, which are sorted.
pub fn forbid_all_but(logits: &mut [f32], allowed: &[TokenId]) {
    let mut allowed = allowed.iter().copied().peekable();
    for id in 0..logits.len() as TokenId {
        if allowed.next_if_eq(&id).is_none() {
            forbid(logits, id);
        }
    }
}

pub(super) fn has_penalties(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
        || params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0
}

fn penalise(logits: &mut [f32], input: SamplingInput<'_>, history: &mut History) {
    let params = input.params;
    let repetition = params.repetition_penalty;
    history.for_each(input, repetition != 1.0, |token, entry| {
        change(logits, token, |logit| {
            let repeated = if logit >= 0.0 {
                logit / repetition
            } else {
                logit * repetition
            };
            let count = entry.num_counted as f32;
            let present = if entry.num_counted > 0 {
                params.presence_penalty
            } else {
                0.0
            };
            repeated - params.frequency_penalty * count - present
        });
    });
}

/// Rules `token` out, if it is in the vocabulary. NaN and `+inf` stay, so that they are detected.
pub fn forbid(logits: &mut [f32], token: TokenId) {
    if let Some(logit) = logits.get_mut(token as usize)
        && *logit < f32::INFINITY
    {
        *logit = f32::NEG_INFINITY;
    }
}

/// Changes a finite logit, and keeps it finite. A token outside the vocabulary has none.
fn change(logits: &mut [f32], token: TokenId, new: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize)
        && logit.is_finite()
    {
        *logit = new(*logit).clamp(f32::MIN, f32::MAX);
    }
}
