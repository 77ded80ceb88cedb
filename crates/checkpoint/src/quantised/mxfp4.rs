//! MXFP4, as OpenAI's gpt-oss has it: the weights of all experts of a layer in floats of 4 bits (E2M1), each 32 of
//! which share a power of two as scale (OCP Microscaling Formats, 1.0).
//!
//! ```text
//! NAME_blocks    U8 [num_matrices, outputs, inputs / 32, 16]    two codes a byte, the first in the low bits
//! NAME_scales    U8 [num_matrices, outputs, inputs / 32]        the exponents, 127 of which stands for 1
//! weight = 2^(exponent - 127) f(code)
//! ```
//!
//! Twice a float of 4 bits is a whole number from -12 to 12, so the weights are taken over as codes of 8 bits, without
//! loss: 4 bits hold whole numbers from -8 to 7 only. A GPU keeps them in 4 bits ([`QuantisedRows::are_twice_e2m1`]).
//! Other weights (`modules_to_not_convert`) are stored unquantised.

use std::ops::Range;

use safetensors::tensor::Dtype as StoredDtype;

use crate::e2m1::half_power_of_two;
use crate::matrix::Matrix;
use crate::safetensors::{SafetensorsFolder, StoredTensor};
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{
    CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1,
};

/// Weights that share a scale.
const GROUP: usize = 32;

/// `quant_method: mxfp4`, which has no settings that matter: the tensors tell what is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MxFp4;

impl MxFp4 {
    /// Matrices of the same shape `[num_matrices, outputs, inputs]`, the rows of all one after the other; `None` if
    /// they are not quantised.
    ///
    /// # Errors
    /// A tensor is missing, or does not have the shape or type that the method gives it.
    pub fn matrices<'a>(
        self,
        tensors: &'a SafetensorsFolder,
        name: &str,
        [num_matrices, outputs, inputs]: [usize; 3],
    ) -> Result<Option<Matrix<'a>>, LoadError> {
        let Some(blocks) = tensors.find(&format!("{name}_blocks"))? else {
            return Ok(None);
        };
        if !inputs.is_multiple_of(GROUP) {
            let reason =
                format!("has rows of {inputs} weights; multiples of {GROUP} are supported");
            return Err(blocks.location.error(reason));
        }
        let num_groups = inputs / GROUP;
        let bytes_of = |stored: StoredTensor<'a>, shape: &[usize]| {
            let stored = stored.of_shape(shape)?;
            match stored.dtype {
                StoredDtype::U8 => Ok(stored.bytes),
                other => {
                    let reason = format!("is of type {other:?}; MXFP4 has U8");
                    Err(stored.location.error(reason))
                }
            }
        };
        let location = blocks.location;
        let shape = [num_matrices, outputs, num_groups, GROUP / 2];
        let blocks = bytes_of(blocks, &shape)?;
        let scales = tensors.get(&format!("{name}_scales"), &shape[..3])?;
        let rows = MxFp4Rows {
            blocks,
            scales: bytes_of(scales, &shape[..3])?,
            num_stored_columns: inputs,
            first_row: 0,
            num_rows: num_matrices * outputs,
            first_column: 0,
            num_columns: inputs,
        };
        Ok(Some(Matrix::Quantised(location, Box::new(rows))))
    }
}

/// The rows of all matrices, or some columns of some of them.
struct MxFp4Rows<'a> {
    blocks: FileRange<'a>,
    scales: FileRange<'a>,
    /// Columns of a row in the file.
    num_stored_columns: usize,
    first_row: usize,
    num_rows: usize,
    first_column: usize,
    num_columns: usize,
}

impl<'a> StoredQuantisedRows<'a> for MxFp4Rows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        Ok(())
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            first_row: self.first_row + rows.start,
            num_rows: rows.len(),
            first_column: self.first_column + columns.start,
            num_columns: columns.len(),
            ..*self
        })
    }
}

impl QuantisedRows for MxFp4Rows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Eight,
                group_size: GROUP,
                has_offsets: false,
            },
            rows: self.num_rows,
            columns: self.num_columns,
        }
    }

    fn are_twice_e2m1(&self) -> bool {
        true
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.num_columns);
        let first = (self.first_row + index) * self.num_stored_columns + self.first_column;
        let mut bytes = vec![0; self.num_columns / 2];
        self.blocks.read_at(first / 2, &mut bytes);
        for (codes, byte) in row.codes.as_chunks_mut().0.iter_mut().zip(&bytes) {
            *codes = [byte & 15, byte >> 4].map(|code| TWICE_E2M1[usize::from(code)]);
        }
        let exponents = &mut bytes[..self.num_columns.div_ceil(GROUP)];
        self.scales.read_at(first / GROUP, exponents);
        for (scale, exponent) in row.scales.iter_mut().zip(exponents) {
            *scale = half_power_of_two(*exponent);
        }
    }
}
