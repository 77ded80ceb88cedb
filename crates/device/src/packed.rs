//! Packed quantised weights as bytes, for a file that saves the next load from rounding them again.

use inflight_numbers::QuantFormat;
use inflight_numbers::Stacking;

/// The bytes of a packed quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBytes<'a> {
    /// The codes.
    pub codes: &'a [u8],
    /// The scales.
    pub scales: &'a [u8],
}

/// A part of a packed quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedPart {
    /// The codes.
    Codes,
    /// The scales.
    Scales,
}

/// Packed bytes are read in pieces of this size.
pub const PACKED_PIECE_BYTES: usize = 1 << 20;

/// Codes or scales to be read from somewhere.
#[derive(Clone, Copy)]
pub struct PackedReader<'a> {
    /// The number of bytes.
    pub num_bytes: usize,
    /// Fills a buffer from an offset on. Called from many threads, once for each piece of [`PACKED_PIECE_BYTES`]; the
    /// last piece may be shorter.
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
