//! Rows of activations times one panel of bf16 weights, in tiles for the kernels.

use super::super::Simd;
use super::super::packed_matrix::Bf16Panels;
use super::super::panel_order::PANEL;
use super::portable;
use super::tile::{GemmKernel, GemmTile, LINE, PAIR_LINES};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Rows of activations, from some row of a matrix to its end.
pub(super) struct PanelInputs<'a> {
    pub bf16: &'a [u16],
    /// The same as f32, if the kernel needs them.
    pub f32: Option<&'a [f32]>,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Computes the sums of rows of `x` with one panel.
pub(super) fn multiply_panel(
    simd: Simd,
    x: PanelInputs<'_>,
    weights: &Bf16Panels,
    panel: usize,
    sums: &mut [f32],
) {
    let num_pairs = weights.num_pairs;
    let x_stride = x.stride;
    let num_rows = sums.len() / PANEL;
    let kernel = kernel(simd);
    let num_tiles = num_rows.div_ceil(kernel.max_rows);
    // The next chunk of weights is prefetched while the current one is multiplied, so that neither
    // waits for the other. The last chunk of a panel is followed by the next panel, which is usually
    // this thread's next task. A single row reads without pauses; its kernel prefetches if that helps.
    let lines_per_pair = if num_rows > 1 {
        PAIR_LINES.div_ceil(num_tiles)
    } else {
        0
    };
    for first_pair in (0..num_pairs).step_by(kernel.chunk_pairs) {
        let chunk = weights.weights(panel, first_pair);
        let chunk_pairs = kernel.chunk_pairs.min(num_pairs - first_pair);
        for tile in 0..num_tiles {
            let lines_before = tile * lines_per_pair * chunk_pairs;
            let all_asked_for = lines_before >= PAIR_LINES * chunk_pairs;
            // Tiles of equal size: 10 rows are 5 + 5, because a tile of few rows is limited by latency.
            let first_row = tile * num_rows / num_tiles;
            let rows = (tile + 1) * num_rows / num_tiles - first_row;
            let first = first_row * x_stride + 2 * first_pair;
            let len = (rows - 1) * x_stride + 2 * chunk_pairs;
            let tile = GemmTile {
                x: x.bf16[first..][..len].as_ptr(),
                x_f32: x
                    .f32
                    .map_or(std::ptr::null(), |x| x[first..][..len].as_ptr()),
                x_stride,
                rows,
                weights: chunk,
                num_pairs: chunk_pairs,
                ahead: chunk.wrapping_add(chunk_pairs * PANEL * 2 + lines_before * LINE),
                ahead_lines: if all_asked_for { 0 } else { lines_per_pair },
                sums: sums[first_row * PANEL..].as_mut_ptr(),
                first: first_pair == 0,
            };
            // SAFETY: `x` has `rows` rows, `x_stride` elements apart, in f32 for AVX2; the panel has `num_pairs`
            // more pairs, and `sums` has 48 elements per row.
            unsafe { (kernel.tile)(&tile) };
        }
    }
}

fn kernel(simd: Simd) -> &'static GemmKernel {
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => &avx512::KERNEL,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::KERNEL,
        _ => &portable::KERNEL,
    }
}
