//! Rows of activations times one panel of weights.

use super::super::Simd;
use super::super::pack::PANEL;
use super::BLOCK;
use super::activations::{Activations, Block};
use super::panels::Panels;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::device::CodeBits;

/// Rows of one tile, at most.
pub(super) const MAX_TILE_ROWS: usize = 8;
/// Bytes of codes of one chunk: they stay in the first-level cache while all rows pass over them.
const CHUNK_BYTES: usize = 24 * 1024;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Cache lines of what one load takes of each of the 48 outputs.
pub(super) const ROW_LINES: usize = PANEL * 4 / LINE;

/// One step: some rows of activations times some blocks of a panel.
pub(super) struct Tile {
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

impl Tile {
    /// The group that a block of the tile is in.
    #[inline(always)]
    pub fn group(&self, block: usize) -> usize {
        (self.first_block + block) / self.blocks_per_group
    }
}

/// Adds a tile's products to its sums. Unsafe: the pointers and sizes of the tile must be right, and
/// the machine must have the kernel's instruction set.
pub(super) type Kernel = unsafe fn(&Tile);

fn kernel(simd: Simd, bits: CodeBits) -> Kernel {
    match (simd, bits) {
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx512Bf16, CodeBits::Eight) => avx512::tile::<false>,
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx512Bf16, CodeBits::Four) => avx512::tile::<true>,
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, CodeBits::Eight) => avx2::tile::<false>,
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, CodeBits::Four) => avx2::tile::<true>,
        (_, CodeBits::Eight) => portable::tile_of_eight_bits,
        (_, CodeBits::Four) => portable::tile_of_four_bits,
    }
}

/// The sums of the rows of `x` from `first_row` on with one panel, `[rows, 48]`.
pub(in super::super) fn multiply_panel(
    simd: Simd,
    x: &Activations,
    first_row: usize,
    weights: &Panels,
    panel: usize,
    sums: &mut [f32],
) {
    let bits = weights.format.bits;
    let kernel = kernel(simd, bits);
    let num_rows = sums.len() / PANEL;
    assert_eq!(x.num_blocks(), weights.num_blocks, "activations for these");
    let num_tiles = num_rows.div_ceil(MAX_TILE_ROWS);
    let max_blocks = CHUNK_BYTES / Panels::code_bytes(bits, BLOCK);
    // As in the other GEMM: a chunk comes from memory while the one before is multiplied, and a single
    // row reads without a pause.
    let lines_per_row = if num_rows > 1 {
        ROW_LINES.div_ceil(num_tiles)
    } else {
        0
    };
    for first_block in (0..weights.num_blocks).step_by(max_blocks) {
        let num_blocks = max_blocks.min(weights.num_blocks - first_block);
        let chunk_lines = Panels::code_bytes(bits, num_blocks * BLOCK) / LINE;
        let codes = weights.codes(panel, first_block);
        for tile in 0..num_tiles {
            let lines_before = tile * lines_per_row * chunk_lines / ROW_LINES;
            // Even shares: 10 rows are 5 + 5.
            let first = tile * num_rows / num_tiles;
            let rows = (tile + 1) * num_rows / num_tiles - first;
            let tile = Tile {
                rows,
                num_blocks,
                first_block,
                x: x.codes(first_row + first, first_block),
                x_pairs: x.pairs(first_row + first, first_block),
                x_blocks: x.blocks(first_row + first, first_block),
                stride: x.num_blocks(),
                codes,
                scales: weights.scales(panel),
                blocks_per_group: weights.format.group_size / BLOCK,
                has_offsets: weights.format.has_offsets,
                code_bias: bits.bias(),
                ahead: codes.wrapping_add((chunk_lines + lines_before) * LINE),
                ahead_lines: if lines_before < chunk_lines {
                    lines_per_row
                } else {
                    0
                },
                sums: sums[first * PANEL..].as_mut_ptr(),
                first: first_block == 0,
            };
            // SAFETY: `x` has that many rows of blocks from here on, the panel that many blocks and all
            // its groups, and `sums` has 48 elements a row; a `Cpu` has its instruction set.
            unsafe { kernel(&tile) };
        }
    }
}
