//! A tower on a device.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::tower_source::TowerSource;
use super::tower_weights::OuterWeights;
use crate::decoder::Decoder;
use crate::draft_model::limits_of_draft_model;
use crate::layer_attention::kv_layouts;
use crate::limits::RunnerLimits;
use crate::residual::norm_of;
use crate::spec::TowerSpec;
use inflight_base::{BlockId, Blocks, LoadError, StepError, Tokens};
use inflight_device::{
    AdapterCapacity, Device, KvDtype, KvSpan, LayerGroups, Norm, Output, StateOps, StepCapacity,
    StepInputs,
};
use inflight_images::{ImagePatches, TileGrid};

/// Makes rows of the residual stream of images.
pub(crate) struct ImageEncoder<D: Device> {
    spec: TowerSpec,
    device: D,
    ops: D::States,
    decoder: Decoder<D>,
    weights: OuterWeights<D>,
    cache: D::KvCache,
    block_table: Vec<BlockId>,
    buffers: Buffers<D>,
}

/// Activations of a tile.
struct Buffers<D: Device> {
    /// `[num_encoded, patch_len]`, with zeros in place of the class token.
    patches: (D::Sums, D::Inputs),
    /// Joined patches, `[num_tokens, merged_width]`.
    merged: (D::Sums, D::Inputs),
    /// `[num_tokens, num_inputs of the projector]`, if the projector has two layers.
    inner: Option<D::Inputs>,
    /// `[num_tokens, row_width]`.
    rows: (D::Sums, D::Inputs),
    /// Without rows: it tells whether the device has failed.
    logits: D::Logits,
}

impl<D: Device> ImageEncoder<D> {
    /// Loads the tower of a model with these limits.
    pub(crate) fn new(
        spec: &TowerSpec,
        source: TowerSource<'_>,
        limits: &RunnerLimits,
        options: &D::Options,
    ) -> Result<Self, LoadError> {
        let ops = D::STATES.ok_or_else(|| {
            LoadError::Resource(format!(
                "the images of {} are encoded on the CPU only: use an instance_group of kind KIND_CPU, or set \
                 max_num_image_tokens to 0",
                spec.encoder.family
            ))
        })?;
        let limits = limits_of_tower(spec, limits);
        let encoder = &spec.encoder;
        let mut device = D::open(options)?;
        let mut outer = None;
        let decoder = Decoder::of_layers(encoder, &limits, &mut device, |device| {
            let (weights, own) = source.load(device)?;
            outer = Some(own);
            Ok(weights)
        })?;
        let Some(weights) = outer else {
            unreachable!("they are loaded with the layers")
        };
        let layouts = kv_layouts(encoder, limits.block_size, limits.kv_dtype);
        // A tile is computed in one step.
        let groups = LayerGroups::of_one_step(encoder.num_layers());
        let num_blocks = limits.num_blocks;
        let cache = device.alloc_kv_cache(&layouts, &groups, num_blocks.index())?;
        let num_encoded = spec.num_encoded();
        device.reserve(
            &cache,
            &StepCapacity {
                max_num_tokens: num_encoded,
                max_num_sequences: 1,
                max_seq_len: num_encoded,
                max_blocks_per_sequence: num_blocks.index(),
                num_layer_groups: 1,
                num_q_heads: encoder.num_heads,
                has_slopes: false,
                adapters: AdapterCapacity::default(),
            },
        )?;
        let mut alloc = |num_rows: usize, width: usize| {
            let sums = device.alloc_sums(num_rows, width)?;
            Ok::<_, LoadError>((sums, device.alloc_inputs(num_rows, width)?))
        };
        let num_tokens = spec.num_tokens();
        let buffers = Buffers {
            patches: alloc(num_encoded, spec.patch.num_values())?,
            merged: alloc(num_tokens, spec.merged_width())?,
            rows: alloc(num_tokens, spec.row_width())?,
            inner: match &spec.projector.inner {
                Some(inner) => {
                    let width = inner.projection.num_outputs();
                    Some(device.alloc_inputs(num_tokens, width)?)
                }
                None => None,
            },
            logits: device.alloc_logits(0, encoder.vocab_size)?,
        };
        Ok(Self {
            spec: spec.clone(),
            ops,
            decoder,
            weights,
            cache,
            block_table: (0..num_blocks.0).map(BlockId).collect(),
            buffers,
            device,
        })
    }

    /// The tower.
    pub(crate) fn spec(&self) -> &TowerSpec {
        &self.spec
    }

    /// The rows of an image, `[num_tokens, row_width]`.
    ///
    /// # Errors
    /// The image is not one that the tower reads, or the device has failed.
    pub(crate) fn encode(&mut self, image: &ImagePatches) -> Result<Vec<bf16>, StepError> {
        self.spec.check_image(image).map_err(StepError)?;
        let mut rows = Vec::with_capacity(image.num_tokens * self.spec.row_width());
        let tile_len = self.spec.num_patches() * self.spec.patch.num_values();
        for patches in image.values.chunks_exact(tile_len) {
            self.encode_tile(patches, &mut rows)?;
        }
        Ok(rows)
    }

    /// Appends the rows of a tile, whose patches are `[num_patches, patch_len]`.
    fn encode_tile(&mut self, patches: &[f32], out: &mut Vec<bf16>) -> Result<(), StepError> {
        let Self {
            spec,
            device,
            ops,
            decoder,
            weights,
            cache,
            block_table,
            buffers,
        } = self;
        let num_encoded = spec.num_encoded();
        let all: Vec<_> = (0..num_encoded as u32).collect();
        let span = KvSpan {
            tokens: 0..num_encoded as u32,
            kv_len: num_encoded as u32,
            block_table: 0..block_table.len() as u32,
        };
        let inputs = StepInputs {
            token_ids: &vec![0; num_encoded],
            spans: &[span],
            block_tables: block_table,
            kept_rows: &all,
            ..StepInputs::default()
        };
        let step = device.begin_step(cache, inputs);
        let (sums, read) = &mut buffers.patches;
        match &weights.class_token {
            Some(_) => {
                let mut rows = vec![0.0; spec.patch.num_values()];
                rows.extend_from_slice(patches);
                ops.write_sums(device, &rows, sums);
            }
            None => ops.write_sums(device, patches, sums),
        }
        device.norm(num_encoded, sums, Norm::Identity, read);
        let hidden = decoder.hidden_mut();
        let embedding = &weights.patch_embedding;
        device.project(num_encoded, read, embedding, Output::Store, None, hidden);
        if let Some(class_token) = &weights.class_token {
            ops.write_sums(device, class_token, hidden);
        }
        if let Some(positions) = &weights.positions {
            device.add_positions(&step, positions, hidden);
        }
        if let Some(norm) = &weights.embedding_norm {
            decoder.norm_hidden_in_place(device, num_encoded, norm);
        }
        decoder.compute_layers(device, cache, &step, inputs, &mut ());
        let hidden_size = spec.encoder.hidden_size;
        let mut encoded = vec![0.0; num_encoded * hidden_size];
        ops.read_states(device, decoder.normed(), num_encoded, &mut encoded);
        let first_patch = num_encoded - spec.num_patches();
        let encoded = &encoded[first_patch * hidden_size..];
        let num_tokens = spec.num_tokens();
        let (sums, read) = &mut buffers.merged;
        ops.write_sums(device, &spec.merge(encoded), sums);
        let norm = match (&spec.projector.norm, &weights.projector_norm) {
            (Some((_, norm)), weights) => norm_of(norm, weights.as_ref()),
            _ => Norm::Identity,
        };
        device.norm(num_tokens, sums, norm, read);
        let read = match (&weights.inner, &mut buffers.inner) {
            (Some((linear, activation)), Some(inner)) => {
                device.project_activated(num_tokens, read, linear, *activation, None, inner);
                &*inner
            }
            _ => &*read,
        };
        let (sums, rows) = &mut buffers.rows;
        device.project(
            num_tokens,
            read,
            &weights.projector,
            Output::Store,
            None,
            sums,
        );
        device.norm(num_tokens, sums, Norm::Identity, rows);
        let mut values = vec![0.0; num_tokens * spec.row_width()];
        ops.read_states(device, rows, num_tokens, &mut values);
        device.end_step(step);
        device.results(&mut buffers.logits, 0)?;
        let start = out.len();
        out.resize(start + values.len(), bf16::ZERO);
        out[start..].convert_from_f32_slice(&values);
        Ok(())
    }
}

impl TowerSpec {
    /// Bytes of the buffers outside of the layers.
    pub(crate) fn num_buffer_bytes(&self) -> usize {
        let patches = self.num_encoded() * self.patch.num_values();
        let rows = self.num_tokens() * (self.merged_width() + self.row_width());
        let inner = self.projector.inner.as_ref();
        let inner = inner.map_or(0, |inner| inner.projection.num_outputs());
        (size_of::<f32>() + size_of::<bf16>()) * (patches + rows)
            + size_of::<bf16>() * self.num_tokens() * inner
    }

    /// Joins the squares of patches of a tile, `[num_patches, hidden_size]`, which may be by their means.
    ///
    /// ```text
    /// merge_size 2, patches of a tile      a b c d      rows   a b e f      or   (a + b + e + f) / 4
    ///                                      e f g h             c d g h           (c + d + g + h) / 4
    /// ```
    fn merge(&self, encoded: &[f32]) -> Vec<f32> {
        let (side, merged) = (self.num_patches_per_side, self.projector.merge_size);
        let width = self.encoder.hidden_size;
        let mut rows = Vec::with_capacity(encoded.len());
        for square_row in (0..side).step_by(merged) {
            for square_column in (0..side).step_by(merged) {
                for row in square_row..square_row + merged {
                    let start = (row * side + square_column) * width;
                    rows.extend_from_slice(&encoded[start..start + merged * width]);
                }
            }
        }
        match self.projector.has_means {
            true => means(&rows, merged.pow(2), width),
            false => rows,
        }
    }

    /// Refuses an image that the tower does not read.
    ///
    /// # Errors
    /// How the image differs from one that it reads.
    pub fn check_image(&self, image: &ImagePatches) -> Result<(), String> {
        let side = self.num_patches_per_side;
        let is_whole = |tile: &&TileGrid| [tile.rows, tile.columns] == [side; 2];
        if let Some(tile) = image.tiles.iter().find(|tile| !is_whole(tile)) {
            return Err(format!(
                "a tile of {} x {} patches; {} reads tiles of {side} x {side}",
                tile.rows, tile.columns, self.encoder.family
            ));
        }
        let num_tiles = image.tiles.len();
        let num_values = num_tiles * self.num_patches() * self.patch.num_values();
        if image.values.len() != num_values {
            return Err(format!(
                "{} values of an image of {num_tiles} tiles, which has {num_values}",
                image.values.len()
            ));
        }
        let num_tokens = num_tiles * self.num_tokens();
        match image.num_tokens == num_tokens {
            true => Ok(()),
            false => Err(format!(
                "{} tokens for an image of {num_tiles} tiles, which becomes {num_tokens} rows",
                image.num_tokens
            )),
        }
    }
}

/// The mean of each `num` consecutive rows, `[rows / num, width]`.
fn means(rows: &[f32], num: usize, width: usize) -> Vec<f32> {
    let mut means = Vec::with_capacity(rows.len() / num);
    for square in rows.chunks_exact(num * width) {
        let mean = |column: usize| {
            let values = square[column..].iter().step_by(width);
            values.sum::<f32>() / num as f32
        };
        means.extend((0..width).map(mean));
    }
    means
}

/// The limits of a tower, which computes one tile at a time.
fn limits_of_tower(spec: &TowerSpec, limits: &RunnerLimits) -> RunnerLimits {
    let num_encoded = Tokens(spec.num_encoded() as u32);
    let limits = limits_of_draft_model(limits);
    RunnerLimits {
        max_num_tokens: num_encoded,
        max_num_requests: 1,
        num_state_rows: 1,
        max_sampled_rows: Tokens::ZERO,
        max_seq_len: num_encoded,
        num_blocks: num_encoded.blocks_ceil(limits.block_size),
        num_host_blocks: Blocks::ZERO,
        kv_dtype: KvDtype::Bf16,
        weights: None,
        ..limits
    }
}
