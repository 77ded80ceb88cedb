//! L7: where Triton meets the engine.
//!
//! ```text
//! implementation   what Triton's entry points call
//! model, instance  what is loaded
//! text_source      the model's tokenizer and chat template
//! batch_strategy   how Triton forms the batches of dynamic_batching
//! request/         from a Triton request to one that the engine takes
//! driver/          from an Execute call to a step, and the requests in flight
//! response/        from tokens to responses
//! observe/         metrics and statistics records
//! ```

mod advice;
mod batch_strategy;
mod driver;
mod implementation;
mod instance;
mod model;
mod model_anchor;
mod model_load;
mod observe;
mod request;
mod response;
mod text_source;

pub use implementation::Inflight;
pub use request::RequestOptions;
pub use request::{client_tables, reference_table};
