//! The precision that float weights are rounded to at load.

use inflight_numbers::{CodeBits, QuantFormat};

/// Rounding of float weights at load, `weight_only_precision`: of the projections and the output layer, unless the
/// checkpoint has quantised them. The embedding and the routers of experts stay bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightPrecision {
    /// What the projections become. The output layer always has 8 bits: its errors are errors of the logits.
    pub bits: CodeBits,
    /// Adjacent inputs of an output that share a 16-bit scale: a multiple of 32, or [all](Self::WHOLE_ROWS).
    pub group_size: usize,
}

impl WeightPrecision {
    /// A group size beyond the width of any row.
    pub const WHOLE_ROWS: usize = u32::MAX as usize;

    /// The default group size: 8 bits lose little in any group, 4 bits less in small ones.
    pub const fn new(bits: CodeBits) -> Self {
        let group_size = match bits {
            CodeBits::Eight | CodeBits::Fp8 => 128,
            CodeBits::Four => 32,
        };
        Self { bits, group_size }
    }

    /// The precision of the output layer.
    pub(super) fn of_output_layer(self) -> Self {
        let bits = match self.bits {
            CodeBits::Four | CodeBits::Eight => CodeBits::Eight,
            CodeBits::Fp8 => CodeBits::Fp8,
        };
        Self { bits, ..self }
    }

    /// The format of the rounded weights.
    pub(super) const fn format(self) -> QuantFormat {
        QuantFormat {
            bits: self.bits,
            group_size: self.group_size,
            has_offsets: false,
        }
    }

    /// Bytes of `num_weights` weights, scales included.
    pub(super) fn num_bytes(self, num_weights: u64) -> u64 {
        let num_scales = num_weights.div_ceil(self.group_size as u64);
        let code_bytes = match self.bits {
            CodeBits::Eight | CodeBits::Fp8 => num_weights,
            CodeBits::Four => num_weights.div_ceil(2),
        };
        code_bytes + 2 * num_scales
    }
}
