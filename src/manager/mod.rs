//! L6: the batch manager as one object: an engine that decides and a runner that computes.
//!
//! ```text
//! stepper.rs      BatchManager: launch a step, land it
//! pipeline.rs     a runner on a thread of its own, for two micro-batches
//! statistics.rs   a record as the Batch Manager's JSON
//! callbacks.rs    what an application does that is called back
//! serve.rs        the loop that calls it
//! thread.rs       the same on a thread of its own
//! executor.rs     requests that are enqueued, and responses that are awaited
//! tensors/        requests and responses as tensors by name
//! options.rs      a batch manager from a text of options
//! sizing/         engine configuration, runner and memory from a model's configuration
//! ```
//!
//! It knows nothing of Triton: the backend's driver is one of its users, `examples/prompts.rs` another.
//! Whoever has a loop of its own calls [`BatchManager::launch`] and [`BatchManager::land`] in it, as the
//! driver does; whoever has not gives its callbacks to [`serve()`] or to a [`ManagerThread`], or asks an
//! [`Executor`]. `crates/embed/` is a [`TensorLayer`] for applications in C.

mod callbacks;
mod executor;
mod options;
mod pipeline;
mod serve;
pub mod sizing;
mod statistics;
mod stepper;
mod tensors;
mod thread;

pub use callbacks::{Callbacks, Response, Submission};
pub use executor::{Executor, ExecutorOptions, OwnedResponse};
pub use options::ManagerOptions;
pub use serve::serve;
pub use statistics::{statistics_json, timestamp};
pub use stepper::{BatchManager, LandedStep};
pub use tensors::{
    HostTensor, HostTensors, TensorCallbacks, TensorLayer, TensorModel, TensorRequest, TensorType,
};
pub use thread::ManagerThread;
