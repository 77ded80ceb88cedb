//! Weights that a head shares with its model.

use inflight_device::{Device, EmbeddingTable, Linear, LogitsTransform};

/// Weights of the model that a head may compute with.
pub(crate) struct SharedWeights<'a, D: Device> {
    /// The rows of the token embedding.
    pub(crate) embedding: EmbeddingTable<'a, D>,
    /// The output layer.
    pub(crate) output_layer: &'a Linear<D>,
    /// The transform of its products.
    pub(crate) transform: LogitsTransform,
}
