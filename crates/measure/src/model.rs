//! A checkpoint on CPU, sized for a load.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_device::KvDtype;
use inflight_device_cpu::{Cpu, CpuOptions, Simd};
use inflight_engine::{BlockReuse, EngineConfig};
use inflight_runner::{CpuRunner, ModelSource, Probe, RunnerLimits};

use crate::Result;
use crate::load::Load;
use crate::roofline::{ModelCost, Precision};

/// Tokens per KV block.
pub const BLOCK_SIZE: u32 = 32;

/// The model to measure, and the threads and instructions to use.
#[derive(Args, Clone, Debug)]
#[group(id = "model options")]
pub struct Options {
    /// The checkpoint's folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Number of threads that compute [default: all that the process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// The instruction set [default: the best of this machine]
    #[arg(long, value_name = "NAME")]
    pub instructions: Option<Simd>,
    /// The type to which weights of a floating-point checkpoint are rounded
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: Precision,
    /// The type in which keys and values are stored
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub kv_cache_dtype: KvDtype,
    /// The token budget of a step
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub max_num_tokens: u32,
}

/// A loaded model, with the configuration and costs to drive it.
pub struct Model<P = ()> {
    /// The runner.
    pub runner: CpuRunner<P>,
    /// Configuration of an engine for this runner.
    pub config: EngineConfig,
    /// Bytes and operations of its steps.
    pub cost: ModelCost,
    options: CpuOptions,
}

impl Options {
    /// Opens the checkpoint.
    ///
    /// # Errors
    /// If the checkpoint cannot be opened or read.
    pub fn open(&self) -> Result<ModelSource> {
        Ok(ModelSource::open(&self.model)?)
    }

    /// Loads the model with enough memory for each of `loads`; the runner reports its operations to `probe`.
    ///
    /// # Errors
    /// If the checkpoint is bad, or the machine lacks the instructions or the memory.
    pub fn load<P: Probe>(
        &self,
        source: &ModelSource,
        loads: &[Load],
        probe: P,
    ) -> Result<Model<P>> {
        let options = CpuOptions {
            num_threads: self.threads,
            simd: self.instructions,
            ..CpuOptions::default()
        };
        let config = engine_config(loads, self.max_num_tokens)?;
        let limits = RunnerLimits {
            kv_dtype: self.kv_cache_dtype,
            weights: self.precision.rounding(),
            ..RunnerLimits::of(&config)
        };
        Ok(Model {
            runner: CpuRunner::with_probe(source, limits, &options, probe)?,
            cost: ModelCost::of::<Cpu>(
                source.spec(),
                self.precision,
                config.block_size,
                self.kv_cache_dtype,
            ),
            config,
            options,
        })
    }
}

impl<P> Model<P> {
    /// Number of threads that compute, and their instruction set.
    ///
    /// # Errors
    /// As [`Options::load`].
    pub fn machine(&self) -> Result<(usize, Simd)> {
        let cpu = Cpu::new(&self.options)?;
        Ok((cpu.num_threads(), cpu.simd()))
    }
}

/// The configuration of an engine for each of `loads`, with a token budget.
///
/// # Errors
/// If none can serve them.
pub fn engine_config(loads: &[Load], max_num_tokens: u32) -> Result<EngineConfig> {
    let block_size = BlockSize::new(BLOCK_SIZE).ok_or("a block has positions")?;
    let max_num_requests = loads.iter().map(|load| load.concurrency).max().unwrap_or(1);
    let longest = loads.iter().map(Load::num_tokens).max();
    let num_blocks = loads
        .iter()
        .map(|load| load.num_tokens().blocks_ceil(block_size).0 * load.concurrency)
        .max();
    let config = EngineConfig {
        max_num_requests,
        max_seq_len: longest.unwrap_or_default(),
        max_num_tokens: Tokens(max_num_tokens),
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(num_blocks.unwrap_or_default()),
        // Prompts with a common prefix are computed in full.
        reuse: BlockReuse::Off,
        ..EngineConfig::default()
    };
    config.check()?;
    Ok(config)
}
