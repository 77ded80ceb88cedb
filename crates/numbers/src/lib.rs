//! L0: weights as plain data: element types, matrices, quantised formats, floats of 8 bits.
//!
//! ```text
//! matrix.rs      float matrices as a checkpoint stores them
//! quantised.rs   matrices of integers with scales
//! e4m3.rs        floats of 8 bits
//! ```

#![forbid(unsafe_code)]

mod e4m3;
mod matrix;
mod quantised;

pub use e4m3::{MAX_E4M3, from_e4m3, to_e4m3};
pub use matrix::{Dtype, FloatRows, NotFinite, RawMatrix, Stacking, convert_elements};
pub use quantised::{
    CodeBits, GROUP_UNIT, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, TWICE_E2M1,
    can_be_packed_together,
};
