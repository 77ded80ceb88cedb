//! A checkpoint on CPU, sized for a load.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use triton_inflight::base::{BlockSize, Blocks, Tokens};
use triton_inflight::device::KvDtype;
use triton_inflight::device::cpu::{Cpu, CpuOptions, Simd};
use triton_inflight::engine::{BlockReuse, EngineConfig};
use triton_inflight::runner::{CpuRunner, ModelSource, Probe, RunnerLimits};

use crate::Result;
use crate::load::Load;
use crate::roofline::{ModelCost, Precision};

/// Tokens of a KV block.
pub const BLOCK_SIZE: u32 = 32;

/// Which model is measured, and with how much of the machine.
#[derive(Args, Clone, Debug)]
#[group(id = "model options")]
pub struct Options {
    /// The checkpoint's folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Threads that compute [default: all that the process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// The instruction set [default: the best that the machine has]
    #[arg(long, value_name = "NAME")]
    pub instructions: Option<Simd>,
    /// What the weights of a float checkpoint are rounded to
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: Precision,
    /// What keys and values are stored as
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub kv_cache_dtype: KvDtype,
    /// The token budget of a step
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub max_num_tokens: u32,
}

/// A model that is ready, and what to drive it with.
pub struct Model<P = ()> {
    /// What computes.
    pub runner: CpuRunner<P>,
    /// What an engine for it is made with.
    pub config: EngineConfig,
    /// What its steps must read and compute.
    pub cost: ModelCost,
    options: CpuOptions,
}

impl Options {
    /// Opens the checkpoint.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn open(&self) -> Result<ModelSource> {
        Ok(ModelSource::open(&self.model)?)
    }

    /// Loads the model, with memory for each of these loads; its runner tells `probe` what it does.
    ///
    /// # Errors
    /// The checkpoint, the machine or the memory is not up to it.
    pub fn load<P: Probe>(
        &self,
        checkpoint: &ModelSource,
        loads: &[Load],
        probe: P,
    ) -> Result<Model<P>> {
        let options = CpuOptions {
            num_threads: self.threads,
            simd: self.instructions,
        };
        let config = self.engine_config(loads)?;
        let limits = RunnerLimits {
            kv_dtype: self.kv_cache_dtype,
            weights: self.precision.rounding(),
            ..RunnerLimits::of(&config)
        };
        let spec = checkpoint.spec();
        let block_bytes =
            <CpuRunner>::kv_bytes_per_block(spec, config.block_size, self.kv_cache_dtype);
        let positions = config.block_size.tokens().index();
        Ok(Model {
            runner: CpuRunner::with_probe(checkpoint, limits, &options, probe)?,
            cost: ModelCost::of(spec, self.precision, block_bytes as f64 / positions as f64),
            config,
            options,
        })
    }

    fn engine_config(&self, loads: &[Load]) -> Result<EngineConfig> {
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
            max_num_tokens: Tokens(self.max_num_tokens),
            block_size,
            chunk_unit: block_size,
            num_blocks: Blocks(num_blocks.unwrap_or_default()),
            // Every prompt is computed, also one that begins as another did.
            reuse: BlockReuse::Off,
            ..EngineConfig::default()
        };
        config.check()?;
        Ok(config)
    }
}

impl<P> Model<P> {
    /// Threads that compute, and the instructions that they use.
    ///
    /// # Errors
    /// As [`Options::load`].
    pub fn machine(&self) -> Result<(usize, Simd)> {
        let cpu = Cpu::new(&self.options)?;
        Ok((cpu.num_threads(), cpu.simd()))
    }
}
