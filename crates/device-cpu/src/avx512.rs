//! Registers of bf16 pairs, which are opaque types in the standard library.

use std::arch::x86_64::*;

/// Loads 16 pairs of bf16 at any alignment.
///
/// # Safety
///
/// 64 bytes are readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load(pairs: *const u16) -> __m512bh {
    // SAFETY: 64 bytes; both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_loadu_si512(pairs.cast())) }
}

/// Broadcasts one pair of bf16.
///
/// # Safety
///
/// 4 bytes are readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn broadcast(pair: *const u16) -> __m512bh {
    // SAFETY: 4 bytes; both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(pair.cast::<i32>().read_unaligned())) }
}

/// Stores 32 bf16 at any alignment.
///
/// # Safety
///
/// 64 bytes are writable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(place: *mut u16, values: __m512bh) {
    // SAFETY: 64 bytes; both types are 32 lanes of 16 bits.
    unsafe {
        _mm512_storeu_si512(
            place.cast(),
            std::mem::transmute::<__m512bh, __m512i>(values),
        )
    };
}

/// 32 lanes of 1.0 in bf16.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn ones() -> __m512bh {
    // SAFETY: both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(0x3f80_3f80)) }
}
