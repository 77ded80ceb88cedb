//! When a sequence ends by its tokens. Stop words are text and are detected in `text/`; those of beams through
//! `stop_text.rs`.

use crate::base::{TokenId, Tokens};
use crate::sampling::finish_reason::FinishReason;
use crate::sampling::params::SamplingParams;

/// The length, end-id and stop-id rule of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopRule {
    /// The most tokens that the request may generate, at least one.
    pub max_new_tokens: Tokens,
}

impl StopRule {
    /// Whether the sequence ends with `token`, its `num_generated`-th, and why.
    pub fn after(
        &self,
        params: &SamplingParams,
        token: TokenId,
        num_generated: Tokens,
    ) -> Option<FinishReason> {
        if params.end_ids.contains(&token) {
            Some(FinishReason::EndId)
        } else if params.stop_token_ids.contains(&token) {
            Some(FinishReason::StopWords)
        } else if num_generated >= self.max_new_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// The tokens that end a request, told from most others without a look at their lists: a set of 64
/// classes, each token in the class of its lowest six bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endings {
    classes: u64,
}

impl Endings {
    /// The end ids and stop ids of `params`.
    pub fn of(params: &SamplingParams) -> Self {
        let ids = params.end_ids.iter().chain(&params.stop_token_ids);
        Self {
            classes: ids.fold(0, |classes, &id| classes | Self::class(id)),
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
            end_ids: vec![2, 128_001],
            stop_token_ids: vec![63, 64],
            ..SamplingParams::default()
        };
        let endings = Endings::of(&params);
        let rule = StopRule {
            max_new_tokens: Tokens(9),
        };
        for token in 0..200_000 {
            let ends = rule.after(&params, token, Tokens(1)).is_some();
            assert!(endings.may_have(token) || !ends, "{token}");
        }
        assert!(!endings.may_have(3));
        assert!(!Endings::of(&SamplingParams::default()).may_have(0));
    }
}
