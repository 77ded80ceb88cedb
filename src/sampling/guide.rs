//! Guided decoding's seam: what says which tokens may come next.

use std::fmt;
use std::sync::Arc;

use crate::base::TokenId;
use crate::sampling::SampleError;

/// Which tokens may follow an output: a grammar, a schema, a list of choices.
///
/// What it says depends on nothing but the tokens that it is asked about, so that a sequence may be
/// paused, resumed and computed in any batch. A guide follows one sequence. It may be asked about others,
/// but then starts from the beginning each time: [`GuideTokens::fresh`] gives each sequence its own.
pub trait GuideTokens: Send + Sync {
    /// A guide to the same outputs for another sequence, which has seen nothing yet.
    fn fresh(&self) -> Guide;

    /// Works out what may follow `generated`, ahead of [`GuideTokens::restrict`], which does it otherwise.
    /// Called while the model computes, on a thread of its own.
    fn prepare(&self, generated: &[TokenId]);

    /// Forbids in `logits`, `[vocab_size]`, every token that may not follow `generated`. The request's
    /// end ids may follow exactly where the output may end.
    ///
    /// # Errors
    /// It cannot be worked out; the request ends with it.
    fn restrict(&self, logits: &mut [f32], generated: &[TokenId]) -> Result<(), SampleError>;
}

/// A shared [`GuideTokens`]. Two are equal if they are the same one.
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
