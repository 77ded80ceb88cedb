//! The seam of logits post-processors: what changes the logits that one request's tokens are chosen from.

use std::fmt;
use std::sync::Arc;

use crate::sampling::{SampleError, SamplingInput};

/// Changes the logits that one request's next token is chosen from (the logits post-processor of
/// TensorRT-LLM's Batch Manager). Who the request is, and its client, are the processor's to know: each
/// request brings its own.
///
/// What it does depends on nothing but the logits and tokens that it is given, so that a sequence may be
/// paused, resumed and computed in any batch.
pub trait ProcessLogits: Send + Sync {
    /// Changes `logits`, `[vocab_size]`, of the token that follows `input.tokens`.
    ///
    /// Called in the step, on any of the runner's threads: the others wait for it. A logit that is not a
    /// number afterwards ends the request with an error, and so does leaving none above `-inf`.
    ///
    /// # Errors
    /// It cannot; the request ends with it. [`SampleError::ProcessorFailed`] leaves the reason to
    /// [`ProcessLogits::failure`].
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError>;

    /// Why it has failed, for the request's client; `None` if it has not, or has nothing to say.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// A shared [`ProcessLogits`]. Two are equal if they are the same one.
#[derive(Clone)]
pub struct LogitsProcessor(pub Arc<dyn ProcessLogits>);

impl fmt::Debug for LogitsProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogitsProcessor")
    }
}

impl PartialEq for LogitsProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
