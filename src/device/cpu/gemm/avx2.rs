//! The tile with AVX2: four rows of 16 outputs at a time, which leave registers for the factors. A single
//! row takes the whole panel at once, since it waits for the weights to come from memory.

use std::arch::x86_64::*;

use super::super::avx2::{add_products, load, store};
use super::super::pack::PANEL;
use super::{LINE, Tile};

/// See [`super::Kernel`].
///
/// # Safety
///
/// The tile's pointers and sizes are right; the machine has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile(tile: &Tile) {
    let mut row = 0;
    while row < tile.rows {
        // SAFETY: the caller's promises; there are that many rows from this one on.
        unsafe {
            match tile.rows - row {
                1 => rows::<1, 6>(tile, row),
                2 => rows::<2, 2>(tile, row),
                3 => rows::<3, 2>(tile, row),
                _ => rows::<4, 2>(tile, row),
            }
        }
        row += 4;
    }
}

/// Some rows of the tile, `8 * REGISTERS` outputs at a time.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const ROWS: usize, const REGISTERS: usize>(tile: &Tile, first: usize) {
    const { assert!(PANEL.is_multiple_of(8 * REGISTERS)) };
    for column in (0..PANEL).step_by(8 * REGISTERS) {
        // Passes over the weights so far: each asks for a line of those ahead with each pair.
        let pass = first / 4 * (PANEL / (8 * REGISTERS)) + column / (8 * REGISTERS);
        let ahead = tile.ahead.wrapping_add(pass * tile.num_pairs * LINE);
        let meanwhile = |pair: usize| {
            if pass < tile.ahead_lines {
                // It never faults, so that what is ahead may also be beyond the matrix.
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(pair * LINE).cast());
            }
        };
        // SAFETY: the tile has `ROWS` rows of sums and of activations from `first` on, and `num_pairs`
        // pairs of 48 outputs.
        unsafe {
            let place = tile.sums.add(first * PANEL + column);
            let mut sums = [[_mm256_setzero_ps(); REGISTERS]; ROWS];
            if !tile.first {
                sums = load(place, PANEL);
            }
            let x = (tile.x.add(first * tile.x_stride), tile.x_stride);
            let w = (tile.weights.add(2 * column), 2 * PANEL);
            add_products(&mut sums, x, w, tile.num_pairs, meanwhile);
            store(&sums, place, PANEL);
        }
    }
}
