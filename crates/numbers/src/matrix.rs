//! Float matrices as a checkpoint stores them, and how several become one packed matrix.

use std::ops::Range;

use half::{bf16, f16};

/// The element type of a matrix in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A float matrix that is read while it is packed.
pub trait FloatRows: Sync {
    /// The element type.
    fn dtype(&self) -> Dtype;

    /// Number of rows: outputs of a linear layer, tokens of an embedding.
    fn rows(&self) -> usize;

    /// Elements per row.
    fn columns(&self) -> usize;

    /// Writes the bytes of `rows` (little-endian) to `out`, which has exactly their size. Called from
    /// many threads.
    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]);
}

impl<M: FloatRows + ?Sized> FloatRows for &M {
    fn dtype(&self) -> Dtype {
        (**self).dtype()
    }

    fn rows(&self) -> usize {
        (**self).rows()
    }

    fn columns(&self) -> usize {
        (**self).columns()
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        (**self).read_rows(rows, out);
    }
}

/// A matrix in memory: row-major, little-endian, at any alignment.
#[derive(Clone, Copy)]
pub struct RawMatrix<'a> {
    dtype: Dtype,
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
}

impl<'a> RawMatrix<'a> {
    /// A view of `rows * columns` elements.
    ///
    /// # Panics
    ///
    /// If `bytes` has another length. The reader of the checkpoint has compared it with the shape.
    pub fn new(dtype: Dtype, rows: usize, columns: usize, bytes: &'a [u8]) -> Self {
        let expected = rows
            .checked_mul(columns)
            .and_then(|len| len.checked_mul(dtype.size()));
        assert_eq!(
            Some(bytes.len()),
            expected,
            "{rows} x {columns} of {dtype:?}"
        );
        Self {
            dtype,
            rows,
            columns,
            bytes,
        }
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of rows: outputs of a linear layer, tokens of an embedding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements per row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let len = self.columns * self.dtype.size();
        &self.bytes[row * len..][..len]
    }

    /// Converts a row to f32.
    ///
    /// # Panics
    ///
    /// If there is no such row, or `out` is not one row long.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns, "length of a row");
        let bytes = self.row(row);
        match self.dtype {
            Dtype::Bf16 => convert_elements(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => convert_elements(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Dtype::F32 => convert_elements(bytes, out, f32::from_le_bytes),
        }
    }
}

impl FloatRows for RawMatrix<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let row_bytes = self.columns * self.dtype.size();
        out.copy_from_slice(&self.bytes[rows.start * row_bytes..rows.end * row_bytes]);
    }
}

/// Converts elements of `N` bytes one by one.
pub fn convert_elements<const N: usize, T>(
    bytes: &[u8],
    out: &mut [T],
    element: impl Fn([u8; N]) -> T,
) {
    for (bytes, out) in bytes.as_chunks::<N>().0.iter().zip(out) {
        *out = element(*bytes);
    }
}

/// A weight that is NaN, infinite, or out of the range of its packed format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// Which of the parts that were packed together.
    pub part: usize,
    /// Its row in that part.
    pub row: usize,
}

/// How matrices of equal width are packed as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacking {
    /// One after the other, as query, key and value: the outputs come in that order.
    Concatenated,
    /// Alternating, as gate and up: outputs with the same index are computed together. The parts have
    /// the same shape.
    Interleaved,
}
