//! Limits of a machine, which kernels and engines are compared with.
//!
//! ```text
//! memory.rs       the CPU's memory read bandwidth
//! arithmetic.rs   the CPU's peak arithmetic throughput, from registers
//! timing.rs       timing on a machine shared with other processes
//! gpu/            limits of a GPU by calculation
//! ```
//!
//! The limits of the CPU are measured, on the number of threads that compute. Other processes can only make a sample
//! slower, so each time is the tenth percentile of many samples.

mod arithmetic;
pub mod gpu;
mod memory;
mod timing;

use inflight_device_cpu::Simd;

pub use timing::{Clock, seconds_of};

/// The limits of a machine, for a number of threads and an instruction set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// Memory read bandwidth, in bytes/s.
    pub read_bytes_per_s: f64,
    /// f32 multiplications and additions per second.
    pub f32_flops: f64,
    /// bf16 multiplications and additions per second, accumulated in f32. Without a bf16 dot product this is
    /// the f32 figure: widening bf16 is a shift, done alongside the arithmetic.
    pub bf16_flops: f64,
    /// 8-bit integer multiplications and additions per second, accumulated in 32 bits.
    pub int8_ops: f64,
}

impl MachineLimits {
    /// Measures once; takes about two seconds.
    ///
    /// # Panics
    /// If 1 GiB of memory or a thread cannot be allocated, or the machine lacks the instructions.
    pub fn measure(num_threads: usize, simd: Simd) -> Self {
        Self::measure_times(1, num_threads, simd)[0]
    }

    /// Measures `num` times in sequence.
    ///
    /// # Panics
    /// As [`MachineLimits::measure`].
    pub fn measure_times(num: usize, num_threads: usize, simd: Simd) -> Vec<Self> {
        assert!(simd.is_supported(), "this machine has no {simd}");
        let memory = memory::Memory::new();
        let measure = |_| Self::measure_with(&memory, num_threads, simd);
        (0..num).map(measure).collect()
    }

    fn measure_with(memory: &memory::Memory, num_threads: usize, simd: Simd) -> Self {
        let peak = |kernel: arithmetic::Kernel| {
            let seconds = timing::seconds_on(num_threads, |_| kernel.run());
            num_threads as f64 * kernel.num_operations() / seconds
        };
        let f32_flops = peak(arithmetic::f32_products(simd));
        Self {
            read_bytes_per_s: memory.read_bytes_per_s(num_threads, simd),
            f32_flops,
            bf16_flops: arithmetic::bf16_products(simd).map_or(f32_flops, peak),
            int8_ops: arithmetic::int8_products(simd).map_or(f32_flops, peak),
        }
    }

    /// Lower bound of the time to read `bytes` and compute `operations` at `operations_per_s`, in seconds.
    /// Reading and computing overlap.
    pub fn seconds(&self, bytes: f64, operations: f64, operations_per_s: f64) -> f64 {
        (bytes / self.read_bytes_per_s).max(operations / operations_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_reading_and_computing_is_the_bound() {
        let limits = MachineLimits {
            read_bytes_per_s: 10.0,
            f32_flops: 100.0,
            bf16_flops: 200.0,
            int8_ops: 400.0,
        };
        assert_eq!(limits.seconds(20.0, 100.0, limits.f32_flops), 2.0);
        assert_eq!(limits.seconds(20.0, 1000.0, limits.bf16_flops), 5.0);
    }

    #[test]
    fn wider_instruction_sets_have_higher_limits() {
        let of: Vec<_> = Simd::ALL
            .into_iter()
            .filter(|simd| simd.is_supported())
            .map(|simd| MachineLimits::measure(1, simd))
            .collect();
        for limits in &of {
            for figure in [
                limits.read_bytes_per_s,
                limits.f32_flops,
                limits.bf16_flops,
                limits.int8_ops,
            ] {
                assert!(figure.is_finite() && figure > 1e8, "{limits:?}");
            }
        }
        let (best, portable) = (of[0], of[of.len() - 1]);
        assert!(
            of.len() == 1 || best.bf16_flops > portable.bf16_flops,
            "{of:?}"
        );
    }
}
