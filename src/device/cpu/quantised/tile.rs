//! What a kernel for quantised weights is given.

use super::super::panel_order::PANEL;
use super::activations::Block;

/// Rows of one tile, at most.
pub(super) const MAX_TILE_ROWS: usize = 8;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Cache lines of what one load takes of each of the 48 outputs.
pub(super) const ROW_LINES: usize = PANEL * 4 / LINE;

/// One step: some rows of activations times some blocks of a panel.
pub(super) struct QuantisedTile {
    /// 1 to [`MAX_TILE_ROWS`].
    pub rows: usize,
    /// Blocks of 32 inputs, from `first_block` on, which the pointers below point to.
    pub num_blocks: usize,
    pub first_block: usize,
    /// Codes of the activations, `[rows, stride, 32]`.
    pub x: *const i8,
    /// The same as pairs, where the kernel wants them.
    pub x_pairs: *const i16,
    /// Scales and sums of the activations, `[rows, stride]`.
    pub x_blocks: *const Block,
    /// Blocks from one row of activations to the next.
    pub stride: usize,
    /// Codes of the weights.
    pub codes: *const u8,
    /// Scales, and offsets where there are any, of the panel's groups from the first one on.
    pub scales: *const u16,
    /// Blocks of a group.
    pub blocks_per_group: usize,
    pub has_offsets: bool,
    /// What was added to the codes so that they have no sign.
    pub code_bias: i32,
    /// Weights that will be wanted soon, to be brought into the second-level cache.
    pub ahead: *const u8,
    /// How many cache lines of them to ask for with each row of the panel.
    pub ahead_lines: usize,
    /// The sums, `[rows, 48]`.
    pub sums: *mut f32,
    /// Whether the sums start at zero instead of at what is in `sums`.
    pub first: bool,
}

impl QuantisedTile {
    /// The group that a block of the tile is in.
    #[inline(always)]
    pub fn group(&self, block: usize) -> usize {
        (self.first_block + block) / self.blocks_per_group
    }
}

/// Adds a tile's products to its sums. Unsafe: the pointers and sizes of the tile must be right, and
/// the machine must have the kernel's instruction set.
pub(super) type QuantisedKernel = unsafe fn(&QuantisedTile);
