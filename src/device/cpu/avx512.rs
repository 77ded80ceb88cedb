//! Registers of bf16 pairs, which the standard library has as opaque types.

use std::arch::x86_64::*;

/// 16 pairs of bf16 from memory of any alignment.
///
/// # Safety
///
/// There are 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load(pairs: *const u16) -> __m512bh {
    // SAFETY: 64 bytes; both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_loadu_si512(pairs.cast())) }
}

/// One pair of bf16 in all 16 places.
///
/// # Safety
///
/// There are 4 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn broadcast(pair: *const u16) -> __m512bh {
    // SAFETY: 4 bytes; both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(pair.cast::<i32>().read_unaligned())) }
}

/// Writes 32 bf16 to memory of any alignment.
///
/// # Safety
///
/// There are 64 bytes.
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

/// 32 times the bf16 one.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn ones() -> __m512bh {
    // SAFETY: both types are 32 lanes of 16 bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(0x3f80_3f80)) }
}
