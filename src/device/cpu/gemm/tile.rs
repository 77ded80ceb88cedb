//! What a GEMM kernel is given.

use super::super::panel_order::PANEL;

/// Elements of a cache line.
pub(super) const LINE: usize = 32;
/// Cache lines of a pair of inputs of a panel.
pub(super) const PAIR_LINES: usize = PANEL * 2 / LINE;

/// One step of a tile: some rows of `x` times one chunk of a panel.
pub(super) struct GemmTile {
    /// The chunk's activations, `[rows, 2 * num_pairs]`.
    pub x: *const u16,
    /// The same as f32, where the kernel wants them.
    pub x_f32: *const f32,
    /// Elements from one row of activations to the next.
    pub x_stride: usize,
    /// At least one, and no more than the kernel takes.
    pub rows: usize,
    /// The chunk's weights, `[num_pairs, 48, 2]`.
    pub weights: *const u16,
    pub num_pairs: usize,
    /// Weights that will be wanted soon, to be brought into the second-level cache.
    pub ahead: *const u16,
    /// How many cache lines of them to ask for during each pair.
    pub ahead_lines: usize,
    /// The sums, `[rows, 48]`.
    pub sums: *mut f32,
    /// Whether the sums start at zero instead of at what is in `sums`.
    pub first: bool,
}

/// A kernel, and what suits it.
pub(super) struct GemmKernel {
    /// Adds a tile's products to its sums. Unsafe: the pointers and sizes of the tile must be right, and
    /// the machine must have the kernel's instruction set.
    pub tile: unsafe fn(&GemmTile),
    /// Rows of one tile, at most.
    pub max_rows: usize,
    /// Pairs of inputs of one chunk.
    pub chunk_pairs: usize,
}
