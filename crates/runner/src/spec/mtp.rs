//! A head for multi-token prediction.

use super::{ModelSpec, Module};

/// A head that predicts the token behind the next one, in the checkpoint of its model, with the model's widths.
#[derive(Clone, Debug, PartialEq)]
pub struct MtpSpec {
    /// Its layer, as a model of one layer.
    pub layer: ModelSpec,
    /// The norm of embedded tokens, `[hidden_size]`.
    pub embedding_norm: Module,
    /// The norm of states, `[hidden_size]`.
    pub state_norm: Module,
    /// The projection of both norms' results, the embedding's first, `[hidden_size, 2 * hidden_size]`.
    pub projection: Module,
    /// The norm behind its layer, `[hidden_size]`.
    pub final_norm: Module,
    /// Its embedding of tokens, which may be missing: it is the model's then.
    pub embedding: Option<Module>,
    /// Its output layer, which may be missing: it is the model's then.
    pub output_layer: Option<Module>,
}
