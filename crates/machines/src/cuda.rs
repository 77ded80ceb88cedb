//! Models on GPUs. Functions that are not generic, as those of `cpus.rs`.

use inflight_base::LoadError;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_runner::{ModelRunner, ModelSource, RankOptions, Runner, RunnerLimits};

use super::leader::{LeadingRunner, RankLimits, RankWatch};
use super::transport::RankConnections;

/// A model on a GPU.
pub type CudaRunner<P = ()> = ModelRunner<Cuda, P>;

/// Bytes of GPU memory that the largest step takes, without the KV cache.
///
/// # Errors
/// A tensor is missing, or has the wrong shape or type.
pub fn num_step_bytes(
    source: &ModelSource,
    limits: &RunnerLimits,
    options: &CudaOptions,
) -> Result<u64, LoadError> {
    let (capacity, widths) = CudaRunner::<()>::step_size(source, limits)?;
    let (mixture, latent) = (source.spec().mixture(), source.spec().latent_shape());
    Ok(Cuda::num_step_bytes(
        &capacity,
        &widths,
        (mixture.as_ref(), latent.as_ref()),
        limits.max_sampled_rows.index(),
        options,
    ))
}

/// Loads a model on a GPU, see [`ModelRunner::new`].
///
/// # Errors
/// As there.
pub fn load_on_gpu(
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CudaOptions,
) -> Result<Box<dyn Runner>, LoadError> {
    Ok(Box::new(CudaRunner::<()>::new(source, limits, options)?))
}

/// Loads a rank's share of a model, see [`ModelRunner::of_rank`].
///
/// # Errors
/// As there.
pub fn load_rank_on_gpu(
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CudaOptions,
    rank: RankOptions,
) -> Result<Box<dyn Runner>, LoadError> {
    let runner = CudaRunner::<()>::of_rank(source, limits, options, rank)?;
    Ok(Box::new(runner))
}

/// Loads a model on several ranks with a GPU each, see [`LeadingRunner::new`].
///
/// # Errors
/// As there.
pub fn lead_on_gpus(
    connections: RankConnections,
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CudaOptions,
    time_limits: RankLimits,
) -> Result<(Box<dyn Runner>, RankWatch), LoadError> {
    let leader = LeadingRunner::<Cuda>::new(connections, source, limits, options, time_limits)?;
    let watch = leader.watch();
    Ok((Box::new(leader), watch))
}
