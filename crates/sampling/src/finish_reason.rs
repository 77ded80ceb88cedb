//! Why a sequence ended.

use crate::SampleError;

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The sequence generated one of its end ids.
    EndId,
    /// Its text contained a stop word, or it generated one of its stop ids.
    StopWords,
    /// It reached `max_tokens` or `max_seq_len`, or no token is left that would not repeat a run of
    /// `no_repeat_ngram_size`.
    Length,
    /// Its prompt is computed, and nothing is generated.
    Pooled,
    /// Its own time limit passed.
    TimedOut,
    /// Its client or Triton cancelled it.
    Cancelled,
    /// No next token could be chosen; the response carries the error.
    Error(SampleError),
}

impl FinishReason {
    /// How a sequence ends when no token can be chosen: with an error or, if only repeats are left, with the tokens
    /// that it has.
    pub fn of(error: SampleError) -> Self {
        match error {
            SampleError::OnlyRepeats => Self::Length,
            error => Self::Error(error),
        }
    }
}
