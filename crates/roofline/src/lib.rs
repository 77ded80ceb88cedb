//! What a machine can do at most, measured: what the figures of kernels and engines stand beside.
//!
//! Both kinds of limit are taken on as many threads as compute: how fast memory can be read, and how fast
//! registers can be multiplied. What else runs on the machine only adds to a time, so a time is the tenth
//! percentile of many.

mod arithmetic;
mod memory;
mod timing;

use triton_inflight::device::cpu::Simd;

pub use timing::{Clock, seconds_of};

/// The limits of a machine, for a number of threads and an instruction set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes read from memory a second.
    pub read_bytes_per_s: f64,
    /// Multiplications and additions of f32 a second.
    pub f32_flops: f64,
    /// The same of bf16, summed as f32. Without a dot product of bf16 it is f32's: bf16 is widened, which
    /// is a shift beside the arithmetic.
    pub bf16_flops: f64,
    /// The same of 8-bit integers, summed as 32-bit ones.
    pub int8_ops: f64,
}

impl Limits {
    /// Measures for about two seconds.
    ///
    /// # Panics
    /// There is no memory for 1 GiB to read, or no thread, or the machine lacks the instructions.
    pub fn measure(num_threads: usize, simd: Simd) -> Self {
        Self::measure_times(1, num_threads, simd)[0]
    }

    /// Measures `num` times, one after the other.
    ///
    /// # Panics
    /// As [`Limits::measure`].
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

    /// The time that reading `bytes` and computing `operations` at `operations_per_s`, one beside the other,
    /// takes at least.
    pub fn seconds(&self, bytes: f64, operations: f64, operations_per_s: f64) -> f64 {
        (bytes / self.read_bytes_per_s).max(operations / operations_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_reading_and_computing_decides() {
        let limits = Limits {
            read_bytes_per_s: 10.0,
            f32_flops: 100.0,
            bf16_flops: 200.0,
            int8_ops: 400.0,
        };
        assert_eq!(limits.seconds(20.0, 100.0, limits.f32_flops), 2.0);
        assert_eq!(limits.seconds(20.0, 1000.0, limits.bf16_flops), 5.0);
    }

    #[test]
    fn every_instruction_set_of_the_machine_has_limits_and_better_ones_have_higher() {
        let of: Vec<_> = Simd::ALL
            .into_iter()
            .filter(|simd| simd.is_supported())
            .map(|simd| Limits::measure(1, simd))
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
