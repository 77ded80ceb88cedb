//! Online softmax of one row.

use std::arch::x86_64::*;

use super::super::TILE;
use super::super::softmax::{EXP2, RowState};

/// Adds the scores of a row to its running maximum and sums, replaces them by the probabilities relative to the new
/// maximum, and returns the factor of earlier sums in all lanes. Positions that are not in the mask `seen` have
/// probability zero; the mask is not empty, and is within the first `num_registers` times eight positions. If
/// `ROUNDED`, probabilities are rounded to bf16 before they are summed.
///
/// # Safety
///
/// There are 64 scores.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn softmax<const ROUNDED: bool>(
    scores: *mut f32,
    num_registers: usize,
    seen: u64,
    scale: f32,
    state: &mut RowState,
) -> __m256 {
    let sees_all = seen == u64::MAX;
    let mut maxima = _mm256_set1_ps(f32::NEG_INFINITY);
    for i in 0..num_registers {
        // SAFETY: the caller's promise.
        let mut score = unsafe { _mm256_loadu_ps(scores.add(i * 8)) };
        if !sees_all {
            let unseen = _mm256_set1_ps(f32::NEG_INFINITY);
            score = _mm256_blendv_ps(unseen, score, mask(seen, i));
        }
        // If a score is NaN, the maximum stays, because it is the second operand.
        maxima = _mm256_max_ps(score, maxima);
    }
    let max = max_of_lanes(maxima);
    let max = if max > state.max { max } else { state.max };

    let factor = _mm256_set1_ps(scale * std::f32::consts::LOG2_E);
    let to_lanes = |x: f32| _mm256_set1_ps(x);
    let rescale = exp2(_mm256_mul_ps(to_lanes(state.max - max), factor));
    let max_lanes = to_lanes(max);
    // SAFETY: 16 sums.
    let (mut low, mut high) = unsafe {
        (
            _mm256_mul_ps(_mm256_loadu_ps(state.sums.as_ptr()), rescale),
            _mm256_mul_ps(_mm256_loadu_ps(state.sums.as_ptr().add(8)), rescale),
        )
    };
    for i in (0..num_registers).step_by(2) {
        // SAFETY: the caller's promise; registers come in groups of two.
        unsafe {
            let place = scores.add(i * 8);
            let mut p0 = _mm256_sub_ps(_mm256_loadu_ps(place), max_lanes);
            let mut p1 = _mm256_sub_ps(_mm256_loadu_ps(place.add(8)), max_lanes);
            p0 = exp2(_mm256_mul_ps(p0, factor));
            p1 = exp2(_mm256_mul_ps(p1, factor));
            if ROUNDED {
                (p0, p1) = (rounded(p0), rounded(p1));
            }
            if !sees_all {
                p0 = _mm256_and_ps(p0, mask(seen, i));
                p1 = _mm256_and_ps(p1, mask(seen, i + 1));
            }
            _mm256_storeu_ps(place, p0);
            _mm256_storeu_ps(place.add(8), p1);
            low = _mm256_add_ps(low, p0);
            high = _mm256_add_ps(high, p1);
        }
    }
    state.max = max;
    // SAFETY: 16 sums.
    unsafe {
        _mm256_storeu_ps(state.sums.as_mut_ptr(), low);
        _mm256_storeu_ps(state.sums.as_mut_ptr().add(8), high);
    }
    rescale
}

/// A mask of the lanes whose bits are set in byte `index` of `seen`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn mask(seen: u64, index: usize) -> __m256 {
    const { assert!(TILE == 64) };
    let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let byte = _mm256_set1_epi32((seen >> (8 * index)) as i32);
    _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(byte, bits), bits))
}

#[inline]
#[target_feature(enable = "avx2")]
fn max_of_lanes(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
}

/// The nearest bf16, ties to even. NaNs stay NaNs, because they come from bf16.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(x: __m256) -> __m256 {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    _mm256_castsi256_ps(_mm256_and_si256(_mm256_add_epi32(bits, half), upper))
}

/// `2^x` within 3 units in the last place for `x <= 0`. NaN stays NaN. Saturates at -125.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2(x: __m256) -> __m256 {
    /// Adding it rounds to an integer, and leaves the biased exponent of its power of two in the low bits of the sum.
    const ROUNDER: f32 = super::super::super::math::ROUNDER + 127.0;
    // The second operand is kept if it is NaN.
    let x = _mm256_max_ps(_mm256_set1_ps(-125.0), x);
    let shifted = _mm256_add_ps(x, _mm256_set1_ps(ROUNDER));
    let r = _mm256_sub_ps(x, _mm256_sub_ps(shifted, _mm256_set1_ps(ROUNDER)));
    let mut p = _mm256_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
    }
    let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    _mm256_mul_ps(p, _mm256_castsi256_ps(power))
}

#[cfg(test)]
mod tests {
    use super::super::super::super::Simd;
    use super::super::super::softmax::check_exp2;
    use super::*;

    #[test]
    fn exp2_is_within_three_units_in_the_last_place() {
        if !Simd::Avx2.is_tested() {
            return;
        }
        let exp2_of = |x: f32| {
            // SAFETY: the machine has the instructions.
            unsafe { _mm256_cvtss_f32(exp2(_mm256_set1_ps(x))) }
        };
        check_exp2(-125.0, exp2_of);
        assert!(exp2_of(f32::NEG_INFINITY) < 3e-38);
    }
}
