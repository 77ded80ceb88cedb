//! Log-probabilities in a step's outputs.

use inflight_base::TokenId;

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogProb {
    /// The token.
    pub token: TokenId,
    /// The natural logarithm of its probability: at most 0, `-inf` for a token that the model rules out, and NaN
    /// where the model's logits are.
    pub log_prob: f32,
    /// 1 for the most likely token. Of equally likely ones the lowest id comes first.
    pub rank: u32,
}

/// The log-probabilities at one position: of the chosen token, and of the most likely ones.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbs {
    /// The chosen token.
    pub chosen: TokenLogProb,
    /// The most likely tokens in order of rank: as many as were asked for, or fewer if the model rules out the
    /// rest. The chosen one may be among them.
    pub top: Vec<TokenLogProb>,
}
