//! Norms of rows.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use half::bf16;

use super::Cuda;
use super::kernels::{Kernels, VECTOR, launch, row_grid, shared_row_grid};
use super::rows::Rows;
use super::uploads::Vector;
use inflight_device::{HeadPlaces, HeadShape, LayerNorm, Norm, QkNorm, RankHost, RowNormOps};

/// Threads of a block that computes a whole row.
const WIDE_ROW_THREADS: u32 = 1024;
/// The same for rows of which a thread keeps all its elements in registers with fewer threads.
const ROW_THREADS: u32 = 256;
const MAX_ROW_THREADS_WIDTH: usize = 4096;
/// Heads that a block computes at once, each in a warp.
const WARPS_OF_HEADS: usize = ROW_THREADS as usize / 32;

/// Norms of rows over the heads of all ranks, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct CudaRowNorms;

/// The kernels of norms whose result is stored, or added.
struct NormKernels {
    identity: fn(&Kernels) -> &CudaFunction,
    rms: fn(&Kernels) -> &CudaFunction,
    layer: fn(&Kernels) -> &CudaFunction,
}

const STORED: NormKernels = NormKernels {
    identity: |kernels| &kernels.round_rows,
    rms: |kernels| &kernels.rms_norm,
    layer: |kernels| &kernels.layer_norm,
};

const ADDED: NormKernels = NormKernels {
    identity: |kernels| &kernels.add_rows,
    rms: |kernels| &kernels.add_rms_normed,
    layer: |kernels| &kernels.add_layer_normed,
};

impl Cuda {
    /// `out = norm(x)`.
    pub(super) fn norm_rows(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        self.launch_norm(&STORED, num_rows, x, norm, out.address());
    }

    /// `hidden += norm(x)`.
    pub(super) fn add_normed_rows(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        hidden: &mut Rows<f32>,
    ) {
        self.launch_norm(&ADDED, num_rows, x, norm, hidden.address());
    }

    /// `hidden = norm(hidden); out = hidden`.
    pub(super) fn layer_norm_rows_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: LayerNorm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        let LayerNorm { weight, bias, eps } = norm;
        launch!(
            self,
            self.kernels.replace_layer_normed,
            "replace_layer_normed",
            row_grid(self.padded(num_rows), row_threads(hidden.width())),
            hidden.address(),
            weight.memory.address(),
            bias.map_or(0, |bias| bias.memory.address()),
            eps,
            hidden.width() as i32
        );
        self.norm_rows(num_rows, hidden, Norm::Identity, out);
    }

    /// `hidden += x; out = norm(hidden)`.
    pub(super) fn add_norm_rows(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        let Norm::Rms { weight, eps } = norm else {
            self.add_normed_rows(num_rows, x, Norm::Identity, hidden);
            return self.norm_rows(num_rows, hidden, norm, out);
        };
        let width = x.width();
        launch!(
            self,
            self.kernels.add_rms_norm,
            "add_rms_norm",
            row_grid(self.padded(num_rows), row_threads(width)),
            out.address(),
            hidden.address(),
            x.address(),
            weight.memory.address(),
            eps,
            width as i32
        );
    }

    fn launch_norm(
        &mut self,
        kernels: &NormKernels,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        out: u64,
    ) {
        let (num_rows, width) = (self.padded(num_rows), x.width());
        match norm {
            Norm::Identity => launch!(
                self,
                (kernels.identity)(&self.kernels),
                "rows without a norm",
                shared_row_grid(num_rows, width.div_ceil(VECTOR)),
                out,
                x.address(),
                width as i32
            ),
            Norm::Rms { weight, eps } => launch!(
                self,
                (kernels.rms)(&self.kernels),
                "an RMS norm",
                row_grid(num_rows, row_threads(width)),
                out,
                x.address(),
                weight.memory.address(),
                eps,
                width as i32
            ),
            Norm::Layer { weight, bias, eps } => launch!(
                self,
                (kernels.layer)(&self.kernels),
                "a layer norm",
                row_grid(num_rows, row_threads(width)),
                out,
                x.address(),
                weight.memory.address(),
                bias.map_or(0, |bias| bias.memory.address()),
                eps,
                width as i32
            ),
        }
    }

    /// Normalises queries and keys in place, each over all of their heads.
    pub(super) fn normalise_rows(
        &mut self,
        num_rows: usize,
        heads: HeadShape,
        qkv: &mut Rows<f32>,
        (q_weight, k_weight, eps): (u64, u64, f32),
    ) {
        let (q_width, k_width) = (heads.q_len(), heads.num_kv_heads * heads.head_dim);
        let config = LaunchConfig {
            grid_dim: (num_rows as u32, 2, 1),
            ..row_grid(num_rows, row_threads(q_width))
        };
        launch!(
            self,
            self.kernels.qk_norm,
            "qk_norm",
            config,
            qkv.address(),
            q_weight,
            k_weight,
            eps,
            q_width as i32,
            k_width as i32
        );
    }

    /// Normalises the heads of queries and keys in place, each by a layer norm with weights of its own.
    pub(super) fn normalise_heads(
        &mut self,
        num_rows: usize,
        heads: HeadShape,
        qkv: &mut Rows<f32>,
        (q_weight, k_weight, eps): (u64, u64, f32),
    ) {
        let num_heads = heads.num_q_heads + heads.num_kv_heads;
        launch!(
            self,
            self.kernels.qk_layer_norm,
            "qk_layer_norm",
            head_grid(num_rows, num_heads),
            qkv.address(),
            q_weight,
            k_weight,
            eps,
            heads.num_q_heads as i32,
            heads.num_kv_heads as i32,
            heads.head_dim as i32
        );
    }
}

impl RowNormOps<Cuda> for CudaRowNorms {
    /// A sum has one term that is not -0 for each head, so that the order in which NCCL adds does not matter.
    fn norm(
        self,
        cuda: &mut Cuda,
        _: &mut RankHost,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, Vector>,
        places: &HeadPlaces,
        qkv: &mut Rows<f32>,
        squares: &mut Rows<f32>,
    ) {
        let num_rows = cuda.padded(num_rows);
        let [num_q, num_k] = places.num_heads;
        let (own_q, own_k) = (heads.num_q_heads, heads.num_kv_heads);
        let first_q = places.places.first().copied().flatten().unwrap_or(0);
        launch!(
            cuda,
            cuda.kernels.qk_squares,
            "qk_squares",
            head_grid(num_rows, num_q + num_k),
            squares.address(),
            qkv.address(),
            num_q as i32,
            num_k as i32,
            first_q as i32,
            own_q as i32,
            own_k as i32,
            heads.head_dim as i32
        );
        cuda.sum_over_ranks(num_rows, squares);
        launch!(
            cuda,
            cuda.kernels.qk_norm_of_squares,
            "qk_norm_of_squares",
            LaunchConfig {
                grid_dim: (num_rows as u32, 2, 1),
                ..row_grid(num_rows, ROW_THREADS)
            },
            qkv.address(),
            squares.address(),
            norm.q.memory.address(),
            norm.k.memory.address(),
            norm.eps,
            num_q as i32,
            num_k as i32,
            own_q as i32,
            own_k as i32,
            heads.head_dim as i32
        );
    }
}

/// Threads for a norm over rows of this width: the same for all rows of a width, since it decides the order of sums.
fn row_threads(width: usize) -> u32 {
    match width <= MAX_ROW_THREADS_WIDTH {
        true => ROW_THREADS,
        false => WIDE_ROW_THREADS,
    }
}

/// Blocks that have a warp for each head of each row.
fn head_grid(num_rows: usize, num_heads: usize) -> LaunchConfig {
    let num_blocks = num_heads.div_ceil(WARPS_OF_HEADS);
    LaunchConfig {
        grid_dim: (num_rows as u32, num_blocks as u32, 1),
        ..row_grid(num_rows, ROW_THREADS)
    }
}
