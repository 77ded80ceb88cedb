//! The operands of a GEMM kernel.

use super::super::panel_order::PANEL;

/// Elements of a cache line.
pub(super) const LINE: usize = 32;
/// Cache lines of one pair of inputs in a panel.
pub(super) const PAIR_LINES: usize = PANEL * 2 / LINE;

/// The work of one call: some rows of `x` times one chunk of a panel.
pub(super) struct GemmTile {
    /// The chunk's activations, `[rows, 2 * num_pairs]`.
    pub x: *const u16,
    /// The same as f32, if the kernel needs them.
    pub x_f32: *const f32,
    /// Elements from one row of activations to the next.
    pub x_stride: usize,
    /// 1 to `max_rows` of the kernel.
    pub rows: usize,
    /// The chunk's weights, `[num_pairs, 48, 2]`.
    pub weights: *const u16,
    pub num_pairs: usize,
    /// Weights that will be needed soon, to be prefetched into the L2 cache.
    pub ahead: *const u16,
    /// Cache lines to prefetch during each pair.
    pub ahead_lines: usize,
    /// The sums, `[rows, 48]`.
    pub sums: *mut f32,
    /// Whether the sums start at zero instead of at the contents of `sums`.
    pub first: bool,
}

/// A kernel and the sizes that it works best with.
pub(super) struct GemmKernel {
    /// Adds the products of a tile to its sums. Unsafe: the pointers and sizes of the tile must be valid, and
    /// the machine must support the kernel's instruction set.
    pub tile: unsafe fn(&GemmTile),
    /// The most rows of a tile.
    pub max_rows: usize,
    /// Rows that the kernel computes together: tiles but the last one have a multiple of them.
    pub row_unit: usize,
    /// Pairs of inputs per chunk.
    pub chunk_pairs: usize,
}
