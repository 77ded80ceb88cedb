//! L6: the batch manager as one object: an engine that decides and a runner that computes.
//!
//! ```text
//! adapters/          adapters that requests name
//! batch_manager.rs   BatchManager: requests in, tokens out
//! step_loop.rs       launching and landing steps, with a runner or in virtual time
//! step_cost.rs       what a step of a runner costs
//! step_runner.rs     a runner that computes them
//! runner_thread.rs   the runner on a thread of its own, for two micro-batches
//! ahead_runner.rs    the runner where steps are planned ahead
//! statistics.rs      a record as the Batch Manager's JSON
//! callbacks.rs       what an application implements
//! serve.rs           the loop that calls it
//! thread.rs          the same on a thread of its own
//! serving_rank.rs    another rank, without requests, on a thread of its own
//! executor.rs        requests that are enqueued, and responses that are awaited
//! tensors/           requests and responses as tensors by name
//! options.rs         a batch manager from JSON options
//! sizing/            engine configuration, runner and memory from a model's configuration
//! ```
//!
//! It knows nothing of Triton: the backend's driver is one of its users, `examples/prompts.rs` another.
//! An application with a loop of its own calls [`BatchManager::launch`] and [`BatchManager::land`] in it, as the
//! driver does. One without passes its callbacks to [`serve()`] or to a [`ManagerThread`], or uses an [`Executor`].
//! `crates/embed/` is a [`TensorLayer`] and a [`TensorExecutor`] for applications in C.

#![forbid(unsafe_code)]

mod adapters;
mod ahead_runner;
mod batch_manager;
mod callbacks;
mod executor;
mod options;
mod runner_thread;
mod serve;
mod serving_rank;
pub mod sizing;
mod statistics;
mod step_cost;
mod step_loop;
mod step_runner;
mod tensors;
mod thread;

pub use adapters::{
    AdapterCacheUsage, AdapterFolders, AdapterLimits, AdapterLoad, AdapterPageLimits, AdapterStore,
    AdapterUpload, LoadedAdapter, UploadHeader, UploadWriter,
};
pub use batch_manager::BatchManager;
pub use callbacks::{Callbacks, Response, Submission};
pub use executor::{Executor, ExecutorOptions, OwnedResponse};
pub use options::ManagerOptions;
pub use serve::serve;
pub use serving_rank::ServingRank;
pub use statistics::{StepTimes, statistics_json, timestamp};
pub use step_cost::{measure_costs, measure_step_cost};
pub use step_loop::{ComputedStep, LandedStep, StepComputer, StepLoop};
pub use tensors::{
    HostTensor, HostTensors, TensorCallbacks, TensorExecutor, TensorLayer, TensorModel,
    TensorRequest, TensorResponse, TensorType,
};
pub use thread::ManagerThread;
