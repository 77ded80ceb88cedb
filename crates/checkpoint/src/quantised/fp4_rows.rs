//! Rows of floats of 4 bits (E2M1), two a byte, the first in the low bits.

use std::ops::Range;

use crate::e2m1::half_power_of_two;
use crate::row_order::part_of;
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{
    CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1, from_e4m3,
};

/// Some columns of some rows of a matrix, read from the file row by row. The codes are twice the floats.
pub struct Fp4Rows<'a> {
    /// `[stored rows, stored columns / 2]`.
    codes: FileRange<'a>,
    /// `[stored rows, stored columns / group]`, a byte each.
    scales: FileRange<'a>,
    kind: Fp4Scale,
    num_stored_columns: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// The scale that a byte stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp4Scale {
    /// Two to the power of it less 127, for 32 weights.
    PowerOfTwo,
    /// A float of 8 bits (E4M3), for 16 weights, which is multiplied by this.
    Float(f32),
}

impl Fp4Scale {
    /// Weights that share one.
    pub const fn group(self) -> usize {
        match self {
            Self::PowerOfTwo => 32,
            Self::Float(_) => 16,
        }
    }

    /// Half of it, because codes are twice the float.
    pub fn half(self, byte: u8) -> f32 {
        match self {
            Self::PowerOfTwo => half_power_of_two(byte),
            Self::Float(factor) => from_e4m3(byte) * factor / 2.0,
        }
    }

    /// How codes with such scales are quantised.
    pub const fn format(self) -> QuantFormat {
        QuantFormat {
            bits: CodeBits::Eight,
            group_size: self.group(),
            has_offsets: false,
        }
    }
}

impl<'a> Fp4Rows<'a> {
    /// All of a matrix, whose tensors have these sizes, with a whole number of groups in a row.
    pub fn new(
        codes: FileRange<'a>,
        scales: FileRange<'a>,
        kind: Fp4Scale,
        [rows, columns]: [usize; 2],
    ) -> Self {
        debug_assert!(columns.is_multiple_of(kind.group()));
        Self {
            codes,
            scales,
            kind,
            num_stored_columns: columns,
            rows: 0..rows,
            columns: 0..columns,
        }
    }
}

impl<'a> StoredQuantisedRows<'a> for Fp4Rows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        Ok(())
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            rows: part_of(&self.rows, rows),
            columns: part_of(&self.columns, columns),
            ..*self
        })
    }
}

impl QuantisedRows for Fp4Rows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: self.kind.format(),
            rows: self.rows.len(),
            columns: self.columns.len(),
        }
    }

    fn are_twice_e2m1(&self) -> bool {
        self.kind == Fp4Scale::PowerOfTwo
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns.len());
        let first = (self.rows.start + index) * self.num_stored_columns + self.columns.start;
        let mut bytes = vec![0; self.columns.len() / 2];
        self.codes.read_at(first / 2, &mut bytes);
        for (codes, byte) in row.codes.as_chunks_mut().0.iter_mut().zip(&bytes) {
            *codes = [byte & 15, byte >> 4].map(|code| TWICE_E2M1[usize::from(code)]);
        }
        bytes.resize(row.scales.len(), 0);
        self.scales.read_at(first / self.kind.group(), &mut bytes);
        for (scale, byte) in row.scales.iter_mut().zip(&bytes) {
            *scale = self.kind.half(*byte);
        }
    }
}
