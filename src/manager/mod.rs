//! L5: the batch manager as one object: an engine that decides and a runner that computes.
//!
//! ```text
//! stepper.rs      BatchManager: launch a step, land it
//! pipeline.rs     a runner on a thread of its own, for two micro-batches
//! statistics.rs   a record as the Batch Manager's JSON
//! callbacks.rs    the loop that serves an application through its callbacks
//! ```
//!
//! It knows nothing of Triton: the backend's driver is one of its users, `examples/prompts.rs` another.
//! Whoever has a loop of its own calls [`BatchManager::launch`] and [`BatchManager::land`] in it, as the
//! driver does; whoever has not gives its callbacks to [`serve`].

mod callbacks;
mod pipeline;
mod statistics;
mod stepper;

pub use callbacks::{Callbacks, Response, serve};
pub use statistics::{statistics_json, timestamp};
pub use stepper::{BatchManager, LandedStep};
