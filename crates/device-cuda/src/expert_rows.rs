//! The experts of rows, and memory for what they compute.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream};
use half::bf16;

use super::gemm::MAX_ROUNDING;
use super::kernels::Kernels;
use super::memory::DeviceMemory;
use super::rows::Rows;
use inflight_base::LoadError;
use inflight_device::{GroupedRouting, MixtureShape, Routing, RoutingRule};

/// Experts of a layer, at most: a lane of a warp has a bit for each of its own.
const MAX_EXPERTS: usize = 1024;
/// What the activations of a chunk of rows may take.
const MAX_CHUNK_BYTES: usize = 256 << 20;
/// Rows of an expert that a block of its products takes; kernels' names end with it.
const TILE_ROWS: [usize; 4] = [8, 16, 32, 64];
/// Tile rows of the kernels for quantised experts, a subset of [`TILE_ROWS`].
const QUANTISED_TILE_ROWS: [usize; 2] = [8, 32];
/// Bytes of the description of a tile.
pub(super) const TILE_BYTES: usize = 16;

/// The experts of rows, and memory for the activations of a chunk of rows.
pub struct ExpertRows {
    pub(super) shape: MixtureShape,
    pub(super) kernels: ExpertKernels,
    /// The expert of each row and rank, `u32`.
    pub(super) experts: DeviceMemory,
    /// Their weights, `f32`.
    pub(super) weights: DeviceMemory,
    /// The weight of the shared expert of each row, `f32`.
    pub(super) shared_weights: DeviceMemory,
    /// Rows that have experts.
    pub(super) num_routed: usize,
    pub(super) chunk: Chunk,
}

/// Rows that are computed together, and what for: `kernels/sort_experts.cu` and `expert_gemm.cu` say how it is laid
/// out.
pub(super) struct Chunk {
    pub(super) max_rows: usize,
    pub(super) sorted: DeviceMemory,
    pub(super) places: DeviceMemory,
    pub(super) tiles: DeviceMemory,
    /// The inner activations of each place.
    pub(super) inner: DeviceMemory,
    /// What the experts give for each place.
    pub(super) sums: DeviceMemory,
    /// The inner activations of the shared expert, and what it gives, if there is one.
    pub(super) shared: Option<(Rows<bf16>, Rows<f32>)>,
}

/// The rules of routing that GPUs have kernels for, as in [`RoutingRule`].
#[derive(Clone, Copy)]
pub(super) enum RouteRule {
    Softmax { is_normalised: bool },
    SparseMixer { jitter: f32 },
    Grouped(GroupedRouting),
}

/// The kernels of mixtures of experts.
pub(super) struct ExpertKernels {
    pub(super) rule: RouteRule,
    /// The routing kernel of the rule.
    pub(super) route: CudaFunction,
    /// The dynamic shared memory that it takes.
    pub(super) route_shared_bytes: u32,
    pub(super) sort: CudaFunction,
    pub(super) add: CudaFunction,
    pub(super) products: ProductKernels,
}

/// The kernels of products with matrices of which each has rows of its own.
pub(super) struct ProductKernels {
    float: [ExpertProducts; TILE_ROWS.len()],
    quantised: [ExpertProducts; QUANTISED_TILE_ROWS.len()],
}

/// The products of tiles of equally many rows.
pub(super) struct ExpertProducts {
    pub(super) tile_rows: usize,
    pub(super) gate_up: CudaFunction,
    /// Outputs of a block of it.
    pub(super) gate_up_outputs: usize,
    pub(super) down: CudaFunction,
    /// Outputs of a block of it.
    pub(super) down_outputs: usize,
}

/// The bytes of each buffer.
struct Bytes {
    experts: usize,
    shared_weights: usize,
    places: usize,
    tiles: usize,
    inner: usize,
    sums: usize,
}

impl ExpertRows {
    /// Reserves memory for up to `max_rows` rows.
    ///
    /// # Errors
    ///
    /// There is not enough, or there are more experts than the kernels know.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        max_rows: usize,
        shape: &MixtureShape,
    ) -> Result<Self, LoadError> {
        let Routing {
            num_experts,
            num_chosen,
            ..
        } = shape.routing;
        assert!(
            (1..=num_experts).contains(&num_chosen),
            "{:?}",
            shape.routing
        );
        if num_experts > MAX_EXPERTS {
            return Err(LoadError::Resource(format!(
                "the model has {num_experts} experts in a layer, and a GPU chooses among {MAX_EXPERTS} at most: use an \
                 instance_group of kind KIND_CPU"
            )));
        }
        let chunk_rows = chunk_rows(max_rows, shape);
        let bytes = Bytes::new(max_rows, chunk_rows, shape);
        let memory = |num_bytes| DeviceMemory::new(stream, num_bytes);
        Ok(Self {
            shape: *shape,
            kernels: ExpertKernels::load(kernels, &shape.routing)?,
            experts: memory(bytes.experts)?,
            weights: memory(bytes.experts)?,
            shared_weights: memory(bytes.shared_weights)?,
            num_routed: 0,
            chunk: Chunk {
                max_rows: chunk_rows,
                sorted: memory(bytes.places)?,
                places: memory(bytes.places)?,
                tiles: memory(bytes.tiles)?,
                inner: memory(bytes.inner)?,
                sums: memory(bytes.sums)?,
                shared: match shape.shared_size {
                    0 => None,
                    width => Some((
                        Rows::new(stream, chunk_rows, width)?,
                        Rows::new(stream, chunk_rows, shape.hidden_size)?,
                    )),
                },
            },
        })
    }

    /// Experts that any row has, once they are chosen. 0 if they cannot be read.
    pub(super) fn num_touched(&self, stream: &CudaStream) -> usize {
        let Routing {
            num_experts,
            num_chosen,
            ..
        } = self.shape.routing;
        let mut experts = vec![0_u32; self.num_routed * num_chosen];
        let bytes = bytemuck::cast_slice_mut(&mut experts);
        if self.experts.read(stream, bytes).is_err() {
            return 0;
        }
        experts.sort_unstable();
        experts.dedup();
        let is_one = |expert: &&u32| (**expert as usize) < num_experts;
        experts.iter().filter(is_one).count()
    }
}

/// Bytes of memory for up to `max_rows` rows.
pub(super) fn num_bytes(max_rows: usize, shape: &MixtureShape) -> usize {
    let chunk_rows = chunk_rows(max_rows, shape);
    let bytes = Bytes::new(max_rows, chunk_rows, shape);
    let shared_row_bytes = match shape.shared_size {
        0 => 0,
        width => 2 * width + 4 * shape.hidden_size,
    };
    let Bytes {
        experts,
        shared_weights,
        places,
        tiles,
        inner,
        sums,
    } = bytes;
    let shared = (chunk_rows + MAX_ROUNDING) * shared_row_bytes;
    2 * experts + shared_weights + 2 * places + tiles + inner + sums + shared
}

/// Bytes of the products of the shared expert's gate and up, before their activation.
pub(super) fn num_shared_scratch_bytes(max_rows: usize, shape: &MixtureShape) -> usize {
    8 * (chunk_rows(max_rows, shape) + MAX_ROUNDING) * shape.shared_size
}

/// Rows that are computed together.
fn chunk_rows(max_rows: usize, shape: &MixtureShape) -> usize {
    let (hidden, shared) = (shape.hidden_size, shape.shared_size);
    let place_bytes = 4 * hidden + 2 * shape.expert_size;
    let shared_bytes = if shared > 0 {
        4 * hidden + 2 * shared
    } else {
        0
    };
    let row_bytes = shape.routing.num_chosen * place_bytes + shared_bytes;
    (MAX_CHUNK_BYTES / row_bytes).clamp(1, max_rows + MAX_ROUNDING)
}

impl Bytes {
    fn new(max_rows: usize, chunk_rows: usize, shape: &MixtureShape) -> Self {
        let Routing {
            num_experts,
            num_chosen,
            ..
        } = shape.routing;
        let max_rows = max_rows + MAX_ROUNDING;
        let num_places = chunk_rows * num_chosen;
        Self {
            experts: 4 * max_rows * num_chosen,
            shared_weights: 4 * max_rows,
            places: 4 * num_places,
            tiles: TILE_BYTES * num_tiles(num_places, TILE_ROWS[0], num_experts),
            inner: 2 * num_places * shape.expert_size,
            sums: 4 * num_places * shape.hidden_size,
        }
    }
}

/// Tiles of rows that are sorted by their experts, empty ones included.
pub(super) fn num_tiles(num_places: usize, tile_rows: usize, num_experts: usize) -> usize {
    num_places / tile_rows + num_experts
}

impl RouteRule {
    fn of(rule: RoutingRule) -> Result<Self, LoadError> {
        match rule {
            RoutingRule::Softmax { is_normalised } => Ok(Self::Softmax { is_normalised }),
            RoutingRule::SparseMixer { jitter } => Ok(Self::SparseMixer { jitter }),
            RoutingRule::Grouped(rule) => Ok(Self::Grouped(rule)),
            RoutingRule::WeightedInputs => Err(LoadError::Resource(
                "the model has experts whose inputs are scaled by the router, which are computed on the CPU only: use \
                 an instance_group of kind KIND_CPU"
                    .to_owned(),
            )),
        }
    }
}

impl ExpertKernels {
    fn load(kernels: &Kernels, routing: &Routing) -> Result<Self, LoadError> {
        let rule = RouteRule::of(routing.rule)?;
        let (route, num_shared) = match rule {
            RouteRule::Softmax { .. } => ("route_softmax", 0),
            RouteRule::SparseMixer { .. } => ("route_sparse_mixer", 0),
            RouteRule::Grouped(rule) => ("route_grouped", routing.num_experts + rule.num_groups),
        };
        let route_shared_bytes = 4 * num_shared as u32;
        Ok(Self {
            rule,
            route: kernels.function("route", route, route_shared_bytes)?,
            route_shared_bytes,
            sort: kernels.function("sort_experts", "sort_experts", 0)?,
            add: kernels.function("add_experts", "add_experts", 0)?,
            products: ProductKernels::load(kernels)?,
        })
    }

    /// Rows of a tile for some rows, if each expert has as many as the others: twice as many still fit a tile.
    pub(super) fn tile_rows(num_rows: usize, routing: &Routing, is_quantised: bool) -> usize {
        let of_expert = (num_rows * routing.num_chosen).div_ceil(routing.num_experts);
        ProductKernels::tile_rows(num_rows.min(2 * of_expert), is_quantised)
    }
}

impl ProductKernels {
    /// Loads them.
    ///
    /// # Errors
    ///
    /// There are none for this GPU.
    pub(super) fn load(kernels: &Kernels) -> Result<Self, LoadError> {
        let products = |kind: &str, tile_rows: usize, down_outputs| {
            let function = |name: &str| {
                let name = format!("{kind}expert_{name}_m{tile_rows}");
                kernels.function(&format!("{kind}expert_gemm"), &name, 0)
            };
            Ok::<_, LoadError>(ExpertProducts {
                tile_rows,
                gate_up: function("gate_up")?,
                gate_up_outputs: 64,
                down: function("down")?,
                down_outputs,
            })
        };
        let [m8, m16, m32, m64] = TILE_ROWS;
        let [quantised_m8, quantised_m32] = QUANTISED_TILE_ROWS;
        Ok(Self {
            float: [
                products("", m8, 64)?,
                products("", m16, 64)?,
                products("", m32, 64)?,
                products("", m64, 128)?,
            ],
            quantised: [
                products("quantised_", quantised_m8, 128)?,
                products("quantised_", quantised_m32, 128)?,
            ],
        })
    }

    /// Rows of a tile where `wanted` rows should fit one: the largest tile if they do not. All of them compute the
    /// same. `is_quantised`: products with quantised weights have tiles of as many rows.
    pub(super) fn tile_rows(wanted: usize, is_quantised: bool) -> usize {
        let sizes = match is_quantised {
            true => &QUANTISED_TILE_ROWS[..],
            false => &TILE_ROWS,
        };
        let found = sizes.iter().find(|&&rows| rows >= wanted);
        *found.unwrap_or(&sizes[sizes.len() - 1])
    }

    /// The products with bf16 weights, or with quantised ones, of tiles of so many rows.
    pub(super) fn of_tiles(&self, tile_rows: usize, is_quantised: bool) -> &ExpertProducts {
        let products = match is_quantised {
            true => &self.quantised[..],
            false => &self.float,
        };
        let found = products.iter().find(|it| it.tile_rows == tile_rows);
        found.expect("tiles of rows that there are kernels for")
    }
}
