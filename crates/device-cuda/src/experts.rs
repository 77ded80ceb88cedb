//! Mixtures of experts: the launches.
//!
//! ```text
//! route_...         the experts and weights of each row                   route.cu
//! sort_experts      rows sorted by expert, tiles of these                 sort_experts.cu
//! expert_gate_up    inner activations of each row and expert              expert_gemm.cu, quantised_expert_gemm.cu
//! expert_down       what each expert gives for each of its rows
//! ...               the shared expert, as a block without experts
//! add_experts       the weighted sum of each row                          add_experts.cu
//! ```
//!
//! The GPU chooses the inputs of the products, so that a step's launches depend on its number of rows alone, and may be
//! a graph. Rows that only fill one up have no experts.

use cudarc::driver::{LaunchConfig, PushKernelArg};
use half::bf16;

use super::Cuda;
use super::expert_rows::{ExpertKernels, ExpertProducts, ExpertRows, RouteRule, num_tiles};
use super::kernels::VECTOR;
use super::kernels::{launch, row_grid, shared_row_grid};
use super::matrix::{Matrix, Weights};
use super::quantised::{CodeKind, QuantisedWeights};
use super::rows::Rows;
use super::uploads::Vector;
use inflight_device::{
    Activation, Expert, Experts, Gating, InnerActivation, Linear, Output, PackedWeights,
    PlainActivation, RouterScores, Routing,
};

/// `WITHOUT_GATES` of the kernels.
const WITHOUT_GATES: i32 = 8;
/// Threads of a block that chooses the experts of a row.
const ROUTE_THREADS: u32 = 32;
/// Threads of a block that sorts rows, at most.
const MAX_SORT_THREADS: usize = 1024;
/// Threads of a block of products.
const PRODUCT_THREADS: u32 = 128;

impl Cuda {
    /// Chooses the experts of each row.
    pub(super) fn route_rows(
        &mut self,
        num_rows: usize,
        logits: &Rows<f32>,
        routing: &Routing,
        correction: Option<&Vector>,
        rows: &mut ExpertRows,
    ) {
        assert_eq!(rows.shape.routing, *routing, "rows of this model");
        let num_rows = self.padded(num_rows);
        rows.num_routed = num_rows;
        if num_rows == 0 {
            return;
        }
        let num_present = self.num_rows_of_step;
        let [num_experts, num_chosen, num_logits] = [
            routing.num_experts,
            routing.num_chosen,
            routing.num_logits(),
        ]
        .map(|num| num as i32);
        let config = LaunchConfig {
            shared_mem_bytes: rows.kernels.route_shared_bytes,
            ..row_grid(num_rows, ROUTE_THREADS)
        };
        match rows.kernels.rule {
            RouteRule::Softmax { is_normalised } => launch!(
                self,
                rows.kernels.route,
                "route_softmax",
                config,
                rows.experts.address(),
                rows.weights.address(),
                rows.shared_weights.address(),
                logits.address(),
                num_present,
                num_experts,
                num_chosen,
                num_logits,
                i32::from(is_normalised)
            ),
            RouteRule::SparseMixer { jitter } => launch!(
                self,
                rows.kernels.route,
                "route_sparse_mixer",
                config,
                rows.experts.address(),
                rows.weights.address(),
                rows.shared_weights.address(),
                logits.address(),
                num_present,
                num_experts,
                num_chosen,
                num_logits,
                jitter
            ),
            RouteRule::Grouped(rule) => launch!(
                self,
                rows.kernels.route,
                "route_grouped",
                config,
                rows.experts.address(),
                rows.weights.address(),
                rows.shared_weights.address(),
                logits.address(),
                correction.map_or(0, |correction| correction.memory.address()),
                num_present,
                num_experts,
                num_chosen,
                num_logits,
                match rule.scores {
                    RouterScores::Softmax => 0,
                    RouterScores::Sigmoid => 1,
                    RouterScores::SigmoidOfLogit => 2,
                },
                rule.num_groups as i32,
                rule.num_chosen_groups as i32,
                rule.num_group_scores as i32,
                i32::from(rule.is_normalised),
                rule.scale
            ),
        }
    }

    /// `out` = what the experts of each row give, or that added to `out`.
    pub(super) fn mix_rows(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        experts: &Experts<Self>,
        rows: &ExpertRows,
        output: Output,
        out: &Rows<f32>,
    ) {
        let num_rows = self.padded(num_rows);
        assert!(num_rows <= rows.num_routed, "{num_rows} rows have experts");
        // Chunks are not rounded up again.
        let padded_rows = self.padded_rows.take();
        for first in (0..num_rows).step_by(rows.chunk.max_rows) {
            let chunk = MixedRows {
                first,
                num_rows: rows.chunk.max_rows.min(num_rows - first),
                x: x.row_address(first),
                rows,
            };
            self.sort_and_multiply(&chunk, experts);
            let shared_sums = match &experts.shared {
                Some(shared) => self.multiply_shared(&chunk, shared, experts.shared_gating),
                None => 0,
            };
            self.add_experts(&chunk, shared_sums, output, out.row_address(first));
        }
        self.padded_rows = padded_rows;
    }

    /// What the chosen experts give for each row of a chunk.
    fn sort_and_multiply(&mut self, chunk: &MixedRows<'_>, experts: &Experts<Self>) {
        let ExpertRows {
            shape,
            kernels,
            chunk: memory,
            ..
        } = chunk.rows;
        let [Expert { gate_up, down }] = &experts.chosen[..] else {
            panic!("the experts of a layer are packed as one");
        };
        let num_experts = shape.routing.num_experts;
        let (hidden, inner) = (shape.hidden_size, shape.expert_size);
        let rows_of_inner = if experts.gating.has_gate() { 2 } else { 1 };
        assert_eq!(gate_up.matrix.n(), rows_of_inner * num_experts * inner);
        assert_eq!(down.matrix.n(), num_experts * hidden);
        let codes = [&gate_up.matrix, &down.matrix].map(codes);
        let is_quantised = codes.iter().any(Option::is_some);
        let tile_rows = ExpertKernels::tile_rows(chunk.num_rows, &shape.routing, is_quantised);
        let of_tiles = |is_quantised| kernels.products.of_tiles(tile_rows, is_quantised);
        let [gate_up_products, down_products] = codes.map(|codes| of_tiles(codes.is_some()));
        let num_places = chunk.num_places();
        let num_tiles = num_tiles(num_places, tile_rows, num_experts);
        let sort_threads = num_places.next_multiple_of(32).min(MAX_SORT_THREADS);
        launch!(
            self,
            kernels.sort,
            "sort_experts",
            row_grid(num_experts, sort_threads as u32),
            memory.sorted.address(),
            memory.places.address(),
            memory.tiles.address(),
            chunk.experts(),
            num_places as i32,
            shape.routing.num_chosen as i32,
            tile_rows as i32,
            num_tiles as i32
        );
        let (gating, alpha, limit) = gating_arguments(experts.gating);
        // Without gates, a warp has other outputs of up in their place.
        let block_outputs = gate_up_products.gate_up_outputs * 2 / rows_of_inner;
        let gate_up_grid = product_grid(inner, block_outputs, num_tiles);
        match codes[0] {
            None => launch!(
                self,
                gate_up_products.gate_up,
                "expert_gate_up",
                gate_up_grid,
                memory.inner.address(),
                chunk.x,
                memory.sorted.address(),
                memory.tiles.address(),
                gate_up.matrix.rows_address(),
                bias_address(gate_up),
                inner as i32,
                hidden as i32,
                gating,
                alpha,
                limit
            ),
            Some(weights) => {
                let addresses = weights.addresses(0, hidden);
                launch!(
                    self,
                    gate_up_products.gate_up,
                    "quantised_expert_gate_up",
                    gate_up_grid,
                    memory.inner.address(),
                    chunk.x,
                    memory.sorted.address(),
                    memory.tiles.address(),
                    number_of(weights.kind),
                    addresses.codes,
                    addresses.scales,
                    addresses.offsets,
                    bias_address(gate_up),
                    inner as i32,
                    hidden as i32,
                    weights.group_size(hidden) as i32,
                    gating,
                    alpha,
                    limit
                );
            }
        }
        self.multiply_tiles(&TileProduct {
            kernels: down_products,
            linear: down,
            n: hidden,
            k: inner,
            x: memory.inner.address(),
            tiles: memory.tiles.address(),
            num_tiles,
            sums: memory.sums.address(),
        });
    }

    /// Products of the rows of tiles, each with the matrix that its tile names.
    pub(super) fn multiply_tiles(&mut self, product: &TileProduct<'_>) {
        let &TileProduct {
            kernels,
            linear,
            n,
            k,
            x,
            tiles,
            num_tiles,
            sums,
        } = product;
        let grid = product_grid(n, kernels.down_outputs, num_tiles);
        match codes(&linear.matrix) {
            None => launch!(
                self,
                kernels.down,
                "expert_down",
                grid,
                sums,
                x,
                tiles,
                linear.matrix.rows_address(),
                bias_address(linear),
                n as i32,
                k as i32
            ),
            Some(weights) => {
                let addresses = weights.addresses(0, k);
                launch!(
                    self,
                    kernels.down,
                    "quantised_expert_down",
                    grid,
                    sums,
                    x,
                    tiles,
                    number_of(weights.kind),
                    addresses.codes,
                    addresses.scales,
                    addresses.offsets,
                    bias_address(linear),
                    n as i32,
                    k as i32,
                    weights.group_size(k) as i32
                );
            }
        }
    }

    /// What the shared expert gives for each row of a chunk: the address.
    fn multiply_shared(
        &mut self,
        chunk: &MixedRows<'_>,
        shared: &Expert<Self>,
        gating: Gating,
    ) -> u64 {
        let activation = match gating {
            Gating::Product(activation) => InnerActivation::Gated(activation),
            Gating::Plain(activation) => InnerActivation::Plain(PlainActivation::Of(activation)),
            Gating::Scaled(..) | Gating::Clamped { .. } | Gating::Bounded(..) => {
                panic!("no family has a shared expert with such gates")
            }
        };
        let Some((inner, sums)) = &chunk.rows.chunk.shared else {
            panic!("memory for a shared expert");
        };
        let Expert { gate_up, down } = shared;
        let scratch = self.scratch.address();
        let num_rows = chunk.num_rows;
        self.multiply(num_rows, chunk.x, &gate_up.matrix, Output::Store, scratch);
        self.activate(num_rows, gate_up, activation, inner.address());
        self.multiply(
            num_rows,
            inner.address(),
            &down.matrix,
            Output::Store,
            sums.address(),
        );
        self.add_bias(num_rows, down, sums.address());
        sums.address()
    }

    /// Adds up what the experts of each row of a chunk have given.
    fn add_experts(&mut self, chunk: &MixedRows<'_>, shared_sums: u64, output: Output, out: u64) {
        let rows = chunk.rows;
        let routing = &rows.shape.routing;
        let width = rows.shape.hidden_size;
        launch!(
            self,
            rows.kernels.add,
            "add_experts",
            shared_row_grid(chunk.num_rows, width.div_ceil(VECTOR)),
            out,
            rows.chunk.sums.address(),
            rows.chunk.places.address(),
            rows.weights.address() + chunk.pair_offset(),
            chunk.experts(),
            shared_sums,
            rows.shared_weights.address() + 4 * chunk.first as u64,
            routing.num_experts as i32,
            routing.num_chosen as i32,
            width as i32,
            i32::from(output == Output::Add)
        );
    }
}

/// A chunk of rows, and their inputs.
struct MixedRows<'a> {
    first: usize,
    num_rows: usize,
    x: u64,
    rows: &'a ExpertRows,
}

impl MixedRows<'_> {
    /// Rows and ranks.
    fn num_places(&self) -> usize {
        self.num_rows * self.rows.shape.routing.num_chosen
    }

    /// Bytes in front of the first row's experts, and weights.
    fn pair_offset(&self) -> u64 {
        (4 * self.first * self.rows.shape.routing.num_chosen) as u64
    }

    fn experts(&self) -> u64 {
        self.rows.experts.address() + self.pair_offset()
    }
}

/// Products of rows in tiles with matrices `[n, k]`, of which each tile has one.
pub(super) struct TileProduct<'a> {
    /// For tiles of as many rows, and for the kind of weights.
    pub(super) kernels: &'a ExpertProducts,
    /// All matrices, one after the other.
    pub(super) linear: &'a Linear<Cuda>,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Rows of `k` bf16, in the order of the tiles.
    pub(super) x: u64,
    /// As kernels/sort_experts.cu describes them.
    pub(super) tiles: u64,
    pub(super) num_tiles: usize,
    /// Rows of `n` f32, in the same order.
    pub(super) sums: u64,
}

/// The grid of products of tiles.
fn product_grid(num_outputs: usize, block_outputs: usize, num_tiles: usize) -> LaunchConfig {
    let num_blocks = num_outputs.div_ceil(block_outputs);
    LaunchConfig {
        grid_dim: (num_blocks as u32, num_tiles as u32, 1),
        block_dim: (PRODUCT_THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// The address of a bias; 0 without one.
fn bias_address(linear: &Linear<Cuda>) -> u64 {
    linear.bias.as_ref().map_or(0, |it| it.memory.address())
}

/// The codes of experts, if they are quantised.
pub(super) fn codes(matrix: &Matrix) -> Option<&QuantisedWeights> {
    match &matrix.weights {
        Weights::Bf16(_) => None,
        Weights::Quantised(weights) => Some(weights),
        Weights::Fp8(_) => unreachable!("experts are not packed for FP8 activations"),
    }
}

/// The kind of codes, as `kernels/quantised_expert_gemm.cu` numbers them.
fn number_of(kind: CodeKind) -> i32 {
    match kind {
        CodeKind::Int4 => 0,
        CodeKind::Int8 => 1,
        CodeKind::Fp8 => 2,
        CodeKind::E2m1 => 3,
    }
}

/// A gating as `kernels/activations.cuh` knows it: its number, alpha and limit.
fn gating_arguments(gating: Gating) -> (i32, f32, f32) {
    match gating {
        Gating::Product(activation) => (number_of_activation(activation), 0.0, 0.0),
        Gating::Clamped { alpha, limit } => (5, alpha, limit),
        Gating::Plain(activation) => (WITHOUT_GATES + number_of_activation(activation), 0.0, 0.0),
        Gating::Scaled(..) => panic!("no family has experts with scaled gates"),
        Gating::Bounded(..) => panic!("bounded gates are computed on the CPU"),
    }
}

fn number_of_activation(activation: Activation) -> i32 {
    match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::Relu => 3,
        Activation::SquaredRelu => 4,
    }
}
