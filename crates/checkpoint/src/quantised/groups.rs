//! Scales and zeros of GPTQ and AWQ: one of each for a group of inputs of an output.
//!
//! ```text
//! qzeros   I32 [groups, outputs / codes per word]
//! scales   [groups, outputs]
//! weight = scale * (code - zero)
//! ```

use std::ops::Range;

use super::module::Module;
use super::words::{Floats, Words, codes_per_word, word_of};
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantisedRow};

/// The groups of a module.
pub struct Groups<'a> {
    bits: CodeBits,
    /// Inputs of a group.
    pub size: usize,
    outputs: usize,
    /// The lane of the zeros of its first output.
    first_lane: usize,
    zeros: Words<'a>,
    scales: Floats<'a>,
}

impl<'a> Groups<'a> {
    /// Finds the tensors; groups have `size` inputs, or all.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or type.
    pub fn find(
        module: &Module<'a, '_>,
        bits: CodeBits,
        size: Option<usize>,
    ) -> Result<Self, LoadError> {
        let size = size.unwrap_or(module.inputs).min(module.inputs);
        let num_groups = module.inputs.div_ceil(size);
        let shape = [num_groups, module.outputs / codes_per_word(bits)];
        let zeros = module.tensors.get(&module.tensor("qzeros"), &shape)?;
        let zeros = Words::new(zeros, shape)?;
        let shape = [num_groups, module.outputs];
        let scales = module.tensors.get(&module.tensor("scales"), &shape)?;
        Ok(Self {
            bits,
            size,
            outputs: module.outputs,
            first_lane: 0,
            zeros,
            scales: Floats::new(scales)?,
        })
    }

    /// The groups of some outputs and some inputs: whole groups.
    #[must_use]
    pub fn part(&self, outputs: Range<usize>, inputs: &Range<usize>) -> Self {
        let per_word = codes_per_word(self.bits);
        let lanes = self.first_lane + outputs.start..self.first_lane + outputs.end;
        let words = lanes.start / per_word..lanes.end.div_ceil(per_word);
        let groups = inputs.start / self.size..inputs.end.div_ceil(self.size);
        Self {
            bits: self.bits,
            size: self.size,
            outputs: outputs.len(),
            first_lane: lanes.start % per_word,
            zeros: self.zeros.part(groups.clone(), words),
            scales: self.scales.part(groups, outputs),
        }
    }

    /// Reads them into memory.
    pub fn preload(&self) -> Result<(), LoadError> {
        self.zeros.read()?;
        self.scales.read()
    }

    /// Whether every zero is stored as this code.
    pub fn all_zeros_are(&self, code: u32) -> Result<bool, LoadError> {
        self.zeros.read()?;
        Ok(self.zeros.are_all(word_of(code, self.bits)))
    }

    /// Writes the scales and offsets of an output into `row`. `zero` extracts the zero of an output from its word,
    /// given which of the outputs of the word it is.
    pub fn read_output(
        &self,
        output: usize,
        zero: impl Fn(u32, usize) -> u32,
        row: &mut QuantisedRow,
    ) {
        let per_word = codes_per_word(self.bits);
        let lane = self.first_lane + output;
        let (column, lane) = (lane / per_word, lane % per_word);
        for (group, scale) in row.scales.iter_mut().enumerate() {
            *scale = self.scales.at(group * self.outputs + output);
        }
        for (group, offset) in row.offsets.iter_mut().enumerate() {
            let zero = zero(self.zeros.at(group, column), lane);
            *offset = row.scales[group] * (self.bits.bias() - zero as i32) as f32;
        }
    }
}
