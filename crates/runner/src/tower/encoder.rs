//! A tower on a device.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::patch_positions::PositionSquare;
use super::projector::ProjectorBuffers;
use super::tile_layout::{LayerRun, TileLayout};
use super::tower_source::TowerSource;
use super::tower_weights::{OuterWeights, PatchPositions};
use crate::decoder::Decoder;
use crate::draft_model::limits_of_draft_model;
use crate::layer_attention::kv_layouts;
use crate::limits::RunnerLimits;
use crate::rope::RopeAxes;
use crate::spec::{TileSizes, TowerSpec};
use inflight_base::{BlockSize, Blocks, LoadError, StepError, Tokens};
use inflight_device::{
    AdapterCapacity, Device, KvDtype, LayerGroups, Norm, Output, StateOps, StepCapacity, StepInputs,
};
use inflight_images::{ImagePatches, TileGrid};

/// Makes rows of the residual stream of images.
pub(crate) struct ImageEncoder<D: Device> {
    spec: TowerSpec,
    block_size: BlockSize,
    device: D,
    ops: D::States,
    decoder: Decoder<D>,
    layer_runs: Vec<LayerRun>,
    weights: OuterWeights<D>,
    cache: D::KvCache,
    buffers: Buffers<D>,
}

/// The rows of an image.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EncodedImage {
    /// In place of the embeddings of its tokens, `[num_tokens, row_width]`.
    pub rows: Vec<bf16>,
    /// What is added behind the first layers of the language model, likewise for each of these layers.
    pub deep_rows: Vec<Vec<bf16>>,
}

/// Activations of a tile.
struct Buffers<D: Device> {
    /// `[max_num_encoded, patch_len]`, with zeros in place of the class token.
    patches: (D::Sums, D::Inputs),
    projector: ProjectorBuffers<D>,
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
        // A tile is computed in one go, layer after layer.
        let groups = LayerGroups::of_one_step(encoder.num_layers());
        let num_blocks = limits.num_blocks;
        let cache = device.alloc_kv_cache(&layouts, &groups, num_blocks.index())?;
        let max_num_encoded = spec.max_num_encoded();
        device.reserve(
            &cache,
            &StepCapacity {
                max_num_tokens: max_num_encoded,
                max_num_sequences: spec.max_num_windows(),
                max_seq_len: max_num_encoded,
                max_blocks_per_sequence: num_blocks.index(),
                num_layer_groups: 1,
                num_q_heads: encoder.num_heads,
                has_slopes: false,
                adapters: AdapterCapacity::default(),
            },
        )?;
        let patch_len = spec.patch.num_values();
        let buffers = Buffers {
            patches: (
                device.alloc_sums(max_num_encoded, patch_len)?,
                device.alloc_inputs(max_num_encoded, patch_len)?,
            ),
            projector: ProjectorBuffers::new(&mut device, spec)?,
            logits: device.alloc_logits(0, encoder.vocab_size)?,
        };
        Ok(Self {
            spec: spec.clone(),
            block_size: limits.block_size,
            ops,
            decoder,
            layer_runs: spec.layer_runs(),
            weights,
            cache,
            buffers,
            device,
        })
    }

    /// The tower.
    pub(crate) fn spec(&self) -> &TowerSpec {
        &self.spec
    }

    /// The rows of an image.
    ///
    /// # Errors
    /// The image is not one that the tower reads, or the device has failed.
    pub(crate) fn encode(&mut self, image: &ImagePatches) -> Result<EncodedImage, StepError> {
        self.spec.check_image(image).map_err(StepError)?;
        let mut encoded = EncodedImage {
            rows: Vec::with_capacity(image.num_tokens * self.spec.row_width()),
            deep_rows: vec![Vec::new(); self.spec.deep_projectors.len()],
        };
        let mut values = &image.values[..];
        for &tile in &image.tiles {
            let num_values = tile.rows * tile.columns * self.spec.patch.num_values();
            let (patches, others) = values.split_at(num_values);
            self.encode_tile(tile, patches, &mut encoded)?;
            values = others;
        }
        let line_end = &self.weights.line_end;
        encoded.rows = self
            .spec
            .rows_of_image(image.row_layout, line_end, encoded.rows);
        Ok(encoded)
    }

    /// Appends the rows of a tile, whose patches are `[num_patches, patch_len]`.
    fn encode_tile(
        &mut self,
        tile: TileGrid,
        patches: &[f32],
        out: &mut EncodedImage,
    ) -> Result<(), StepError> {
        let layout = TileLayout::new(&self.spec, tile, self.block_size);
        let num_encoded = layout.num_encoded();
        let rows: Vec<_> = (0..num_encoded as u32).collect();
        let token_ids = vec![0; num_encoded];
        let num_runs = self.layer_runs.len();
        for index in 0..num_runs {
            let run = self.layer_runs[index].clone();
            let inputs = StepInputs {
                token_ids: &token_ids,
                spans: layout.spans(&run),
                block_tables: layout.block_table(),
                positions: layout.positions(),
                kept_rows: &rows,
                ..StepInputs::default()
            };
            let step = self.device.begin_step(&self.cache, inputs);
            if index == 0 {
                self.embed(&step, tile, &layout, patches);
            }
            let Self {
                spec,
                device,
                ops,
                decoder,
                weights,
                cache,
                buffers,
                ..
            } = self;
            decoder.compute_layers(device, cache, &step, inputs, run.layers, &mut ());
            let mut encoded = vec![0.0; num_encoded * spec.encoder.hidden_size];
            let mut project = |device: &mut D, encoded: &[f32], weights, out: &mut Vec<bf16>| {
                let first_patch = num_encoded - tile.rows * tile.columns;
                let encoded = &encoded[first_patch * spec.encoder.hidden_size..];
                let num_tokens = layout.tokens().rows * layout.tokens().columns;
                let merged = (&*spec.merge(tile, encoded), num_tokens);
                let rows = buffers.projector.project(device, *ops, weights, merged);
                let mut in_order = Vec::with_capacity(rows.len());
                layout.restore(&rows, spec.row_width(), &mut in_order);
                let start = out.len();
                out.resize(start + in_order.len(), bf16::ZERO);
                out[start..].convert_from_f32_slice(&in_order);
            };
            if let Some(deep) = run.deep_projector {
                ops.read_sums(device, decoder.hidden(), num_encoded, &mut encoded);
                let weights = &weights.deep_projectors[deep];
                project(device, &encoded, weights, &mut out.deep_rows[deep]);
            }
            if index + 1 == num_runs {
                ops.read_states(device, decoder.normed(), num_encoded, &mut encoded);
                project(device, &encoded, &weights.projector, &mut out.rows);
            }
            device.end_step(step);
        }
        self.device.results(&mut self.buffers.logits, 0)?;
        Ok(())
    }

    /// Begins with the embedded patches of a tile, in the first step.
    fn embed(&mut self, step: &D::Step<'_>, tile: TileGrid, layout: &TileLayout, patches: &[f32]) {
        let Self {
            spec,
            device,
            ops,
            decoder,
            weights,
            buffers,
            ..
        } = self;
        let num_encoded = layout.num_encoded();
        let patch_len = spec.patch.num_values();
        let mut values = Vec::with_capacity(num_encoded * patch_len);
        if weights.class_token.is_some() {
            values.resize(patch_len, 0.0);
        }
        layout.arrange(patches, patch_len, &mut values);
        let (sums, read) = &mut buffers.patches;
        ops.write_sums(device, &values, sums);
        device.norm(num_encoded, sums, Norm::Identity, read);
        let hidden = decoder.hidden_mut();
        let embedding = &weights.patch_embedding;
        let output = match &weights.positions {
            Some(PatchPositions::Interpolated(square)) => {
                let rows = PositionSquare::of_patches(square, tile, layout.positions());
                ops.write_sums(device, &rows, hidden);
                Output::Add
            }
            _ => Output::Store,
        };
        device.project(num_encoded, read, embedding, output, None, hidden);
        if let Some(class_token) = &weights.class_token {
            ops.write_sums(device, class_token, hidden);
        }
        if let Some(PatchPositions::InOrder(positions)) = &weights.positions {
            device.add_positions(step, positions, hidden);
        }
        if let Some(norm) = &weights.embedding_norm {
            decoder.norm_hidden_in_place(device, num_encoded, norm);
        }
    }
}

impl TowerSpec {
    /// Bytes of the buffers outside of the layers.
    pub(crate) fn num_buffer_bytes(&self) -> usize {
        let patches = self.max_num_encoded() * self.patch.num_values();
        let rows = self.max_num_tokens() * (self.merged_width() + self.row_width());
        let inner = self.projector.inner.as_ref();
        let inner = inner.map_or(0, |inner| inner.projection.num_outputs());
        let merging = self.projector.merging.as_ref();
        let merging = merging.map_or(0, |merging| self.max_num_tokens() * merging.num_outputs());
        (size_of::<f32>() + size_of::<bf16>()) * (patches + rows + merging)
            + size_of::<bf16>() * self.max_num_tokens() * inner
    }

    /// Joins the squares of patches of a tile, `[num_patches, hidden_size]`, which may be by their means.
    ///
    /// ```text
    /// merge_size 2, patches of a tile      a b c d      rows   a b e f      or   (a + b + e + f) / 4
    ///                                      e f g h             c d g h           (c + d + g + h) / 4
    /// for a merging layer                  first row           a0 b0 e0 f0 a1 b1 ..
    /// ```
    fn merge(&self, tile: TileGrid, encoded: &[f32]) -> Vec<f32> {
        if let TileSizes::Squares { .. } = self.tiles {
            return encoded.to_vec();
        }
        let merged = self.projector.merge_size;
        let width = self.encoder.hidden_size;
        let mut rows = Vec::with_capacity(encoded.len());
        for square_row in (0..tile.rows).step_by(merged) {
            for square_column in (0..tile.columns).step_by(merged) {
                for row in square_row..square_row + merged {
                    let start = (row * tile.columns + square_column) * width;
                    rows.extend_from_slice(&encoded[start..start + merged * width]);
                }
            }
        }
        match self.projector.merging {
            Some(_) => rows
                .chunks_exact(merged * merged * width)
                .flat_map(|square| {
                    let columns = 0..width;
                    columns.flat_map(move |column| square[column..].iter().step_by(width).copied())
                })
                .collect(),
            None if self.projector.has_means => means(&rows, merged.pow(2), width),
            None => rows,
        }
    }

    /// Refuses an image that the tower does not read.
    ///
    /// # Errors
    /// How the image differs from one that it reads.
    pub fn check_image(&self, image: &ImagePatches) -> Result<(), String> {
        if let Some(tile) = image.tiles.iter().find(|tile| !self.reads(tile)) {
            let merge = self.projector.merge_size;
            return Err(format!(
                "a tile of {} x {} patches; {} reads {}",
                tile.rows,
                tile.columns,
                self.encoder.family,
                match self.tiles {
                    TileSizes::Square {
                        num_patches_per_side: side,
                    } => format!("tiles of {side} x {side}"),
                    TileSizes::Squares { max_num_patches }
                    | TileSizes::Rows { max_num_patches } => format!(
                        "tiles of up to {max_num_patches} patches, with rows and columns that are multiples of {merge}"
                    ),
                }
            ));
        }
        let num_tiles = image.tiles.len();
        if self.text_axes != RopeAxes::Sequence && num_tiles != 1 {
            return Err(format!(
                "an image of {num_tiles} tiles; {} reads images of one",
                self.encoder.family
            ));
        }
        let num_values = image.num_patches() * self.patch.num_values();
        if image.values.len() != num_values {
            return Err(format!(
                "{} values of an image of {num_tiles} tiles, which has {num_values}",
                image.values.len()
            ));
        }
        self.check_rows(image)
    }

    /// Whether it reads such a tile.
    fn reads(&self, tile: &TileGrid) -> bool {
        match self.tiles {
            TileSizes::Square {
                num_patches_per_side: side,
            } => [tile.rows, tile.columns] == [side; 2],
            TileSizes::Squares { max_num_patches } | TileSizes::Rows { max_num_patches } => {
                let merge = self.projector.merge_size;
                let sides = [tile.rows, tile.columns];
                let is_whole = sides.iter().all(|&it| it > 0 && it.is_multiple_of(merge));
                is_whole && tile.rows.saturating_mul(tile.columns) <= max_num_patches
            }
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
    let num_encoded = Tokens(spec.max_num_encoded() as u32);
    let limits = limits_of_draft_model(limits);
    RunnerLimits {
        max_num_tokens: num_encoded,
        max_num_requests: 1,
        num_state_rows: 1,
        max_sampled_rows: Tokens::ZERO,
        max_seq_len: num_encoded,
        num_blocks: Blocks(spec.max_num_blocks(limits.block_size)),
        num_host_blocks: Blocks::ZERO,
        kv_dtype: KvDtype::Bf16,
        weights: None,
        ..limits
    }
}
