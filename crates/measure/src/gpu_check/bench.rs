//! Times an operation, beside what the machine can do.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaContext;
use inflight_device::{AttentionParams, HeadShape};
use inflight_device_cuda::Cuda;
use serde_json::json;

use super::check::Check;
use super::machine::check_device;
use super::report::Report;
use crate::Result;
use crate::figures::four_digits;

/// Bytes of weights that take turns: more than the cache of any GPU.
pub const ROTATED_BYTES: usize = 512 << 20;

/// The machine, and how much is measured.
pub struct Bench<'a> {
    /// What was asked for.
    pub check: &'a Check,
    /// Of the GPU.
    pub context: Arc<CudaContext>,
    /// Calls of an operation that are timed.
    pub num_calls: usize,
    /// Positions that a row sees.
    pub context_len: usize,
}

/// What one call reads and writes, and computes.
pub struct Work {
    /// Read and written.
    pub num_bytes: usize,
    /// Additions and multiplications.
    pub num_operations: usize,
    /// The rows of the call, for the report.
    pub rows: String,
}

impl Bench<'_> {
    /// Calls an operation many times, and reports the time of one call.
    pub fn time(
        &self,
        name: &str,
        work: Work,
        device: &mut Cuda,
        report: &mut Report,
        mut call: impl FnMut(&mut Cuda, usize),
    ) -> Result<()> {
        // The first calls choose an algorithm and touch all memory.
        for index in 0..2 {
            call(device, index);
        }
        self.context.synchronize()?;
        let start = Instant::now();
        for index in 0..self.num_calls {
            call(device, index);
        }
        let queued = start.elapsed();
        self.context.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / self.num_calls as f64;
        check_device(device)?;
        let (bytes, operations) = (work.num_bytes as f64, work.num_operations as f64);
        let mut figures = json!({
            "us": four_digits(1e6 * seconds),
            // Where it is as long as the call, the host is what takes the time.
            "launch_us": four_digits(1e6 * queued.as_secs_f64() / self.num_calls as f64),
            "gb_per_s": four_digits(bytes / seconds / 1e9),
            "tflop_per_s": four_digits(operations / seconds / 1e12),
        });
        if let Some(limits) = self.check.limits {
            let bound = limits.seconds(bytes, operations, limits.bf16_flops);
            figures["share_of_limit"] = four_digits(bound / seconds);
        }
        report.figures(&format!("{name}, {}", work.rows), figures)
    }
}

/// Attention to all positions.
pub fn attention_params(heads: HeadShape) -> AttentionParams {
    AttentionParams {
        shape: heads,
        scale: 1.0,
        soft_cap: None,
        window: None,
        chunk: None,
        is_bidirectional: false,
        num_sinks: 0,
        shifts_sinks: false,
    }
}
