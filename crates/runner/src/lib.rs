//! L4: from a checkpoint to `run(plan, &mut output)`.
//!
//! ```text
//! model_source.rs what a runner is loaded from: a checkpoint, and the model that it describes
//! families/       one file for each model family: from config.json to a description of the model
//! spec.rs rope.rs alibi.rs    that description
//! model_tensors.rs    the weights of a model by name
//! module_names.rs what modules are called in checkpoints and adapters
//! weight_sources.rs   all weights found and checked
//! packer.rs       packs matrices for a device
//! precision.rs    the precision that float weights are rounded to
//! weight_cache.rs rounded weights, kept in a file for the next load
//! stage.rs        what a rank of several has of a model: the layers of its stage
//! share.rs        and its share of each layer
//! ranks/          the processes of several ranks
//! linear_weights.rs    those of a projection or a norm: found, cut for a rank, and packed
//! weights.rs      all weights, packed; positions.rs the embeddings of positions
//! first_steps.rs  steps before the first request, which prepare a device
//! adapter.rs      the weights of an adapter, packed for the places of a model
//! adapter_parts.rs    what ranks have of them
//! adapter_sizes.rs    what adapters take in memory, before there are any
//! decoder.rs      the forward pass over the packed tokens of a step, on any device
//! residual.rs     the residual stream between its operations
//! model_runner.rs ModelRunner: plan -> forward pass -> logits -> sampled tokens
//! block_moves.rs  moves of KV blocks, as a device makes them
//! draft_head/     an EAGLE-3 head that guesses the next tokens
//! draft_model.rs  a smaller model that guesses the next tokens
//! step_layout.rs  a plan in the terms of a device: spans, and the rows that matter
//! step_sampling.rs sampling_worker.rs    from logits to the results of a step
//! pooler.rs       the states that stand for prompts, in a model that generates nothing
//! class_head.rs   the head that makes numbers of classes from them
//! kv_file.rs      a file of KV cache blocks, for the next load
//! probe.rs        the profiling probe
//! guide_threads.rs masks of guides, computed beside the steps
//! synthetic.rs    SyntheticRunner: no weights, a checkable hash
//! gate.rs         a file by which tests control how many steps it makes
//! ```
//!
//! A runner computes what a [`StepPlan`] says and samples the next tokens. It never sees queues,
//! policies or how requests end, and all it keeps of a sequence are the keys and values in its blocks.

#![forbid(unsafe_code)]

mod adapter;
mod adapter_parts;
mod adapter_sizes;
mod alibi;
mod block_moves;
mod class_head;
mod decoder;
mod draft_head;
mod draft_model;
mod families;
mod first_steps;
mod gate;
mod grouped_layers;
mod guide_threads;
mod kv_file;
mod latent;
mod limits;
mod linear_weights;
mod model_runner;
mod model_source;
mod model_tensors;
mod module_names;
mod packer;
mod pass;
mod pooler;
mod positions;
mod precision;
mod probe;
mod progress;
mod ranks;
mod residual;
mod rope;
mod sampling_worker;
mod share;
pub mod spec;
mod stage;
mod step_layout;
mod step_sampling;
mod summed;
pub mod synthetic;
mod weight_cache;
mod weight_sources;
mod weights;

use inflight_base::{HostBlockId, StepError};
use inflight_device::RankInput;
use inflight_device_cpu::Cpu;
use inflight_device_cuda::Cuda;
use inflight_engine::{BlockMove, Step, StepOutput, StepPlan};

pub use adapter::{PreparedAdapter, UsedAdapter};
pub use adapter_parts::AdapterParts;
pub use adapter_sizes::AdapterSizes;
pub use draft_head::HeadSource;
pub use grouped_layers::GroupedLayers;
pub use kv_file::KvFile;
pub use limits::{AdapterRoom, AttentionWindows, RunnerLimits};
pub use model_runner::{ModelRunner, RankOptions};
pub use model_source::ModelSource;
pub use precision::WeightPrecision;
pub use probe::{Operation, Probe, Work};
pub use ranks::{
    GpuChoice, LeadingRunner, Peers, RANK_PROGRAM, RankConnections, RankDevice, RankGpu,
    RankLimits, RankMemory, RankTransport, RankWatch, leave_mpi_world, rank_main, serve_mpi_rank,
    serve_next_mpi_model,
};
pub use rope::{Rope, RopeScaling};
pub use spec::{
    ClassActivation, ClassDense, ClassHead, ClassModules, ClassTransform, ModelSpec, Pooling,
};
pub use synthetic::{SyntheticOptions, SyntheticRunner, candidates, next_token};

/// A model on CPU.
pub type CpuRunner<P = ()> = ModelRunner<Cpu, P>;

/// A model on a GPU.
pub type CudaRunner<P = ()> = ModelRunner<Cuda, P>;

/// The runner of an instance, which computes its steps.
pub enum Runner {
    /// A real model on CPU.
    Cpu(Box<CpuRunner>),
    /// A real model on several CPUs, each of which has a part of it.
    Ranks(Box<LeadingRunner>),
    /// A real model on a GPU.
    Cuda(Box<CudaRunner>),
    /// A real model on several GPUs, each of which has a part of it.
    CudaRanks(Box<LeadingRunner<Cuda>>),
    /// No model: hashes, after a given time.
    Synthetic(SyntheticRunner),
}

impl Runner {
    /// Makes the drafts of a step before its first model call, see [`ModelRunner::make_drafts`].
    ///
    /// # Errors
    /// As for `run`.
    pub fn make_drafts(&mut self, step: &mut Step) -> Result<(), StepError> {
        match self {
            Self::Cpu(runner) => runner.make_drafts(step),
            // They have no draft models.
            Self::Ranks(_) | Self::Cuda(_) | Self::CudaRanks(_) | Self::Synthetic(_) => Ok(()),
        }
    }

    /// Computes one model call of a step, and appends its results to `output`.
    ///
    /// # Errors
    /// If the step has failed as a whole; the instance cannot continue.
    pub fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        match self {
            Self::Cpu(runner) => runner.run(plan, output),
            Self::Ranks(runner) => runner.run(plan, output),
            Self::CudaRanks(runner) => runner.run(plan, output),
            Self::Cuda(runner) => runner.run(plan, output),
            Self::Synthetic(runner) => runner.run(plan, output),
        }
    }

    /// Whether a model call may be launched before the one before it was collected, with tokens that that one samples.
    pub fn can_run_ahead(&self) -> bool {
        match self {
            Self::Cpu(runner) => runner.can_run_ahead(),
            Self::Cuda(runner) => runner.can_run_ahead(),
            Self::Ranks(_) | Self::CudaRanks(_) | Self::Synthetic(_) => false,
        }
    }

    /// Whether a model call may be launched before the one before it was collected, if it does not depend on it, see
    /// [`ModelRunner::has_stages`].
    pub fn has_stages(&self) -> bool {
        match self {
            Self::Ranks(runner) => runner.has_stages(),
            Self::CudaRanks(runner) => runner.has_stages(),
            Self::Cpu(_) | Self::Cuda(_) | Self::Synthetic(_) => false,
        }
    }

    /// Compares what the engine of this rank was given before the next step with what those of the others were, see
    /// [`ModelRunner::compare_inputs`].
    ///
    /// # Errors
    /// It is something else, or a rank has failed.
    pub fn compare_inputs(&mut self, inputs: &[RankInput]) -> Result<(), StepError> {
        match self {
            Self::Cpu(runner) => runner.compare_inputs(inputs),
            Self::Cuda(runner) => runner.compare_inputs(inputs),
            // There is one engine.
            Self::Ranks(_) | Self::CudaRanks(_) | Self::Synthetic(_) => Ok(()),
        }
    }

    /// Starts a model call of a step, see [`ModelRunner::launch`].
    ///
    /// # Errors
    /// As for `run`.
    pub fn launch(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        match self {
            Self::Cpu(runner) => runner.launch(plan),
            Self::Ranks(runner) => runner.launch(plan),
            Self::CudaRanks(runner) => runner.launch(plan),
            Self::Cuda(runner) => runner.launch(plan),
            // It has no device that runs ahead: what is launched is computed when it is collected.
            Self::Synthetic(_) => Ok(()),
        }
    }

    /// Waits for the oldest model call that was launched, see [`ModelRunner::collect`].
    ///
    /// # Errors
    /// As for `run`.
    pub fn collect(
        &mut self,
        plan: &StepPlan<'_>,
        output: &mut StepOutput,
    ) -> Result<(), StepError> {
        match self {
            Self::Cpu(runner) => runner.collect(plan, output),
            Self::Ranks(runner) => runner.collect(plan, output),
            Self::CudaRanks(runner) => runner.collect(plan, output),
            Self::Cuda(runner) => runner.collect(plan, output),
            Self::Synthetic(runner) => runner.run(*plan, output),
        }
    }

    /// Makes moves of blocks outside of a step, one after the other.
    pub fn move_blocks(&mut self, moves: &[BlockMove]) {
        match self {
            Self::Cpu(runner) => runner.move_blocks(moves),
            Self::Ranks(runner) => runner.move_blocks(moves),
            Self::CudaRanks(runner) => runner.move_blocks(moves),
            Self::Cuda(runner) => runner.move_blocks(moves),
            Self::Synthetic(runner) => runner.move_blocks(moves),
        }
    }

    /// The bytes of a block in host memory.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError> {
        match self {
            Self::Cpu(runner) => runner.host_block(block),
            Self::Ranks(runner) => runner.host_block(block),
            Self::CudaRanks(runner) => runner.host_block(block),
            Self::Cuda(runner) => runner.host_block(block),
            Self::Synthetic(runner) => Ok(runner.host_block(block)),
        }
    }

    /// What it computes with.
    pub fn description(&self) -> String {
        match self {
            Self::Cpu(runner) => runner.description(),
            Self::Ranks(runner) => runner.description(),
            Self::CudaRanks(runner) => runner.description(),
            Self::Cuda(runner) => runner.description(),
            Self::Synthetic(_) => "hashes".to_owned(),
        }
    }

    /// Whether its sequences may have adapters.
    pub fn has_adapters(&self) -> bool {
        !matches!(self, Self::Synthetic(_))
    }

    /// Tells whether the processes of the other ranks live; `None` if there are none.
    pub fn rank_watch(&self) -> Option<RankWatch> {
        match self {
            Self::Ranks(runner) => Some(runner.watch()),
            Self::CudaRanks(runner) => Some(runner.watch()),
            Self::Cpu(_) | Self::Cuda(_) | Self::Synthetic(_) => None,
        }
    }

    /// Whether tokens are chosen from logits.
    pub fn has_logits(&self) -> bool {
        match self {
            Self::Cpu(_) | Self::Ranks(_) | Self::Cuda(_) | Self::CudaRanks(_) => true,
            Self::Synthetic(_) => false,
        }
    }

    /// Token ids are below it.
    pub fn vocab_size(&self) -> u32 {
        match self {
            Self::Cpu(runner) => runner.vocab_size() as u32,
            Self::Ranks(runner) => runner.vocab_size() as u32,
            Self::CudaRanks(runner) => runner.vocab_size() as u32,
            Self::Cuda(runner) => runner.vocab_size() as u32,
            Self::Synthetic(runner) => runner.vocab_size(),
        }
    }
}
