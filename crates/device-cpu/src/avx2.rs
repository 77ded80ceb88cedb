//! Loading and storing blocks of sums in AVX2 registers.

use std::arch::x86_64::*;

/// Loads rows of sums that are `stride` elements apart.
///
/// # Safety
///
/// `place` points to that many rows.
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

/// Stores rows of sums `stride` elements apart.
///
/// # Safety
///
/// `place` points to that many rows.
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
