//! L3: buffers and operations of the devices that a model runs on.
//!
//! ```text
//! matrix.rs quantised.rs      weights as a checkpoint stores them, and how they are packed
//! e4m3.rs                     floats of 8 bits
//! attention.rs rope.rs        heads, windows and sinks, rotary angles
//! kv_layout.rs kv_batch.rs    the blocks of a KV cache, and which of them a step uses
//! layer_groups.rs             layers that share blocks
//! latent.rs                   multi-head latent attention
//! low_rank.rs adapter_values.rs adapter_bytes.rs  adapters
//! operands.rs packed.rs       what operations are given; packed weights as bytes
//! experts.rs                  mixtures of experts
//! memory.rs                   large buffers of the host
//! ranks.rs                    what the hosts of several ranks say to each other
//! pool/ disjoint_slice.rs     the host's threads
//! cpu/ cuda/                  the operations on CPU, and on NVIDIA GPUs
//! ```
//!
//! A [`Device`] is a machine with the operations of a decoder. An operation knows rows, sizes and block tables;
//! it knows neither requests nor the meaning of layers.

mod adapter_bytes;
mod adapter_values;
mod attention;
pub mod cpu;
pub mod cuda;
mod disjoint_slice;
mod e4m3;
mod experts;
mod host_memory;
mod kv_batch;
mod kv_layout;
mod latent;
mod layer_groups;
mod low_rank;
mod matrix;
mod memory;
mod operands;
mod packed;
mod pool;
mod quantised;
mod ranks;
mod rope;

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use half::bf16;

use crate::base::{BlockId, HostBlockId, LoadError, StepError};
use crate::collective::Collective;

pub use attention::{AttentionParams, HeadBiases, HeadPlaces, HeadShape, QkNorm, QkNormKind};
pub use e4m3::{MAX_E4M3, from_e4m3, to_e4m3};
pub use experts::{
    Expert, Experts, GroupedRouting, MixtureShape, RouterScores, Routing, RoutingRule,
};
pub use host_memory::{available_host_bytes, available_process_bytes, host_id};
pub use kv_batch::{KvBatch, KvSpan};
pub use kv_layout::{KvDtype, KvLayout, KvValues};
pub use latent::{LatentHeads, LatentParams, LatentShape};
pub use layer_groups::{GroupBlocks, LayerGroups, LayerPlace};
pub use low_rank::{AdaptedPlace, AdaptedRows, AdapterRun, AdapterWeights, DenseRows, LowRank};
pub use matrix::{Dtype, FloatRows, NotFinite, RawMatrix, Stacking};
pub use operands::{
    Activation, AdapterCapacity, DeviceSample, EmbeddingTable, FirstStep, Gating, Linear,
    LogitsTransform, Norm, Output, PackedWeights, QuantisedWidths, RankRole, RopeParams,
    StepCapacity, StepInputs, StepResults, StepWidths, Tile, Tiling, TokenInFlight,
};
pub use packed::{PACKED_PIECE_BYTES, PackedBytes, PackedPart, PackedReader, PackedShape};
pub use pool::{Pool, Topology, Turn, yield_to_others};
pub use quantised::{
    CodeBits, GROUP_UNIT, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1,
    can_be_packed_together,
};
pub use ranks::RankInput;
pub use rope::RopeTable;

/// A machine that a decoder runs on, and its operations, each as large as machines fuse them.
///
/// ```text
/// load    pack..., upload...                     weights go to the device
///         alloc_sums, ..., reserve               memory for the largest step
/// step    copy_positions, offload, onboard       forks of sequences, and blocks to and from host memory
///         begin_step                             everything that the step needs from the host
///           embed, norm                          or their fused forms, in an order that depends only on
///           project, rope_and_store, ...         the shape of the step
///           logits, sample
///         end_step
///         results                                for the host's sampler: what the device has not sampled
/// ```
///
/// Operations may run later than they are called, in order. Only [`Device::context_logits`],
/// [`Device::end_step`], [`Device::results`], [`Device::earlier_samples`] and [`Device::host_logits`] may wait for them: so a device can upload a step at once in
/// [`Device::begin_step`], record its operations the first time that it sees a shape and replay them after
/// that, and fetch results when they are read.
///
/// A matrix product reads inputs and weights and adds up in f32; [`Device::Inputs`] and [`Device::Sums`] are the
/// rows before and after it. What is computed for a sequence does not depend on the rest of the step.
///
/// # Panics
///
/// Operations panic if the shapes of their operands do not agree.
pub trait Device: Sized {
    /// Which part of the machine to use.
    type Options;
    /// Packed weights of one or several projections with the same input.
    type Matrix: PackedWeights;
    /// A norm's weights, or a bias.
    type Vector;
    /// The rows of a token embedding.
    type Embedding;
    /// A [`RopeTable`] on the device.
    type Angles;
    /// Rows of activations that results are added up in: f32.
    type Sums;
    /// Rows of activations that products and attention read: bf16.
    type Inputs;
    /// Rows of logits on their way to the host.
    type Logits;
    /// The experts of rows, and memory for what these compute.
    type ExpertRows;
    /// The keys and values of all sequences.
    type KvCache;
    /// Copies of blocks of the cache in memory of the host.
    type HostBlocks;
    /// A step between [`Device::begin_step`] and [`Device::end_step`].
    type Step<'a>;

    /// Whether it samples tokens by itself. Then steps come with [`StepInputs::sampling`].
    const SAMPLES: bool = false;

    /// Whether it multiplies with weights of [`CodeBits::Fp8`]. If not, they become bf16.
    const HAS_FP8: bool = false;

    /// What sets the names of files of packed weights apart from those of other kinds of devices.
    const PACKED_FILE_KIND: Option<&'static str> = None;

    /// Whether it adds [adapters](AdapterWeights) to projections.
    const HAS_ADAPTERS: bool = false;

    /// Whether [attention](Device::paged_attention) takes scores of no position.
    const HAS_SINK_LOGITS: bool = false;

    /// Whether it computes models that generate nothing: it returns [states](Device::read_states), normalises [sums in
    /// place](Device::norm_in_place), and has [bidirectional](AttentionParams::is_bidirectional) attention.
    const HAS_POOLING: bool = false;

    /// Whether it computes heads that make drafts: it [returns states](Device::read_states), [takes](Device::write_sums)
    /// them back, and normalises [sums in place](Device::norm_in_place).
    const HAS_DRAFT_HEADS: bool = false;

    /// Whether it can cut sums over the inputs of a product into tiles.
    const HAS_TILES: bool = false;

    /// Whether codes that are all [twice floats of 4 bits](QuantisedRows::are_twice_e2m1) take 4 bits each.
    const PACKS_E2M1: bool = false;

    /// Whether the experts of a layer are one matrix, of [`Device::pack_experts`], and so are the heads of
    /// [latent attention](LatentHeads).
    const STACKS_EXPERTS: bool = false;

    /// When it cuts sums into tiles, with these options.
    fn tiling(_options: &Self::Options) -> Tiling {
        match Self::HAS_TILES {
            true => Tiling::OfRanks,
            false => Tiling::Never,
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// If the machine does not have what `options` ask for.
    fn open(options: &Self::Options) -> Result<Self, LoadError>;

    /// Its processor, for the log.
    fn description(&self) -> String;

    /// The host's threads, for what is done there: loading and sampling.
    fn host_threads(&mut self) -> &mut Pool;

    /// Packs float matrices of equal width as one.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory. The inner one: a weight is not finite in bf16.
    fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError>;

    /// Packs quantised matrices that [`can_be_packed_together`] as one.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory. The inner one: a scale or an offset is not finite, or above 16.
    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        stacking: Stacking,
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError>;

    /// Packs float matrices of all experts of a layer as one, one expert after the other, and gate in front of up.
    ///
    /// # Errors
    ///
    /// As [`Device::pack`].
    ///
    /// # Panics
    ///
    /// If the device [packs](Device::STACKS_EXPERTS) each expert by itself.
    fn pack_experts<M: FloatRows>(
        &mut self,
        _parts: &[M],
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError> {
        unreachable!("each expert is packed by itself");
    }

    /// Packs quantised matrices of all experts of a layer, which can be packed together and have no input order, in the same order.
    ///
    /// # Errors
    ///
    /// As [`Device::pack_quantised`].
    ///
    /// # Panics
    ///
    /// If the device [packs](Device::STACKS_EXPERTS) each expert by itself.
    fn pack_quantised_experts(
        &mut self,
        _: &[&dyn QuantisedRows],
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError> {
        unreachable!("each expert is packed by itself");
    }

    /// Bytes that [`Device::pack_quantised_experts`] takes for one of the matrices. `are_twice_e2m1`: the
    /// [codes](QuantisedRows::are_twice_e2m1) of all of them.
    ///
    /// # Panics
    ///
    /// If the device [packs](Device::STACKS_EXPERTS) each expert by itself.
    fn num_expert_bytes(_: QuantisedShape, _are_twice_e2m1: bool) -> usize {
        unreachable!("each expert is packed by itself");
    }

    /// The layout of [`Device::packed_part`], with its version: what files of packed weights depend on. `None` if there
    /// are no such files for this device.
    fn packed_layout(&self) -> Option<String> {
        None
    }

    /// Bytes of the codes and of the scales of a packed quantised matrix; `None` if this one cannot be kept in a file.
    fn packed_len(_matrix: &Self::Matrix) -> Option<[usize; 2]> {
        None
    }

    /// The codes or the scales of a matrix that has a [length](Device::packed_len).
    ///
    /// # Errors
    ///
    /// If they cannot be read.
    fn packed_part<'m>(
        &mut self,
        _matrix: &'m Self::Matrix,
        _part: PackedPart,
    ) -> Result<Cow<'m, [u8]>, LoadError> {
        Ok(Cow::Borrowed(&[]))
    }

    /// Reads a matrix from the bytes that [`Device::packed_part`] gave. `None` if their number is wrong.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    fn read_packed(
        &mut self,
        _shape: PackedShape<'_>,
        _codes: PackedReader<'_>,
        _scales: PackedReader<'_>,
    ) -> Result<Option<Self::Matrix>, LoadError> {
        Ok(None)
    }

    /// Uploads a norm's weights, or a bias.
    ///
    /// # Errors
    ///
    /// If there is not enough memory. The same holds for all that follow.
    fn upload_vector(&mut self, values: Vec<f32>) -> Result<Self::Vector, LoadError>;

    /// Uploads the rows of an embedding, `[vocab_size, hidden_size]`.
    fn upload_embedding(
        &mut self,
        rows: Vec<bf16>,
        hidden_size: usize,
    ) -> Result<Self::Embedding, LoadError>;

    /// Uploads rotary angles.
    fn upload_angles(&mut self, table: RopeTable) -> Result<Self::Angles, LoadError>;

    /// Reserves rows of sums.
    fn alloc_sums(&mut self, max_rows: usize, width: usize) -> Result<Self::Sums, LoadError>;

    /// Reserves rows of inputs.
    fn alloc_inputs(&mut self, max_rows: usize, width: usize) -> Result<Self::Inputs, LoadError>;

    /// Reserves rows of logits.
    fn alloc_logits(&mut self, max_rows: usize, width: usize) -> Result<Self::Logits, LoadError>;

    /// Reserves what mixtures of experts of this shape need for up to `max_rows` rows.
    ///
    /// # Errors
    ///
    /// If there is not enough memory, or the device computes no mixtures of experts.
    fn alloc_expert_rows(
        &mut self,
        max_rows: usize,
        shape: &MixtureShape,
    ) -> Result<Self::ExpertRows, LoadError>;

    /// Reserves a pool of blocks for the layers of `groups`.
    fn alloc_kv_cache(
        &mut self,
        layout: KvLayout,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<Self::KvCache, LoadError>;

    /// Reserves memory of the host for copies of `num_blocks` blocks of the cache.
    fn alloc_host_blocks(
        &mut self,
        cache: &Self::KvCache,
        num_blocks: usize,
    ) -> Result<Self::HostBlocks, LoadError>;

    /// Bytes that one block takes in so many layers, padding included; in memory of the host at most as many.
    fn kv_bytes_per_block(layout: &KvLayout, num_layers: usize) -> usize;

    /// Reserves what steps of this capacity need besides.
    fn reserve(&mut self, cache: &Self::KvCache, capacity: &StepCapacity) -> Result<(), LoadError>;

    /// Generation steps that it wants to compute before the first request, in this order, so that no request waits for
    /// what a first step does besides. Nothing is stored in the cache, and the results do not matter. After
    /// [`Device::reserve`].
    fn first_steps(&self) -> Vec<FirstStep> {
        Vec::new()
    }

    /// Copies the first positions of blocks to other ones, in all layers: `(source, target, num_positions)`, one after
    /// the other.
    fn copy_positions(
        &mut self,
        cache: &mut Self::KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    );

    /// Copies a block of the cache to memory of the host, in all layers.
    fn offload(
        &mut self,
        cache: &Self::KvCache,
        source: BlockId,
        host: &mut Self::HostBlocks,
        target: HostBlockId,
    );

    /// Copies a block from memory of the host to the cache, in all layers.
    fn onboard(
        &mut self,
        host: &Self::HostBlocks,
        source: HostBlockId,
        cache: &mut Self::KvCache,
        target: BlockId,
    );

    /// The bytes of a block in memory of the host, once all copies to and from there have been made.
    ///
    /// # Errors
    ///
    /// If an operation has failed.
    fn host_block<'h>(
        &mut self,
        host: &'h mut Self::HostBlocks,
        block: HostBlockId,
    ) -> Result<&'h mut [u8], StepError>;

    /// Begins a step. On a machine that several models share, it waits for its turn.
    fn begin_step<'a>(&mut self, cache: &Self::KvCache, inputs: StepInputs<'a>) -> Self::Step<'a>;

    /// `out = scale * table[token_ids]`.
    fn embed(
        &mut self,
        step: &Self::Step<'_>,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Self::Sums,
    );

    /// `out += table[positions]`, the positions of the step's tokens in their sequences.
    fn add_positions(
        &mut self,
        step: &Self::Step<'_>,
        table: &Self::Embedding,
        out: &mut Self::Sums,
    );

    /// `out += row` in some rows. For models that generate nothing.
    ///
    /// # Panics
    ///
    /// If the device [cannot](Device::HAS_POOLING).
    fn add_to_rows(&mut self, _rows: Range<usize>, _row: &Self::Vector, _out: &mut Self::Sums) {
        unreachable!("the device does not add to some rows");
    }

    /// `out = norm(x)`.
    fn norm(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Inputs,
    );

    /// `hidden = norm(hidden); out = hidden`. All devices do it with a layer norm: of embedded tokens, and behind residual sums. Other
    /// norms are for models that generate nothing, and for heads that make drafts.
    ///
    /// # Panics
    ///
    /// If the device has neither of [these](Device::HAS_POOLING), and it is another norm.
    fn norm_in_place(
        &mut self,
        _num_rows: usize,
        _hidden: &mut Self::Sums,
        _norm: Norm<'_, Self::Vector>,
        _out: &mut Self::Inputs,
    ) {
        unreachable!("the device does not normalise sums in place");
    }

    /// `hidden += norm(x)`.
    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        norm: Norm<'_, Self::Vector>,
        hidden: &mut Self::Sums,
    );

    /// `hidden += x; out = norm(hidden)`.
    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        hidden: &mut Self::Sums,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Inputs,
    );

    /// `out = x * W^T + bias`, or that added to `out`.
    fn project(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        output: Output,
        out: &mut Self::Sums,
    );

    /// `out = activation(gate) * up`, where gate and up are the [interleaved](Stacking::Interleaved) parts of
    /// `x * W^T + bias`. The bias is that of gate, then that of up.
    fn project_gated(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        activation: Activation,
        out: &mut Self::Inputs,
    );

    /// `out = activation(x * W^T + bias)`.
    fn project_activated(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        activation: Activation,
        out: &mut Self::Inputs,
    );

    /// As [`Device::project`]; adapters change rows.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn project_adapted(
        &mut self,
        _num_rows: usize,
        _x: &Self::Inputs,
        _linear: &Linear<Self>,
        _output: Output,
        _adapted: AdaptedRows<'_>,
        _out: &mut Self::Sums,
    ) {
        unreachable!("the device has no adapters");
    }

    /// Changes the embeddings of tokens that have adapters. `scale` is the factor of [`Device::embed`]. On a rank of several,
    /// adapters have weights for some tokens only, from `first_token` on; those of others stay as they are.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn adapt_embeddings(
        &mut self,
        _step: &Self::Step<'_>,
        _first_token: usize,
        _adapted: AdaptedRows<'_>,
        _scale: f32,
        _out: &mut Self::Sums,
    ) {
        unreachable!("the device has no adapters");
    }

    /// As [`Device::logits`]; adapters change rows in front of the transform.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn logits_adapted(
        &mut self,
        _num_rows: usize,
        _states: &Self::Inputs,
        _lm_head: &Linear<Self>,
        _transform: LogitsTransform,
        _adapted: AdaptedRows<'_>,
        _out: &mut Self::Logits,
    ) {
        unreachable!("the device has no adapters");
    }

    /// As [`Device::context_logits`]; adapters change rows, counted from the first of `rows`.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn context_logits_adapted(
        &mut self,
        _states: &Self::Inputs,
        _rows: Range<usize>,
        _lm_head: &Linear<Self>,
        _transform: LogitsTransform,
        _adapted: AdaptedRows<'_>,
        _out: &mut [f32],
    ) {
        unreachable!("the device has no adapters");
    }

    /// As [`Device::project_gated`]; adapters are added to gate and up.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn project_gated_adapted(
        &mut self,
        _num_rows: usize,
        _x: &Self::Inputs,
        _linear: &Linear<Self>,
        _activation: Activation,
        _adapted: AdaptedRows<'_>,
        _out: &mut Self::Inputs,
    ) {
        unreachable!("the device has no adapters");
    }

    /// As [`Device::project_activated`]; adapters are added in front of the activation.
    ///
    /// # Panics
    ///
    /// If the device has no adapters.
    fn project_activated_adapted(
        &mut self,
        _num_rows: usize,
        _x: &Self::Inputs,
        _linear: &Linear<Self>,
        _activation: Activation,
        _adapted: AdaptedRows<'_>,
        _out: &mut Self::Inputs,
    ) {
        unreachable!("the device has no adapters");
    }

    /// Chooses the experts of each row by the logits of a router, `[num_rows, num_logits]`, and the corrections of
    /// [scores](GroupedRouting), `[num_experts]`.
    fn route(
        &mut self,
        num_rows: usize,
        logits: &Self::Sums,
        routing: &Routing,
        correction: Option<&Self::Vector>,
        rows: &mut Self::ExpertRows,
    );

    /// `out = sum over the chosen experts of weight * down(activation(gate(x)) * up(x))`, and that of the shared expert, or
    /// all of this added to `out`. Experts of a row are added in the order of their scores, largest first, and the shared one
    /// last. [`Device::route`] has chosen them.
    fn mix_experts(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        experts: &Experts<Self>,
        rows: &mut Self::ExpertRows,
        output: Output,
        out: &mut Self::Sums,
    );

    /// The experts that the last call of [`Device::route`] has chosen for any row, for a profile. May wait for it.
    fn num_touched_experts(&self, rows: &Self::ExpertRows) -> usize;

    /// Normalises the queries and keys of `qkv` if the model does so, rotates them, writes the queries to
    /// `q` and stores keys and values in a layer of the cache. `sink_q` takes the queries with the rotation of their
    /// [shifted](AttentionParams::shifted) positions. `qkv` may hold anything afterwards.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn rope_and_store(
        &mut self,
        step: &Self::Step<'_>,
        params: RopeParams<'_, Self>,
        qkv: &mut Self::Sums,
        cache: &mut Self::KvCache,
        layer: usize,
        q: &mut Self::Inputs,
        sink_q: Option<(&AttentionParams, &mut Self::Inputs)>,
    );

    /// Attention of the queries of all tokens over the cached positions of their sequences that they see. Behind the
    /// queries come those for the sinks, if they are others.
    ///
    /// # Panics
    ///
    /// If there are `biases` of [no position](Device::HAS_SINK_LOGITS), which the device does not take, or linear ones that
    /// [`StepCapacity::has_slopes`] did not announce.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn paged_attention(
        &mut self,
        step: &Self::Step<'_>,
        params: &AttentionParams,
        biases: HeadBiases<'_, Self::Vector>,
        queries: (&Self::Inputs, Option<&Self::Inputs>),
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Inputs,
    );

    /// Reserves memory for [latent attention](LatentShape) of up to `max_rows` rows, before [`Device::reserve`].
    ///
    /// # Errors
    ///
    /// There is not enough.
    fn reserve_latents(&mut self, _max_rows: usize, _shape: &LatentShape) -> Result<(), LoadError> {
        Ok(())
    }

    /// Normalises the latent of each row of `kv`, `[num_rows, latent_dim + rotary_dim]`, rotates the shared key behind it, and
    /// stores both in a layer of the cache, whose [values are in the keys](KvValues::InKeys).
    fn store_latents(
        &mut self,
        step: &Self::Step<'_>,
        params: &LatentParams<'_, Self>,
        kv: &Self::Sums,
        cache: &mut Self::KvCache,
        layer: usize,
    );

    /// [Latent attention](LatentShape) of the queries of all tokens, `[num_rows, num_heads * (content_dim + rotary_dim)]`, which are not
    /// rotated yet. `out` is `[num_rows, num_heads * value_dim]`.
    fn latent_attention(
        &mut self,
        step: &Self::Step<'_>,
        params: &LatentParams<'_, Self>,
        q: &Self::Sums,
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Inputs,
    );

    /// Makes it one of the ranks of a model, which compute all steps together. What goes wrong between them is an error of
    /// [`Device::results`]. By default it can only be alone.
    ///
    /// # Errors
    ///
    /// If it can only be alone.
    fn join_ranks(
        &mut self,
        _collective: Box<dyn Collective>,
        _role: RankRole,
    ) -> Result<(), LoadError> {
        Err(LoadError::Resource(format!(
            "{} cannot compute a model together with other ranks yet: use one rank",
            self.description()
        )))
    }

    /// Compares what it computes with, once it has [joined](Device::join_ranks) others, with what those of its stage do: each decides
    /// for itself, from the same rows, which experts these have. By default all devices give the same bits.
    ///
    /// # Errors
    ///
    /// Others may give other bits, or a rank has failed.
    fn check_ranks_alike(&mut self) -> Result<(), LoadError> {
        Ok(())
    }

    /// Waits until all ranks have loaded their weights. No later operation between them takes longer than `time_limit`. By
    /// default it is the only rank.
    ///
    /// # Errors
    ///
    /// A rank has failed, or does not load in time.
    fn meet_ranks(&mut self, _time_limit: Duration) -> Result<(), LoadError> {
        Ok(())
    }

    /// Compares what the engine of this rank was given before a step with what those of the others were, where each rank has one. By
    /// default it is the only rank.
    ///
    /// # Errors
    ///
    /// It is something else, or a rank has failed.
    fn compare_inputs(&mut self, _inputs: &[RankInput]) -> Result<(), StepError> {
        Ok(())
    }

    /// Whether all ranks go on with something: whether rank 0 does. By default it is the only rank.
    ///
    /// # Errors
    ///
    /// A rank has failed.
    fn agree(&mut self, goes_on: bool) -> Result<bool, StepError> {
        Ok(goes_on)
    }

    /// Whether a projection on this rank gives whole sums, so that it may add to the residual stream itself.
    /// If not, its result is stored, summed over all ranks, and added afterwards. By default it is the only rank.
    fn has_whole_sums(&self) -> bool {
        true
    }

    /// Sums rows over all ranks of the stage.
    fn all_reduce(&mut self, _num_rows: usize, _rows: &mut Self::Sums) {
        // The only rank has the sums.
    }

    /// `out = x * W^T + bias`, summed over all ranks of the stage: [`Device::project`] and [`Device::all_reduce`], of which a device may
    /// do some rows of each at the same time.
    fn project_and_sum(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        out: &mut Self::Sums,
    ) {
        self.project(num_rows, x, linear, Output::Store, out);
        self.all_reduce(num_rows, out);
    }

    /// As [`Device::project`], of some of the inputs in `x`: `out = x[inputs] * W^T + bias`, or that added to `out`. Adapters may
    /// change rows, by the same inputs.
    ///
    /// # Panics
    ///
    /// If it can only be [alone](Device::join_ranks). The same holds for those that follow, up to
    /// [`Device::receive_results`].
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn project_part(
        &mut self,
        _num_rows: usize,
        _x: &Self::Inputs,
        _inputs: Range<usize>,
        _linear: &Linear<Self>,
        _adapted: Option<AdaptedRows<'_>>,
        _output: Output,
        _out: &mut Self::Sums,
    ) {
        unreachable!("the device has no ranks");
    }

    /// `out` becomes the sum over all tiles of all ranks of `x[inputs] * W^T + bias`, in pairs. `None` is a tile without inputs.
    /// Only devices that [have tiles](Device::HAS_TILES) do it.
    fn sum_tiles(
        &mut self,
        _num_rows: usize,
        _x: &Self::Inputs,
        _tiles: &[Option<Tile<Self>>],
        _out: &mut Self::Sums,
    ) {
        unreachable!("the device has no tiles");
    }

    /// Normalises queries and keys over all heads of the model, in `qkv`, which has those of this rank. `squares`, as wide as
    /// the heads of the model, may hold anything afterwards.
    fn norm_over_ranks(
        &mut self,
        _num_rows: usize,
        _heads: HeadShape,
        _norm: QkNorm<'_, Self::Vector>,
        _places: &HeadPlaces,
        _qkv: &mut Self::Sums,
        _squares: &mut Self::Sums,
    ) {
        unreachable!("the device has no ranks");
    }

    /// Makes all of `rows` -0, which changes no sum over all ranks.
    fn clear_part(&mut self, _num_rows: usize, _rows: &mut Self::Sums) {
        unreachable!("the device has no ranks");
    }

    /// As [`Device::embed`], with this rank's part of the table, whose first row is that of `first_token`. The embeddings of
    /// other tokens become -0, which changes no sum over all ranks.
    fn embed_part(
        &mut self,
        _step: &Self::Step<'_>,
        _table: EmbeddingTable<'_, Self>,
        _first_token: usize,
        _scale: f32,
        _out: &mut Self::Sums,
    ) {
        unreachable!("the device has no ranks");
    }

    /// Collects the logits of all ranks of the stage, each of which has those of some tokens: `widths` are the numbers of tokens of all
    /// ranks, `part` has this one's. A rank that does not sample does not get them. Of the `greedy_rows` the device may
    /// collect the largest logits only, and return their tokens as [`StepResults::samples`].
    fn gather_logits(
        &mut self,
        _num_rows: usize,
        _greedy_rows: &[u32],
        _widths: &[usize],
        _part: &mut Self::Logits,
        _out: &mut Self::Logits,
    ) {
        unreachable!("the device has no ranks");
    }

    /// The same, in memory of the host.
    fn gather_context_logits(&mut self, _widths: &[usize], _part: &[f32], _out: &mut [f32]) {
        unreachable!("the device has no ranks");
    }

    /// Reserves what rows on their way between stages need besides: there are at most `max_rows` of this width in a step, and
    /// `max_sequences` in one of generation. Nothing, by default.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn reserve_rows_between_stages(
        &mut self,
        _max_rows: usize,
        _max_sequences: usize,
        _width: usize,
    ) -> Result<(), LoadError> {
        Ok(())
    }

    /// Sends rows to the next stage, at the latest at the end of the step.
    fn send_rows(&mut self, _num_rows: usize, _rows: &Self::Sums) {
        unreachable!("the device has no ranks");
    }

    /// Waits for the rows of the previous stage.
    fn receive_rows(&mut self, _num_rows: usize, _rows: &mut Self::Sums) {
        unreachable!("the device has no ranks");
    }

    /// The most values of rows that are sent without waiting for the next stage, if that has received all before them.
    fn max_unread(&self) -> usize {
        unreachable!("the device has no ranks");
    }

    /// A number of the step that was begun last, the same on all ranks.
    fn step_number(&self) -> u64 {
        unreachable!("the device has no ranks");
    }

    /// Sends values of a step from the last stage to the first one, or to the stage behind.
    ///
    /// # Errors
    ///
    /// If an operation between ranks has failed.
    fn send_results(&mut self, _values: &[f32]) -> Result<(), StepError> {
        unreachable!("the device has no ranks");
    }

    /// Waits for values of the last stage, from a step with this number.
    ///
    /// # Errors
    ///
    /// If an operation between ranks has failed.
    fn receive_results(&mut self, _step: u64, _values: &mut [f32]) -> Result<(), StepError> {
        unreachable!("the device has no ranks");
    }

    /// Moves the step's kept rows of both to the front.
    fn keep_rows(
        &mut self,
        step: &Self::Step<'_>,
        hidden: &mut Self::Sums,
        attended: &mut Self::Inputs,
    );

    /// Moves the step's sampled rows to the front. `states` has its kept rows.
    fn keep_sampled_rows(&mut self, step: &Self::Step<'_>, states: &mut Self::Inputs);

    /// `out = transform(states * W^T + bias)`, to be read with [`Device::results`].
    fn logits(
        &mut self,
        num_rows: usize,
        states: &Self::Inputs,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        out: &mut Self::Logits,
    );

    /// Samples from the step's rows of logits where [`StepInputs::sampling`] says how. By default the host samples all.
    fn sample(&mut self, _step: &Self::Step<'_>, _logits: &mut Self::Logits) {}

    /// `out = transform(states[rows] * W^T + bias)`, in memory of the host. For the logits of prompts, which are rarely wanted.
    fn context_logits(
        &mut self,
        states: &Self::Inputs,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        out: &mut [f32],
    );

    /// `out = rows`, from memory of the host. For heads that make drafts.
    ///
    /// # Panics
    ///
    /// If the device [cannot](Device::HAS_DRAFT_HEADS).
    fn write_sums(&mut self, _rows: &[f32], _out: &mut Self::Sums) {
        unreachable!("the device does not take rows of the host");
    }

    /// `out = states`, the first `num_rows` rows, in memory of the host. For models that generate nothing, and heads that make
    /// drafts.
    ///
    /// # Panics
    ///
    /// If the device cannot do [either](Device::HAS_POOLING).
    fn read_states(&mut self, _states: &Self::Inputs, _num_rows: usize, _out: &mut [f32]) {
        unreachable!("the device does not return states");
    }

    /// Ends a step.
    fn end_step(&mut self, step: Self::Step<'_>);

    /// The results of a step with `num_rows` rows of logits, once they are there. By default these are the logits.
    ///
    /// # Errors
    ///
    /// If an operation of this step or of an earlier one has failed.
    fn results<'l>(
        &mut self,
        logits: &'l mut Self::Logits,
        num_rows: usize,
    ) -> Result<StepResults<'l>, StepError> {
        Ok(StepResults {
            logits: self.host_logits(logits, num_rows)?,
            samples: &[],
        })
    }

    /// Whether a step may begin before the results of the one before it are read, with tokens that
    /// [that one samples](StepInputs::in_flight). Never by default.
    fn can_run_ahead(&self, _logits: &Self::Logits) -> bool {
        false
    }

    /// Keeps what the step that has just ended samples from `num_rows` rows, so that it can be read after the next one has
    /// begun.
    fn keep_samples(&mut self, _logits: &mut Self::Logits, _num_rows: usize) {}

    /// What was sampled in the step before the last one that has begun, once it is there. The logits are gone.
    ///
    /// # Errors
    ///
    /// If an operation of that step or of an earlier one has failed.
    fn earlier_samples<'l>(
        &mut self,
        _logits: &'l mut Self::Logits,
    ) -> Result<&'l [DeviceSample], StepError> {
        Ok(&[])
    }

    /// The first rows of logits in memory of the host, once they are there. After a change by the caller, a second
    /// call in the same step gives the changed ones.
    ///
    /// # Errors
    ///
    /// If an operation of this step or of an earlier one has failed.
    fn host_logits<'l>(
        &mut self,
        logits: &'l mut Self::Logits,
        num_rows: usize,
    ) -> Result<&'l mut [f32], StepError>;
}
