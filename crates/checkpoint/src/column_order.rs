//! Quantised rows whose columns are stored in another order, since a converter has reordered heads.

use std::ops::Range;
use std::sync::Arc;

use super::row_order::{RowOrder, part_of};
use super::stored_rows::{DequantisedRows, StoredQuantisedRows};
use inflight_base::LoadError;
use inflight_numbers::{QuantisedRow, QuantisedRows, QuantisedShape};

/// A matrix of codes whose groups lie in whole heads.
pub(super) struct ReorderedCodes<'a> {
    /// Has all columns, in the order of the file.
    stored: Box<dyn StoredQuantisedRows<'a> + 'a>,
    order: RowOrder,
    /// Columns that stay together.
    head_dim: usize,
    /// The columns of this part: whole groups.
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
