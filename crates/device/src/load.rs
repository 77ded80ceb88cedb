//! Memory and weights of a device.

use std::borrow::Cow;

use half::bf16;

use super::experts::MixtureShape;
use super::kv_layouts::KvLayouts;
use super::latent::LatentShape;
use super::layer_groups::LayerGroups;
use super::operands::{FirstStep, PackedWeights, StepCapacity};
use super::packed::{PackedPart, PackedReader, PackedShape};
use super::rope::RopeTable;
use inflight_base::LoadError;
use inflight_numbers::{FloatRows, NotFinite, QuantisedRows, Stacking};
use inflight_threads::Pool;

/// A machine that models are loaded on. Weights go to the device, then memory is reserved for the largest step.
pub trait Load: Sized {
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
    /// Rows of activations that results are added up in: f32, `[max_rows, width]`.
    type Sums;
    /// Rows of activations that products and attention read: bf16, `[max_rows, width]`.
    type Inputs;
    /// Rows of logits on their way to the host, `[max_rows, vocab_size]`.
    type Logits;
    /// The experts of rows, and memory for what these compute.
    type ExpertRows;
    /// The keys and values of all sequences.
    type KvCache;
    /// Copies of blocks of the cache in memory of the host.
    type HostBlocks;

    /// Whether it multiplies with weights of [`CodeBits::Fp8`](inflight_numbers::CodeBits::Fp8). If not, they become
    /// bf16.
    const HAS_FP8: bool = false;

    /// The part of a file name of packed weights that no other kind of device has.
    const PACKED_FILE_KIND: Option<&'static str> = None;

    /// Whether codes that are all [twice floats of 4 bits](QuantisedRows::are_twice_e2m1) take 4 bits each.
    const PACKS_E2M1: bool = false;

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

    /// Packs float matrices of equal width as one, `[all their rows, width]`.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory. The inner one: a weight is not finite in bf16.
    fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError>;

    /// Packs quantised matrices that [`can_be_packed_together`](inflight_numbers::can_be_packed_together) as one.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory. The inner one: a scale or an offset is not finite, or above 16.
    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        stacking: Stacking,
    ) -> Result<Result<Self::Matrix, NotFinite>, LoadError>;

    /// The layout of [`Load::packed_part`], with its version: what files of packed weights depend on. `None` if there
    /// are no such files for this device.
    fn packed_layout(&self) -> Option<String> {
        None
    }

    /// Bytes of the codes and of the scales of a packed quantised matrix; `None` if this one cannot be kept in a file.
    fn packed_len(_matrix: &Self::Matrix) -> Option<[usize; 2]> {
        None
    }

    /// The codes or the scales of a matrix that has a [length](Load::packed_len).
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

    /// Reads a matrix from the bytes that [`Load::packed_part`] gave. `None` if their number is wrong.
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
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the device computes no layers whose layouts differ.
    fn alloc_kv_cache(
        &mut self,
        layouts: &KvLayouts,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<Self::KvCache, LoadError>;

    /// Reserves memory of the host for copies of `num_blocks` blocks of the cache.
    fn alloc_host_blocks(
        &mut self,
        cache: &Self::KvCache,
        num_blocks: usize,
    ) -> Result<Self::HostBlocks, LoadError>;

    /// Bytes that one block takes in the layers of any of the `groups`, padding included; in memory of the host at most
    /// as many.
    fn kv_bytes_per_block(layouts: &KvLayouts, groups: &LayerGroups) -> usize;

    /// Reserves memory for [latent attention](LatentShape) of up to `max_rows` rows, before [`Load::reserve`].
    ///
    /// # Errors
    ///
    /// There is not enough.
    fn reserve_latents(&mut self, _max_rows: usize, _shape: &LatentShape) -> Result<(), LoadError> {
        Ok(())
    }

    /// Reserves what steps of this capacity need besides.
    fn reserve(&mut self, cache: &Self::KvCache, capacity: &StepCapacity) -> Result<(), LoadError>;

    /// Generation steps that it wants to compute before the first request, in this order, so that no request waits for
    /// the extra work of a first step. Nothing is stored in the cache, and the results do not matter. After
    /// [`Load::reserve`].
    fn first_steps(&self) -> Vec<FirstStep> {
        Vec::new()
    }
}
