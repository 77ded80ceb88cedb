//! Rows of activations times one panel of bf16 weights, in tiles for the kernels.

use std::ops::Range;

use super::super::Simd;
#[cfg(target_arch = "x86_64")]
use super::super::amx::{TILE_ROWS, Tiles};
use super::super::packed_matrix::Bf16Panels;
use super::super::panel_order::PANEL;
use super::portable;
use super::tasks::MAX_ROWS;
use super::tile::{GemmKernel, GemmTile, LINE, PAIR_LINES};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};

/// Rows of activations, from some row of a matrix to its end.
pub(super) struct PanelInputs<'a> {
    pub bf16: &'a [u16],
    /// The same as f32, if the kernel needs them.
    pub f32: Option<&'a [f32]>,
    /// Row stride in elements.
    pub stride: usize,
}

/// Rows of a block are a multiple of this, but in the last one.
pub(super) const BLOCK_UNIT: usize = 16;

/// A panel that is multiplied with some rows.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub panel: usize,
    /// Whether the next panel is prefetched. Once is enough.
    pub reads_ahead: bool,
}

/// The kernel of a thread that multiplies some rows, ready for them.
pub(super) struct PanelKernel {
    kernel: &'static GemmKernel,
    /// The tile registers of the thread, if the kernel needs any.
    #[cfg(target_arch = "x86_64")]
    tiles: Option<Tiles>,
}

impl PanelKernel {
    /// For `num_rows` rows at a time, or, if they are more than a tile of AMX has, any more than that.
    pub fn new(simd: Simd, num_rows: usize) -> Self {
        Self {
            kernel: kernel(simd),
            #[cfg(target_arch = "x86_64")]
            tiles: (simd == Simd::AmxBf16).then(|| Tiles::of_rows(num_rows.min(TILE_ROWS))),
        }
    }

    fn is_ready(&self, num_rows: usize) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.kernel.row_unit == TILE_ROWS {
            let ready = self.tiles.as_ref().map(Tiles::num_rows);
            return ready == Some(num_rows.min(TILE_ROWS));
        }
        num_rows > 0
    }

    /// Computes the sums of rows of `x` with one panel.
    pub fn multiply(&self, x: PanelInputs<'_>, weights: &Bf16Panels, at: At, sums: &mut [f32]) {
        let num_rows = sums.len() / PANEL;
        assert!(self.is_ready(num_rows), "a kernel for {num_rows} rows");
        multiply_panel(self.kernel, x, weights, at, sums);
    }
}

/// The most rows whose sums are finished while they are in the L1 cache. Other kernels than that of AMX take much
/// longer for the sums, and read the weights once for all rows of a task.
pub(super) fn block_len(simd: Simd) -> usize {
    match simd {
        Simd::AmxBf16 => 4 * BLOCK_UNIT,
        _ => MAX_ROWS,
    }
}

/// A part of `num_rows` rows in `num_parts` parts of equal size, in units.
pub(super) fn part(num_rows: usize, unit: usize, part: usize, num_parts: usize) -> Range<usize> {
    let num_units = num_rows.div_ceil(unit);
    let bound = |part: usize| num_rows.min(part * num_units / num_parts * unit);
    bound(part)..bound(part + 1)
}

fn multiply_panel(
    kernel: &GemmKernel,
    x: PanelInputs<'_>,
    weights: &Bf16Panels,
    At { panel, reads_ahead }: At,
    sums: &mut [f32],
) {
    let num_pairs = weights.num_pairs;
    let x_stride = x.stride;
    let num_rows = sums.len() / PANEL;
    let num_tiles = num_rows.div_ceil(kernel.max_rows);
    // The next chunk of weights is prefetched while the current one is multiplied, so that neither
    // waits for the other. The last chunk of a panel is followed by the next panel, which is usually
    // this thread's next task. A single row reads without pauses; its kernel prefetches if that helps.
    let lines_per_pair = if num_rows > 1 && reads_ahead {
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
            let part = part(num_rows, kernel.row_unit, tile, num_tiles);
            let (first_row, rows) = (part.start, part.len());
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
        Simd::AmxBf16 => &amx::KERNEL,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => &avx512::KERNEL,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::KERNEL,
        _ => &portable::KERNEL,
    }
}
