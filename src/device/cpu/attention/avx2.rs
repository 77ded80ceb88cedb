//! The tile with AVX2: four rows of 16 scores, then of 16 elements of values, at a time.

use std::arch::x86_64::*;

use super::super::avx2::{add_products, load, store};
use super::super::kv_cache::GROUP;
use super::softmax::softmax;
use super::{MAX_ROWS, TILE, Tile};

/// Registers of 16 sums.
const REGISTERS: usize = GROUP / 8;

/// See [`super::Kernel`].
///
/// # Safety
///
/// The tile's pointers and sizes are right; the machine has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile(tile: &Tile) {
    const { assert!(MAX_ROWS >= 4) };
    let mut row = 0;
    while row < tile.rows {
        // SAFETY: the caller's promises; there are that many rows from this one on.
        unsafe {
            match tile.rows - row {
                1 => some_rows::<1>(tile, row),
                2 => some_rows::<2>(tile, row),
                3 => some_rows::<3>(tile, row),
                _ => some_rows::<4>(tile, row),
            }
        }
        row += 4;
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn some_rows<const ROWS: usize>(tile: &Tile, first: usize) {
    let (head_dim, padded_dim) = (tile.layout.head_dim, tile.layout.padded_dim());
    // The first rows ask for the next tile. A prefetch never faults, wherever it points.
    let ask = |line: *const u16, offset: usize| {
        if first == 0 {
            _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(offset).cast());
        }
    };
    // SAFETY: the tile has `ROWS` rows from `first` on, of everything, and groups of the layout's
    // lengths: keys are `head_dim / 2` pairs of 16 positions, values 8 pairs of `padded_dim` elements.
    unsafe {
        let q = (tile.q.add(first * head_dim), head_dim);
        for (group, &keys) in tile.keys[..tile.num_groups].iter().enumerate() {
            let mut scores = [[_mm256_setzero_ps(); REGISTERS]; ROWS];
            let ahead = tile.keys_ahead[group];
            let ask = |pair| ask(ahead, pair * 2 * GROUP);
            add_products(&mut scores, q, (keys, 2 * GROUP), head_dim / 2, ask);
            store(&scores, tile.scores.add(group * GROUP), TILE);
        }
        let rescale: [f32; ROWS] = std::array::from_fn(|i| {
            softmax(
                &mut *tile.scores.add(i * TILE).cast(),
                *tile.seen.add(first + i),
                tile.scale,
                &*tile.scales,
                &mut *tile.state.add(first + i),
                &mut *tile.probabilities.add(i * TILE).cast(),
            )
        });
        for d in (0..padded_dim).step_by(GROUP) {
            let place = tile.acc.add(first * padded_dim + d);
            let mut sums: [[_; REGISTERS]; ROWS] = load(place, padded_dim);
            for (sums, rescale) in sums.iter_mut().zip(rescale) {
                for sum in sums {
                    *sum = _mm256_mul_ps(*sum, _mm256_set1_ps(rescale));
                }
            }
            for (group, values) in tile.values[..tile.num_groups].iter().enumerate() {
                let p = (tile.probabilities.add(group * GROUP).cast_const(), TILE);
                let values = (values.add(2 * d), 2 * padded_dim);
                let ahead = tile.values_ahead[group];
                let ask = |pair| ask(ahead, 2 * (pair * padded_dim + d));
                add_products(&mut sums, p, values, GROUP / 2, ask);
            }
            store(&sums, place, padded_dim);
        }
    }
}
