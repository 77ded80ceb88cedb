//! When a sequence ends by its own tokens. Stop *words* are text, and live in `text/`.

use crate::base::{TokenId, Tokens};
use crate::sampling::{SampleError, SamplingParams};

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// It produced one of its end ids.
    EndId,
    /// Its text contained a stop word, or it produced one of its stop ids.
    StopWords,
    /// It reached `max_tokens` or `max_seq_len`.
    Length,
    /// Its own time limit passed.
    TimedOut,
    /// Its client, or Triton, gave it up.
    Cancelled,
    /// No next token could be chosen; the response carries the error.
    Error(SampleError),
}

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
