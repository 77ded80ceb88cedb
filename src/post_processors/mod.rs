//! L2: logits post-processors: what a request names to change the logits of its tokens.
//!
//! ```text
//! registry.rs           PostProcessors: every name that the requests of a model may give
//! processed_request.rs  the request whose logits are processed
//! built_in.rs           those that every model has
//! library_request.rs    those of a user's shared library: their checks and their failures
//! guarded.rs            a copy of the logits that shows a write beyond it
//! library/              opens a library and calls it; unsafe. Its abi.rs is the C header as Rust types
//! ```
//!
//! A request names one, with arguments of its own, and gets a [`crate::sampling::ProcessLogits`] for itself.

mod built_in;
mod guarded_logits;
mod library;
mod library_request;
mod processed_request;
mod registry;

pub use built_in::reference_table;
pub use processed_request::ProcessedRequest;
pub use registry::PostProcessors;
