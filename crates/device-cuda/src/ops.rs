//! The operations of a forward pass on a GPU, as a device has them.

use std::ops::Range;

use cudarc::driver::PushKernelArg;
use half::bf16;

use super::Cuda;
use super::attention::Attended;
use super::expert_rows::ExpertRows;
use super::graphs::StepMode;
use super::kernels::{VECTOR, launch, shared_row_grid};
use super::kv_cache::KvCache;
use super::logits::Logits;
use super::memory::DeviceMemory;
use super::rows::Rows;
use super::step::CudaStep;
use super::uploads::{Embedding, Vector};
use inflight_device::{
    AdaptedRows, AttentionParams, EmbeddingTable, Experts, HeadBiases, InnerActivation, KvDtype,
    LatentParams, LayerNorm, Linear, LogitsTransform, Norm, Ops, Output, PackedWeights, QkNorm,
    QkNormKind, RopeParams, Routing,
};

impl Ops for Cuda {
    fn embed(
        &mut self,
        step: &CudaStep,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let (table, hidden_size) = match table {
            EmbeddingTable::Own(embedding) => (embedding.memory.address(), embedding.hidden_size),
            EmbeddingTable::Tied(matrix) => (matrix.rows_address(), matrix.k()),
        };
        let config = shared_row_grid(step.num_rows, hidden_size.div_ceil(VECTOR));
        let sampled = self.sampled_tokens.as_ref();
        let sampled = sampled.map_or(0, |tokens| tokens.address());
        launch!(
            self,
            self.kernels.embed,
            "embed",
            config,
            out.address(),
            table,
            step.token_ids,
            sampled,
            scale,
            hidden_size as i32
        );
    }

    fn add_positions(&mut self, step: &CudaStep, table: &Embedding, out: &mut Rows<f32>) {
        let width = table.hidden_size;
        launch!(
            self,
            self.kernels.add_positions,
            "add_positions",
            shared_row_grid(step.num_rows, width.div_ceil(VECTOR)),
            out.address(),
            table.memory.address(),
            step.positions,
            width as i32
        );
    }

    fn norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        self.norm_rows(num_rows, x, norm, out);
    }

    fn norm_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: LayerNorm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        self.layer_norm_rows_in_place(num_rows, hidden, norm, out);
    }

    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        hidden: &mut Rows<f32>,
    ) {
        self.add_normed_rows(num_rows, x, norm, hidden);
    }

    fn scale(&mut self, num_rows: usize, factor: f32, hidden: &mut Rows<f32>) {
        launch!(
            self,
            self.kernels.scale_rows,
            "scale_rows",
            shared_row_grid(self.padded(num_rows), hidden.width()),
            hidden.address(),
            factor,
            hidden.width() as i32
        );
    }

    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        self.add_norm_rows(num_rows, x, hidden, norm, out);
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
        self.project_rows(num_rows, x, linear, output, adapted, out);
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
        self.project_rows_activated(num_rows, x, linear, activation, adapted, out);
    }

    fn adapt_embeddings(
        &mut self,
        step: &CudaStep,
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let tokens = (step.adapters[0], step.token_ids);
        self.adapt_embedded(tokens, first_token, adapted, scale, out);
    }

    fn route(
        &mut self,
        num_rows: usize,
        logits: &Rows<f32>,
        routing: &Routing,
        correction: Option<&Vector>,
        rows: &mut ExpertRows,
    ) {
        self.route_rows(num_rows, logits, routing, correction, rows);
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
        self.mix_rows(num_rows, x, experts, rows, output, out);
    }

    fn num_touched_experts(&self, rows: &ExpertRows) -> usize {
        match self.mode {
            StepMode::Eager => rows.num_touched(&self.stream),
            // The operations of a graph have no profile of their own.
            StepMode::Recording(_) | StepMode::Replaying(_) => 0,
        }
    }

    fn rope_and_store(
        &mut self,
        step: &CudaStep,
        params: RopeParams<'_, Self>,
        qkv: &mut Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
        q: &mut Rows<bf16>,
        sink_q: Option<(&AttentionParams, &mut Rows<bf16>)>,
    ) {
        let heads = params.heads;
        let (sink_q, last_for_sinks) = sink_q.map_or((0, 0), |(attention, sink_q)| {
            (sink_q.address(), attention.shifted(u32::MAX))
        });
        let arrays = cache.layer(layer);
        let (q_norm, k_norm, eps) = match params.qk_norm {
            None => (0, 0, 0.0),
            Some(QkNorm {
                q, k, kind, eps, ..
            }) => {
                let (q, k) = (q.memory.address(), k.memory.address());
                match kind {
                    QkNormKind::Head | QkNormKind::RotatedHead => (q, k, eps),
                    QkNormKind::Row => {
                        self.normalise_rows(step.num_rows, heads, qkv, (q, k, eps));
                        (0, 0, 0.0)
                    }
                    QkNormKind::BiasedLayer => {
                        panic!("head norms with biases are computed on the CPU")
                    }
                    QkNormKind::LayerOfHead => {
                        self.normalise_heads(step.num_rows, heads, qkv, (q, k, eps));
                        (0, 0, 0.0)
                    }
                }
            }
        };
        let norms_follow = params
            .qk_norm
            .is_some_and(|norm| norm.kind == QkNormKind::RotatedHead);
        let query_factors = params.angles.query_factors.as_ref();
        let kernel = match cache.layout.dtype {
            KvDtype::Bf16 => &self.kernels.rope_and_store_bf16,
            KvDtype::Int8 => &self.kernels.rope_and_store_int8,
            KvDtype::Fp8 => &self.kernels.rope_and_store_fp8,
        };
        let config = shared_row_grid(step.num_rows, qkv.width().div_ceil(2 * VECTOR));
        launch!(
            self,
            kernel,
            "rope_and_store",
            config,
            q.address(),
            sink_q,
            last_for_sinks,
            arrays.keys,
            arrays.values,
            arrays.key_scales,
            arrays.value_scales,
            qkv.address(),
            params.angles.memory.address(),
            q_norm,
            k_norm,
            eps,
            step.positions,
            step.slots(cache.group(layer)),
            heads.num_q_heads as i32,
            heads.num_kv_heads as i32,
            heads.head_dim as i32,
            cache.layout.block_size.tokens().0 as i32,
            query_factors.map_or(0, DeviceMemory::address),
            i32::from(norms_follow)
        );
    }

    fn paged_attention(
        &mut self,
        step: &CudaStep,
        params: &AttentionParams,
        biases: HeadBiases<'_, Vector>,
        (q, sink_q): (&Rows<bf16>, Option<&Rows<bf16>>),
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let Some(attention) = &self.attention else {
            unreachable!("reserve comes before steps");
        };
        let attended = Attended {
            groups: attention.groups(),
            sink_logits: biases
                .sink_logits
                .map_or(0, |logits| logits.memory.address()),
            slopes: biases.slopes.map_or(0, |slopes| slopes.memory.address()),
            q: q.address(),
            sink_q: sink_q.map_or(0, Rows::address),
            out: out.address(),
        };
        self.attend(step, params, attended, cache, layer);
    }

    fn store_latents(
        &mut self,
        step: &CudaStep,
        params: &LatentParams<'_, Self>,
        kv: &Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        self.store_latents_of_rows(step, params, kv, cache, layer);
    }

    fn latent_attention(
        &mut self,
        step: &CudaStep,
        params: &LatentParams<'_, Self>,
        q: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        self.attend_to_latents(step, params, q, cache, layer, out);
    }

    fn keep_rows(&mut self, step: &CudaStep, hidden: &mut Rows<f32>, attended: &mut Rows<bf16>) {
        if !step.keeps_all {
            self.gather(step.num_kept, step.kept_rows, hidden);
            self.gather(step.num_kept, step.kept_rows, attended);
        }
    }

    fn keep_sampled_rows(&mut self, step: &CudaStep, states: &mut Rows<bf16>) {
        if !step.samples_all {
            self.gather(step.num_sampled, step.sampled_rows, states);
        }
    }

    fn logits(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Logits,
    ) {
        self.logits_of_rows(num_rows, states, lm_head, transform, adapted, out);
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
        self.rows_of_context_logits(states, rows, lm_head, transform, adapted, out);
    }
}
