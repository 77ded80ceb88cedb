//! Why no token could be chosen.

use thiserror::Error;

/// Why a sequence has no next token. Only this sequence fails; the others of its step do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum SampleError {
    /// The model returned a logit that is NaN or positive infinity. Negative infinity is allowed: it rules a token out.
    #[error("the model's logits are not finite numbers: its weights may be damaged")]
    NotFinite,
    /// Every token is ruled out, by the model or by the request.
    #[error(
        "no token is allowed: the logits post-processor, the guide, embedding_bias, allowed_token_ids, \
         bad_words and min_tokens leave none; allow more"
    )]
    NoneAllowed,
    /// Every other token that is allowed would repeat an n-gram of `no_repeat_ngram_size` tokens. The
    /// sequence has not failed: it ends with the tokens that it has, see [`FinishReason::of`](crate::FinishReason::of).
    #[error("every token that is allowed would repeat a run of no_repeat_ngram_size tokens")]
    OnlyRepeats,
    /// The request's guide would need more work or memory for its next token than one request may have.
    #[error(
        "the guide has become too complex: its grammar is ambiguous, as what has been generated can be derived in too many \
         ways, or too large; do not repeat a rule by itself ('s ::= s s | ...', or '+' of what ends with '+'), but write \
         's ::= [a-z]+', give alternatives different beginnings, and let no two of them match the same text"
    )]
    GuideTooComplex,
    /// The request's guide cannot be followed any further, for a reason of its own.
    #[error("the guide failed: its grammar cannot be followed any further")]
    GuideFailed,
    /// The request's logits post-processor failed, or broke its rules. The processor has the reason.
    #[error("the logits post-processor failed")]
    ProcessorFailed,
}
