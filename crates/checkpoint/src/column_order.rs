//! Matrices whose columns are stored in another order: those of heads that a converter has reordered.

use std::ops::Range;
use std::sync::Arc;

use super::matrix::{DequantisedRows, Matrix, StoredQuantisedRows};
use super::row_order::{RowOrder, RowSelection, part_of};
use super::tensor::TensorLocation;
use inflight_base::LoadError;
use inflight_numbers::{Dtype, FloatRows, QuantisedRow, QuantisedRows, QuantisedShape};

/// A matrix of floats.
pub struct ReorderedFloats<'a> {
    /// Has all columns, in the order of the file.
    stored: Matrix<'a>,
    order: RowOrder,
    /// Those that it has.
    columns: Range<usize>,
}

/// A matrix of codes whose groups lie in whole heads.
pub(super) struct ReorderedCodes<'a> {
    /// Has all columns, in the order of the file.
    stored: Box<dyn StoredQuantisedRows<'a> + 'a>,
    order: RowOrder,
    /// Columns that stay together.
    head_dim: usize,
    /// Those that it has: whole groups.
    columns: Range<usize>,
}

/// Rows that become f32 as they are read.
struct ReorderedRows<'a> {
    stored: Arc<dyn DequantisedRows + 'a>,
    order: RowOrder,
    num_columns: usize,
}

/// Rows with columns that are stored in this order.
pub(super) fn reordered<'a>(
    stored: Arc<dyn DequantisedRows + 'a>,
    order: RowOrder,
    num_columns: usize,
) -> Arc<dyn DequantisedRows + 'a> {
    Arc::new(ReorderedRows {
        stored,
        order,
        num_columns,
    })
}

impl<'a> ReorderedFloats<'a> {
    /// `stored` with columns in this order.
    pub(super) fn new(stored: Matrix<'a>, order: RowOrder) -> Self {
        let columns = 0..stored.columns();
        Self {
            stored,
            order,
            columns,
        }
    }

    pub(super) fn select(self, rows: RowSelection) -> Self {
        Self {
            stored: self.stored.select(rows),
            ..self
        }
    }

    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            stored: self.stored.part(rows, 0..self.stored.columns()),
            order: self.order,
            columns: part_of(&self.columns, columns),
        }
    }

    pub(super) fn location(&self) -> TensorLocation<'_> {
        self.stored.location()
    }

    pub(super) fn is_quantised(&self) -> bool {
        self.stored.is_quantised()
    }

    pub(super) fn preload(&self) -> Result<(), LoadError> {
        self.stored.preload()
    }

    fn floats(&self) -> &dyn FloatRows {
        self.stored.float_rows().expect("a matrix of floats")
    }
}

impl FloatRows for ReorderedFloats<'_> {
    fn dtype(&self) -> Dtype {
        self.floats().dtype()
    }

    fn rows(&self) -> usize {
        self.stored.rows()
    }

    fn columns(&self) -> usize {
        self.columns.len()
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let size = self.dtype().size();
        let mut row = vec![0; self.stored.columns() * size];
        for (index, out) in rows.zip(out.chunks_exact_mut(self.columns.len() * size)) {
            self.floats().read_rows(index..index + 1, &mut row);
            for (column, out) in self.columns.clone().zip(out.chunks_exact_mut(size)) {
                let first = self.order.stored_row(column) * size;
                out.copy_from_slice(&row[first..first + size]);
            }
        }
    }
}

impl<'a> ReorderedCodes<'a> {
    /// `stored` with columns in this order, of which `head_dim`, whole groups, stay together.
    pub(super) fn new(
        stored: Box<dyn StoredQuantisedRows<'a> + 'a>,
        order: RowOrder,
        head_dim: usize,
    ) -> Self {
        let columns = 0..stored.columns();
        Self {
            stored,
            order,
            head_dim,
            columns,
        }
    }
}

impl QuantisedRows for ReorderedCodes<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            columns: self.columns.len(),
            ..self.stored.shape()
        }
    }

    fn are_twice_e2m1(&self) -> bool {
        self.stored.are_twice_e2m1()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let mut stored = QuantisedRow::default();
        self.stored.read_row(index, &mut stored);
        let group_size = self.format().group_size;
        let places = self.columns.clone().step_by(group_size);
        let places = places.map(|column| {
            // All columns of a head keep their places in it.
            let head = column / self.head_dim * self.head_dim;
            self.order.stored_row(head) + column - head
        });
        let mut codes = Vec::with_capacity(self.columns.len());
        let mut scales = Vec::new();
        let mut offsets = Vec::new();
        for place in places {
            codes.extend_from_slice(&stored.codes[place..place + group_size]);
            scales.push(stored.scales[place / group_size]);
            offsets.extend(stored.offsets.get(place / group_size));
        }
        *row = QuantisedRow {
            codes,
            scales,
            offsets,
        };
    }
}

impl<'a> StoredQuantisedRows<'a> for ReorderedCodes<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.stored.preload()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            stored: self.stored.part(rows, 0..self.stored.columns()),
            columns: part_of(&self.columns, columns),
            ..*self
        })
    }
}

impl DequantisedRows for ReorderedRows<'_> {
    fn preload(&self) -> Result<(), LoadError> {
        self.stored.preload()
    }

    fn read(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let mut stored = vec![0.0; self.num_columns];
        self.stored.read(row, 0..self.num_columns, &mut stored);
        for (column, out) in columns.zip(out) {
            *out = stored[self.order.stored_row(column)];
        }
    }
}
