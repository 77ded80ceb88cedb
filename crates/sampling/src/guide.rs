//! The interface of guided decoding: which tokens may come next.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::SampleError;
use inflight_base::TokenId;

/// Decides which tokens may follow an output: by a grammar, a schema or a list of choices.
///
/// The answer depends only on the tokens that it is given, so that a sequence can be paused, resumed and computed in
/// any batch. A guide follows one sequence. Given another's tokens it starts from the beginning, so each sequence gets
/// its own by [`GuideTokens::fresh`].
pub trait GuideTokens: Send + Sync {
    /// A guide to the same outputs for another sequence.
    fn fresh(&self) -> Guide;

    /// Computes what may follow `generated`, and what may follow it with the first of `drafts`, the first two, and so
    /// on, as far as they are allowed. Called on a thread that computes no step; it may take long.
    fn prepare(&self, generated: &[TokenId], drafts: &[TokenId]);

    /// Whether it is known what may follow `generated`, so that [`GuideTokens::restrict`] is quick. Takes no time
    /// itself, also during [`GuideTokens::prepare`].
    fn is_ready(&self, generated: &[TokenId]) -> bool;

    /// What computing has cost so far.
    fn cost(&self) -> GuideCost;

    /// Has a [`GuideTokens::prepare`] that goes on fail soon, for good.
    fn give_up(&self);

    /// More about an error of this guide than the error says itself: a text in its place. `None` if there is no more.
    fn explain(&self, _: SampleError) -> Option<String> {
        None
    }

    /// Forbids in `logits`, `[vocab_size]`, every token that may not follow `generated`. The request's
    /// end ids may follow exactly where the output may end. Computes that if it is not known.
    ///
    /// # Errors
    /// It cannot be computed; the request ends with the error.
    fn restrict(&self, logits: &mut [f32], generated: &[TokenId]) -> Result<(), SampleError>;
}

/// The time that a guide has taken. It decides which guide is computed first, and never what a guide allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuideCost {
    /// Since it was made.
    pub total: Duration,
    /// For the last token.
    pub last: Duration,
}

/// A shared [`GuideTokens`]. Two are equal if they are one object.
#[derive(Clone)]
pub struct Guide(pub Arc<dyn GuideTokens>);

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guide")
    }
}

impl PartialEq for Guide {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
