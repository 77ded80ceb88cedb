//! A matrix of 8-bit floats with scales: `weight = scale * code`.

use std::ops::Range;

use super::row_order::RowSelection;
use super::weight_file::FileRange;
use crate::device::{
    CodeBits, Dtype, FloatRows, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, from_e4m3,
};

/// Read as f32, or, for a device that multiplies with the codes, as quantised rows.
pub struct Fp8Matrix<'a> {
    /// `[stored rows, columns]`.
    codes: FileRange<'a>,
    columns: usize,
    scales: Fp8Scales,
    /// Which rows of the file it has.
    selection: Selection,
}

/// The scales of a matrix.
pub struct Fp8Scales {
    /// `[blocks of outputs, blocks of inputs]`.
    pub values: Vec<f32>,
    /// Outputs of a block.
    pub block_outputs: usize,
    /// Inputs of a block.
    pub block_inputs: usize,
}

enum Selection {
    /// As many as there are.
    All(usize),
    Rows(RowSelection),
}

impl<'a> Fp8Matrix<'a> {
    /// All rows of a file's matrix.
    pub fn new(codes: FileRange<'a>, rows: usize, columns: usize, scales: Fp8Scales) -> Self {
        Self {
            codes,
            columns,
            scales,
            selection: Selection::All(rows),
        }
    }

    /// Some of its rows. It has all of them, in the order of the file.
    pub fn select(self, rows: RowSelection) -> Self {
        Self {
            selection: Selection::Rows(rows),
            ..self
        }
    }

    /// Whether devices can multiply with its codes: inputs of a block are a multiple of 32, or all.
    pub fn has_groups(&self) -> bool {
        let inputs = self.scales.block_inputs;
        inputs.is_multiple_of(32) || inputs >= self.columns
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        match &self.selection {
            Selection::All(rows) => *rows,
            Selection::Rows(rows) => rows.len,
        }
    }

    /// Elements of a row.
    pub fn num_columns(&self) -> usize {
        self.columns
    }

    /// Reads the codes of a row, and returns its scales: one for each `block_inputs` columns.
    fn read_codes(&self, row: usize, codes: &mut [u8]) -> &[f32] {
        let row = match &self.selection {
            Selection::All(_) => row,
            Selection::Rows(rows) => rows.stored_row(row),
        };
        self.codes.read_at(row * self.columns, codes);
        let num_groups = self.columns.div_ceil(self.scales.block_inputs);
        &self.scales.values[row / self.scales.block_outputs * num_groups..][..num_groups]
    }
}

impl FloatRows for Fp8Matrix<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn rows(&self) -> usize {
        self.num_rows()
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let mut codes = vec![0; self.columns];
        for (row, out) in rows.zip(out.chunks_exact_mut(4 * self.columns)) {
            let scales = self.read_codes(row, &mut codes);
            let block_inputs = self.scales.block_inputs;
            let blocks = codes
                .chunks(block_inputs)
                .zip(out.chunks_mut(4 * block_inputs));
            for ((codes, out), scale) in blocks.zip(scales) {
                for (code, out) in codes.iter().zip(out.as_chunks_mut().0) {
                    *out = (scale * from_e4m3(*code)).to_le_bytes();
                }
            }
        }
    }
}

impl QuantisedRows for Fp8Matrix<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Fp8,
                group_size: self.scales.block_inputs.min(self.columns),
                has_offsets: false,
            },
            rows: self.num_rows(),
            columns: self.columns,
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns);
        let scales = self.read_codes(index, bytemuck::cast_slice_mut(&mut row.codes));
        row.scales.copy_from_slice(scales);
    }
}
