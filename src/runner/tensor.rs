//! A tensor of floating point where it lies in a checkpoint's file.

use std::ops::Range;
use std::path::Path;

use super::weight_file::Bytes;
use crate::base::LoadError;
use crate::device::cpu::{Dtype, FloatRows, RawMatrix};

/// Where a tensor is: what an error about it names.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    pub(super) name: &'a str,
}

impl Place<'_> {
    /// An error of the tensor.
    pub(super) fn error(&self, reason: String) -> LoadError {
        LoadError::Tensor {
            path: self.path.to_owned(),
            name: self.name.to_owned(),
            reason,
        }
    }

    /// The error of a weight that is NaN, infinite, or too large for bf16.
    pub(super) fn not_finite(&self, row: usize) -> LoadError {
        self.error(format!(
            "row {row} has a value that is NaN, infinite, or too large for bf16; the file is damaged \
             or the training diverged"
        ))
    }
}

/// A tensor's values where they lie in the file, little-endian, row-major.
#[derive(Clone, Copy)]
pub(super) struct Tensor<'a> {
    place: Place<'a>,
    dtype: Dtype,
    shape: &'a [usize],
    bytes: Bytes<'a>,
    row_order: RowOrder,
}

/// Where the rows of queries and keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// As transformers has them.
    Same,
    /// Of each head, the two rows of a pair that is turned together lie together. transformers has the first
    /// ones of all pairs first.
    PairsTogether {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Where a row lies.
    pub(super) fn stored(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::PairsTogether { head_dim } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let (place, pair) = (row / (head_dim / 2), row % (head_dim / 2));
                head * head_dim + 2 * pair + place
            }
        }
    }
}

impl<'a> Tensor<'a> {
    /// `bytes` are as many as the shape and the type say.
    pub(super) fn new(
        place: Place<'a>,
        dtype: Dtype,
        shape: &'a [usize],
        bytes: Bytes<'a>,
    ) -> Self {
        Self {
            place,
            dtype,
            shape,
            bytes,
            row_order: RowOrder::Same,
        }
    }

    /// The same with rows in another order: there are whole heads of them.
    pub(super) fn with_row_order(self, row_order: RowOrder) -> Self {
        Self { row_order, ..self }
    }

    /// Where it is.
    pub(super) fn place(&self) -> Place<'a> {
        self.place
    }

    /// Number of rows: the first dimension; one dimension is one row.
    pub(super) fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Elements of a row.
    pub(super) fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Writes a row of the matrix as f32.
    pub(super) fn read_row(&self, index: usize, out: &mut [f32]) {
        let mut bytes = vec![0; self.row_bytes()];
        self.read_rows(index..index + 1, &mut bytes);
        RawMatrix::new(self.dtype, 1, self.columns(), &bytes).row_to_f32(0, out);
    }

    /// All values as f32, checked: what is added to or multiplied with a row.
    pub(super) fn to_f32(self) -> Result<Vec<f32>, LoadError> {
        let mut stored = vec![0.0; self.bytes.len() / self.dtype.size()];
        let bytes = self.bytes.to_vec()?;
        RawMatrix::new(self.dtype, 1, stored.len(), &bytes).row_to_f32(0, &mut stored);
        let order = (0..stored.len()).map(|index| self.row_order.stored(index));
        let values: Vec<f32> = order.map(|index| stored[index]).collect();
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(self.place.not_finite(index)),
        }
    }

    fn row_bytes(&self) -> usize {
        self.columns() * self.dtype.size()
    }
}

impl FloatRows for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn rows(&self) -> usize {
        self.rows()
    }

    fn columns(&self) -> usize {
        self.columns()
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let row_bytes = self.row_bytes();
        if self.row_order == RowOrder::Same {
            return self.bytes.read_at(rows.start * row_bytes, out);
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            let stored = self.row_order.stored(row);
            self.bytes.read_at(stored * row_bytes, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_pairs_are_taken_apart() {
        let order = RowOrder::PairsTogether { head_dim: 6 };
        let stored: Vec<_> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
