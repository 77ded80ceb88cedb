//! Sizes an instance and loads its runner.

use std::path::Path;

use super::configured_model::ConfiguredModel;
use super::engine_config::{ModelDimensions, engine_config};
use super::host_memory::{self, InstanceMemory};
use crate::base::LoadError;
use crate::config::{ModelConfig, Settings};
use crate::device::cpu::{CpuOptions, Simd};
use crate::engine::EngineConfig;
use crate::runner::{
    CpuRunner, ModelSource, Runner, RunnerLimits, SyntheticOptions, SyntheticRunner,
};

/// A runner, the engine configuration that it was sized for, and the memory that both may use.
pub struct LoadedRunner {
    /// The engine's configuration.
    pub config: EngineConfig,
    /// The runner, with its weights loaded.
    pub runner: Runner,
    /// The memory reserved for weights and KV cache.
    pub memory: InstanceMemory,
}

/// Sizes the KV cache by the memory that is free, and loads the weights. Without a checkpoint the runner is the
/// synthetic one; files that the configuration names are relative to `folder`, the model's folder.
///
/// # Errors
/// Settings that contradict each other, a checkpoint that cannot be loaded, or memory that does not suffice.
pub fn load_runner(
    config: &ModelConfig,
    source: Option<&ModelSource>,
    folder: &Path,
) -> Result<LoadedRunner, LoadError> {
    let settings = &config.settings;
    let model = ConfiguredModel { settings, source };
    let weight_bytes = model.num_weight_bytes()?;
    let (engine, reservation) = host_memory::reserve(|available_bytes| {
        // The KV cache shares what the weights leave.
        let left = available_bytes.map(|bytes| bytes.saturating_sub(weight_bytes));
        let engine = engine_config(config, &model, left)?;
        let kv_bytes = u64::from(engine.num_blocks.0) * model.kv_bytes_per_block(engine.block_size);
        Ok::<_, LoadError>((engine, weight_bytes + kv_bytes))
    })?;
    let limits = RunnerLimits {
        kv_dtype: model.kv_dtype(),
        weights: model.weights(),
        attention: model.attention(),
        ..RunnerLimits::of(&engine)
    };
    let runner = match source {
        Some(source) => {
            let runner = CpuRunner::new(source, limits, &cpu_options(settings)?)?;
            Runner::Cpu(Box::new(runner))
        }
        None => Runner::Synthetic(synthetic(settings, &limits, folder)?),
    };
    let bytes_per_block = model.kv_bytes_per_block(engine.block_size);
    Ok(LoadedRunner {
        config: engine,
        runner,
        memory: InstanceMemory::new(reservation, weight_bytes, bytes_per_block),
    })
}

fn synthetic(
    settings: &Settings,
    limits: &RunnerLimits,
    folder: &Path,
) -> Result<SyntheticRunner, LoadError> {
    let options = SyntheticOptions {
        vocab_size: settings.synthetic_vocab_size,
        step_base_us: settings.synthetic_step_us,
        step_per_token_us: settings.synthetic_token_us,
    };
    let gate = settings.synthetic_gate.as_ref();
    Ok(SyntheticRunner::new(options, limits)?
        .failing_after(settings.synthetic_fail_after)
        .gated_by(gate.map(|path| folder.join(path))))
}

fn cpu_options(settings: &Settings) -> Result<CpuOptions, LoadError> {
    let simd = settings.cpu_instruction_set.as_deref().map(|name| {
        name.parse::<Simd>().map_err(|_| LoadError::Knob {
            key: "cpu_instruction_set".to_owned(),
            value: name.to_owned(),
            expected: "one that this build has".to_owned(),
        })
    });
    Ok(CpuOptions {
        num_threads: settings.num_threads,
        simd: simd.transpose()?,
    })
}
