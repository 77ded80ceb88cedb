//! What the weights of a float checkpoint are rounded to.

use crate::device::{CodeBits, QuantFormat};

/// Quantisation while a checkpoint is loaded, `weight_only_precision`: of the projections and the output
/// layer, where the checkpoint has not quantised them itself. The embedding stays bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightPrecision {
    /// Of the projections. The output layer has 8 bits always: an error there is an error of the logits.
    pub bits: CodeBits,
    /// Neighbouring inputs of an output that share a scale of 16 bits; a multiple of 32.
    pub group_size: usize,
}

impl WeightPrecision {
    /// The usual group size: what 8 bits lose is small in any group, of 4 bits small groups keep more.
    pub const fn new(bits: CodeBits) -> Self {
        let group_size = match bits {
            CodeBits::Eight => 128,
            CodeBits::Four => 32,
        };
        Self { bits, group_size }
    }

    /// That of the output layer.
    pub(super) fn of_output_layer(self) -> Self {
        let bits = CodeBits::Eight;
        Self { bits, ..self }
    }

    /// How weights are quantised with it.
    pub(super) const fn format(self) -> QuantFormat {
        QuantFormat {
            bits: self.bits,
            group_size: self.group_size,
            has_offsets: false,
        }
    }

    /// Bytes of so many weights, scales included.
    pub(super) fn num_bytes(self, num_weights: u64) -> u64 {
        let num_scales = num_weights.div_ceil(self.group_size as u64);
        let code_bytes = match self.bits {
            CodeBits::Eight => num_weights,
            CodeBits::Four => num_weights.div_ceil(2),
        };
        code_bytes + 2 * num_scales
    }
}
