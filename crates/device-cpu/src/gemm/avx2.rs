//! The kernel for AVX2: five rows of 16 outputs at a time, which keeps both multipliers busy and leaves registers
//! for the factors. A single row takes the whole panel at once, because it is limited by memory.
//!
//! Activations are f32, so that one of them is broadcast by the instruction that multiplies it. Weights are widened
//! once for all rows, by a shift or a mask.

use std::arch::x86_64::*;

use super::super::avx2::{load, store};
use super::super::panel_order::PANEL;
use super::tile::{GemmKernel, GemmTile, LINE, PAIR_LINES};

/// How far ahead the weights of a single row are prefetched, in elements: 1 KiB. The hardware prefetcher stops at
/// each page, and was 5 to 20 % slower (Zen 3).
const AHEAD: usize = 512;

/// See [`GemmKernel`]. A chunk of weights is 24 KiB, which stay in the L1 cache.
pub(super) const KERNEL: GemmKernel = GemmKernel {
    tile,
    max_rows: 5,
    row_unit: 1,
    chunk_pairs: 128,
};

/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile(tile: &GemmTile) {
    const { assert!(KERNEL.max_rows == 5) };
    // SAFETY: the caller's promises.
    unsafe {
        match tile.rows {
            1 => rows::<1, 6>(tile),
            2 => rows::<2, 2>(tile),
            3 => rows::<3, 2>(tile),
            4 => rows::<4, 2>(tile),
            _ => rows::<5, 2>(tile),
        }
    }
}

/// The rows of the tile, `8 * REGISTERS` outputs at a time.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const ROWS: usize, const REGISTERS: usize>(tile: &GemmTile) {
    const { assert!(PANEL.is_multiple_of(8 * REGISTERS)) };
    for pass in 0..PANEL / (8 * REGISTERS) {
        let column = pass * 8 * REGISTERS;
        // Each pass prefetches one line per pair.
        let ahead = tile.ahead.wrapping_add(pass * tile.num_pairs * LINE);
        // SAFETY: the tile has `ROWS` rows of sums and of activations, and `num_pairs` pairs of 48
        // outputs.
        unsafe {
            let place = tile.sums.add(column);
            let mut sums = [[_mm256_setzero_ps(); REGISTERS]; ROWS];
            if !tile.first {
                sums = load(place, PANEL);
            }
            for pair in 0..tile.num_pairs {
                if pass < tile.ahead_lines {
                    // A prefetch never faults, so it may point beyond the matrix.
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(pair * LINE).cast());
                }
                let weights = tile.weights.add((pair * PANEL + column) * 2);
                if ROWS == 1 {
                    for line in 0..PAIR_LINES {
                        let soon = weights.wrapping_add(AHEAD + line * LINE);
                        _mm_prefetch::<_MM_HINT_T0>(soon.cast());
                    }
                }
                let x = tile.x_f32.add(2 * pair);
                let mut first = [_mm256_setzero_ps(); REGISTERS];
                for (i, first) in first.iter_mut().enumerate() {
                    let pairs = _mm256_loadu_si256(weights.add(16 * i).cast());
                    *first = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                }
                multiply(&mut sums, x, tile.x_stride, &first);
                let mut second = [_mm256_setzero_ps(); REGISTERS];
                for (i, second) in second.iter_mut().enumerate() {
                    let pairs = _mm256_loadu_ps(weights.add(16 * i).cast());
                    let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                    *second = _mm256_and_ps(pairs, _mm256_castsi256_ps(upper));
                }
                multiply(&mut sums, x.add(1), tile.x_stride, &second);
            }
            store(&sums, place, PANEL);
        }
    }
}

/// Adds the products of one input: `sums[row][i] += x[row] * weights[i]`.
///
/// # Safety
///
/// `x` has `ROWS` elements, `stride` apart.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply<const ROWS: usize, const REGISTERS: usize>(
    sums: &mut [[__m256; REGISTERS]; ROWS],
    x: *const f32,
    stride: usize,
    weights: &[__m256; REGISTERS],
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = _mm256_set1_ps(unsafe { *x.add(row * stride) });
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = _mm256_fmadd_ps(x, *weights, *sum);
        }
    }
}
