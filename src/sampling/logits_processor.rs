//! The seam of logits post-processors: what changes the logits that one request's tokens are chosen from.

use std::any::Any;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::sampling::{SampleError, SamplingInput};

/// Changes the logits that one request's next token is chosen from (the logits post-processor of
/// TensorRT-LLM's Batch Manager). Each request brings its own, and one may serve several: whose logits they are,
/// and of which client, stands in the input's [`Owner`](crate::sampling::Owner).
///
/// What it does depends on nothing but the logits and the input that it is given, so that a sequence may be
/// paused, resumed and computed in any batch.
pub trait ProcessLogits: Any + Send + Sync {
    /// Changes `logits`, `[vocab_size]`, of the token that follows `input.tokens`.
    ///
    /// Called in the step, on any of the runner's threads: the others wait for it. A logit that is not a
    /// number afterwards ends the request with an error, and so does leaving none above `-inf`.
    ///
    /// # Errors
    /// It cannot; the request ends with it. [`SampleError::ProcessorFailed`] leaves the reason to
    /// [`ProcessLogits::failure`].
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError>;

    /// What prepares it, if it works on all sequences of a step together with the others of its kind. Then
    /// [`ProcessLogits::process`] only takes over what has been prepared.
    fn batch(&self) -> Option<&dyn ProcessBatch> {
        None
    }

    /// Why it has failed, for the request's client; `None` if it has not, or has nothing to say.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Works on the logits of several sequences at once. What it does to one of them depends on nothing of the
/// others.
pub trait ProcessBatch: Send + Sync {
    /// Called once a step with all sequences whose [`ProcessLogits::batch`] is this, before any of them is
    /// processed. What comes of it, it leaves with their processors.
    fn prepare(&self, rows: &[BatchRow<'_>]);
}

/// A token that is to be chosen.
#[derive(Clone, Copy)]
pub struct BatchRow<'a> {
    /// Its request's processor.
    pub processor: &'a dyn ProcessLogits,
    /// The model's, `[vocab_size]`, where [`ProcessLogits::process`] will get them.
    pub logits: &'a [f32],
    /// What came before it.
    pub input: SamplingInput<'a>,
}

/// Has the processors prepared that work on batches, each batch once. Of rows without such a processor,
/// there may be any number: they cost a look, and no memory.
pub fn prepare_batches<'a>(rows: impl Iterator<Item = (&'a [f32], SamplingInput<'a>)>) {
    let batched = rows.filter_map(|(logits, input)| {
        let processor = &*input.params.logits_processor.as_ref()?.0;
        let batch = processor.batch()?;
        let row = BatchRow {
            processor,
            logits,
            input,
        };
        Some((batch, row))
    });
    let mut batched: Vec<_> = batched.collect();
    while let Some(&(first, _)) = batched.first() {
        let mut rows = Vec::with_capacity(batched.len());
        batched.retain(|&(batch, row)| {
            let is_of_first = ptr::addr_eq(batch, first);
            if is_of_first {
                rows.push(row);
            }
            !is_of_first
        });
        first.prepare(&rows);
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
