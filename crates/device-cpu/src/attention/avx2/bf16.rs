//! Keys and values in bf16, widened to f32 by a shift or a mask.

use crate::kv_cache::GroupedLayout;
use std::arch::x86_64::*;

use super::super::super::kv_cache::GROUP;
use super::super::softmax::bound;
use super::super::{AttentionTile, TILE};
use super::softmax::softmax;
use super::{REGISTERS, ask, end_of_seen, for_blocks, for_some_rows};

/// Sums of rows, `16 * GROUPS` columns each.
type Sums<const ROWS: usize, const GROUPS: usize> = [[[__m256; REGISTERS]; GROUPS]; ROWS];

/// See [`super::super::AttentionKernel`]. Queries are f32. Only positions that are seen are read of the last group.
///
/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn tile(tile: &AttentionTile) {
    // SAFETY: the caller's promises; the rows are of the tile.
    unsafe { for_some_rows!(tile, some_rows) }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn some_rows<const ROWS: usize, const GROUPS: usize>(tile: &AttentionTile, first: usize) {
    let mut rescale = [_mm256_setzero_ps(); ROWS];
    // SAFETY: the tile has `ROWS` rows from `first` on, of everything, and the groups that they see.
    unsafe {
        let end = end_of_seen::<ROWS>(tile, first);
        let num_groups = end.div_ceil(GROUP);
        for_blocks!(num_groups, GROUPS, score::<ROWS>(tile, first));
        for (row, rescale) in rescale.iter_mut().enumerate() {
            let scores = tile.scores.add(row * TILE);
            let scores = std::slice::from_raw_parts_mut(scores, num_groups * GROUP);
            if let Some(cap) = tile.soft_cap {
                bound(scores, tile.scale, cap);
            }
            if let Some(bias) = tile.bias(first + row) {
                bias.add_to(scores);
            }
            *rescale = softmax::<true>(
                tile.scores.add(row * TILE),
                num_groups * REGISTERS,
                *tile.seen.add(first + row),
                tile.scale,
                &mut *tile.state.add(first + row),
            );
        }
        let width = tile.layout.padded_dim() / GROUP;
        for_blocks!(
            width,
            GROUPS,
            accumulate::<ROWS>(tile, first, end, &rescale)
        );
    }
}

/// Writes the scores of some rows with some groups.
///
/// # Safety
///
/// The tile has these rows, and the groups from `start` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn score<const ROWS: usize, const GROUPS: usize>(
    tile: &AttentionTile,
    first: usize,
    start: usize,
) {
    let head_dim = tile.layout.head_dim;
    let mut keys = [std::ptr::null(); GROUPS];
    keys.copy_from_slice(&tile.keys[start..][..GROUPS]);
    let mut ahead = [std::ptr::null(); GROUPS];
    ahead.copy_from_slice(&tile.keys_ahead[start..][..GROUPS]);
    let mut sums: Sums<ROWS, GROUPS> = [[[_mm256_setzero_ps(); REGISTERS]; GROUPS]; ROWS];
    for pair in 0..head_dim / 2 {
        if first == 0 {
            ask(&ahead, pair * 2 * GROUP);
        }
        // SAFETY: the rows have `head_dim` elements; a group of keys has a pair of each 16 positions for two.
        unsafe {
            let q = tile.wide_q.add(first * head_dim + 2 * pair);
            add_products(&mut sums, (q, head_dim), (&keys, pair * 2 * GROUP), 2);
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.as_flattened().iter().enumerate() {
            // SAFETY: there are `MAX_ROWS` rows of 64 scores.
            unsafe { _mm256_storeu_ps(tile.scores.add(row * TILE + start * GROUP + i * 8), *sum) };
        }
    }
}

/// Rescales some columns of the running sums of some rows, and adds the weighted values.
///
/// # Safety
///
/// The tile has these rows, `end` positions, and 16 times `GROUPS` columns from 16 times `start` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate<const ROWS: usize, const GROUPS: usize>(
    tile: &AttentionTile,
    first: usize,
    end: usize,
    rescale: &[__m256; ROWS],
    start: usize,
) {
    let padded_dim = tile.layout.padded_dim();
    let place = |row: usize, i: usize| {
        let place = (first + row) * padded_dim + start * GROUP + i * 8;
        tile.acc.wrapping_add(place)
    };
    let mut sums: Sums<ROWS, GROUPS> = [[[_mm256_setzero_ps(); REGISTERS]; GROUPS]; ROWS];
    for (row, (sums, rescale)) in sums.iter_mut().zip(rescale).enumerate() {
        for (i, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
            // SAFETY: the row has these columns.
            *sum = _mm256_mul_ps(unsafe { _mm256_loadu_ps(place(row, i)) }, *rescale);
        }
    }
    for group in 0..end.div_ceil(GROUP) {
        let mut values = [std::ptr::null(); GROUPS];
        let mut ahead = [std::ptr::null(); GROUPS];
        for i in 0..GROUPS {
            values[i] = tile.values[group].wrapping_add(2 * (start + i) * GROUP);
            ahead[i] = tile.values_ahead[group].wrapping_add(2 * (start + i) * GROUP);
        }
        let len = (end - group * GROUP).min(GROUP);
        for pair in 0..len / 2 {
            let offset = pair * 2 * padded_dim;
            if first == 0 {
                ask(&ahead, offset);
            }
            // SAFETY: there are `MAX_ROWS` rows of 64 probabilities; a group of values has two positions'
            // elements side by side.
            unsafe {
                let p = tile.scores.add(group * GROUP + 2 * pair);
                add_products(&mut sums, (p, TILE), (&values, offset), 2);
            }
        }
        if !len.is_multiple_of(2) {
            // The position after the last one may be NaN.
            // SAFETY: as above.
            unsafe {
                let p = tile.scores.add(group * GROUP + len - 1);
                let offset = len / 2 * 2 * padded_dim;
                add_products(&mut sums, (p, TILE), (&values, offset), 1);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.as_flattened().iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(place(row, i), *sum) };
        }
    }
}

/// Adds the products of a pair, or of its first element: `sums[row][column] += x[row][i] * w[column][i]`. The elements
/// of each sum are added in order, for any number of rows and columns.
///
/// # Safety
///
/// `x` has `ROWS` rows of `len` elements, `x_stride` apart; at `offset` from each of `w` are 16 pairs.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_products<const ROWS: usize, const GROUPS: usize>(
    sums: &mut Sums<ROWS, GROUPS>,
    (x, x_stride): (*const f32, usize),
    (w, offset): (&[*const u16; GROUPS], usize),
    len: usize,
) {
    for i in 0..len {
        // The second half is loaded again, because no registers are left to keep the pairs.
        let offset = if i == 0 { offset } else { opaque(offset) };
        for (group, w) in w.iter().enumerate() {
            // SAFETY: the caller's promises.
            unsafe {
                let w = widen(w.add(offset), i);
                for (row, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*x.add(row * x_stride + i));
                    for (sum, w) in sums[group].iter_mut().zip(w) {
                        *sum = _mm256_fmadd_ps(x, w, *sum);
                    }
                }
            }
        }
    }
}

/// The first or the second elements of 16 pairs of bf16.
///
/// # Safety
///
/// The pairs are there; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen(pairs: *const u16, which: usize) -> [__m256; REGISTERS] {
    let mut wide = [_mm256_setzero_ps(); REGISTERS];
    for (i, wide) in wide.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let pairs = unsafe { _mm256_loadu_si256(pairs.add(16 * i).cast()) };
        *wide = _mm256_castsi256_ps(match which {
            0 => _mm256_slli_epi32::<16>(pairs),
            _ => _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32)),
        });
    }
    wide
}

/// Hides `x` from the optimiser.
#[inline(always)]
fn opaque(x: usize) -> usize {
    let mut x = x;
    // SAFETY: the assembly is empty.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) x, options(nomem, nostack, preserves_flags)) };
    x
}
