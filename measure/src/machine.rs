//! The machine as far as a model uses it, and its limits.

use std::fmt;

use inflight_limits::Limits;
use serde_json::{Value, json};
use triton_inflight::device::cpu::Simd;

use crate::Result;
use crate::figures::round;
use crate::model::Model;

/// Threads, instructions and what they can do at most.
#[derive(Clone, Debug)]
pub struct Machine {
    num_threads: usize,
    simd: Simd,
    /// What they can do.
    pub limits: Limits,
}

impl Machine {
    /// Measures the limits now.
    ///
    /// # Errors
    /// As [`Model::machine`].
    pub fn measure<P>(model: &Model<P>) -> Result<Self> {
        let (num_threads, simd) = model.machine()?;
        Ok(Self {
            num_threads,
            simd,
            limits: Limits::measure(num_threads, simd),
        })
    }

    /// What else runs on the machine only takes away: of two measurements each figure is the higher one.
    pub fn or_better(&self, other: &Self) -> Self {
        let (a, b) = (&self.limits, &other.limits);
        Self {
            limits: Limits {
                read_bytes_per_s: a.read_bytes_per_s.max(b.read_bytes_per_s),
                f32_flops: a.f32_flops.max(b.f32_flops),
                bf16_flops: a.bf16_flops.max(b.bf16_flops),
                int8_ops: a.int8_ops.max(b.int8_ops),
            },
            ..*self
        }
    }

    /// As a row of its own.
    pub fn row(&self) -> Value {
        json!({
            "row": "limits",
            "threads": self.num_threads,
            "instructions": self.simd.as_str(),
            "read_gb_per_s": round(self.limits.read_bytes_per_s / 1e9),
            "f32_gflop_per_s": round(self.limits.f32_flops / 1e9),
            "bf16_gflop_per_s": round(self.limits.bf16_flops / 1e9),
            "int8_gop_per_s": round(self.limits.int8_ops / 1e9),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits {
            read_bytes_per_s,
            f32_flops,
            bf16_flops,
            int8_ops,
        } = self.limits;
        write!(
            f,
            "{}, {} threads: {:.1} GB/s read; GFLOP/s f32 {:.0}, bf16 {:.0}, int8 {:.0}",
            self.simd,
            self.num_threads,
            read_bytes_per_s / 1e9,
            f32_flops / 1e9,
            bf16_flops / 1e9,
            int8_ops / 1e9
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_measurements_the_higher_figures_count() {
        let a = Machine {
            num_threads: 2,
            simd: Simd::Portable,
            limits: Limits {
                read_bytes_per_s: 1e9,
                f32_flops: 4e9,
                bf16_flops: 5e9,
                int8_ops: 6e9,
            },
        };
        let b = Machine {
            limits: Limits {
                read_bytes_per_s: 2e9,
                int8_ops: 5e9,
                ..a.limits
            },
            ..a
        };
        let both = a.or_better(&b).to_string();
        assert_eq!(
            both,
            "portable, 2 threads: 2.0 GB/s read; GFLOP/s f32 4, bf16 5, int8 6"
        );
    }
}
