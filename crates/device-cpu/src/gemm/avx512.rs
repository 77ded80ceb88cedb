//! The kernel for AVX-512: 16 outputs per register, a pair of inputs per instruction (`vdpbf16ps`).
//!
//! Nine rows of three registers are 27 independent sums: enough to hide the latency of the instruction, with
//! registers left for the weights and an activation. Up to nine rows share one pass over the weights.

use std::arch::x86_64::*;

use super::super::avx512::{broadcast, load};
use super::super::panel_order::PANEL;
use super::tile::{GemmKernel, GemmTile, LINE};

/// Registers per row of sums.
const REGISTERS: usize = PANEL / 16;

/// Pairs of inputs in a cache line of a row of activations.
const LINE_PAIRS: usize = LINE / 2;

/// See [`GemmKernel`]. A chunk of weights is 96 KiB: the L2 cache is fast enough, and the sums are loaded and stored
/// less often than with a chunk that fits the L1 cache.
pub(super) const KERNEL: GemmKernel = GemmKernel {
    tile,
    max_rows: 9,
    row_unit: 1,
    chunk_pairs: 512,
};

/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile(tile: &GemmTile) {
    const { assert!(KERNEL.max_rows == 9) };
    // SAFETY: the caller's promises, with as many rows as the tile has.
    unsafe {
        match tile.rows {
            1 => rows::<1>(tile),
            2 => rows::<2>(tile),
            3 => rows::<3>(tile),
            4 => rows::<4>(tile),
            5 => rows::<5>(tile),
            6 => rows::<6>(tile),
            7 => rows::<7>(tile),
            8 => rows::<8>(tile),
            _ => rows::<9>(tile),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn rows<const ROWS: usize>(tile: &GemmTile) {
    let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
    if !tile.first {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the tile has `ROWS` rows of 48 sums.
                *sum = unsafe { _mm512_loadu_ps(tile.sums.add(row * PANEL + i * 16)) };
            }
        }
    }
    let (mut weights, mut ahead) = (tile.weights, tile.ahead);
    for first_pair in (0..tile.num_pairs).step_by(LINE_PAIRS) {
        let num_pairs = LINE_PAIRS.min(tile.num_pairs - first_pair);
        let x = tile.x.wrapping_add(2 * first_pair);
        // So many rows are more than the hardware prefetcher follows. A prefetch never faults, so it may point beyond
        // the matrix.
        for row in 0..ROWS {
            _mm_prefetch::<_MM_HINT_T0>(x.wrapping_add(row * tile.x_stride + LINE).cast());
        }
        for pair in 0..num_pairs {
            for _ in 0..tile.ahead_lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(LINE);
            }
            // SAFETY: the tile has `num_pairs` pairs of 48 outputs.
            let pairs =
                unsafe { std::array::from_fn::<_, REGISTERS, _>(|i| load(weights.add(i * 32))) };
            weights = weights.wrapping_add(PANEL * 2);
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the tile has `ROWS` rows of `num_pairs` pairs of activations.
                let x = unsafe { broadcast(x.add(row * tile.x_stride + 2 * pair)) };
                for (sum, pairs) in sums.iter_mut().zip(pairs) {
                    *sum = _mm512_dpbf16_ps(*sum, x, pairs);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: the tile has `ROWS` rows of 48 sums.
            unsafe { _mm512_storeu_ps(tile.sums.add(row * PANEL + i * 16), *sum) };
        }
    }
}
