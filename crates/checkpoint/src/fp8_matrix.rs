//! A matrix of 8-bit floats with scales: `weight = scale * code`.

use std::ops::Range;
use std::sync::Arc;

use super::row_order::{RowOrder, RowSelection, part_of};
use super::weight_file::FileRange;
use inflight_numbers::{
    CodeBits, Dtype, FloatRows, GROUP_UNIT, QuantFormat, QuantisedRow, QuantisedRows,
    QuantisedShape, from_e4m3,
};

/// Read as f32, or, for a device that multiplies with the codes, as quantised rows.
pub struct Fp8Matrix<'a> {
    /// `[stored rows, stored columns]`.
    codes: FileRange<'a>,
    num_stored_columns: usize,
    scales: Arc<Fp8Scales>,
    /// Which rows of the file it has.
    rows: RowSelection,
    /// Which columns of these.
    columns: Range<usize>,
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

impl<'a> Fp8Matrix<'a> {
    /// All rows of a file's matrix.
    pub fn new(codes: FileRange<'a>, rows: usize, columns: usize, scales: Fp8Scales) -> Self {
        Self {
            codes,
            num_stored_columns: columns,
            scales: Arc::new(scales),
            rows: RowSelection {
                first: 0,
                len: rows,
                order: RowOrder::Same,
                runs: None,
            },
            columns: 0..columns,
        }
    }

    /// Some of its rows. It has all of them, in the order of the file.
    pub fn select(self, rows: RowSelection) -> Self {
        Self { rows, ..self }
    }

    /// Some of its rows, in the order that they are read in, and some elements of each.
    ///
    /// # Panics
    ///
    /// If it does not have them.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            codes: self.codes,
            num_stored_columns: self.num_stored_columns,
            scales: Arc::clone(&self.scales),
            rows: self.rows.part(rows),
            columns: part_of(&self.columns, columns),
        }
    }

    /// Whether devices can multiply with its codes: blocks have a multiple of 32 inputs, or all, and the columns can be
    /// cut into groups that have one scale.
    pub fn has_groups(&self) -> bool {
        let inputs = self.scales.block_inputs;
        let are_groups = inputs >= self.num_stored_columns || inputs.is_multiple_of(GROUP_UNIT);
        are_groups && self.format_of_columns().is_some()
    }

    /// The format of its columns by themselves.
    fn format_of_columns(&self) -> Option<QuantFormat> {
        let of_blocks = QuantFormat {
            bits: CodeBits::Fp8,
            group_size: self.scales.block_inputs,
            has_offsets: false,
        };
        of_blocks.of_columns(&self.columns)
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.rows.len
    }

    /// Elements of a row.
    pub fn num_columns(&self) -> usize {
        self.columns.len()
    }

    /// Reads the codes of a row, and returns the scales of the blocks that they are in.
    fn read_codes(&self, row: usize, codes: &mut [u8]) -> &[f32] {
        let row = self.rows.stored_row(row);
        let first = row * self.num_stored_columns + self.columns.start;
        self.codes.read_at(first, codes);
        let Fp8Scales {
            values,
            block_outputs,
            block_inputs,
        } = &*self.scales;
        let num_groups = self.num_stored_columns.div_ceil(*block_inputs);
        let of_row = &values[row / block_outputs * num_groups..][..num_groups];
        &of_row[self.columns.start / block_inputs..self.columns.end.div_ceil(*block_inputs)]
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
        self.num_columns()
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let mut codes = vec![0; self.num_columns()];
        let block_inputs = self.scales.block_inputs;
        let of_first_block = block_inputs - self.columns.start % block_inputs;
        for (row, out) in rows.zip(out.chunks_exact_mut(4 * codes.len())) {
            let scales = self.read_codes(row, &mut codes);
            let (mut codes, mut out, mut len) = (&codes[..], out, of_first_block);
            for scale in scales {
                let block;
                (block, codes) = codes.split_at(len.min(codes.len()));
                let (values, rest) = out.split_at_mut(4 * block.len());
                for (code, value) in block.iter().zip(values.as_chunks_mut().0) {
                    *value = (scale * from_e4m3(*code)).to_le_bytes();
                }
                (out, len) = (rest, block_inputs);
            }
        }
    }
}

impl QuantisedRows for Fp8Matrix<'_> {
    fn shape(&self) -> QuantisedShape {
        let format = self.format_of_columns().expect("it has groups");
        QuantisedShape {
            format: QuantFormat {
                group_size: format.group_size.min(self.num_columns()),
                ..format
            },
            rows: self.num_rows(),
            columns: self.num_columns(),
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let format = self.format();
        row.resize(format, self.num_columns());
        let scales = self.read_codes(index, bytemuck::cast_slice_mut(&mut row.codes));
        // Groups may be smaller than blocks.
        let block_inputs = self.scales.block_inputs;
        let before = self.columns.start % block_inputs;
        for (group, scale) in row.scales.iter_mut().enumerate() {
            *scale = scales[(before + group * format.group_size) / block_inputs];
        }
    }
}
