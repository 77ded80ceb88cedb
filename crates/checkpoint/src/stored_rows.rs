//! Quantised rows as a checkpoint's files have them.

use std::ops::Range;

use inflight_base::LoadError;
use inflight_numbers::QuantisedRows;

/// Quantised rows in a checkpoint's files.
pub trait StoredQuantisedRows<'a>: QuantisedRows + Send {
    /// Reads into memory what single rows cannot be read without: formats that scatter a row's codes over the whole
    /// tensor are held in memory while they are packed.
    ///
    /// # Errors
    /// The file has become shorter, or memory is short.
    fn preload(&self) -> Result<(), LoadError>;

    /// Some of its rows, and some columns of each: whole groups; all, if there is an
    /// [order of inputs](QuantisedRows::input_order). Of the files, only these are read, as far as the format allows.
    ///
    /// # Panics
    /// It does not have them.
    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a>;
}

/// Rows that become f32 as they are read.
pub trait DequantisedRows: Send + Sync {
    /// As [`StoredQuantisedRows::preload`].
    ///
    /// # Errors
    /// As there.
    fn preload(&self) -> Result<(), LoadError> {
        Ok(())
    }

    /// Writes some elements of a row.
    fn read(&self, row: usize, columns: Range<usize>, out: &mut [f32]);
}
