//! Models on CPUs. These functions are not generic, so that a model on CPUs is compiled here, and not in each crate
//! that loads one.

use inflight_base::LoadError;
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_runner::{CpuRunner, ModelSource, RankOptions, Runner, RunnerLimits};

use super::leader::{LeadingRunner, RankLimits, RankWatch};
use super::transport::RankConnections;

/// Loads a model on the CPUs of this process, see [`CpuRunner::new`].
///
/// # Errors
/// As there.
pub fn load_on_cpus(
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CpuOptions,
) -> Result<Box<dyn Runner>, LoadError> {
    Ok(Box::new(CpuRunner::new(source, limits, options)?))
}

/// Loads a rank's share of a model, see [`CpuRunner::of_rank`].
///
/// # Errors
/// As there.
pub fn load_rank_on_cpus(
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CpuOptions,
    rank: RankOptions,
) -> Result<Box<dyn Runner>, LoadError> {
    Ok(Box::new(CpuRunner::of_rank(source, limits, options, rank)?))
}

/// Loads a model on several ranks of CPUs, see [`LeadingRunner::new`].
///
/// # Errors
/// As there.
pub fn lead_on_cpus(
    connections: RankConnections,
    source: &ModelSource,
    limits: RunnerLimits,
    options: &CpuOptions,
    time_limits: RankLimits,
) -> Result<(Box<dyn Runner>, RankWatch), LoadError> {
    let leader = LeadingRunner::<Cpu>::new(connections, source, limits, options, time_limits)?;
    let watch = leader.watch();
    Ok((Box::new(leader), watch))
}
