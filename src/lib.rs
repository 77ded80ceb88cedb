//! `inflight`: a Triton Inference Server backend that generates text with in-flight batching.
//!
//! Here Triton meets the batch manager. Everything below is a crate of its own, with a level, and imports only crates
//! of a lower level. `docs/src/architecture.md` lists them and their levels; `tests/architecture/` enforces them.
//!
//! ```text
//! entry            the functions that Triton finds in the library
//! implementation   what they call
//! model, instance  what is loaded
//! text_source      the model's tokenizer and chat template
//! batch_strategy   how Triton forms the batches of dynamic_batching
//! request/         from a Triton request to one that the engine takes
//! driver/          from an Execute call to a step, and the requests in flight
//! response/        from tokens to responses
//! observe/         metrics and statistics records
//! ```
//!
//! # One step
//!
//! ```text
//! engine.add(request) / engine.cancel(id)      any number, before the step
//! let step = engine.schedule();                a pure decision: plain data
//! runner.run(plan, &mut output)?;              the only call that takes time, for each of step.plans()
//! engine.apply(step, &mut output, &mut events);   tokens, finishes, pauses
//! ```

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must not take tritonserver down: build with panic = \"unwind\"");

mod advice;
mod batch_strategy;
mod driver;
mod entry;
mod image_source;
mod implementation;
mod instance;
mod model;
mod model_anchor;
mod model_load;
mod observe;
mod request;
mod response;
mod text_source;
#[cfg(test)]
#[allow(dead_code, reason = "the tests of crates/text use all of it")]
#[path = "../tests/support/toy_tokenizers.rs"]
mod toys;

pub use implementation::Inflight;
pub use request::RequestOptions;
pub use request::{client_tables, reference_table};
