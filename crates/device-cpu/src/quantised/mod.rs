//! GEMM over weights of 8 or 4 bits.
//!
//! A weight is `scale * code + offset`; consecutive inputs of an output share scale and offset. Activations are
//! rounded to 8 bits before the product, with one scale per 32 elements:
//!
//! ```text
//! k           0        32        64        96        128
//! codes       | block   | block   | block   | block   |  exact sums of products in i32
//! activations | scale   | scale   | scale   | scale   |
//! weights     | scale, offset of group 0    | group 1 |  a group is a whole number of blocks
//! out = sum over blocks in order: f32(sum) * (scale * scale) + offset * sum of activations
//! ```
//!
//! The sums of a block are exact, and blocks are added in order with one rounding each, so all instruction sets give
//! the same bits, whatever rows are multiplied together.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod multiply;
mod pack;
mod panel_bytes;
mod panel_format;
mod panels;
mod portable;
mod rounded;
mod tile;

pub(super) use activations::RoundedActivations;
pub(super) use multiply::multiply_panel;
pub(super) use panel_format::PanelBits;
pub(super) use panels::Panels;

pub use panel_bytes::PANELS_VERSION;
pub use rounded::Rounded;

/// Inputs per block: those that share a scale of the activations.
pub const BLOCK: usize = 32;
