//! The kernels of latent attention, and memory for what they compute.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream};

use super::attention::HeadGroups;
use super::attention_tiles::WARP_QUERIES;
use super::expert_rows::{ProductKernels, TILE_BYTES};
use super::gemm::MAX_ROUNDING;
use super::kernels::Kernels;
use super::memory::DeviceMemory;
use inflight_base::LoadError;
use inflight_device::LatentShape;

/// What the activations of a chunk of heads may take, if it has more than one group.
const MAX_CHUNK_BYTES: usize = 512 << 20;
/// Rows of a tile where there are many, at least.
const MIN_TILE_ROWS: usize = 32;
/// Tiles of a launch, at most.
const MAX_TILES: usize = 65_535;

/// The kernels of latent attention, and memory for the activations of a chunk of heads.
pub(super) struct Latents {
    pub(super) shape: LatentShape,
    /// The head groups of a chunk.
    pub(super) groups: HeadGroups,
    pub(super) kernels: LatentKernels,
    pub(super) tiles: DeviceMemory,
    /// Contents of queries, then attended latents: `[heads][rows]`, bf16.
    pub(super) by_heads: DeviceMemory,
    /// Queries in the space of the latents, then values: `[heads][rows]`, f32.
    pub(super) sums: DeviceMemory,
    /// `[rows][heads][key_dim]`, bf16.
    pub(super) keyed: DeviceMemory,
    /// `[rows][heads][latent_dim]`, bf16.
    pub(super) attended: DeviceMemory,
}

pub(super) struct LatentKernels {
    pub(super) store: CudaFunction,
    pub(super) split_queries: CudaFunction,
    pub(super) rotate_queries: CudaFunction,
    pub(super) split_attended: CudaFunction,
    pub(super) join_values: CudaFunction,
    pub(super) tile_heads: CudaFunction,
    pub(super) products: ProductKernels,
}

/// The bytes of each buffer.
struct Bytes {
    tiles: usize,
    by_heads: usize,
    sums: usize,
    keyed: usize,
    attended: usize,
}

impl Latents {
    /// Reserves memory for up to `max_rows` rows.
    ///
    /// # Errors
    ///
    /// There is not enough, or there are no kernels for this GPU.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        max_rows: usize,
        shape: &LatentShape,
    ) -> Result<Self, LoadError> {
        let groups = head_groups(max_rows, shape);
        let bytes = Bytes::new(max_rows, &groups, shape);
        let memory = |num_bytes| DeviceMemory::new(stream, num_bytes);
        let load = |name| kernels.function("latent_rows", name, 0);
        Ok(Self {
            shape: *shape,
            groups,
            kernels: LatentKernels {
                store: load("store_latents")?,
                split_queries: load("split_queries")?,
                rotate_queries: load("rotate_queries")?,
                split_attended: load("split_attended")?,
                join_values: load("join_values")?,
                tile_heads: load("tile_heads")?,
                products: ProductKernels::load(kernels)?,
            },
            tiles: memory(bytes.tiles)?,
            by_heads: memory(bytes.by_heads)?,
            sums: memory(bytes.sums)?,
            keyed: memory(bytes.keyed)?,
            attended: memory(bytes.attended)?,
        })
    }
}

/// Bytes of memory for up to `max_rows` rows.
pub(super) fn num_bytes(max_rows: usize, shape: &LatentShape) -> usize {
    let Bytes {
        tiles,
        by_heads,
        sums,
        keyed,
        attended,
    } = Bytes::new(max_rows, &head_groups(max_rows, shape), shape);
    tiles + by_heads + sums + keyed + attended
}

/// Groups of heads that attend together, as large as a tile of queries allows, and how many of them are a chunk.
fn head_groups(max_rows: usize, shape: &LatentShape) -> HeadGroups {
    let num_heads = shape.num_heads;
    let divides = |group: &usize| num_heads.is_multiple_of(*group);
    let group = (1..=WARP_QUERIES).rev().find(divides).unwrap_or(1);
    let max_rows = max_rows + MAX_ROUNDING;
    let by_bytes = MAX_CHUNK_BYTES / (max_rows * group * head_bytes(shape).iter().sum::<usize>());
    let by_tiles = MAX_TILES / (group * max_rows.div_ceil(MIN_TILE_ROWS));
    HeadGroups {
        num_groups: by_bytes.min(by_tiles).clamp(1, num_heads / group),
        group,
        key_dim: shape.key_dim(),
        value_dim: shape.latent_dim,
    }
}

/// Bytes that a row of a head takes in each buffer of activations.
fn head_bytes(shape: &LatentShape) -> [usize; 4] {
    [
        2 * shape.content_dim.max(shape.latent_dim),
        4 * shape.value_dim.max(shape.latent_dim),
        2 * shape.key_dim(),
        2 * shape.latent_dim,
    ]
}

impl Bytes {
    fn new(max_rows: usize, groups: &HeadGroups, shape: &LatentShape) -> Self {
        let (max_rows, num_heads) = (max_rows + MAX_ROUNDING, groups.num_groups * groups.group);
        let [by_heads, sums, keyed, attended] =
            head_bytes(shape).map(|bytes| max_rows * num_heads * bytes);
        Self {
            tiles: TILE_BYTES * num_heads * max_rows.div_ceil(MIN_TILE_ROWS),
            by_heads,
            sums,
            keyed,
            attended,
        }
    }
}
