//! The block of sums that all AVX2 kernels are made of.

use std::arch::x86_64::*;

/// Adds to `ROWS` rows of `8 * REGISTERS` sums the products of pairs of bf16:
///
/// ```text
/// sums[row][column] += x[row][pair].0 * w[pair][column].0, then x[row][pair].1 * w[pair][column].1
/// ```
///
/// A bf16 is widened to f32 by shifting it up, or by clearing what is below it. Each sum is one chain
/// over the pairs in order, however many rows and registers there are. `meanwhile` is called with each
/// pair, to ask for memory.
///
/// # Safety
///
/// `x` has `ROWS` rows of `num_pairs` pairs, `x_stride` elements apart; `w` has `num_pairs` rows of
/// `8 * REGISTERS` pairs, `w_stride` elements apart. The machine has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn add_products<const ROWS: usize, const REGISTERS: usize>(
    sums: &mut [[__m256; REGISTERS]; ROWS],
    (x, x_stride): (*const u16, usize),
    (w, w_stride): (*const u16, usize),
    num_pairs: usize,
    meanwhile: impl Fn(usize),
) {
    for pair in 0..num_pairs {
        meanwhile(pair);
        let w: [_; REGISTERS] = std::array::from_fn(|i| {
            // SAFETY: the row of weights is that long.
            widen(unsafe { _mm256_loadu_si256(w.add(pair * w_stride + i * 16).cast()) })
        });
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the row of activations is that long.
            let x = unsafe {
                x.add(row * x_stride + 2 * pair)
                    .cast::<i32>()
                    .read_unaligned()
            };
            let (x0, x1) = widen(_mm256_set1_epi32(x));
            for (sum, (w0, w1)) in sums.iter_mut().zip(w) {
                *sum = _mm256_fmadd_ps(x1, w1, _mm256_fmadd_ps(x0, w0, *sum));
            }
        }
    }
}

/// The first and the second of each pair of bf16.
#[inline]
#[target_feature(enable = "avx2")]
fn widen(pairs: __m256i) -> (__m256, __m256) {
    let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    (
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
        _mm256_castsi256_ps(second),
    )
}

/// Rows of sums from memory, `stride` elements apart.
///
/// # Safety
///
/// They are there.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load<const ROWS: usize, const REGISTERS: usize>(
    place: *const f32,
    stride: usize,
) -> [[__m256; REGISTERS]; ROWS] {
    std::array::from_fn(|row| {
        std::array::from_fn(|i| {
            // SAFETY: the caller's promise.
            unsafe { _mm256_loadu_ps(place.add(row * stride + i * 8)) }
        })
    })
}

/// Rows of sums to memory, `stride` elements apart.
///
/// # Safety
///
/// There is room.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn store<const ROWS: usize, const REGISTERS: usize>(
    sums: &[[__m256; REGISTERS]; ROWS],
    place: *mut f32,
    stride: usize,
) {
    for (row, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_ps(place.add(row * stride + i * 8), *sum) };
        }
    }
}
