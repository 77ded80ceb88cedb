//! A matrix of a checkpoint, in whatever form it is stored.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytemuck::allocation::try_zeroed_vec;

use super::column_order::{ReorderedCodes, reordered};
use super::fp8_matrix::Fp8Matrix;
use super::row_order::{RowOrder, RowSelection, part_of};
use super::stored_rows::{DequantisedRows, StoredQuantisedRows};
use super::tensor::{Tensor, TensorLocation};
use super::transposed::Transposed;
use inflight_base::LoadError;
use inflight_numbers::{Dtype, FloatRows, QuantisedRow, QuantisedRows, QuantisedShape, RawMatrix};

/// Lower bound of a row's norm, against division by zero.
const MIN_LENGTH: f64 = 1e-12;

/// The weights of a linear layer or of the embedding. A row is an output, or a token.
pub enum Matrix<'a> {
    /// Floating point.
    Float(Tensor<'a>),
    /// Floating point, stored by columns.
    Transposed(Transposed<'a>),
    /// The transpose of another one, in floating point.
    Turned(Turned<'a>),
    /// Integer codes in a format that the kernels compute with.
    Quantised(TensorLocation<'a>, Box<dyn StoredQuantisedRows<'a> + 'a>),
    /// 8-bit floats with scales: codes for devices that multiply with them, floating point for others.
    Fp8(TensorLocation<'a>, Fp8Matrix<'a>),
    /// Some columns of another one that may be rounded.
    Columns(Box<MatrixColumns<'a>>),
    /// Another one, in floating point, whose columns are stored in another order.
    Reordered(ReorderedFloats<'a>),
    /// Another one, in floating point, whose rows are divided by their lengths.
    Unit(UnitRows<'a>),
    /// Codes in a format that no kernel has, dequantised as they are read.
    Dequantised {
        /// File and name.
        location: TensorLocation<'a>,
        /// Number of rows.
        rows: usize,
        /// Elements of a row.
        columns: usize,
        /// Its rows.
        read: Arc<dyn DequantisedRows + 'a>,
    },
}

/// Some columns of a matrix.
pub struct MatrixColumns<'a> {
    some: Matrix<'a>,
    /// All columns of these rows.
    all: Matrix<'a>,
    /// Which of these they are.
    columns: Range<usize>,
}

/// Writes the row of this index as f32.
pub type ReadRow<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// Some rows of a quantised matrix.
struct SelectedRows<'a> {
    all: Box<dyn StoredQuantisedRows<'a> + 'a>,
    rows: RowSelection,
    /// The row of the file that is the first one of `all`.
    first: usize,
}

/// Quantised rows as floats, in the order of the inputs. Whole rows are read.
pub(super) struct InOrderOfInputs<'a>(pub Box<dyn StoredQuantisedRows<'a> + 'a>);

/// What a matrix has of another one.
struct DequantisedPart<'a> {
    all: Arc<dyn DequantisedRows + 'a>,
    rows: RowSelection,
    first_column: usize,
}

impl<'a> Matrix<'a> {
    /// Its transpose.
    #[must_use]
    pub fn turned(self) -> Self {
        Self::Turned(Turned::new(self))
    }

    /// This matrix, in floating point, with rows that are divided by their lengths.
    #[must_use]
    pub fn with_unit_rows(self) -> Self {
        Self::Unit(UnitRows::new(self))
    }

    /// This matrix with columns that are stored in an order of heads. Codes keep their format where their groups lie in
    /// whole heads, and are dequantised otherwise.
    #[must_use]
    pub fn with_columns_in(self, order: RowOrder, head_dim: usize) -> Self {
        match self {
            Self::Quantised(location, all) => {
                let is_whole = head_dim.is_multiple_of(all.format().group_size);
                match is_whole && all.input_order().is_none() {
                    true => {
                        let codes = ReorderedCodes::new(all, order, head_dim);
                        Self::Quantised(location, Box::new(codes))
                    }
                    false => {
                        let (rows, columns) = (all.rows(), all.columns());
                        let in_order: Arc<dyn DequantisedRows + 'a> =
                            Arc::new(InOrderOfInputs(all));
                        Self::dequantised_part(location, in_order, 0..rows, 0..columns)
                            .with_columns_in(order, head_dim)
                    }
                }
            }
            Self::Dequantised {
                location,
                rows,
                columns,
                read,
            } => Self::Dequantised {
                location,
                rows,
                columns,
                read: reordered(read, order, columns),
            },
            floats => Self::Reordered(ReorderedFloats::new(floats, order)),
        }
    }

    /// Some of its rows. It has all of them, in the order of the file.
    pub fn select(self, rows: RowSelection) -> Self {
        match self {
            Self::Reordered(all) => Self::Reordered(all.select(rows)),
            Self::Unit(all) => Self::Unit(all.select(rows)),
            Self::Float(tensor) => Self::Float(tensor.select(rows)),
            Self::Transposed(matrix) => Self::Transposed(matrix.select(rows)),
            Self::Turned(matrix) => Self::Turned(matrix.select(rows)),
            Self::Quantised(location, all) => {
                let first = 0;
                Self::Quantised(location, Box::new(SelectedRows { all, rows, first }))
            }
            Self::Fp8(location, all) => Self::Fp8(location, all.select(rows)),
            Self::Columns(all) => Self::Columns(Box::new(MatrixColumns {
                some: all.some.select(rows),
                all: all.all.select(rows),
                columns: all.columns,
            })),
            Self::Dequantised {
                location,
                columns,
                read: all,
                ..
            } => Self::Dequantised {
                location,
                rows: rows.len,
                columns,
                read: Arc::new(DequantisedPart {
                    all,
                    rows,
                    first_column: 0,
                }),
            },
        }
    }

    /// Some of its rows, in the order that they are read in, and some elements of each: what a rank of several reads.
    /// Of codes, these are whole [groups](Matrix::columns_of_group). Codes with an order of inputs become floats where
    /// only some inputs are read, for their groups are scattered over all.
    ///
    /// # Panics
    /// If it does not have them.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let all_columns = 0..self.columns();
        match self {
            Self::Columns(of) => Self::Columns(Box::new(MatrixColumns {
                some: of.some.read_part(rows.clone(), columns.clone()),
                all: of.all.read_part(rows, 0..of.all.columns()),
                columns: part_of(&of.columns, columns),
            })),
            // Parts of these are rounded alone, as a part of codes in another order of inputs is.
            Self::Quantised(..) | Self::Dequantised { .. } => self.read_part(rows, columns),
            _ if columns == all_columns => self.read_part(rows, columns),
            _ => Self::Columns(Box::new(MatrixColumns {
                some: self.read_part(rows.clone(), columns.clone()),
                all: self.read_part(rows, all_columns),
                columns,
            })),
        }
    }

    /// The same, without a memory of the columns beside them.
    fn read_part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        match self {
            Self::Columns(of) => of.some.read_part(rows, columns),
            Self::Reordered(all) => Self::Reordered(all.part(rows, columns)),
            Self::Unit(all) => Self::Unit(all.part(rows, columns)),
            Self::Float(tensor) => Self::Float(tensor.part(rows, columns)),
            Self::Transposed(matrix) => Self::Transposed(matrix.part(rows, columns)),
            Self::Turned(matrix) => Self::Turned(matrix.part(rows, columns)),
            Self::Fp8(location, matrix) => Self::Fp8(*location, matrix.part(rows, columns)),
            Self::Quantised(location, all) => {
                let all_columns = 0..all.columns();
                if columns == all_columns || all.input_order().is_none() {
                    return Self::Quantised(*location, all.part(rows, columns));
                }
                let num_rows = rows.len();
                let in_order = InOrderOfInputs(all.part(rows, all_columns));
                Self::dequantised_part(*location, Arc::new(in_order), 0..num_rows, columns)
            }
            Self::Dequantised { location, read, .. } => {
                Self::dequantised_part(*location, Arc::clone(read), rows, columns)
            }
        }
    }

    /// These columns extended to whole groups of `group_size` columns of the stored row, and the range of these columns
    /// within them. `None` if the groups have no other columns.
    pub fn with_whole_groups(&self, group_size: usize) -> Option<(Self, Range<usize>)> {
        let Self::Columns(of) = self else {
            return None;
        };
        let Range { start, end } = of.columns;
        let first = start / group_size * group_size;
        let last = end.checked_next_multiple_of(group_size);
        let last = last.map_or(of.all.columns(), |last| last.min(of.all.columns()));
        if (first..last) == of.columns {
            return None;
        }
        let wider = of.all.read_part(0..self.rows(), first..last);
        Some((wider, start - first..end - first))
    }

    /// Whether it is stored as codes, of integers or of 8-bit floats.
    pub fn is_quantised(&self) -> bool {
        match self {
            Self::Float(_) | Self::Transposed(_) | Self::Unit(_) => false,
            Self::Turned(matrix) => matrix.is_quantised(),
            Self::Reordered(all) => all.is_quantised(),
            Self::Columns(of) => of.some.is_quantised(),
            Self::Quantised(..) | Self::Fp8(..) | Self::Dequantised { .. } => true,
        }
    }

    /// Columns that cannot be apart in a [part](Matrix::part) with some of them.
    pub fn columns_of_group(&self) -> usize {
        match self {
            Self::Quantised(_, codes) if codes.input_order().is_none() => {
                match codes.format().group_size {
                    size if size < codes.columns() => size,
                    // Words of codes.
                    _ => 8,
                }
            }
            Self::Quantised(..)
            | Self::Float(_)
            | Self::Transposed(_)
            | Self::Turned(_)
            | Self::Fp8(..)
            | Self::Columns(_)
            | Self::Reordered(_)
            | Self::Unit(_)
            | Self::Dequantised { .. } => 1,
        }
    }

    fn dequantised_part(
        location: TensorLocation<'a>,
        all: Arc<dyn DequantisedRows + 'a>,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Self {
        Self::Dequantised {
            location,
            rows: rows.len(),
            columns: columns.len(),
            read: Arc::new(DequantisedPart {
                all,
                rows: RowSelection {
                    first: rows.start,
                    len: rows.len(),
                    order: RowOrder::Same,
                    runs: None,
                },
                first_column: columns.start,
            }),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Float(tensor) => tensor.rows(),
            Self::Transposed(matrix) => matrix.rows(),
            Self::Turned(matrix) => matrix.rows(),
            Self::Columns(of) => of.some.rows(),
            Self::Reordered(all) => all.rows(),
            Self::Unit(all) => all.rows(),
            Self::Fp8(_, rows) => rows.num_rows(),
            Self::Quantised(_, codes) => codes.rows(),
            Self::Dequantised { rows, .. } => *rows,
        }
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        match self {
            Self::Float(tensor) => tensor.columns(),
            Self::Transposed(matrix) => matrix.columns(),
            Self::Turned(matrix) => matrix.columns(),
            Self::Columns(of) => of.some.columns(),
            Self::Reordered(all) => all.columns(),
            Self::Unit(all) => all.columns(),
            Self::Fp8(_, rows) => rows.num_columns(),
            Self::Quantised(_, codes) => codes.columns(),
            Self::Dequantised { columns, .. } => *columns,
        }
    }

    /// Its file and name.
    pub fn location(&self) -> TensorLocation<'_> {
        match self {
            Self::Float(tensor) => tensor.location(),
            Self::Transposed(matrix) => matrix.location(),
            Self::Turned(matrix) => matrix.location(),
            Self::Columns(of) => of.some.location(),
            Self::Reordered(all) => all.location(),
            Self::Unit(all) => all.location(),
            Self::Quantised(location, _)
            | Self::Fp8(location, _)
            | Self::Dequantised { location, .. } => *location,
        }
    }

    /// Its rows, if they are floating point.
    pub fn float_rows(&self) -> Option<&dyn FloatRows> {
        match self {
            Self::Float(tensor) => Some(tensor),
            Self::Transposed(matrix) => Some(matrix),
            Self::Turned(matrix) => Some(matrix),
            Self::Columns(of) => of.some.float_rows(),
            Self::Reordered(all) => Some(all),
            Self::Unit(all) => Some(all),
            Self::Fp8(_, rows) => Some(rows),
            Self::Quantised(..) | Self::Dequantised { .. } => None,
        }
    }

    /// Its codes, if they are 8-bit floats that devices can multiply with.
    pub fn fp8_rows(&self) -> Option<&dyn QuantisedRows> {
        match self {
            Self::Fp8(_, rows) if rows.has_groups() => Some(rows),
            Self::Columns(of) => of.some.fp8_rows(),
            _ => None,
        }
    }

    /// Reads into memory what single rows cannot be read without.
    ///
    /// # Errors
    /// The file has become shorter, or memory is short.
    pub fn preload(&self) -> Result<(), LoadError> {
        match self {
            Self::Quantised(_, codes) => codes.preload(),
            Self::Transposed(matrix) => matrix.preload(),
            Self::Turned(matrix) => matrix.preload(),
            Self::Columns(of) => of.some.preload(),
            Self::Reordered(all) => all.preload(),
            Self::Unit(all) => all.preload(),
            Self::Dequantised { read, .. } => read.preload(),
            Self::Float(_) | Self::Fp8(..) => Ok(()),
        }
    }

    /// Writes a row as f32, in the order of the inputs. The matrix has been [preloaded](Matrix::preload).
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        match self {
            Self::Float(tensor) => tensor.read_row(index, out),
            Self::Transposed(matrix) => read_float_row(matrix, index, out),
            Self::Turned(matrix) => read_float_row(matrix, index, out),
            Self::Columns(of) => of.some.read_row(index, out),
            Self::Reordered(all) => read_float_row(all, index, out),
            Self::Unit(all) => read_float_row(all, index, out),
            Self::Fp8(_, rows) => read_float_row(rows, index, out),
            Self::Quantised(_, codes) => dequantise_row(&**codes, index, out),
            Self::Dequantised { read, columns, .. } => read.read(index, 0..*columns, out),
        }
    }

    /// The error for a row with a weight that is NaN, infinite, or too large.
    pub fn not_finite(&self, row: usize) -> LoadError {
        match self {
            Self::Float(tensor) => tensor.location().not_finite(row),
            Self::Transposed(matrix) => matrix.location().not_finite(row),
            Self::Turned(matrix) => matrix.location().not_finite(row),
            Self::Columns(of) => of.some.not_finite(row),
            Self::Reordered(all) => all.location().not_finite(row),
            Self::Unit(all) => all.location().not_finite(row),
            Self::Fp8(location, _) => location.not_finite(row),
            Self::Quantised(location, _) | Self::Dequantised { location, .. } => {
                location.error(format!(
                    "output {row} has a scale or an offset that is NaN, infinite, or above 16; the file is damaged"
                ))
            }
        }
    }
}

impl QuantisedRows for SelectedRows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            rows: self.rows.len,
            ..self.all.shape()
        }
    }

    fn input_order(&self) -> Option<&[u32]> {
        self.all.input_order()
    }

    fn are_twice_e2m1(&self) -> bool {
        self.all.are_twice_e2m1()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        self.all
            .read_row(self.rows.stored_row(index) - self.first, row);
    }
}

impl<'a> StoredQuantisedRows<'a> for SelectedRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.all.preload()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let rows = self.rows.part(rows);
        let stored = || (0..rows.len).map(|row| rows.stored_row(row));
        let first = stored().min().unwrap_or(self.first);
        let end = stored().max().map_or(first, |last| last + 1);
        let all = first - self.first..end - self.first;
        Box::new(Self {
            all: self.all.part(all, columns),
            rows,
            first,
        })
    }
}

impl DequantisedRows for InOrderOfInputs<'_> {
    fn preload(&self) -> Result<(), LoadError> {
        self.0.preload()
    }

    fn read(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let mut whole = vec![0.0; self.0.columns()];
        dequantise_row(&*self.0, row, &mut whole);
        out.copy_from_slice(&whole[columns]);
    }
}

impl DequantisedRows for DequantisedPart<'_> {
    fn preload(&self) -> Result<(), LoadError> {
        self.all.preload()
    }

    fn read(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let first = self.first_column;
        let columns = first + columns.start..first + columns.end;
        self.all.read(self.rows.stored_row(row), columns, out);
    }
}

impl<R: Fn(usize, Range<usize>, &mut [f32]) + Send + Sync> DequantisedRows for R {
    fn read(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        self(row, columns, out);
    }
}

fn read_float_row(rows: &dyn FloatRows, index: usize, out: &mut [f32]) {
    let dtype = rows.dtype();
    let mut bytes = vec![0; out.len() * dtype.size()];
    rows.read_rows(index..index + 1, &mut bytes);
    RawMatrix::new(dtype, 1, out.len(), &bytes).row_to_f32(0, out);
}

fn dequantise_row(codes: &dyn QuantisedRows, index: usize, out: &mut [f32]) {
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

/// A matrix of floats whose columns are stored in another order.
pub struct ReorderedFloats<'a> {
    /// Has all columns, in the order of the file.
    stored: Box<Matrix<'a>>,
    order: RowOrder,
    /// The columns of this part.
    columns: Range<usize>,
}

impl<'a> ReorderedFloats<'a> {
    /// `stored` with columns in this order.
    fn new(stored: Matrix<'a>, order: RowOrder) -> Self {
        let columns = 0..stored.columns();
        Self {
            stored: Box::new(stored),
            order,
            columns,
        }
    }

    fn select(self, rows: RowSelection) -> Self {
        Self {
            stored: Box::new(self.stored.select(rows)),
            ..self
        }
    }

    fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            stored: Box::new(self.stored.part(rows, 0..self.stored.columns())),
            order: self.order,
            columns: part_of(&self.columns, columns),
        }
    }

    fn location(&self) -> TensorLocation<'_> {
        self.stored.location()
    }

    fn is_quantised(&self) -> bool {
        self.stored.is_quantised()
    }

    fn preload(&self) -> Result<(), LoadError> {
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

/// A matrix, in whatever form it is stored, whose rows have the length 1, in floating point.
pub struct UnitRows<'a> {
    /// Has all columns.
    stored: Box<Matrix<'a>>,
    /// The columns of this part.
    columns: Range<usize>,
}

impl<'a> UnitRows<'a> {
    /// The rows of `stored` divided by their lengths.
    fn new(stored: Matrix<'a>) -> Self {
        let columns = 0..stored.columns();
        Self {
            stored: Box::new(stored),
            columns,
        }
    }

    fn select(self, rows: RowSelection) -> Self {
        Self {
            stored: Box::new(self.stored.select(rows)),
            ..self
        }
    }

    fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            stored: Box::new(self.stored.part(rows, 0..self.stored.columns())),
            columns: part_of(&self.columns, columns),
        }
    }

    fn location(&self) -> TensorLocation<'_> {
        self.stored.location()
    }

    fn preload(&self) -> Result<(), LoadError> {
        self.stored.preload()
    }
}

impl FloatRows for UnitRows<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn rows(&self) -> usize {
        self.stored.rows()
    }

    fn columns(&self) -> usize {
        self.columns.len()
    }

    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let mut row = vec![0.0; self.stored.columns()];
        let row_len = self.columns.len() * size_of::<f32>();
        for (index, out) in rows.zip(out.chunks_exact_mut(row_len)) {
            self.stored.read_row(index, &mut row);
            let squares = row.iter().map(|&value| f64::from(value).powi(2));
            let length = squares.sum::<f64>().sqrt().max(MIN_LENGTH);
            let values = row[self.columns.clone()].iter();
            for (value, out) in values.zip(out.chunks_exact_mut(size_of::<f32>())) {
                let value = (f64::from(*value) / length) as f32;
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// The transpose of a matrix, in whatever form that is stored: quantised weights are dequantised. Its rows are held in
/// memory while they are packed.
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
