//! Stop words that a client gives as token ids, and reads itself.

use std::sync::Arc;

use crate::base::TokenId;

/// Runs of tokens, any of which ends a sequence.
#[derive(Clone, Debug, Default)]
pub struct StopIds(Arc<[Vec<TokenId>]>);

impl StopIds {
    /// These words.
    pub fn new(words: &[Vec<TokenId>]) -> Self {
        Self(words.into())
    }

    /// Whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tokens of the longest word.
    pub fn max_len(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether the last of these tokens complete a word.
    pub fn end(&self, tokens: &[TokenId]) -> bool {
        self.0.iter().any(|word| tokens.ends_with(word))
    }
}
