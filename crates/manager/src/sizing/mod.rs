//! The size of an instance: the engine's configuration, the runner, and the memory for both.
//!
//! ```text
//! configured_model.rs  a checkpoint as its configuration serves it: precision, windows, bytes
//! engine_config.rs     from the configuration and the free memory to an `EngineConfig`
//! gpu_memory.rs        free memory of GPUs, and what it is for besides the KV cache
//! host_cache.rs        host memory for what the KV cache gives up
//! host_memory.rs       free memory, less what other instances have reserved
//! load.rs              all of it in one call, with the runner at the end
//! load_on_gpu.rs       the runner of an instance on GPUs
//! loading.rs           the parts of loading that CPUs and GPUs share
//! rank_cpus.rs         the CPUs of each rank
//! rank_gpus.rs         the GPU of each rank
//! ```

mod configured_model;
mod engine_config;
#[cfg(feature = "cuda")]
mod gpu_memory;
mod host_cache;
mod host_memory;
mod load;
#[cfg(feature = "cuda")]
mod load_on_gpu;
mod loading;
mod rank_cpus;
#[cfg(feature = "cuda")]
mod rank_gpus;

pub use configured_model::{ConfiguredModel, open_model_source};
pub(crate) use configured_model::{
    check_draft_model_path, open_with_draft_head, open_with_draft_model,
};
pub use engine_config::{ModelDimensions, engine_config};
pub(crate) use engine_config::{image_limits, speculation};
pub(crate) use host_cache::MAX_PREFIX_BLOCKS;
pub use host_memory::{InstanceMemory, MemoryUsage};
pub use load::load_runner;
pub(crate) use load::{check_draft_model, check_ranks, cpu_options};
pub use loading::LoadedRunner;
pub(crate) use loading::{rank_limits, rank_transport};
