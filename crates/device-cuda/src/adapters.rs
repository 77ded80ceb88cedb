//! What adapters make of their rows.
//!
//! ```text
//! take      rows whose sums get factors give theirs away before a product is added to them
//! replace   the product of rows that have weights of their own in place of the model's
//! shrink    x * A^T, scaled
//! expand    that * B^T is added
//! finish    factors, what was given away, biases
//! ```
//!
//! A step with adapters is launched operation by operation, never as a graph.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg};

use super::Cuda;
use super::adapter_memory::{AdapterMemory, MAX_PARTS, padded_rank};
use super::kernels::{Kernels, launch};
use super::memory::{DeviceMemory, UploadBuffer};
use super::rows::Rows;
use inflight_base::LoadError;
use inflight_device::RANK_PANEL;
use inflight_device::{
    AdaptedPlace, AdaptedRows, AdapterRun, DenseRows, LowRank, StepCapacity, StepInputs,
};

/// Rows of a tile: `MAX_ROWS` of low_rank.cu.
const TILE_ROWS: u32 = 4;
/// Threads of a block. That of the shrink decides the order of its sums.
const SHRINK_THREADS: u32 = 256;
const EXPAND_THREADS: u32 = 128;
const REPLACE_THREADS: u32 = 128;
/// Outputs that a block of it computes.
const REPLACE_OUTPUTS: usize = 32;
const ELEMENT_THREADS: u32 = 256;
/// Blocks that share the elements of a tile.
const MAX_ELEMENT_BLOCKS: usize = 16;
/// Kinds of rows that a step uploads tiles of: all, those that are kept, those that are sampled from.
pub(super) const NUM_KINDS: usize = 3;
/// Words of a tile in the upload of a step.
pub(super) const TILE_WORDS: usize = size_of::<AdapterTile>() / size_of::<u32>();

/// `Tile` of low_rank.cu: neighbouring rows with the same adapter.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct AdapterTile {
    table: u64,
    first_row: u32,
    num_rows: u32,
}

/// The tiles of a step on the device, for rows of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AdapterTiles {
    /// Rows of that kind, with and without adapters.
    pub num_rows: usize,
    pub address: u64,
    pub num_tiles: usize,
}

/// The adapters of a model on a GPU.
pub(super) struct Adapters {
    memory: AdapterMemory,
    /// `x * A^T` of a step.
    shrunk: DeviceMemory,
    /// The length of its rows.
    max_rank: usize,
    take: CudaFunction,
    replace: CudaFunction,
    shrink: CudaFunction,
    expand: CudaFunction,
    finish: CudaFunction,
    embed: CudaFunction,
    /// Of all rows of the step, of its kept rows, and of its sampled rows.
    tiles: [AdapterTiles; NUM_KINDS],
    /// Tiles of rows of another kind.
    upload: UploadBuffer,
}

/// The rows of a product.
#[derive(Clone, Copy)]
pub(super) struct ProductRows {
    /// The rows that have adapters.
    pub tiles: AdapterTiles,
    /// What is multiplied.
    pub x: u64,
    /// The sums.
    pub out: u64,
    /// Outputs of a row.
    pub width: usize,
}

impl Adapters {
    /// Loads the kernels, and reserves memory. `None` for models without adapters.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        capacity: &StepCapacity,
    ) -> Result<Option<Self>, LoadError> {
        if capacity.adapters.max_rank == 0 {
            return Ok(None);
        }
        let function = |name| kernels.function("low_rank", name, 0);
        Ok(Some(Self {
            memory: AdapterMemory::new(stream, copies_bytes(capacity))?,
            shrunk: DeviceMemory::new(stream, shrunk_bytes(capacity))?,
            max_rank: padded_rank(capacity.adapters.max_rank),
            take: function("low_rank_take")?,
            replace: function("low_rank_replace")?,
            shrink: function("low_rank_shrink")?,
            expand: function("low_rank_expand")?,
            finish: function("low_rank_finish")?,
            embed: function("low_rank_embed")?,
            tiles: [AdapterTiles::default(); NUM_KINDS],
            upload: UploadBuffer::new(stream, TILE_WORDS * capacity.max_num_tokens)?,
        }))
    }

    /// Brings in the adapters of a step. Returns the tiles of all its rows, of its kept rows, and of its sampled rows.
    ///
    /// # Errors
    ///
    /// As [`AdapterMemory::bring_in`].
    pub fn bring_in(
        &mut self,
        stream: &Arc<CudaStream>,
        inputs: &StepInputs<'_>,
        step: u64,
    ) -> Result<[Vec<AdapterTile>; NUM_KINDS], LoadError> {
        self.memory.bring_in(stream, inputs.adapters, step)?;
        let kinds = [
            inputs.adapters,
            inputs.kept_adapters,
            inputs.sampled_adapters,
        ];
        Ok(kinds.map(|runs| self.tiles(runs, step)))
    }

    /// Sets the tiles of the step that begins.
    pub fn set_tiles(&mut self, tiles: [AdapterTiles; NUM_KINDS]) {
        self.tiles = tiles;
    }

    /// The tiles of the rows that a projection computes: all of the step, or the kept ones. If these are as many, they
    /// are the same.
    pub fn projected(&self, num_rows: usize) -> AdapterTiles {
        let [all, kept, _] = self.tiles;
        if all.num_rows == num_rows { all } else { kept }
    }

    /// The tiles of the rows that are sampled from.
    pub fn sampled(&self) -> AdapterTiles {
        self.tiles[2]
    }

    /// Uploads tiles of rows of another kind.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    fn upload(
        &mut self,
        stream: &CudaStream,
        runs: &[AdapterRun],
        step: u64,
    ) -> Result<AdapterTiles, DriverError> {
        let tiles = self.tiles(runs, step);
        let words: &[u32] = bytemuck::cast_slice(&tiles);
        self.upload.staging()?[..words.len()].copy_from_slice(words);
        let address = self.upload.address(0);
        self.upload.upload(stream, words.len())?;
        Ok(AdapterTiles {
            num_rows: runs.iter().map(|run| run.rows.len()).sum(),
            address,
            num_tiles: tiles.len(),
        })
    }

    /// The tiles of runs, whose adapters the step has brought in.
    ///
    /// ```text
    /// rows    | run: 9 rows           |     | run: 2 |
    /// tiles   | 4 rows | 4 rows | 1   |     | 2      |
    /// ```
    fn tiles(&mut self, runs: &[AdapterRun], step: u64) -> Vec<AdapterTile> {
        let mut tiles = Vec::new();
        for AdapterRun { weights, rows } in runs {
            let table = self.memory.table(weights, step);
            let table = table.expect("the step has brought it in");
            let first_rows = rows.clone().step_by(TILE_ROWS as usize);
            tiles.extend(first_rows.map(|first_row| AdapterTile {
                table,
                first_row,
                num_rows: TILE_ROWS.min(rows.end - first_row),
            }));
        }
        tiles
    }
}

/// Bytes of device memory that the adapters of a model take.
pub(super) fn num_bytes(capacity: &StepCapacity) -> usize {
    match capacity.adapters.max_rank {
        0 => 0,
        _ => copies_bytes(capacity) + shrunk_bytes(capacity),
    }
}

fn copies_bytes(capacity: &StepCapacity) -> usize {
    let tables =
        AdapterMemory::num_table_bytes(capacity.max_num_sequences, capacity.adapters.num_places);
    capacity.adapters.max_bytes + tables
}

fn shrunk_bytes(capacity: &StepCapacity) -> usize {
    let row_len = MAX_PARTS * padded_rank(capacity.adapters.max_rank);
    capacity.max_num_tokens * row_len * size_of::<f32>()
}

impl Cuda {
    /// Before a product is added to `out`: rows whose sums get factors give theirs away. Returns where to; 0 if there
    /// are none.
    pub(super) fn take_adapted(&mut self, rows: ProductRows, adapted: AdaptedRows<'_>) -> u64 {
        if !any(adapted, |place| place.factors().is_some()) {
            return 0;
        }
        let saved = self.scratch.address();
        let adapters = adapters(&self.adapters);
        launch!(
            self,
            adapters.take,
            "low_rank_take",
            element_grid(rows.tiles, rows.width),
            rows.out,
            saved,
            adapters.memory.address(),
            rows.tiles.address,
            adapted.place as i32,
            rows.width as i32
        );
        saved
    }

    /// Turns `out`, which has the products of `x` with the model's weights, to what adapters make of them; `saved` is
    /// what [`Cuda::take_adapted`] has returned.
    pub(super) fn add_adapted(&mut self, rows: ProductRows, adapted: AdaptedRows<'_>, saved: u64) {
        let ProductRows {
            tiles,
            x,
            out,
            width,
        } = rows;
        let place = adapted.place as i32;
        let replaced = adapted.changed().find_map(|(_, place)| place.replacement());
        if let Some(replaced) = replaced {
            let adapters = adapters(&self.adapters);
            launch!(
                self,
                adapters.replace,
                "low_rank_replace",
                grid(tiles, width.div_ceil(REPLACE_OUTPUTS), REPLACE_THREADS),
                out,
                x,
                adapters.memory.address(),
                tiles.address,
                place,
                replaced.columns() as i32,
                width as i32
            );
        }
        let num_panels = most(adapted, |part| part.rank().div_ceil(RANK_PANEL));
        if num_panels > 0 {
            let adapters = adapters(&self.adapters);
            launch!(
                self,
                adapters.shrink,
                "low_rank_shrink",
                grid(tiles, MAX_PARTS * num_panels, SHRINK_THREADS),
                adapters.shrunk.address(),
                x,
                adapters.memory.address(),
                tiles.address,
                place,
                adapters.max_rank as i32
            );
        }
        self.expand(tiles, adapted, out, width);
        if any(adapted, |place| {
            place.factors().is_some() || place.bias().is_some()
        }) {
            let adapters = adapters(&self.adapters);
            launch!(
                self,
                adapters.finish,
                "low_rank_finish",
                element_grid(tiles, width),
                out,
                saved,
                adapters.memory.address(),
                tiles.address,
                place,
                width as i32
            );
        }
    }

    /// Changes embedded tokens, which have been multiplied by `scale`. The adapters have weights of some tokens, from
    /// `first_token` on; others stay as they are.
    pub(super) fn adapt_embedded(
        &mut self,
        (tiles, token_ids): (AdapterTiles, u64),
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &Rows<f32>,
    ) {
        let width = out.width();
        let sampled = self.sampled_tokens.as_ref();
        let sampled = sampled.map_or(0, |tokens| tokens.address());
        // They are as many at all of them.
        let num_tokens = most(adapted, LowRank::num_inputs);
        let replaced = adapted.changed().find_map(|(_, place)| place.replacement());
        let num_tokens = replaced.map_or(num_tokens, DenseRows::rows);
        let adapters = adapters(&self.adapters);
        launch!(
            self,
            adapters.embed,
            "low_rank_embed",
            element_grid(tiles, width),
            out.address(),
            adapters.shrunk.address(),
            adapters.memory.address(),
            tiles.address,
            adapted.place as i32,
            token_ids,
            sampled,
            first_token as i32,
            num_tokens as i32,
            scale,
            adapters.max_rank as i32,
            width as i32
        );
        self.expand(tiles, adapted, out.address(), width);
    }

    /// Uploads the tiles of rows that only an operation has. None if it fails.
    pub(super) fn upload_tiles(&mut self, runs: &[AdapterRun]) -> AdapterTiles {
        let Some(adapters) = self.adapters.as_mut().filter(|_| self.failure.is_none()) else {
            return AdapterTiles::default();
        };
        let tiles = adapters.upload(&self.stream, runs, self.num_steps);
        self.record("uploading tiles of adapters", tiles)
            .unwrap_or_default()
    }

    /// Adds what has been shrunk to the outputs.
    fn expand(&mut self, tiles: AdapterTiles, adapted: AdaptedRows<'_>, out: u64, width: usize) {
        let num_outputs = most(adapted, |part| part.outputs().len());
        if num_outputs == 0 {
            return;
        }
        let outputs_per_block = 2 * EXPAND_THREADS as usize;
        let adapters = adapters(&self.adapters);
        launch!(
            self,
            adapters.expand,
            "low_rank_expand",
            grid(
                tiles,
                MAX_PARTS * num_outputs.div_ceil(outputs_per_block),
                EXPAND_THREADS
            ),
            out,
            adapters.shrunk.address(),
            adapters.memory.address(),
            tiles.address,
            adapted.place as i32,
            adapters.max_rank as i32,
            width as i32
        );
    }
}

fn adapters(adapters: &Option<Adapters>) -> &Adapters {
    adapters.as_ref().expect("a model with adapters")
}

/// Whether an adapter has this at the place.
fn any(adapted: AdaptedRows<'_>, has: impl Fn(&AdaptedPlace) -> bool) -> bool {
    adapted.changed().any(|(_, place)| has(place))
}

/// The largest of the numbers of all parts.
fn most(adapted: AdaptedRows<'_>, number: impl Fn(&LowRank) -> usize) -> usize {
    let parts = adapted.changed().flat_map(|(_, place)| place.parts());
    parts.map(number).max().unwrap_or(0)
}

/// Blocks that share the elements of a tile.
fn element_grid(tiles: AdapterTiles, width: usize) -> LaunchConfig {
    let blocks = width.div_ceil(ELEMENT_THREADS as usize);
    grid(tiles, blocks.min(MAX_ELEMENT_BLOCKS), ELEMENT_THREADS)
}

/// Blocks for each tile.
fn grid(tiles: AdapterTiles, blocks: usize, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (tiles.num_tiles as u32, blocks as u32, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}
