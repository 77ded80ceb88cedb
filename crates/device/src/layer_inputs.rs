//! Layers that read the token again: per-layer embeddings.
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
//!
//! Several residual streams (AltUp; Baykal et al., arXiv:2301.13310), of which layers compute the first one:
//!
//! ```text
//! predict  stream[i] += sum over j of p[i, j] * stream[j]        p = prediction(m), m = tanh(routed)
//! layer    stream[0] becomes what its blocks make of it
//! correct  stream[i] = predicted[i] + (c[i] + 1) * (stream[0] - predicted[0])        c = correction(m) likewise
//! ```

use super::lacking::Lacking;
use super::load::Load;
use super::operands::Activation;
use super::step_io::StepIo;

/// The most streams that a model may have.
pub const MAX_STREAMS: usize = 8;

/// How the inputs of all layers are made.
pub struct LayerInputParams<'a, D: Load> {
    /// The embeddings of all layers, `[_, num_layers * width]`. Tokens that it lacks have its first row.
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

/// The coefficients that mix streams.
pub struct StreamCoefs<'a, D: Load> {
    /// The projection that chooses coefficients, `[num_rows, num_streams]`. Its hyperbolic tangents are rounded to
    /// bf16.
    pub routed: &'a D::Sums,
    /// From these to the coefficients, `[num_streams, num_coefs]`: `num_streams^2` to predict, `num_streams` to
    /// correct.
    pub weights: &'a D::Vector,
}

/// Extra operations of models whose layers have inputs of their own, factors of the residual stream or of the columns
/// of what blocks compute, experts beside feed-forward blocks, several residual streams, gates that are mostly 0, norms
/// inside of blocks, or clipped queries, keys and values.
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

    /// Multiplies the queries of the step's tokens with the [factors](super::RopeTable::query_factor) of their
    /// positions, `[num_tokens, q_len]`, where they are not rotated as a whole.
    fn scale_queries(self, device: &mut D, step: &D::Step<'_>, angles: &D::Angles, q: &mut D::Sums);

    /// `out = x * weight`, `[num_rows, hidden_size]`, with a weight for each column.
    fn scale_columns(
        self,
        device: &mut D,
        num_rows: usize,
        x: &D::Sums,
        weight: &D::Vector,
        out: &mut D::Inputs,
    );

    /// `x = x * weight`, `[num_rows, hidden_size]`, with a weight for each column.
    fn scale_columns_in_place(
        self,
        device: &mut D,
        num_rows: usize,
        weight: &D::Vector,
        x: &mut D::Sums,
    );

    /// Predicts the streams, of which `hidden` is the first one. `predicted` becomes a copy of that.
    fn predict_streams(
        self,
        device: &mut D,
        num_rows: usize,
        coefs: StreamCoefs<'_, D>,
        hidden: &mut D::Sums,
        others: &mut [D::Sums],
        predicted: &mut D::Sums,
    );

    /// Corrects the streams by what a layer has made of the first one.
    fn correct_streams(
        self,
        device: &mut D,
        num_rows: usize,
        coefs: StreamCoefs<'_, D>,
        predicted: &D::Sums,
        hidden: &mut D::Sums,
        others: &mut [D::Sums],
    );

    /// Gives the rows of `x` the root mean squares of the rows of `like`. The mean square of `x` counts as at least
    /// 1e-5.
    fn match_magnitudes(self, device: &mut D, num_rows: usize, like: &D::Sums, x: &mut D::Sums);

    /// `out = activation(max(gate - cutoff, 0)) * up`, where the cutoff of a row is `num_deviations` standard
    /// deviations above the mean of its gates. `gate_up` has all gates of a row before its ups, `[num_rows, 2 *
    /// width]`; `out` is `[num_rows, width]`. Afterwards `gate_up` may hold anything.
    fn gate_sparsely(
        self,
        device: &mut D,
        num_rows: usize,
        activation: Activation,
        num_deviations: f32,
        gate_up: &mut D::Sums,
        out: &mut D::Inputs,
    );

    /// `x = x / sqrt(mean(x^2) + eps) * weight`, `[num_rows, weight.len()]`: an RMS norm of what a block has made.
    fn norm_inputs(
        self,
        device: &mut D,
        num_rows: usize,
        weight: &D::Vector,
        eps: f32,
        x: &mut D::Inputs,
    );

    /// `x = min(max(x, -bound), bound)`, for whole rows.
    fn clip(self, device: &mut D, num_rows: usize, bound: f32, x: &mut D::Sums);
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

    fn scale_queries(self, _: &mut D, _: &D::Step<'_>, _: &D::Angles, _: &mut D::Sums) {
        match self {}
    }

    fn scale_columns(self, _: &mut D, _: usize, _: &D::Sums, _: &D::Vector, _: &mut D::Inputs) {
        match self {}
    }

    fn scale_columns_in_place(self, _: &mut D, _: usize, _: &D::Vector, _: &mut D::Sums) {
        match self {}
    }

    fn predict_streams(
        self,
        _: &mut D,
        _: usize,
        _: StreamCoefs<'_, D>,
        _: &mut D::Sums,
        _: &mut [D::Sums],
        _: &mut D::Sums,
    ) {
        match self {}
    }

    fn correct_streams(
        self,
        _: &mut D,
        _: usize,
        _: StreamCoefs<'_, D>,
        _: &D::Sums,
        _: &mut D::Sums,
        _: &mut [D::Sums],
    ) {
        match self {}
    }

    fn match_magnitudes(self, _: &mut D, _: usize, _: &D::Sums, _: &mut D::Sums) {
        match self {}
    }

    fn gate_sparsely(
        self,
        _: &mut D,
        _: usize,
        _: Activation,
        _: f32,
        _: &mut D::Sums,
        _: &mut D::Inputs,
    ) {
        match self {}
    }

    fn norm_inputs(self, _: &mut D, _: usize, _: &D::Vector, _: f32, _: &mut D::Inputs) {
        match self {}
    }

    fn clip(self, _: &mut D, _: usize, _: f32, _: &mut D::Sums) {
        match self {}
    }
}
