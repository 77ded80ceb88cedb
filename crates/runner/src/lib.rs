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
//! share.rs        and its share of each layer: head_share.rs and recurrence_share.rs its heads, rank.rs its tiles
//! rank_calls.rs   what the ranks of a model tell each other of each model call
//! linear_weights.rs    weights of a projection or a norm: found, cut for a rank, and packed
//! weights.rs      all weights, packed; positions.rs the embeddings of positions
//! first_steps.rs  steps before the first request, which prepare a device
//! adapter.rs      the weights of an adapter, packed for the places of a model
//! adapter_parts.rs    what ranks have of them
//! adapter_sizes.rs    what adapters take in memory, before there are any
//! decoder.rs      the forward pass over the packed tokens of a step, on any device
//! residual.rs     the residual stream between its operations
//! runner.rs       Runner: what computes the steps of an instance
//! model_runner.rs ModelRunner: plan -> forward pass -> logits -> sampled tokens
//! block_moves.rs  moves of KV blocks, as a device makes them
//! draft_head/     heads that guess the next tokens: EAGLE-3, multi-token prediction
//! draft_model.rs  a smaller model that guesses the next tokens
//! step_layout.rs  a plan in the terms of a device: spans, and the rows that matter
//! step_sampling.rs sampling_worker.rs    from logits to the results of a step
//! results.rs      what a rank does with the results of a step
//! pooler.rs       the states that stand for prompts, in a pooling model
//! class_head.rs   the classification head
//! tower/          the vision tower of a model with images
//! kv_file.rs      a file of KV cache blocks, for the next load
//! probe.rs        the profiling probe
//! guide_threads.rs masks of guides, computed beside the steps
//! synthetic.rs    SyntheticRunner: no weights, a checkable hash
//! gate.rs         a file by which tests control how many steps it makes
//! ```
//!
//! A runner computes what a [`StepPlan`](inflight_engine::StepPlan) says and samples the next tokens. It never sees
//! queues, policies or how requests end, and all it keeps of a sequence are the keys and values in its blocks.

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
mod embedding_rows;
mod experts_block;
mod families;
mod feed_forward_weights;
mod first_steps;
mod gate;
mod grouped_layers;
mod guide_threads;
mod head_share;
mod indexer;
mod kv_file;
mod late_inputs;
mod latent;
mod layer_attention;
mod layer_inputs;
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
mod rank;
mod rank_calls;
mod recurrence;
mod recurrence_share;
mod recurrence_spec;
mod residual;
mod results;
mod rope;
mod runner;
mod sampling_worker;
mod share;
pub mod spec;
mod stage;
mod state_slots;
mod step_layout;
mod step_sampling;
mod stream_weights;
mod streams;
mod summed;
pub mod synthetic;
mod tower;
mod weight_cache;
mod weight_sources;
mod weights;

use inflight_device_cpu::Cpu;

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
pub use rank_calls::{ReceivedCalls, SentCalls};
pub use rope::{Rope, RopeAxes, RopeScaling};
pub use runner::Runner;
pub use spec::{
    ClassActivation, ClassDense, ClassHead, ClassModules, ClassTransform, ModelSpec, Pooling,
    TowerSpec,
};
pub use synthetic::{SyntheticOptions, SyntheticRunner, candidates, next_token};

/// A model on CPU.
pub type CpuRunner<P = ()> = ModelRunner<Cpu, P>;
