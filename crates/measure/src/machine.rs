//! The machine as a model uses it, and its limits.

use std::fmt;

use inflight_device_cpu::Simd;
use serde_json::{Value, json};

use crate::Result;
use crate::figures::round;
use crate::limits::MachineLimits;
use crate::model::Model;
use crate::roofline::Precision;

/// Number of measurements, taken in sequence.
const NUM_MEASUREMENTS: usize = 3;

/// Spread of the measurements above which a warning is printed, as a share of the highest.
const MAX_SPREAD: f64 = 0.1;

/// Threads, instruction set and measured limits.
#[derive(Clone, Debug)]
pub struct Machine {
    num_threads: usize,
    simd: Simd,
    num_measurements: usize,
    /// The highest figure of all measurements each, since other processes can only lower a figure.
    pub limits: MachineLimits,
    /// The lowest figure of all measurements each.
    lowest: MachineLimits,
}

impl Machine {
    /// Measures the limits now, several times.
    ///
    /// # Errors
    /// As [`Model::machine`].
    pub fn measure<P>(model: &Model<P>) -> Result<Self> {
        let (num_threads, simd) = model.machine()?;
        let one = |limits| Self {
            num_threads,
            simd,
            num_measurements: 1,
            limits,
            lowest: limits,
        };
        let all = MachineLimits::measure_times(NUM_MEASUREMENTS, num_threads, simd);
        let all = all.into_iter().map(one).reduce(|a, b| a.and(&b));
        Ok(all.expect("more than one"))
    }

    /// The same machine with the measurements of both.
    pub fn and(&self, other: &Self) -> Self {
        Self {
            num_measurements: self.num_measurements + other.num_measurements,
            limits: each(&self.limits, &other.limits, f64::max),
            lowest: each(&self.lowest, &other.lowest, f64::min),
            ..*self
        }
    }

    /// Spread of the measurements of the two limits that matter to a model with weights of this `precision`,
    /// reading and computing, as a share of the highest.
    pub fn spread(&self, precision: Precision) -> f64 {
        let (low, high) = (&self.lowest, &self.limits);
        let read = low.read_bytes_per_s / high.read_bytes_per_s;
        1.0 - read.min(precision.peak(low) / precision.peak(high))
    }

    /// A warning for figures compared with these limits, if the measurements differ too much.
    pub fn warning(&self, precision: Precision) -> Option<String> {
        let spread = self.spread(precision);
        (spread > MAX_SPREAD).then(|| {
            format!(
                "the limits of this run differ by {:.0} %, and its shares may be off by as much",
                spread * 100.0
            )
        })
    }

    /// The limits as a row.
    pub fn row(&self) -> Value {
        let figures = |limits: &MachineLimits| {
            json!({
                "read_gb_per_s": round(limits.read_bytes_per_s / 1e9),
                "f32_gflop_per_s": round(limits.f32_flops / 1e9),
                "bf16_gflop_per_s": round(limits.bf16_flops / 1e9),
                "int8_gop_per_s": round(limits.int8_ops / 1e9),
            })
        };
        let mut row = json!({
            "row": "limits",
            "threads": self.num_threads,
            "instructions": self.simd.as_str(),
            "measurements": self.num_measurements,
        });
        if let (Value::Object(row), Value::Object(highest)) = (&mut row, figures(&self.limits)) {
            row.extend(highest);
            row.insert("lowest".to_owned(), figures(&self.lowest));
        }
        row
    }
}

/// Combines two limits figure by figure.
fn each(a: &MachineLimits, b: &MachineLimits, of: fn(f64, f64) -> f64) -> MachineLimits {
    MachineLimits {
        read_bytes_per_s: of(a.read_bytes_per_s, b.read_bytes_per_s),
        f32_flops: of(a.f32_flops, b.f32_flops),
        bf16_flops: of(a.bf16_flops, b.bf16_flops),
        int8_ops: of(a.int8_ops, b.int8_ops),
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (high, low) = (&self.limits, &self.lowest);
        write!(
            f,
            "{}, {} threads: {:.1} GB/s read (lowest {:.1}); GFLOP/s f32 {:.0} ({:.0}), bf16 {:.0} ({:.0}), int8 \
             {:.0} ({:.0}); {} measurements",
            self.simd,
            self.num_threads,
            high.read_bytes_per_s / 1e9,
            low.read_bytes_per_s / 1e9,
            high.f32_flops / 1e9,
            low.f32_flops / 1e9,
            high.bf16_flops / 1e9,
            low.bf16_flops / 1e9,
            high.int8_ops / 1e9,
            low.int8_ops / 1e9,
            self.num_measurements
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: MachineLimits = MachineLimits {
        read_bytes_per_s: 1e9,
        f32_flops: 4e9,
        bf16_flops: 5e9,
        int8_ops: 6e9,
    };

    fn machine(limits: MachineLimits) -> Machine {
        Machine {
            num_threads: 2,
            simd: Simd::Portable,
            num_measurements: 1,
            limits,
            lowest: limits,
        }
    }

    #[test]
    fn the_highest_figures_are_the_limits_and_the_lowest_are_printed_beside_them() {
        let both = machine(LIMITS).and(&machine(MachineLimits {
            read_bytes_per_s: 2e9,
            int8_ops: 5e9,
            ..LIMITS
        }));
        assert_eq!(
            both.to_string(),
            "portable, 2 threads: 2.0 GB/s read (lowest 1.0); GFLOP/s f32 4 (4), bf16 5 (5), int8 6 (5); 2 \
             measurements"
        );
        let row = both.row();
        assert_eq!(
            (&row["read_gb_per_s"], &row["int8_gop_per_s"]),
            (&json!(2.0), &json!(6.0))
        );
        let lowest = &row["lowest"];
        assert_eq!(
            (&lowest["read_gb_per_s"], &lowest["int8_gop_per_s"]),
            (&json!(1.0), &json!(5.0))
        );
        assert_eq!(row["measurements"], 2);
    }

    #[test]
    fn warns_when_measurements_differ_by_more_than_a_tenth() {
        let beside = |other: MachineLimits| machine(LIMITS).and(&machine(other));
        let read = beside(MachineLimits {
            read_bytes_per_s: 0.8e9,
            ..LIMITS
        });
        assert!((read.spread(Precision::Bf16) - 0.2).abs() < 1e-9);
        let warning = read.warning(Precision::Int4).expect("it differs");
        assert!(warning.contains("differ by 20 %"), "{warning}");
        let computed = beside(MachineLimits {
            bf16_flops: 4e9,
            int8_ops: 5.9e9,
            ..LIMITS
        });
        assert!(computed.warning(Precision::Bf16).is_some());
        assert_eq!(
            computed.warning(Precision::Int8),
            None,
            "the int8 limits do not differ"
        );
        assert_eq!(machine(LIMITS).spread(Precision::Bf16), 0.0);
    }

    #[test]
    fn a_machine_is_measured_several_times() {
        let all = MachineLimits::measure_times(2, 1, Simd::Portable);
        assert_eq!(all.len(), 2);
        assert!(
            all.iter().all(|limits| limits.read_bytes_per_s > 1e8),
            "{all:?}"
        );
    }
}
