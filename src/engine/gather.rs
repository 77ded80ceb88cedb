//! What a request wants to know besides its tokens, and what a step brings of it.

use crate::sampling::TokenLogProbs;

/// What a request wants besides its tokens. Each costs time and memory, so the default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gather {
    /// The log-probability of each token that is chosen, and those of so many of the most likely ones;
    /// `None`: not even that.
    pub log_probs: Option<u32>,
}

impl Gather {
    /// Whether any of it is made of logits.
    pub fn needs_logits(&self) -> bool {
        self.log_probs.is_some()
    }
}

/// What a step brings of what a request wants besides its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gathered {
    /// Of the step's token, if it has one and they are wanted.
    pub log_probs: Option<TokenLogProbs>,
}
