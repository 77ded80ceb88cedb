//! The operations of a forward pass.

use std::ops::Range;

use super::attention::{AttentionParams, HeadBiases};
use super::expert_weights::Experts;
use super::experts::Routing;
use super::latent_weights::LatentParams;
use super::linear::{EmbeddingTable, Linear, RopeParams};
use super::low_rank::AdaptedRows;
use super::operands::{InnerActivation, LayerNorm, LogitsTransform, Norm, Output};
use super::step_io::StepIo;

/// The operations of a decoder, each as large as machines fuse them.
///
/// A matrix product reads inputs and weights and adds up in f32; [`Load::Inputs`](super::Load::Inputs) and
/// [`Load::Sums`](super::Load::Sums) are the rows before and after it. What is computed for a sequence does not depend
/// on the rest of the step.
///
/// # Panics
///
/// Operations panic if the shapes of their operands do not agree.
pub trait Ops: StepIo {
    /// `out = scale * table[token_ids]`, `[num_tokens, width]`.
    fn embed(
        &mut self,
        step: &Self::Step<'_>,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Self::Sums,
    );

    /// `out += table[positions]`, the positions of the step's tokens in their sequences, `[num_tokens, width]`.
    fn add_positions(
        &mut self,
        step: &Self::Step<'_>,
        table: &Self::Embedding,
        out: &mut Self::Sums,
    );

    /// `out = norm(x)`, `[num_rows, width]` both, as in all norms of rows.
    fn norm(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Inputs,
    );

    /// `hidden = norm(hidden); out = hidden`, with a layer norm: of embedded tokens, and behind residual sums. Other
    /// norms are operations of [`StateOps`](super::StateOps).
    fn norm_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Self::Sums,
        norm: LayerNorm<'_, Self::Vector>,
        out: &mut Self::Inputs,
    );

    /// `hidden += norm(x)`.
    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        norm: Norm<'_, Self::Vector>,
        hidden: &mut Self::Sums,
    );

    /// `hidden *= factor`, `[num_rows, hidden_size]`.
    fn scale(&mut self, num_rows: usize, factor: f32, hidden: &mut Self::Sums);

    /// `hidden += x; out = norm(hidden)`.
    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Self::Sums,
        hidden: &mut Self::Sums,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Inputs,
    );

    /// `out = x * W^T + bias`, or this added to `out`; adapters change rows. `x` is `[num_rows, inputs]`, `out` is
    /// `[num_rows, outputs]`.
    fn project(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        output: Output,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Self::Sums,
    );

    /// `out = activation(x * W^T + bias)`, gated or not; adapters are added in front of the activation. `x` is
    /// `[num_rows, inputs]`, `out` is `[num_rows, width of the activation]`.
    fn project_activated(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        linear: &Linear<Self>,
        activation: InnerActivation,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Self::Inputs,
    );

    /// Changes the embeddings of tokens that have adapters, `[num_tokens, width]`. `scale` is the factor of
    /// [`Ops::embed`]. On a rank of several, adapters have weights for some tokens only, from `first_token` on; those
    /// of others stay as they are.
    fn adapt_embeddings(
        &mut self,
        step: &Self::Step<'_>,
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut Self::Sums,
    );

    /// Chooses the experts of each row by the logits of a router, `[num_rows, num_logits]`, and the corrections of
    /// [scores](super::GroupedRouting), `[num_experts]`.
    fn route(
        &mut self,
        num_rows: usize,
        logits: &Self::Sums,
        routing: &Routing,
        correction: Option<&Self::Vector>,
        rows: &mut Self::ExpertRows,
    );

    /// `out = sum over the chosen experts of weight * down(activation(gate(x)) * up(x))`, and that of the shared
    /// expert, or all of this added to `out`. Experts of a row are added in the order of their scores, largest first,
    /// and the shared one last. [`Ops::route`] has chosen them. `x` and `out` are `[num_rows, hidden_size]`.
    fn mix_experts(
        &mut self,
        num_rows: usize,
        x: &Self::Inputs,
        experts: &Experts<Self>,
        rows: &mut Self::ExpertRows,
        output: Output,
        out: &mut Self::Sums,
    );

    /// The experts that the last call of [`Ops::route`] has chosen for any row, for a profile. May wait for it.
    fn num_touched_experts(&self, rows: &Self::ExpertRows) -> usize;

    /// Normalises the queries and keys of `qkv`, `[num_tokens, qkv_len]`, if the model does so, rotates them,
    /// multiplies queries with the [factors](super::RopeTable::query_factor) of their positions, writes them to `q`,
    /// `[num_tokens, q_len]`, and stores keys and values in a layer of the cache. `sink_q` takes the queries with the
    /// rotation of their [shifted](AttentionParams::shifted) positions. `qkv` may hold anything afterwards. Without key
    /// heads nothing is stored, and `layer` is the layer whose keys and values attention reads.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn rope_and_store(
        &mut self,
        step: &Self::Step<'_>,
        params: RopeParams<'_, Self>,
        qkv: &mut Self::Sums,
        cache: &mut Self::KvCache,
        layer: usize,
        q: &mut Self::Inputs,
        sink_q: Option<(&AttentionParams, &mut Self::Inputs)>,
    );

    /// Attention of the queries of all tokens over the cached positions of their sequences that they see. Behind the
    /// queries come those for the sinks, if they are others. Both and `out` are `[num_tokens, q_len]`.
    ///
    /// # Panics
    ///
    /// If there are linear `biases` that [`StepCapacity::has_slopes`](super::StepCapacity::has_slopes) did not
    /// announce.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn paged_attention(
        &mut self,
        step: &Self::Step<'_>,
        params: &AttentionParams,
        biases: HeadBiases<'_, Self::Vector>,
        queries: (&Self::Inputs, Option<&Self::Inputs>),
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Inputs,
    );

    /// Normalises the latent of each row of `kv`, `[num_rows, latent_dim + rotary_dim]`, rotates the shared key behind
    /// it, and stores both in a layer of the cache, whose [values are in the keys](super::KvValues::InKeys).
    fn store_latents(
        &mut self,
        step: &Self::Step<'_>,
        params: &LatentParams<'_, Self>,
        kv: &Self::Sums,
        cache: &mut Self::KvCache,
        layer: usize,
    );

    /// [Latent attention](super::LatentShape) of the queries of all tokens, `[num_rows, num_heads * (content_dim +
    /// rotary_dim)]`, which are not rotated yet. `out` is `[num_rows, num_heads * value_dim]`.
    fn latent_attention(
        &mut self,
        step: &Self::Step<'_>,
        params: &LatentParams<'_, Self>,
        q: &Self::Sums,
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Inputs,
    );

    /// Whether a projection with all of its inputs adds its result to the residual stream. Otherwise the result is
    /// stored and added afterwards, like partial sums of ranks.
    fn has_whole_sums(&self) -> bool {
        true
    }

    /// Moves the step's kept rows of both, `[num_tokens, width]`, to the front.
    fn keep_rows(
        &mut self,
        step: &Self::Step<'_>,
        hidden: &mut Self::Sums,
        attended: &mut Self::Inputs,
    );

    /// Moves the step's sampled rows to the front. `states` has its kept rows.
    fn keep_sampled_rows(&mut self, step: &Self::Step<'_>, states: &mut Self::Inputs);

    /// `out = transform(states * W^T + bias)`, `[num_rows, vocab_size]`, to be read with [`StepIo::results`]; adapters
    /// change rows in front of the transform.
    fn logits(
        &mut self,
        num_rows: usize,
        states: &Self::Inputs,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Self::Logits,
    );

    /// `out = transform(states[rows] * W^T + bias)`, `[rows.len(), vocab_size]`, in memory of the host. For the logits
    /// of prompts, which are rarely wanted. Adapters change rows in front of the transform, counted from the first of
    /// `rows`.
    fn context_logits(
        &mut self,
        states: &Self::Inputs,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut [f32],
    );
}
