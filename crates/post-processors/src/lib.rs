//! L2: logits post-processors, which change the logits of the requests that name them.
//!
//! ```text
//! registry.rs           PostProcessors: all post-processors of a model, by name
//! processed_request.rs  the request whose logits are processed
//! built_in.rs           the built-in post-processors
//! library_request.rs    post-processors from a user's shared library: calls, checks and failures
//! guarded_logits.rs     a copy of the logits that detects writes outside of them
//! library/              loads a library and calls it; unsafe. abi.rs has the Rust types of the C header
//! ```
//!
//! A request names a post-processor and its arguments, and gets its own [`inflight_sampling::ProcessLogits`].

mod built_in;
mod guarded_logits;
mod library;
mod library_request;
mod processed_request;
mod registry;

pub use built_in::reference_table;
pub use processed_request::ProcessedRequest;
pub use registry::PostProcessors;
