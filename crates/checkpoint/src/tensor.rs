//! A float tensor of a checkpoint, read from its file on demand.

use std::ops::Range;
use std::path::Path;

use super::row_order::{RowOrder, RowSelection};
use super::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{Dtype, FloatRows, RawMatrix};

/// A tensor's file and name, for errors.
#[derive(Clone, Copy)]
pub struct TensorLocation<'a> {
    /// The file.
    pub path: &'a Path,
    /// The tensor's name in that file.
    pub name: &'a str,
}

impl TensorLocation<'_> {
    /// An error about the tensor.
    pub fn error(&self, reason: String) -> LoadError {
        LoadError::Tensor {
            path: self.path.to_owned(),
            name: self.name.to_owned(),
            reason,
        }
    }

    /// The error for a weight that is NaN, infinite, or too large for bf16.
    pub fn not_finite(&self, row: usize) -> LoadError {
        self.error(format!(
            "row {row} has a value that is NaN, infinite, or too large for bf16; the file is damaged \
             or the training diverged"
        ))
    }
}

/// A float tensor in its file, little-endian and row-major.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    location: TensorLocation<'a>,
    dtype: Dtype,
    shape: &'a [usize],
    bytes: FileRange<'a>,
    /// Of a matrix its rows, of a vector its elements.
    rows: RowSelection,
    /// Of each row, the first element that is read, and how many are; of a vector, its length.
    first_column: usize,
    num_columns: usize,
    /// Elements of a whole row in the file.
    stored_columns: usize,
}

impl<'a> Tensor<'a> {
    /// `bytes` has the length that shape and type require; unless the order is the same, the rows are whole heads.
    pub(super) fn new(
        location: TensorLocation<'a>,
        dtype: Dtype,
        shape: &'a [usize],
        bytes: FileRange<'a>,
        row_order: RowOrder,
    ) -> Self {
        Self {
            location,
            dtype,
            shape,
            bytes,
            rows: RowSelection {
                first: 0,
                len: match shape {
                    [len] => *len,
                    _ => shape.iter().rev().skip(1).product(),
                },
                order: row_order,
                runs: None,
            },
            first_column: 0,
            num_columns: shape.last().copied().unwrap_or(1),
            stored_columns: shape.last().copied().unwrap_or(1),
        }
    }

    /// Some of its rows; of a vector, some of its elements. It has all of them, in the order of the file.
    pub fn select(self, rows: RowSelection) -> Self {
        debug_assert!(self.rows.first == 0 && self.rows.is_contiguous());
        Self { rows, ..self }
    }

    /// Its elements, row after row, as a vector. It has all of them, in the order of the file.
    pub fn flattened(self) -> Self {
        let all = RowSelection {
            len: self.shape.iter().product(),
            ..self.rows
        };
        self.select(all)
    }

    /// A row for each index of its first dimension, such as the kernel of each output of a convolution. It has all of
    /// its elements, in the order of the file.
    pub fn with_joined_rows(self) -> Self {
        let num_rows = self.shape.first().copied().unwrap_or(1);
        let num_columns = self.shape.iter().skip(1).product();
        let rows = RowSelection {
            len: num_rows,
            ..self.rows
        };
        Self {
            num_columns,
            stored_columns: num_columns,
            ..self.select(rows)
        }
    }

    /// Some of its rows, in the order that they are read in, and some elements of each.
    ///
    /// # Panics
    ///
    /// If it does not have them.
    #[must_use]
    pub fn part(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= self.num_columns,
            "columns {columns:?}"
        );
        Self {
            rows: self.rows.part(rows),
            first_column: self.first_column + columns.start,
            num_columns: columns.len(),
            ..self
        }
    }

    /// Some elements of a vector, in the order that they are read in.
    ///
    /// # Panics
    ///
    /// If it does not have them.
    #[must_use]
    pub fn elements(self, elements: Range<usize>) -> Self {
        Self {
            rows: self.rows.part(elements),
            ..self
        }
    }

    /// Its file and name.
    pub fn location(&self) -> TensorLocation<'a> {
        self.location
    }

    /// Its dimensions in the file.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Number of rows; a vector is one.
    pub fn rows(&self) -> usize {
        if self.shape.len() < 2 {
            1
        } else {
            self.rows.len
        }
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.num_columns
    }

    /// Writes a row as f32.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        let mut bytes = vec![0; self.row_bytes()];
        self.read_rows(index..index + 1, &mut bytes);
        RawMatrix::new(self.dtype, 1, self.columns(), &bytes).row_to_f32(0, out);
    }

    /// All values as f32: a norm or a bias.
    ///
    /// # Errors
    /// The file has become shorter, memory is short, or a value is not finite.
    pub fn to_f32(self) -> Result<Vec<f32>, LoadError> {
        let indices = || (0..self.rows.len).map(|index| self.rows.stored_row(index));
        let (Some(first), Some(last)) = (indices().min(), indices().max()) else {
            return Ok(Vec::new());
        };
        let size = self.dtype.size();
        let bytes = self.bytes.to_vec_of(first * size..(last + 1) * size)?;
        let mut stored = vec![0.0; last + 1 - first];
        RawMatrix::new(self.dtype, 1, stored.len(), &bytes).row_to_f32(0, &mut stored);
        let values: Vec<f32> = indices().map(|index| stored[index - first]).collect();
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(self.location.not_finite(index)),
        }
    }

    fn row_bytes(&self) -> usize {
        self.num_columns * self.dtype.size()
    }

    /// Bytes of a whole row in the file.
    fn stored_row_bytes(&self) -> usize {
        self.stored_columns * self.dtype.size()
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
        let stored_bytes = self.stored_row_bytes();
        if self.rows.is_contiguous() && row_bytes == stored_bytes {
            let first = self.rows.first + rows.start;
            return self.bytes.read_at(first * row_bytes, out);
        }
        let first_byte = self.first_column * self.dtype.size();
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            let stored = self.rows.stored_row(row);
            self.bytes.read_at(stored * stored_bytes + first_byte, out);
        }
    }
}
