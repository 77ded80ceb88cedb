//! L2: logits post-processors: what a request names to change the logits of its tokens.
//!
//! ```text
//! registry.rs       PostProcessors: every name that the requests of a model may give
//! built_in.rs       those that every model has
//! ```
//!
//! A request names one, with arguments of its own, and gets a [`crate::sampling::ProcessLogits`] for itself.

mod built_in;
mod registry;

pub use built_in::reference_table;
pub use registry::{PostProcessors, ProcessedRequest};
