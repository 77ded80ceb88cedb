//! Random operands with a seed that failures print, and CPU devices.

use std::num::NonZeroUsize;

use half::bf16;
use inflight_device_cpu::{Cpu, CpuOptions, PackedMatrix, Simd};
use inflight_numbers::{Dtype, RawMatrix, Stacking};

use crate::missing;

/// Random numbers (splitmix64), different in each run unless `KERNEL_SEED` is set.
pub struct Rng(u64);

impl Rng {
    /// Prints its seed, which the test harness shows if the test fails.
    pub fn new() -> Self {
        let seed = match std::env::var("KERNEL_SEED") {
            Ok(seed) => seed.parse().expect("KERNEL_SEED is a number"),
            Err(_) => std::time::UNIX_EPOCH
                .elapsed()
                .expect("a clock past 1970")
                .as_nanos() as u64,
        };
        println!("KERNEL_SEED={seed}");
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn f32s(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    pub fn bf16s(&mut self, len: usize) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.unit())).collect()
    }
}

/// A CPU device with a given instruction set and number of threads.
pub fn cpu(simd: Simd, num_threads: usize) -> Cpu {
    Cpu::new(&CpuOptions {
        num_threads: NonZeroUsize::new(num_threads),
        simd: Some(simd),
        ..CpuOptions::default()
    })
    .expect("a supported instruction set")
}

/// The instruction sets of this machine. Reports that the test skips the others.
pub fn simds() -> impl Iterator<Item = Simd> {
    Simd::ALL
        .into_iter()
        .filter(|simd| missing::present_or_reported(simd, simd.is_supported()))
}

pub fn bytes(values: &[bf16]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub fn pack(cpu: &mut Cpu, n: usize, k: usize, weights: &[bf16]) -> PackedMatrix {
    let weights = bytes(weights);
    let matrix = RawMatrix::new(Dtype::Bf16, n, k, &weights);
    cpu.pack(&[matrix], Stacking::Concatenated)
        .expect("memory")
        .expect("finite weights")
}

/// The bits of values, so that comparisons include NaN and the sign of zero.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Fails unless `got` is `exact` rounded to bf16: within half a unit in the last place, with 8 significant
/// bits, plus some f32 rounding before.
pub fn assert_near(got: bf16, exact: f64, what: &str) {
    assert_near_after(got, exact, 0.0, what);
}

/// The same for a value that may have had the error `before` in front of the rounding.
pub fn assert_near_after(got: bf16, exact: f64, before: f64, what: &str) {
    const ROUNDING: f64 = 1.01 / 256.0;
    let error = (got.to_f64() - exact).abs();
    assert!(
        error <= ROUNDING * exact.abs() + before * (1.0 + ROUNDING) + 1e-30,
        "{what}: {got} for {exact}"
    );
}
