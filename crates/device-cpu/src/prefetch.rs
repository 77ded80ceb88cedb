//! Reading ahead.

/// Prefetches a cache line. Any address is allowed.
#[inline(always)]
pub(super) fn prefetch(line: *const u16) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has this instruction, and it never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}
