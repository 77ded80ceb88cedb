//! Peak arithmetic throughput, from registers.

use std::hint::black_box;

use inflight_device_cpu::Simd;

/// A few milliseconds of arithmetic.
pub(crate) struct Kernel {
    run: fn(),
    operations: f64,
}

impl Kernel {
    pub(crate) fn run(&self) {
        (self.run)();
    }

    /// Number of multiplications and additions in one run.
    pub(crate) fn num_operations(&self) -> f64 {
        self.operations
    }
}

const ROUNDS: usize = 400_000;

/// A kernel that adds to `registers` accumulators of `products` lanes each, in every round.
const fn kernel(run: fn(), registers: usize, products: usize) -> Kernel {
    Kernel {
        run,
        operations: (ROUNDS * registers * products * 2) as f64,
    }
}

/// The f32 multiply-add kernel.
pub(crate) fn f32_products(simd: Simd) -> Kernel {
    match simd {
        // SAFETY: `MachineLimits::measure` checks that the CPU has these instructions.
        #[cfg(target_arch = "x86_64")]
        Simd::AmxBf16 | Simd::Avx512Bf16 => kernel(|| unsafe { x86::f32_avx512() }, 24, 16),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => kernel(|| unsafe { x86::f32_avx2() }, 12, 8),
        _ => kernel(f32_portable, 1, 48),
    }
}

/// The bf16 dot-product kernel; `None` without such instructions.
pub(crate) fn bf16_products(simd: Simd) -> Option<Kernel> {
    match simd {
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Simd::AmxBf16 => Some(kernel(|| unsafe { x86::bf16_amx() }, 6, 16 * 16 * 32)),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512Bf16 => Some(kernel(|| unsafe { x86::bf16_avx512() }, 24, 32)),
        _ => None,
    }
}

/// The 8-bit integer dot-product kernel; `None` without such instructions.
pub(crate) fn int8_products(simd: Simd) -> Option<Kernel> {
    match simd {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Simd::AmxBf16 | Simd::Avx512Bf16 => Some(kernel(|| unsafe { x86::int8_avx512() }, 24, 64)),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Simd::Avx2 => Some(kernel(|| unsafe { x86::int8_avx2() }, 8, 32)),
        _ => None,
    }
}

fn f32_portable() {
    let mut sums = [0.0_f32; 48];
    let a = black_box(0.5);
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = *sum * a + a;
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::ROUNDS;

    #[target_feature(enable = "avx512f")]
    pub(super) fn f32_avx512() {
        let mut sums = [_mm512_setzero_ps(); 24];
        let a = _mm512_set1_ps(black_box(0.5));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, a);
            }
        }
        black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16_avx512() {
        let mut sums = [_mm512_setzero_ps(); 24];
        let half = _mm512_set1_ps(black_box(0.5));
        let a = _mm512_cvtne2ps_pbh(half, half);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, a);
            }
        }
        black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    }

    /// Tiles of 16 rows of 64 bytes, all zero: six of sums.
    pub(super) unsafe fn bf16_amx() {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for tile in 0..8 {
            configuration.0[16 + 2 * tile] = 64;
            configuration.0[48 + tile] = 16;
        }
        // SAFETY: the caller's promise; the 64 bytes are a valid configuration.
        unsafe {
            asm!(
                "ldtilecfg [{configuration}]",
                "2:",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm7",
                "tdpbf16ps tmm4, tmm6, tmm7",
                "tdpbf16ps tmm5, tmm6, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                configuration = in(reg) &raw const configuration,
                rounds = inout(reg) ROUNDS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8_avx512() {
        let mut sums = [_mm512_setzero_si512(); 24];
        let a = _mm512_set1_epi8(black_box(1));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, a);
            }
        }
        black_box(sums.map(|sum| _mm512_reduce_add_epi32(sum)));
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn f32_avx2() {
        let mut sums = [_mm256_setzero_ps(); 12];
        let a = _mm256_set1_ps(black_box(0.5));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, a);
            }
        }
        black_box(sums.map(|sum| _mm256_cvtss_f32(sum)));
    }

    /// AVX2 has no 8-bit dot product: 8-bit products are summed in pairs, pairs in fours, fours into the
    /// sums.
    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2() {
        let mut sums = [_mm256_setzero_si256(); 8];
        let a = _mm256_set1_epi8(black_box(1));
        let ones = _mm256_set1_epi16(1);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                // The operand depends on the sums, so that the compiler cannot hoist the product out of the
                // loop.
                let pairs = _mm256_maddubs_epi16(a, *sum);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(sums.map(|sum| _mm256_extract_epi32::<0>(sum)));
    }
}
