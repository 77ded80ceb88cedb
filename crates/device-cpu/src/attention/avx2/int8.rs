//! Stored 8-bit keys and values with 16-bit queries and probabilities: the products of two elements are summed exactly,
//! in 32 bits. The queries of a row have one scale, and so have its probabilities in a tile, after they were
//! multiplied by the scales of the values.

use crate::kv_cache::GroupedLayout;
use std::arch::x86_64::*;

use super::super::super::kv_cache::GROUP;
use super::super::softmax::bound;
use super::super::{AttentionTile, TILE};
use super::softmax::{mask, softmax};
use super::{REGISTERS, ask, end_of_seen, for_blocks, for_some_rows};

/// Sums of rows, `16 * GROUPS` columns each.
type Sums<const ROWS: usize, const GROUPS: usize> = [[[__m256i; REGISTERS]; GROUPS]; ROWS];

/// See [`super::super::AttentionKernel`]. Queries have 16 bits.
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
    let mut factors = [[_mm256_setzero_ps(); 2]; ROWS];
    // SAFETY: the tile has `ROWS` rows from `first` on, of everything, and the groups that they see.
    unsafe {
        let end = end_of_seen::<ROWS>(tile, first);
        let num_groups = end.div_ceil(GROUP);
        for_blocks!(num_groups, GROUPS, score::<ROWS>(tile, first));
        for (row, factors) in factors.iter_mut().enumerate() {
            let seen = *tile.seen.add(first + row);
            let q_scale = *tile.q_scales.add(first + row);
            let scale = tile.scale * q_scale;
            let scores = tile.scores.add(row * TILE);
            let scores = std::slice::from_raw_parts_mut(scores, num_groups * GROUP);
            if let Some(cap) = tile.soft_cap {
                bound(scores, scale, cap);
            }
            if let Some(bias) = tile.bias(first + row) {
                bias.at_scale(q_scale).add_to(scores);
            }
            let rescale = softmax::<false>(
                tile.scores.add(row * TILE),
                num_groups * REGISTERS,
                seen,
                scale,
                &mut *tile.state.add(first + row),
            );
            *factors = [rescale, weigh(tile, row, num_groups * REGISTERS, seen)];
        }
        let width = tile.layout.padded_dim() / GROUP;
        for_blocks!(
            width,
            GROUPS,
            accumulate::<ROWS>(tile, first, end, &factors)
        );
    }
}

/// Writes the scores of some rows with some groups, without the scales of the queries.
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
    let mut sums: Sums<ROWS, GROUPS> = [[[_mm256_setzero_si256(); REGISTERS]; GROUPS]; ROWS];
    for pair in 0..head_dim / 2 {
        if first == 0 && pair % 2 == 0 {
            ask(&ahead, pair * GROUP);
        }
        // SAFETY: the rows have `head_dim` elements; a group of keys has a pair of each 16 positions for two.
        unsafe {
            let q = tile.q.add(first * head_dim + 2 * pair);
            add_products(&mut sums, (q, head_dim), (&keys, pair * GROUP));
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.as_flattened().iter().enumerate() {
            let place = start * GROUP + i * 8;
            // SAFETY: there are `MAX_ROWS` rows of 64 scores, and the scales of these groups.
            unsafe {
                let scales = scales(tile, place / 8, 0);
                let score = _mm256_mul_ps(_mm256_cvtepi32_ps(*sum), scales);
                _mm256_storeu_ps(tile.scores.add(row * TILE + place), score);
            }
        }
    }
}

/// Writes the weights of the values of a row as 16-bit integers: its probabilities times the scales of the values.
/// Returns the scale of the weighted values in all lanes.
///
/// # Safety
///
/// There are `MAX_ROWS` rows of 64 probabilities and of 64 weights, and the groups that the registers are of.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn weigh(tile: &AttentionTile, row: usize, num_registers: usize, seen: u64) -> __m256 {
    /// The largest weight: 64 of them times 127 sum up within 32 bits.
    const LARGEST: f32 = i16::MAX as f32;
    let probabilities = tile.scores.wrapping_add(row * TILE);
    let weights = tile.probabilities.wrapping_add(row * TILE);
    let mut maxima = _mm256_setzero_si256();
    for i in 0..num_registers {
        // SAFETY: the caller's promises.
        unsafe {
            let place = probabilities.add(i * 8);
            let scales = scales(tile, i, GROUP);
            let mut weight = _mm256_mul_ps(_mm256_loadu_ps(place), scales);
            if seen != u64::MAX {
                // Scales of masked positions may be NaN.
                weight = _mm256_and_ps(weight, mask(seen, i));
            }
            // None is negative, so bits have the order of the values, with NaNs at the end.
            maxima = _mm256_max_epu32(maxima, _mm256_castps_si256(weight));
            _mm256_storeu_ps(place, weight);
        }
    }
    let max = max_of_lanes(maxima);
    // Numbers whose inverse would overflow become zero.
    let inverse = match max {
        0.0..1e-33 => 0.0,
        _ => LARGEST / max,
    };
    let inverse = _mm256_set1_ps(inverse);
    for i in (0..num_registers).step_by(2) {
        // SAFETY: as above.
        unsafe {
            let place = probabilities.add(i * 8);
            let low = _mm256_mul_ps(_mm256_loadu_ps(place), inverse);
            let high = _mm256_mul_ps(_mm256_loadu_ps(place.add(8)), inverse);
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
            // The instruction packs halves alternately: first, second, first, second.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            _mm256_storeu_si256(weights.add(i * 8).cast(), words);
        }
    }
    _mm256_set1_ps(max / LARGEST)
}

/// The scales of eight positions, of keys or of values.
///
/// # Safety
///
/// The tile has the group that they are of.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn scales(tile: &AttentionTile, register: usize, part: usize) -> __m256 {
    let place = part + register % REGISTERS * 8;
    // SAFETY: a group has 16 scales of keys and 16 of values.
    let bits =
        unsafe { _mm_loadu_si128(tile.stored_scales[register / REGISTERS].add(place).cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

/// The lane with the largest bits.
#[inline]
#[target_feature(enable = "avx2")]
fn max_of_lanes(x: __m256i) -> f32 {
    let x = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
    let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x));
    f32::from_bits(_mm_cvtsi128_si32(x) as u32)
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
    factors: &[[__m256; 2]; ROWS],
    start: usize,
) {
    let padded_dim = tile.layout.padded_dim();
    let mut sums: Sums<ROWS, GROUPS> = [[[_mm256_setzero_si256(); REGISTERS]; GROUPS]; ROWS];
    for group in 0..end.div_ceil(GROUP) {
        let mut values = [std::ptr::null(); GROUPS];
        let mut ahead = [std::ptr::null(); GROUPS];
        for i in 0..GROUPS {
            values[i] = tile.values[group].wrapping_add((start + i) * GROUP);
            ahead[i] = tile.values_ahead[group].wrapping_add((start + i) * GROUP);
        }
        // The weight of the position after the last one is zero.
        let len = (end - group * GROUP).min(GROUP);
        for pair in 0..len.div_ceil(2) {
            let offset = pair * padded_dim;
            if first == 0 {
                ask(&ahead, offset);
            }
            // SAFETY: there are `MAX_ROWS` rows of 64 weights; a group of values has two positions' elements
            // side by side.
            unsafe {
                let weights = tile.probabilities.add(group * GROUP + 2 * pair);
                add_products(&mut sums, (weights, TILE), (&values, offset));
            }
        }
    }
    for (row, (sums, [rescale, scale])) in sums.iter().zip(factors).enumerate() {
        for (i, sum) in sums.as_flattened().iter().enumerate() {
            // SAFETY: the row has these columns.
            unsafe {
                let place = tile
                    .acc
                    .add((first + row) * padded_dim + start * GROUP + i * 8);
                let before = _mm256_mul_ps(_mm256_loadu_ps(place), *rescale);
                let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(*sum), *scale, before);
                _mm256_storeu_ps(place, sum);
            }
        }
    }
}

/// Adds the products of a pair: `sums[row][column] += x[row][0] * w[column][0] + x[row][1] * w[column][1]`.
///
/// # Safety
///
/// `x` has `ROWS` pairs of 16 bits, `x_stride` apart; at `offset` from each of `w` are 16 pairs of 8 bits.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_products<const ROWS: usize, const GROUPS: usize>(
    sums: &mut Sums<ROWS, GROUPS>,
    (x, x_stride): (*const u16, usize),
    (w, offset): (&[*const u16; GROUPS], usize),
) {
    for (group, w) in w.iter().enumerate() {
        // SAFETY: the caller's promises.
        unsafe {
            let w = widen(w.add(offset));
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(x.add(row * x_stride).cast::<i32>().read_unaligned());
                for (sum, w) in sums[group].iter_mut().zip(w) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(x, w));
                }
            }
        }
    }
}

/// Widens 16 pairs from 8 to 16 bits.
///
/// # Safety
///
/// The pairs are there; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen(pairs: *const u16) -> [__m256i; REGISTERS] {
    let mut wide = [_mm256_setzero_si256(); REGISTERS];
    for (i, wide) in wide.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *wide = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(pairs.add(8 * i).cast()) });
    }
    wide
}
