//! Operands that are weights on a device.

use std::ops::Range;

use super::attention::{HeadShape, QkNorm};
use super::load::Load;

/// A projection, or several that share their input.
pub struct Linear<D: Load> {
    /// The weights.
    pub matrix: D::Matrix,
    /// The biases of all outputs.
    pub bias: Option<D::Vector>,
    /// Its place in the weights of adapters; `None` if they have none for it.
    pub place: Option<usize>,
}

/// A projection of some of the inputs, whose products are summed by themselves.
pub struct Tile<D: Load> {
    /// The inputs.
    pub inputs: Range<usize>,
    /// Their projection.
    pub linear: Linear<D>,
}

/// Where the rows of the token embedding are.
pub enum EmbeddingTable<'a, D: Load> {
    /// In a table of its own.
    Own(&'a D::Embedding),
    /// In the output projection, which is tied to it and [has rows](super::PackedWeights::has_rows).
    Tied(&'a D::Matrix),
}

/// How a row of the QKV projection becomes rotated queries and stored keys and values.
pub struct RopeParams<'a, D: Load> {
    /// The heads of the row.
    pub heads: HeadShape,
    /// Norms of query and key heads, before the rotation.
    pub qk_norm: Option<QkNorm<'a, D::Vector>>,
    /// The angles.
    pub angles: &'a D::Angles,
}
