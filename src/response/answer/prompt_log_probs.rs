//! The log-probabilities of a prompt's tokens, until a response carries them.

use crate::response::log_probs;
use inflight_base::TokenId;
use inflight_sampling::TokenLogProbs;
use inflight_text::Tokenizer;

/// The log-probabilities of a prompt's tokens, as steps bring them.
pub struct PromptLogProbs {
    /// The first token, which has none.
    first: TokenId,
    num_tokens: usize,
    others: Vec<TokenLogProbs>,
}

impl PromptLogProbs {
    /// The log-probabilities of a prompt, of which none is known.
    ///
    /// # Panics
    /// The prompt is empty.
    pub fn of(prompt: &[TokenId]) -> Self {
        Self {
            first: prompt[0],
            num_tokens: prompt.len(),
            others: Vec::with_capacity(prompt.len() - 1),
        }
    }

    /// Adds the log-probabilities of the next tokens.
    pub(super) fn add(&mut self, mut log_probs: Vec<TokenLogProbs>) {
        self.others.append(&mut log_probs);
    }

    /// Whether all tokens have theirs.
    pub(super) fn are_whole(&self) -> bool {
        1 + self.others.len() == self.num_tokens
    }

    /// The number of entries to be written.
    pub(super) fn num_entries(&self) -> usize {
        self.others.iter().map(|token| 1 + token.top.len()).sum()
    }

    /// The JSON list of all tokens.
    pub(super) fn json(&self, tokenizer: Option<&Tokenizer>) -> Vec<u8> {
        let mut json = Vec::new();
        // Writing to memory cannot fail.
        let _ = log_probs::write_prompt(&mut json, self.first, &self.others, tokenizer);
        json
    }
}
