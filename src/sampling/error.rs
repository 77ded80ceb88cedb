//! Why no token could be chosen.

use thiserror::Error;

/// Why a sequence has no next token. Only this sequence fails; the others of its step do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum SampleError {
    /// The model gave a logit that is NaN or positive infinity. Negative infinity is a number here:
    /// a token that the model rules out.
    #[error("the model's logits are not finite numbers: its weights may be damaged")]
    NotFinite,
    /// Every token is ruled out, by the model or by the request.
    #[error(
        "no token is allowed: allowed_token_ids, bad_words, no_repeat_ngram_size and min_tokens \
         leave none; allow more"
    )]
    NoneAllowed,
}
