//! Layers that read the token again: per-layer embeddings, and factors of the residual stream (layer scalars).
//!
//! ```text
//! inputs   [num_tokens, num_layers * width]    made once a step, from the embedded tokens:
//!
//!          (norm(projection_scale * projected) + embedding_scale * table[token]) * scale
//!
//! layer i  hidden += norm(projection(activation(gate(hidden)) * inputs[i]))
//! ```
//!
//! The norm is an RMS norm over the `width` elements of a layer. Source: Gemma 3n and Gemma 4 in transformers, where
//! these inputs are called per-layer embeddings.

use super::lacking::Lacking;
use super::load::Load;
use super::operands::Activation;
use super::step_io::StepIo;

/// How the inputs of all layers are made.
pub struct LayerInputParams<'a, D: Load> {
    /// The embeddings of all layers, `[_, num_layers * width]`.
    pub table: &'a D::Embedding,
    /// The factor of these embeddings.
    pub embedding_scale: f32,
    /// The factor of projected tokens.
    pub projection_scale: f32,
    /// The weights of the norm, `[width]`.
    pub norm: &'a D::Vector,
    /// Added to the mean square.
    pub eps: f32,
    /// The factor of the sum.
    pub scale: f32,
}

/// Extra operations of models whose layers have inputs of their own, factors of the residual stream, or experts beside
/// feed-forward blocks.
pub trait LayerInputOps<D: StepIo>: Copy {
    /// Makes the inputs of all layers of the step's tokens from their projections, `[num_tokens, num_layers * width]`.
    fn combine(
        self,
        device: &mut D,
        step: &D::Step<'_>,
        params: LayerInputParams<'_, D>,
        inputs: &mut D::Sums,
    );

    /// `out = activation(gates) * inputs` of a layer. `gates` and `out` are `[num_rows, width]`. Afterwards `gates` may
    /// hold anything.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn gate(
        self,
        device: &mut D,
        num_rows: usize,
        activation: Activation,
        gates: &mut D::Sums,
        inputs: &D::Sums,
        layer: usize,
        out: &mut D::Inputs,
    );

    /// Moves the inputs of the step's kept rows to the front.
    fn keep_rows(self, device: &mut D, step: &D::Step<'_>, inputs: &mut D::Sums);

    /// `out = 0`, `[num_rows, hidden_size]`.
    fn clear(self, device: &mut D, num_rows: usize, out: &mut D::Sums);

    /// Multiplies the weight of each expert that [`Ops::route`](super::Ops::route) has chosen with its own factor,
    /// `[num_experts]`.
    fn scale_experts(
        self,
        device: &mut D,
        num_rows: usize,
        scales: &D::Vector,
        rows: &mut D::ExpertRows,
    );
}

impl<D: StepIo> LayerInputOps<D> for Lacking {
    fn combine(self, _: &mut D, _: &D::Step<'_>, _: LayerInputParams<'_, D>, _: &mut D::Sums) {
        match self {}
    }

    fn gate(
        self,
        _: &mut D,
        _: usize,
        _: Activation,
        _: &mut D::Sums,
        _: &D::Sums,
        _: usize,
        _: &mut D::Inputs,
    ) {
        match self {}
    }

    fn keep_rows(self, _: &mut D, _: &D::Step<'_>, _: &mut D::Sums) {
        match self {}
    }

    fn clear(self, _: &mut D, _: usize, _: &mut D::Sums) {
        match self {}
    }

    fn scale_experts(self, _: &mut D, _: usize, _: &D::Vector, _: &mut D::ExpertRows) {
        match self {}
    }
}
