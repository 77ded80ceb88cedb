//! Packed quantised weights as bytes, for a file that saves the next load from rounding them again.

use super::matrix::Stacking;
use super::quantised::QuantFormat;

/// The bytes of a packed quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBytes<'a> {
    /// The codes.
    pub codes: &'a [u8],
    /// The scales.
    pub scales: &'a [u8],
}

/// Codes or scales to be read from somewhere.
#[derive(Clone, Copy)]
pub struct PackedReader<'a> {
    /// The number of bytes.
    pub num_bytes: usize,
    /// Writes the bytes from an offset on, as many as fit. Called from many threads.
    pub read: &'a (dyn Fn(usize, &mut [u8]) + Sync),
}

/// The shape of quantised matrices that are packed as one.
#[derive(Clone, Copy, Debug)]
pub struct PackedShape<'a> {
    /// Outputs of each part.
    pub num_rows: &'a [usize],
    /// Inputs, the same for all parts.
    pub columns: usize,
    /// How the parts are combined.
    pub stacking: Stacking,
    /// Their format.
    pub format: QuantFormat,
}
