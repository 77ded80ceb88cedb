//! Columns of floats of 4 bits (E2M1), two neighbours of a column a byte, the first in the low bits.

use std::ops::Range;

use super::fp4_rows::Fp4Scale;
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::{FileRange, LazyBytes};
use inflight_base::LoadError;
use inflight_numbers::{QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1};

/// A matrix whose rows are the columns of its tensors. The codes are twice the floats. Its tensors are held in memory
/// while it is packed.
pub struct Fp4Columns<'a> {
    /// `[columns / 2, rows]`.
    codes: LazyBytes<'a>,
    /// `[columns / group, rows]`, a byte each.
    scales: LazyBytes<'a>,
    kind: Fp4Scale,
    rows: usize,
    columns: usize,
}

impl<'a> Fp4Columns<'a> {
    /// All of a matrix, whose tensors have these sizes, with a whole number of groups in a row.
    pub fn new(
        codes: FileRange<'a>,
        scales: FileRange<'a>,
        kind: Fp4Scale,
        [rows, columns]: [usize; 2],
    ) -> Self {
        Self {
            codes: codes.lazy(),
            scales: scales.lazy(),
            kind,
            rows,
            columns,
        }
    }
}

impl<'a> StoredQuantisedRows<'a> for Fp4Columns<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.codes.read()?;
        self.scales.read()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let group = self.kind.group();
        let pairs = columns.start / 2..columns.end / 2;
        let groups = columns.start / group..columns.end / group;
        Box::new(Self {
            codes: self.codes.part(self.rows, pairs, rows.clone()),
            scales: self.scales.part(self.rows, groups, rows.clone()),
            kind: self.kind,
            rows: rows.len(),
            columns: columns.len(),
        })
    }
}

impl QuantisedRows for Fp4Columns<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: self.kind.format(),
            rows: self.rows,
            columns: self.columns,
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns);
        let bytes = self.codes.chunks_exact(self.rows);
        for (codes, bytes) in row.codes.as_chunks_mut().0.iter_mut().zip(bytes) {
            let byte = bytes[index];
            *codes = [byte & 15, byte >> 4].map(|code| TWICE_E2M1[usize::from(code)]);
        }
        let bytes = self.scales.chunks_exact(self.rows);
        for (scale, bytes) in row.scales.iter_mut().zip(bytes) {
            *scale = self.kind.half(bytes[index]);
        }
    }
}
