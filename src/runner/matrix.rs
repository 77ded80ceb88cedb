//! A matrix of a checkpoint, in whatever form it is stored.

use super::tensor::{Place, Tensor};
use crate::base::LoadError;
use crate::device::cpu::{QuantisedRow, QuantisedRows};

/// The weights of a linear layer, or of the embedding: a row is an output, or a token.
pub(super) enum Matrix<'a> {
    /// Floating point.
    Float(Tensor<'a>),
    /// Codes that the kernels have.
    Codes(Place<'a>, Box<dyn StoredCodes + 'a>),
    /// Codes that no kernel has: their numbers are read.
    Numbers {
        place: Place<'a>,
        rows: usize,
        columns: usize,
        /// Writes a row.
        read: Box<ReadRow<'a>>,
    },
}

/// Codes where they lie in a checkpoint's files.
pub(super) trait StoredCodes: QuantisedRows {
    /// Reads what rows cannot be read without: codes of a row that lie all over a tensor. It stays in memory.
    ///
    /// # Errors
    /// The file has become shorter, or there is no memory.
    fn read(&self) -> Result<(), LoadError>;
}

/// Writes a row of numbers.
pub(super) type ReadRow<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

impl Matrix<'_> {
    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Float(tensor) => tensor.rows(),
            Self::Codes(_, codes) => codes.rows(),
            Self::Numbers { rows, .. } => *rows,
        }
    }

    /// Elements of a row.
    pub(super) fn columns(&self) -> usize {
        match self {
            Self::Float(tensor) => tensor.columns(),
            Self::Codes(_, codes) => codes.columns(),
            Self::Numbers { columns, .. } => *columns,
        }
    }

    /// Where it is.
    pub(super) fn place(&self) -> Place<'_> {
        match self {
            Self::Float(tensor) => tensor.place(),
            Self::Codes(place, _) | Self::Numbers { place, .. } => *place,
        }
    }

    /// Reads what rows cannot be read without.
    ///
    /// # Errors
    /// A file has become shorter, or there is no memory.
    pub(super) fn read(&self) -> Result<(), LoadError> {
        match self {
            Self::Codes(_, codes) => codes.read(),
            Self::Float(_) | Self::Numbers { .. } => Ok(()),
        }
    }

    /// Writes a row as f32, in the order of the inputs. It has been [read](Matrix::read).
    pub(super) fn read_row(&self, index: usize, out: &mut [f32]) {
        match self {
            Self::Float(tensor) => tensor.read_row(index, out),
            Self::Codes(_, codes) => read_codes(codes.as_ref(), index, out),
            Self::Numbers { read, .. } => read(index, out),
        }
    }

    /// The error of a row with a weight that is NaN, infinite, or too large.
    pub(super) fn not_finite(&self, row: usize) -> LoadError {
        match self {
            Self::Float(tensor) => tensor.place().not_finite(row),
            Self::Codes(place, _) | Self::Numbers { place, .. } => place.error(format!(
                "output {row} has a scale or an offset that is NaN, infinite, or above 16; the file is damaged"
            )),
        }
    }
}

fn read_codes(codes: &dyn QuantisedRows, index: usize, out: &mut [f32]) {
    let mut row = QuantisedRow::default();
    codes.read_row(index, &mut row);
    let Some(order) = codes.input_order() else {
        return row.dequantise(codes.format(), out);
    };
    let mut ordered = vec![0.0; out.len()];
    row.dequantise(codes.format(), &mut ordered);
    for (weight, &input) in ordered.iter().zip(order) {
        out[input as usize] = *weight;
    }
}
