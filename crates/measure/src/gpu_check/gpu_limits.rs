//! What a GPU was measured to do: the limits that figures are compared with.

use crate::limits::MachineLimits;

/// What a GPU was measured to do.
#[derive(Clone, Copy, Debug)]
pub struct GpuLimits {
    /// Bytes that a copy on the GPU reads and writes in a second.
    pub bytes_per_s: f64,
    /// Multiplications and additions of a large bf16 product in a second.
    pub flops: f64,
}

impl GpuLimits {
    /// In the terms of the roofline.
    pub fn roofline(&self) -> MachineLimits {
        MachineLimits {
            read_bytes_per_s: self.bytes_per_s,
            f32_flops: self.flops,
            bf16_flops: self.flops,
            int8_ops: self.flops,
        }
    }
}
