//! A float matrix whose file holds it by columns.

use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::allocation::try_zeroed_vec;

use super::row_order::{RowOrder, RowSelection};
use super::tensor::{Tensor, TensorLocation};
use inflight_base::LoadError;
use inflight_numbers::{Dtype, FloatRows};

/// Columns that are read at a time.
const BLOCK: usize = 64;

/// The weights of a linear layer that are stored as `[inputs, outputs]`. Its rows are held in memory while they are
/// packed.
pub struct Transposed<'a> {
    stored: Tensor<'a>,
    /// The stored columns that are its rows.
    rows: RowSelection,
    /// `[rows, columns]`, little-endian, once they have been read.
    values: OnceLock<Vec<u8>>,
}

impl<'a> Transposed<'a> {
    /// The transpose of a matrix.
    pub fn new(stored: Tensor<'a>) -> Self {
        Self {
            stored,
            rows: RowSelection {
                first: 0,
                len: stored.columns(),
                order: RowOrder::Same,
                runs: None,
            },
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
        Self {
            stored: self.stored.part(columns, 0..self.stored.columns()),
            rows: self.rows.part(rows),
            values: OnceLock::new(),
        }
    }

    /// Its file and name.
    pub fn location(&self) -> TensorLocation<'a> {
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
        let values = match self.stored.dtype().size() {
            2 => self.transpose::<2>()?,
            _ => self.transpose::<4>()?,
        };
        // Another thread may have read the same rows.
        let _ = self.values.set(values);
        Ok(())
    }

    /// The rows, of elements of `SIZE` bytes.
    fn transpose<const SIZE: usize>(&self) -> Result<Vec<u8>, LoadError> {
        let columns = self.stored.rows();
        // Not rows of other ranks, other experts, or other layers.
        let rows = || (0..self.rows.len).map(|row| self.rows.stored_row(row));
        let first_stored = rows().min().unwrap_or(0);
        let end_stored = rows().max().map_or(first_stored, |last| last + 1);
        let stored = self.stored.part(0..columns, first_stored..end_stored);
        let num_stored = stored.columns();
        let len = self.rows.len * columns * SIZE;
        let no_memory = |()| LoadError::Resource(format!("no memory for {len} bytes of weights"));
        let mut values = try_zeroed_vec(len).map_err(no_memory)?;
        let mut block = vec![0; BLOCK.min(columns) * num_stored * SIZE];
        for first in (0..columns).step_by(BLOCK) {
            let num = BLOCK.min(columns - first);
            let block = &mut block[..num * num_stored * SIZE];
            stored.read_rows(first..first + num, block);
            let (block, _) = block.as_chunks::<SIZE>();
            for (row, out) in values.chunks_exact_mut(columns * SIZE).enumerate() {
                let (out, _) = out[first * SIZE..].as_chunks_mut::<SIZE>();
                let stored = block.iter().skip(self.rows.stored_row(row) - first_stored);
                for (out, value) in out.iter_mut().zip(stored.step_by(num_stored)) {
                    *out = *value;
                }
            }
        }
        Ok(values)
    }
}

impl FloatRows for Transposed<'_> {
    fn dtype(&self) -> Dtype {
        self.stored.dtype()
    }

    fn rows(&self) -> usize {
        self.rows.len
    }

    fn columns(&self) -> usize {
        self.stored.rows()
    }

    /// # Panics
    /// If it has not been [preloaded](Transposed::preload).
    fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let row_bytes = self.columns() * self.dtype().size();
        let values = self.values.get().expect("preloaded");
        out.copy_from_slice(&values[rows.start * row_bytes..rows.end * row_bytes]);
    }
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

    use super::*;
    use crate::{RowRuns, SafetensorsFile};
    use inflight_numbers::RawMatrix;

    /// Both types, more inputs than are read at a time, and rows with others between.
    #[test]
    fn columns_are_rows() {
        const INPUTS: usize = 150;
        const OUTPUTS: usize = 12;
        let value = |input: usize, output: usize| (input * OUTPUTS + output) as f32;
        let name = format!("inflight-transposed-{}.safetensors", std::process::id());
        let path = std::env::temp_dir().join(name);
        let values = (0..INPUTS * OUTPUTS).map(|index| index as f32);
        let f32s: Vec<_> = values.clone().flat_map(f32::to_le_bytes).collect();
        let f16s: Vec<_> = values
            .flat_map(|value| half::f16::from_f32(value).to_le_bytes())
            .collect();
        let shape = vec![INPUTS, OUTPUTS];
        let tensors = [("f32", Dtype::F32, &f32s), ("f16", Dtype::F16, &f16s)];
        let views = tensors.map(|(name, dtype, bytes)| {
            let view = TensorView::new(dtype, shape.clone(), bytes);
            (name, view.expect("consistent"))
        });
        serialize_to_file(views, None, &path).expect("written");
        let file = SafetensorsFile::open(&path, "").expect("it opens");
        let _ = std::fs::remove_file(&path);
        for name in ["f32", "f16"] {
            let tensor = file.tensor(name).expect("there");
            let stored = tensor.to_float().expect("floats");
            let whole = Transposed::new(stored);
            let selection = RowSelection {
                first: 2,
                len: 4,
                order: RowOrder::Same,
                runs: Some(RowRuns::new(2, 6)),
            };
            let some = Transposed::new(stored).select(selection);
            let all: Vec<_> = (0..OUTPUTS).collect();
            for (matrix, outputs) in [(whole, all), (some, vec![2, 3, 8, 9])] {
                matrix.preload().expect("memory");
                assert_eq!((matrix.rows(), matrix.columns()), (outputs.len(), INPUTS));
                let mut bytes = vec![0; 2 * INPUTS * matrix.dtype().size()];
                for (row, pair) in outputs.windows(2).enumerate() {
                    matrix.read_rows(row..row + 2, &mut bytes);
                    let read = RawMatrix::new(matrix.dtype(), 2, INPUTS, &bytes);
                    for (row, &output) in pair.iter().enumerate() {
                        let mut values = vec![0.0; INPUTS];
                        read.row_to_f32(row, &mut values);
                        let expected: Vec<_> =
                            (0..INPUTS).map(|input| value(input, output)).collect();
                        assert_eq!(values, expected, "{name}, output {output}");
                    }
                }
            }
        }
    }
}
