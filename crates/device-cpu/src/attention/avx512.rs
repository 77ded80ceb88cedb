//! The kernel for AVX-512: scores of 16 positions per register, then 16 elements of values per register, both
//! with `vdpbf16ps`.

use crate::kv_cache::GroupedLayout;
use std::arch::x86_64::*;

use super::super::avx512::{broadcast, load, ones, store};
use super::super::kv_cache::GROUP;
use super::softmax::{EXP2, bound};
use super::{AttentionTile, MAX_ROWS, TILE, TILE_GROUPS};

/// See [`super::AttentionKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid, and the machine supports AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn tile(tile: &AttentionTile) {
    // Six rows times four registers are 24 independent sums.
    const { assert!(MAX_ROWS == 6) };
    let num_chunks = tile.rows.div_ceil(MAX_ROWS);
    for chunk in 0..num_chunks {
        let first = chunk * tile.rows / num_chunks;
        let rows = (chunk + 1) * tile.rows / num_chunks - first;
        // SAFETY: the caller's promises; the rows are of the tile.
        unsafe {
            match rows {
                1 => some_rows::<1>(tile, first),
                2 => some_rows::<2>(tile, first),
                3 => some_rows::<3>(tile, first),
                4 => some_rows::<4>(tile, first),
                5 => some_rows::<5>(tile, first),
                _ => some_rows::<6>(tile, first),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn some_rows<const ROWS: usize>(tile: &AttentionTile, first: usize) {
    // SAFETY: the tile has `ROWS` rows from `first` on, of everything.
    unsafe {
        score::<ROWS>(tile, first);
        if let Some(cap) = tile.soft_cap {
            let scores = std::slice::from_raw_parts_mut(tile.scores, ROWS * TILE);
            bound(scores, tile.scale, cap);
        }
        add_biases(tile, first, ROWS);
        let mut rescale = [_mm512_setzero_ps(); ROWS];
        for (i, rescale) in rescale.iter_mut().enumerate() {
            *rescale = softmax(tile, first + i, i);
        }
        let padded_dim = tile.layout.padded_dim();
        let mut d = 0;
        while d < padded_dim {
            match (padded_dim - d) / 16 {
                1 => accumulate::<ROWS, 1>(tile, first, d, &rescale),
                2 => accumulate::<ROWS, 2>(tile, first, d, &rescale),
                3 => accumulate::<ROWS, 3>(tile, first, d, &rescale),
                _ => accumulate::<ROWS, 4>(tile, first, d, &rescale),
            }
            d += 64;
        }
    }
}

/// Adds the linear biases, if there are any, to the scores of some rows.
///
/// # Safety
///
/// The tile has these rows, and scores of so many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn add_biases(tile: &AttentionTile, first: usize, rows: usize) {
    for row in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(bias) = tile.bias(first + row) {
                bias.add_to(&mut *tile.scores.add(row * TILE).cast::<[f32; TILE]>());
            }
        }
    }
}

/// Writes the scores of `ROWS` rows with four groups. If the tile has fewer, the last one is repeated, and its
/// positions are masked later.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn score<const ROWS: usize>(tile: &AttentionTile, first: usize) {
    let head_dim = tile.layout.head_dim;
    let mut keys = tile.keys;
    for group in tile.num_groups..TILE_GROUPS {
        keys[group] = keys[0];
    }
    let mut sums = [[_mm512_setzero_ps(); TILE_GROUPS]; ROWS];
    for pair in 0..head_dim / 2 {
        // SAFETY: a group of keys has `head_dim / 2` pairs of 16 positions.
        let keys = keys.map(|keys| unsafe { load(keys.add(pair * 2 * GROUP)) });
        if first == 0 {
            for ahead in tile.keys_ahead {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(pair * 2 * GROUP).cast());
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the tile has that row of `head_dim` queries.
            let q = unsafe { broadcast(tile.q.add((first + row) * head_dim + 2 * pair)) };
            for (sum, keys) in sums.iter_mut().zip(keys) {
                *sum = _mm512_dpbf16_ps(*sum, q, keys);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (group, sum) in sums.iter().enumerate() {
            // SAFETY: the tile has that row of 64 scores, and 64 scales of keys.
            unsafe {
                let scales = _mm512_loadu_ps((*tile.scales).keys.as_ptr().add(group * GROUP));
                let scores = tile.scores.add(row * TILE + group * GROUP);
                _mm512_storeu_ps(scores, _mm512_mul_ps(*sum, scales));
            }
        }
    }
}

/// The softmax of `super::softmax` for one row of scaled scores. Returns the factor of its earlier sums in all
/// lanes. The probabilities are summed by the same instruction that weights the values with them.
///
/// # Safety
///
/// The tile has that row, and scores and probabilities at that place.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn softmax(tile: &AttentionTile, row: usize, place: usize) -> __m512 {
    // SAFETY: the tile has this row of everything.
    let (scores, seen, state, probabilities) = unsafe {
        let scores = tile.scores.add(place * TILE);
        (
            std::array::from_fn::<_, TILE_GROUPS, _>(|i| _mm512_loadu_ps(scores.add(i * GROUP))),
            *tile.seen.add(row),
            &mut *tile.state.add(row),
            tile.probabilities.add(place * TILE),
        )
    };
    let seen: [__mmask16; TILE_GROUPS] =
        std::array::from_fn(|i| (seen >> (i * GROUP)) as __mmask16);

    let old_max = _mm512_set1_ps(state.max);
    let mut max = old_max;
    for (scores, seen) in scores.iter().zip(seen) {
        // If a score is NaN, the maximum stays, because it is the second operand.
        max = _mm512_mask_max_ps(max, seen, *scores, max);
    }
    let max = max_of_lanes(max);

    let scale = _mm512_set1_ps(tile.scale * std::f32::consts::LOG2_E);
    let rescale = exp2(!0, _mm512_mul_ps(_mm512_sub_ps(old_max, max), scale));
    // SAFETY: 16 sums.
    let mut sums = _mm512_mul_ps(unsafe { _mm512_loadu_ps(state.sums.as_ptr()) }, rescale);
    let p: [__m512; TILE_GROUPS] =
        std::array::from_fn(|i| exp2(seen[i], _mm512_mul_ps(_mm512_sub_ps(scores[i], max), scale)));
    for p in p.as_chunks::<2>().0 {
        sums = _mm512_dpbf16_ps(sums, _mm512_cvtne2ps_pbh(p[1], p[0]), ones());
    }
    // Scales of masked positions may be NaN.
    let p: [__m512; TILE_GROUPS] = std::array::from_fn(|i| {
        // SAFETY: 64 scales of values.
        let scales = unsafe { _mm512_loadu_ps((*tile.scales).values.as_ptr().add(i * GROUP)) };
        _mm512_maskz_mul_ps(seen[i], p[i], scales)
    });
    for (i, p) in p.as_chunks::<2>().0.iter().enumerate() {
        // SAFETY: 64 probabilities.
        unsafe {
            store(
                probabilities.add(i * 2 * GROUP),
                _mm512_cvtne2ps_pbh(p[1], p[0]),
            );
        }
    }
    state.max = _mm512_cvtss_f32(max);
    // SAFETY: 16 sums.
    unsafe { _mm512_storeu_ps(state.sums.as_mut_ptr(), sums) };
    rescale
}

/// `2^x` within 3 units in the last place for `x <= 0` in the lanes of `mask`, zero in the others. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(mask: __mmask16, x: __m512) -> __m512 {
    // Minus infinity minus its integer part is NaN, and results below the normal range take many times as long. The
    // second operand is kept if it is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    _mm512_maskz_scalef_ps(mask, p, n)
}

/// The largest lane, in all lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn max_of_lanes(x: __m512) -> __m512 {
    let x = _mm512_max_ps(x, _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x));
    let x = _mm512_max_ps(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
    let x = _mm512_max_ps(x, _mm512_permute_ps::<0b01_00_11_10>(x));
    _mm512_max_ps(x, _mm512_permute_ps::<0b10_11_00_01>(x))
}

/// Rescales 16 * `REGISTERS` columns of the running sums of `ROWS` rows, starting at `d`, and adds the weighted
/// values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn accumulate<const ROWS: usize, const REGISTERS: usize>(
    tile: &AttentionTile,
    first: usize,
    d: usize,
    rescale: &[__m512; ROWS],
) {
    let padded_dim = tile.layout.padded_dim();
    let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
    for (row, (sums, rescale)) in sums.iter_mut().zip(rescale).enumerate() {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the tile has that row of `padded_dim` sums, and `d` and what follows are below it.
            let before =
                unsafe { _mm512_loadu_ps(tile.acc.add((first + row) * padded_dim + d + i * 16)) };
            *sum = _mm512_mul_ps(before, *rescale);
        }
    }
    for group in 0..tile.num_groups {
        for pair in 0..GROUP / 2 {
            // SAFETY: a group of values has 8 pairs of `padded_dim` elements.
            let values = std::array::from_fn::<_, REGISTERS, _>(|i| unsafe {
                load(tile.values[group].add((pair * padded_dim + d + i * 16) * 2))
            });
            if first == 0 {
                let ahead = tile.values_ahead[group].wrapping_add((pair * padded_dim + d) * 2);
                for i in 0..REGISTERS {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(i * 32).cast());
                }
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let place = row * TILE + group * GROUP + 2 * pair;
                // SAFETY: the tile has that row of 64 probabilities.
                let p = unsafe { broadcast(tile.probabilities.add(place)) };
                for (sum, values) in sums.iter_mut().zip(values) {
                    *sum = _mm512_dpbf16_ps(*sum, p, values);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                _mm512_storeu_ps(tile.acc.add((first + row) * padded_dim + d + i * 16), *sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Simd;
    use super::super::softmax::check_exp2;
    use super::*;

    #[test]
    fn exp2_is_within_three_units_in_the_last_place() {
        if !Simd::Avx512Bf16.is_tested() {
            return;
        }
        let exp2_of = |x: f32| {
            // SAFETY: the machine has the instructions.
            unsafe { _mm512_cvtss_f32(exp2(1, _mm512_set1_ps(x))) }
        };
        check_exp2(-126.0, exp2_of);
        assert_eq!(exp2_of(f32::NEG_INFINITY), f32::MIN_POSITIVE);
    }
}
