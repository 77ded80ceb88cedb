//! Rows of activations times one panel of quantised weights, in tiles for the kernels.

use super::super::Simd;
use super::super::panel_order::PANEL;
use super::BLOCK;
use super::activations::RoundedActivations;
use super::panel_format::PanelBits;
use super::panels::Panels;
use super::portable;
use super::tile::{LINE, MAX_TILE_ROWS, QuantisedKernel, QuantisedTile, ROW_LINES};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Bytes of codes per chunk: they stay in the L1 cache while all rows use them.
const CHUNK_BYTES: usize = 24 * 1024;
fn kernel(simd: Simd, bits: PanelBits) -> QuantisedKernel {
    match (simd, bits) {
        #[cfg(target_arch = "x86_64")]
        (Simd::AmxBf16 | Simd::Avx512Bf16, PanelBits::Eight) => avx512::tile::<false>,
        #[cfg(target_arch = "x86_64")]
        (Simd::AmxBf16 | Simd::Avx512Bf16, PanelBits::Four) => avx512::tile::<true>,
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, PanelBits::Eight) => avx2::tile::<false>,
        #[cfg(target_arch = "x86_64")]
        (Simd::Avx2, PanelBits::Four) => avx2::tile::<true>,
        (_, PanelBits::Eight) => portable::tile_of_eight_bits,
        (_, PanelBits::Four) => portable::tile_of_four_bits,
    }
}

/// Computes the sums of the rows of `x` from `first_row` on with one panel, `[rows, 48]`.
pub(crate) fn multiply_panel(
    simd: Simd,
    x: &RoundedActivations,
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
    let max_blocks = CHUNK_BYTES / bits.code_bytes(BLOCK);
    // As in the GEMM over bf16: the next chunk is prefetched while the current one is multiplied, and a
    // single row reads without pauses.
    let lines_per_row = if num_rows > 1 {
        ROW_LINES.div_ceil(num_tiles)
    } else {
        0
    };
    for first_block in (0..weights.num_blocks).step_by(max_blocks) {
        let num_blocks = max_blocks.min(weights.num_blocks - first_block);
        let chunk_lines = bits.code_bytes(num_blocks * BLOCK) / LINE;
        let codes = weights.codes(panel, first_block);
        for tile in 0..num_tiles {
            let lines_before = tile * lines_per_row * chunk_lines / ROW_LINES;
            // Tiles of equal size: 10 rows are 5 + 5.
            let first = tile * num_rows / num_tiles;
            let rows = (tile + 1) * num_rows / num_tiles - first;
            let tile = QuantisedTile {
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
            // SAFETY: `x` has that many more rows, the panel that many more blocks and all its groups, and
            // `sums` has 48 elements per row. A `Cpu` is created only with a supported instruction set.
            unsafe { kernel(&tile) };
        }
    }
}
