//! The operations of a forward pass on CPU, as a device has them.

use std::ops::Range;

use half::bf16;

use super::Cpu;
use super::embedding::Embedding;
use super::experts::ExpertRows;
use super::kv_cache::KvCache;
use super::logits::CpuLogits;
use super::rows::Rows;
use super::step::CpuStep;
use inflight_device::{
    AdaptedRows, AttentionParams, EmbeddingTable, Experts, Gating, HeadBiases, InnerActivation,
    LatentParams, LayerNorm, Linear, LogitsTransform, Norm, Ops, Output, QkNorm, RopeParams,
    Routing,
};

impl Ops for Cpu {
    fn embed(
        &mut self,
        step: &CpuStep<'_>,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let out = out.first_mut(step.token_ids.len());
        match table {
            EmbeddingTable::Own(embedding) => {
                self.embed(&embedding.table(), step.token_ids, scale, out);
            }
            EmbeddingTable::Tied(matrix) => self.embed_packed(matrix, step.token_ids, scale, out),
        }
    }

    fn add_positions(&mut self, step: &CpuStep<'_>, table: &Embedding, out: &mut Rows<f32>) {
        let batch = &step.batch;
        let out = out.first_mut(batch.num_tokens());
        let position = |token| batch.place(token).1;
        self.add_positions(table.rows(), table.hidden_size(), position, out);
    }

    fn norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        let norm = of_slices(norm);
        self.norm(x.first(num_rows), x.width(), norm, out.first_mut(num_rows));
    }

    fn norm_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: LayerNorm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        self.norm_rows_in_place(num_rows, hidden, norm.into(), out);
    }

    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        hidden: &mut Rows<f32>,
    ) {
        let (norm, hidden) = (of_slices(norm), hidden.first_mut(num_rows));
        self.add_normed(x.first(num_rows), x.width(), norm, hidden);
    }

    fn scale(&mut self, num_rows: usize, factor: f32, hidden: &mut Rows<f32>) {
        let width = hidden.width();
        let hidden = hidden.first_mut(num_rows);
        self.for_each_row_block(num_rows, width, hidden, |_, hidden| {
            hidden.iter_mut().for_each(|value| *value *= factor);
        });
    }

    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        self.add_norm(
            x.first(num_rows),
            x.width(),
            hidden.first_mut(num_rows),
            of_slices(norm),
            out.first_mut(num_rows),
        );
    }

    fn project(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        output: Output,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows<f32>,
    ) {
        let (x, out) = (x.first(num_rows), out.first_mut(num_rows));
        self.linear(x, num_rows, linear, adapted, output, out);
    }

    fn project_activated(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: InnerActivation,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows<bf16>,
    ) {
        let (x, out) = (x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        self.with_added_rows(
            x,
            num_rows,
            adapted,
            matrix.n(),
            |cpu, added| match activation {
                InnerActivation::Gated(activation) => {
                    let gating = (activation.into(), added);
                    cpu.gemm_gated_with(x, num_rows, matrix, bias, gating, out);
                }
                InnerActivation::ScaledGate(activation, factor) => {
                    let gating = (Gating::Scaled(activation, factor), added);
                    cpu.gemm_gated_with(x, num_rows, matrix, bias, gating, out);
                }
                InnerActivation::Plain(activation) => {
                    let activation = (activation, added);
                    cpu.gemm_activated(x, num_rows, matrix, bias, activation, out);
                }
            },
        );
    }

    fn adapt_embeddings(
        &mut self,
        step: &CpuStep<'_>,
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let (token_ids, n) = (step.token_ids, out.width());
        let out = out.first_mut(token_ids.len());
        self.adapt_embeddings(token_ids, first_token, adapted, scale, out, n);
    }

    fn route(
        &mut self,
        num_rows: usize,
        logits: &Rows<f32>,
        routing: &Routing,
        correction: Option<&Vec<f32>>,
        rows: &mut ExpertRows,
    ) {
        let correction = correction.map(Vec::as_slice);
        self.route(logits.first(num_rows), routing, correction, rows);
    }

    fn mix_experts(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        experts: &Experts<Self>,
        rows: &mut ExpertRows,
        output: Output,
        out: &mut Rows<f32>,
    ) {
        self.mix_experts(
            x.first(num_rows),
            experts,
            rows,
            output,
            out.first_mut(num_rows),
        );
    }

    fn num_touched_experts(&self, rows: &ExpertRows) -> usize {
        rows.num_touched()
    }

    fn rope_and_store(
        &mut self,
        step: &CpuStep<'_>,
        params: RopeParams<'_, Self>,
        qkv: &mut Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
        q: &mut Rows<bf16>,
        sink_q: Option<(&AttentionParams, &mut Rows<bf16>)>,
    ) {
        let num_rows = step.batch.num_tokens();
        let norm = params.qk_norm.map(of_heads);
        self.rope_and_store(
            qkv.first(num_rows),
            params.heads,
            norm,
            (params.angles, step.positions),
            &step.batch,
            cache,
            layer,
            q.first_mut(num_rows),
            sink_q.map(|(params, q)| (params, q.first_mut(num_rows))),
        );
    }

    fn paged_attention(
        &mut self,
        step: &CpuStep<'_>,
        params: &AttentionParams,
        biases: HeadBiases<'_, Vec<f32>>,
        (q, sink_q): (&Rows<bf16>, Option<&Rows<bf16>>),
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let num_rows = step.batch.num_tokens();
        self.paged_attention(
            (q.first(num_rows), sink_q.map(|q| q.first(num_rows))),
            (params, of_query_heads(biases)),
            &step.batch,
            cache,
            layer,
            out.first_mut(num_rows),
        );
    }

    fn store_latents(
        &mut self,
        step: &CpuStep<'_>,
        params: &LatentParams<'_, Self>,
        kv: &Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        let kv = kv.first(step.batch.num_tokens());
        self.store_latents(kv, params, &step.batch, cache, layer);
    }

    fn latent_attention(
        &mut self,
        step: &CpuStep<'_>,
        params: &LatentParams<'_, Self>,
        q: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let num_rows = step.batch.num_tokens();
        let (q, out) = (q.first(num_rows), out.first_mut(num_rows));
        self.latent_attention(q, params, &step.batch, cache, layer, out);
    }

    fn keep_rows(&mut self, step: &CpuStep<'_>, hidden: &mut Rows<f32>, attended: &mut Rows<bf16>) {
        hidden.keep(step.kept_rows);
        attended.keep(step.kept_rows);
    }

    fn keep_sampled_rows(&mut self, step: &CpuStep<'_>, states: &mut Rows<bf16>) {
        states.keep(step.sampled_rows);
    }

    fn logits(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut CpuLogits,
    ) {
        let (states, out) = (states.first(num_rows), out.begin(num_rows));
        self.linear(states, num_rows, lm_head, adapted, Output::Store, out);
        self.transform_logits(transform, out);
    }

    fn context_logits(
        &mut self,
        states: &Rows<bf16>,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut [f32],
    ) {
        let num_rows = rows.len();
        let states = states.range(rows);
        self.linear(states, num_rows, lm_head, adapted, Output::Store, out);
        self.transform_logits(transform, out);
    }
}

pub(super) fn of_heads<'a>(norm: QkNorm<'a, Vec<f32>>) -> QkNorm<'a> {
    QkNorm {
        q: norm.q,
        k: norm.k,
        kind: norm.kind,
        has_values: norm.has_values,
        eps: norm.eps,
    }
}

fn of_query_heads<'a>(biases: HeadBiases<'a, Vec<f32>>) -> HeadBiases<'a> {
    HeadBiases {
        sink_logits: biases.sink_logits.map(Vec::as_slice),
        slopes: biases.slopes.map(Vec::as_slice),
    }
}

fn of_slices<'a>(norm: Norm<'a, Vec<f32>>) -> Norm<'a, [f32]> {
    match norm {
        Norm::Identity => Norm::Identity,
        Norm::Rms { weight, eps } => Norm::Rms { weight, eps },
        Norm::Layer { weight, bias, eps } => Norm::Layer {
            weight,
            bias: bias.map(Vec::as_slice),
            eps,
        },
    }
}

impl Cpu {
    /// `hidden = norm(hidden); out = hidden`.
    pub(super) fn norm_rows_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        let (width, norm) = (hidden.width(), of_slices(norm));
        let (hidden, out) = (hidden.first_mut(num_rows), out.first_mut(num_rows));
        self.norm_in_place(hidden, width, norm, out);
    }

    /// `out = x * W^T + bias`, or that added to `out`, for `num_rows` rows; adapters change rows.
    fn linear(
        &mut self,
        x: &[bf16],
        num_rows: usize,
        linear: &Linear<Self>,
        adapted: Option<AdaptedRows<'_>>,
        output: Output,
        out: &mut [f32],
    ) {
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        match adapted {
            None => self.gemm(x, num_rows, matrix, bias, output, out),
            Some(adapted) => self.gemm_adapted(x, num_rows, matrix, bias, adapted, output, out),
        }
    }
}
