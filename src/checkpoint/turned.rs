//! The transpose of a matrix.

use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::allocation::try_zeroed_vec;

use super::matrix::Matrix;
use super::row_order::{RowOrder, RowSelection};
use super::tensor::TensorLocation;
use crate::base::LoadError;
use crate::device::{Dtype, FloatRows};

/// The transpose of a matrix, in whatever form that is stored: quantised weights are dequantised. Its rows are held in memory
/// while they are packed.
pub struct Turned<'a> {
    stored: Box<Matrix<'a>>,
    /// The stored columns that are its rows.
    rows: RowSelection,
    /// `[rows, columns]`, once they have been read.
    values: OnceLock<Vec<f32>>,
}

impl<'a> Turned<'a> {
    /// The transpose of a matrix.
    pub fn new(stored: Matrix<'a>) -> Self {
        let rows = RowSelection {
            first: 0,
            len: stored.columns(),
            order: RowOrder::Same,
            runs: None,
        };
        Self {
            stored: Box::new(stored),
            rows,
            values: OnceLock::new(),
        }
    }

    /// Some of its rows. It has all of them, in the order of the file.
    pub fn select(self, rows: RowSelection) -> Self {
        Self {
            rows,
            values: OnceLock::new(),
            ..self
        }
    }

    /// Some of its rows, in the order that they are read in, and some elements of each.
    ///
    /// # Panics
    /// If it does not have them.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let all = 0..self.stored.columns();
        Self {
            stored: Box::new(self.stored.part(columns, all)),
            rows: self.rows.part(rows),
            values: OnceLock::new(),
        }
    }

    /// Whether the matrix is stored as codes.
    pub fn is_quantised(&self) -> bool {
        self.stored.is_quantised()
    }

    /// File and name of the matrix.
    pub fn location(&self) -> TensorLocation<'_> {
        self.stored.location()
    }

    /// Reads its rows into memory, unless they have been read.
    ///
    /// # Errors
    /// Memory is short.
    pub fn preload(&self) -> Result<(), LoadError> {
        if self.values.get().is_some() {
            return Ok(());
        }
        self.stored.preload()?;
        let (columns, len) = (self.stored.rows(), self.rows.len * self.stored.rows());
        let mut values = try_zeroed_vec::<f32>(len)
            .map_err(|()| LoadError::Resource(format!("no memory for {len} weights")))?;
        let mut row = vec![0.0; self.stored.columns()];
        for column in 0..columns {
            self.stored.read_row(column, &mut row);
            for (index, out) in values.iter_mut().skip(column).step_by(columns).enumerate() {
                *out = row[self.rows.stored_row(index)];
            }
        }
        // Another thread may have read the same rows.
        let _ = self.values.set(values);
        Ok(())
    }
}

impl FloatRows for Turned<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn rows(&self) -> usize {
        self.rows.len
    }

    fn columns(&self) -> usize {
        self.stored.rows()
    }

    /// # Panics
    /// If it has not been [preloaded](Turned::preload).
    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let columns = self.columns();
        let values = self.values.get().expect("preloaded");
        let values = &values[rows.start * columns..rows.end * columns];
        for (value, out) in values.iter().zip(out.as_chunks_mut().0) {
            *out = value.to_le_bytes();
        }
    }
}
