//! The operands of a kernel for quantised weights.

use super::super::panel_order::PANEL;
use super::activations::Block;

/// The most rows of a tile.
pub(super) const MAX_TILE_ROWS: usize = 8;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Cache lines that one load per output covers, for all 48 outputs.
pub(super) const ROW_LINES: usize = PANEL * 4 / LINE;

/// The work of one call: some rows of activations times some blocks of a panel.
pub(super) struct QuantisedTile {
    /// 1 to [`MAX_TILE_ROWS`].
    pub rows: usize,
    /// Blocks of 32 inputs. The pointers below point to block `first_block`.
    pub num_blocks: usize,
    pub first_block: usize,
    /// Codes of the activations, `[rows, stride, 32]`.
    pub x: *const i8,
    /// The same as pairs, if the kernel needs them.
    pub x_pairs: *const i16,
    /// Scales and sums of the activations, `[rows, stride]`.
    pub x_blocks: *const Block,
    /// Blocks from one row of activations to the next.
    pub stride: usize,
    /// Codes of the weights.
    pub codes: *const u8,
    /// The scales, and offsets if there are any, of all groups of the panel.
    pub scales: *const u16,
    /// Blocks per group.
    pub blocks_per_group: usize,
    pub has_offsets: bool,
    /// Added to the signed codes, gave the unsigned ones.
    pub code_bias: i32,
    /// Weights that will be needed soon, to be prefetched into the L2 cache.
    pub ahead: *const u8,
    /// Cache lines to prefetch with each row of the panel.
    pub ahead_lines: usize,
    /// The sums, `[rows, 48]`.
    pub sums: *mut f32,
    /// Whether the sums start at zero instead of at the contents of `sums`.
    pub first: bool,
}

impl QuantisedTile {
    /// The group that a block of the tile is in.
    #[inline(always)]
    pub fn group(&self, block: usize) -> usize {
        (self.first_block + block) / self.blocks_per_group
    }
}

/// Adds the products of a tile to its sums. Unsafe: the pointers and sizes of the tile must be valid, and
/// the machine must support the kernel's instruction set.
pub(super) type QuantisedKernel = unsafe fn(&QuantisedTile);
