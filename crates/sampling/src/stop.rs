//! When a sequence ends by its tokens. Stop words that are text are detected in `text/`; for beams through
//! `stop_text.rs`.

use std::sync::Arc;

use crate::finish_reason::FinishReason;
use crate::params::SamplingParams;
use inflight_base::{TokenId, Tokens};

/// The length, end-id and stop-word rule of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopRule {
    /// The most tokens that the request may generate, at least one.
    pub max_new_tokens: Tokens,
    /// Words of token ids. A sequence ends when its last generated tokens are one of them.
    pub stop_words: Arc<[Vec<TokenId>]>,
}

impl StopRule {
    /// A rule without stop words.
    pub fn at_length(max_new_tokens: Tokens) -> Self {
        Self {
            max_new_tokens,
            stop_words: Arc::default(),
        }
    }

    /// Why the sequence ends with `token`, generated after the tokens `before` it, if it does.
    pub fn after(
        &self,
        params: &SamplingParams,
        before: &[TokenId],
        token: TokenId,
    ) -> Option<FinishReason> {
        if params.end_ids.contains(&token) {
            Some(FinishReason::EndId)
        } else if params.stop_token_ids.contains(&token) {
            Some(FinishReason::StopWords)
        } else if before.len() + 1 >= self.max_new_tokens.index() {
            Some(FinishReason::Length)
        } else {
            let ends = |word: &Vec<TokenId>| {
                let (last, rest) = word.split_last()?;
                (*last == token && before.ends_with(rest)).then_some(FinishReason::StopWords)
            };
            self.stop_words.iter().find_map(ends)
        }
    }
}

/// A filter for the tokens that end a request, so that their lists are rarely searched: a set of 64 classes, each
/// token in the class of its lowest six bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endings {
    classes: u64,
}

impl Endings {
    /// The end ids and stop ids of `params`, and the last tokens of the stop words of `stop`.
    pub fn of(params: &SamplingParams, stop: &StopRule) -> Self {
        let ids = params.end_ids.iter().chain(&params.stop_token_ids);
        let words = stop.stop_words.iter().filter_map(|word| word.last());
        Self {
            classes: ids
                .chain(words)
                .fold(0, |classes, &id| classes | Self::class(id)),
        }
    }

    /// `false` if [`StopRule::after`] has nothing to say about `token` itself.
    pub fn may_have(self, token: TokenId) -> bool {
        self.classes & Self::class(token) != 0
    }

    fn class(id: TokenId) -> u64 {
        1 << (id % 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_of_endings_misses_none_of_them() {
        let params = SamplingParams {
            end_ids: vec![2, 66, 128_001],
            stop_token_ids: vec![63, 64],
            ..SamplingParams::default()
        };
        let rule = StopRule {
            stop_words: [vec![5, 70_001], vec![199_000]].into(),
            ..StopRule::at_length(Tokens(9))
        };
        let endings = Endings::of(&params, &rule);
        let mut num_endings = 0;
        for token in 0..200_000 {
            let ends = rule.after(&params, &[5], token).is_some();
            num_endings += u32::from(ends);
            assert!(endings.may_have(token) || !ends, "{token}");
        }
        assert_eq!(num_endings, 7);
        assert!(!endings.may_have(3));
        let none = Endings::of(&SamplingParams::default(), &StopRule::at_length(Tokens(9)));
        assert!(!none.may_have(0));
    }

    #[test]
    fn a_stop_word_ends_a_sequence_wherever_it_begins() {
        let rule = StopRule {
            stop_words: [vec![1, 2, 1, 3], vec![9]].into(),
            ..StopRule::at_length(Tokens(8))
        };
        let params = SamplingParams {
            end_ids: vec![4],
            ..SamplingParams::default()
        };
        let end = |tokens: &[TokenId]| {
            (0..tokens.len()).find_map(|i| {
                let reason = rule.after(&params, &tokens[..i], tokens[i]);
                reason.map(|reason| (i, reason))
            })
        };
        let word = FinishReason::StopWords;
        // The word begins within a beginning of itself.
        assert_eq!(end(&[1, 2, 1, 2, 1, 3, 5]), Some((5, word)));
        assert_eq!(end(&[1, 2, 3, 9]), Some((3, word)));
        assert_eq!(end(&[1, 2, 1]), None, "half a word");
        assert_eq!(end(&[4, 9]), Some((0, FinishReason::EndId)));
        let long = [1, 2, 5, 5, 1, 2, 1, 3];
        assert_eq!(
            end(&long),
            Some((7, FinishReason::Length)),
            "the length comes first"
        );
    }
}
