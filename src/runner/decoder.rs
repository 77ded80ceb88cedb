//! The decoder-only transformer: one forward pass for every model and every device.
//!
//! A step is one pass over the weights for all tokens of all sequences, packed:
//!
//! ```text
//! token ids -> hidden [m, hidden_size], the residual stream
//! each layer:  hidden += o(attention(rope(qkv(norm(hidden)))))
//!              hidden += down(silu(gate) * up of norm(hidden))
//! kept rows -> lm_head(norm(hidden)) -> logits [num_rows, vocab_size]
//! ```
//!
//! The inputs of matrix products and the KV cache are bf16; all sums are f32. Only attention combines rows,
//! and only rows of the same sequence, so what is computed for a sequence does not depend on the rest of
//! the step.

use std::ops::Range;

use super::limits::RunnerLimits;
use super::model_source::ModelSource;
use super::probe::{Operation, Probe, Work};
use super::residual::{Probed, ResidualStream};
use super::rope::Rope;
use super::spec::{Activation, FeedForward, LayerSpec, ModelSpec, Norms};
use super::weights::{Layer, Weights};
use crate::base::{BlockSize, LoadError, Tokens};
use crate::device::{
    AttentionParams, Device, HeadShape, KvDtype, KvLayout, QkNorm, RopeParams, RopeTable,
    StepInputs,
};

/// A model's weights on a device, and the activations of its largest step.
pub(super) struct Decoder<D: Device> {
    weights: Weights<D>,
    /// One table for each position embedding that the layers have.
    angles: Vec<D::Angles>,
    heads: HeadShape,
    attention: Vec<LayerAttention>,
    rms_norm_eps: f32,
    kv_bytes_per_position: usize,
    residual: ResidualStream<D>,
    buffers: Buffers<D>,
}

/// The parameters of a layer's attention besides its weights.
#[derive(Clone, Copy)]
struct LayerAttention {
    params: AttentionParams,
    /// The index of its table in [`Decoder::angles`].
    angles: usize,
}

/// Activations, each `[max_num_tokens, width]`.
struct Buffers<D: Device> {
    /// Queries, keys and values before rotation.
    qkv: D::Sums,
    /// Rotated queries.
    q: D::Inputs,
    /// The output of attention, as wide as the queries.
    attended: D::Inputs,
    /// `intermediate_size` wide: the input of the down projection.
    inner: D::Inputs,
}

impl<D: Device> Decoder<D> {
    /// Loads the weights, and sizes everything for `limits`.
    pub(super) fn new(
        source: &ModelSource,
        limits: &RunnerLimits,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let spec = source.spec();
        let weights = Weights::load(source, limits.weights, device)?;
        // A sequence is not longer than the pool, unless it gives blocks back.
        let longest = limits.num_blocks.tokens(limits.block_size);
        let num_positions = match spec.largest_window(&limits.attention, limits.max_seq_len) {
            Some(_) => limits.max_seq_len,
            None => limits.max_seq_len.min(longest),
        };
        let (attention, ropes) = layer_attention(spec, limits);
        let layout = kv_layout(spec, limits.block_size, limits.kv_dtype);
        let heads = head_shape(spec);
        let max_rows = limits.max_num_tokens.index();
        Ok(Self {
            weights,
            angles: upload_angles(device, spec, &ropes, limits.max_seq_len, num_positions)?,
            heads,
            attention,
            rms_norm_eps: spec.rms_norm_eps,
            kv_bytes_per_position: D::kv_bytes_per_block(&layout, 1)
                / layout.block_size.tokens().index(),
            residual: ResidualStream::new(device, max_rows, spec.hidden_size, spec.rms_norm_eps)?,
            buffers: Buffers {
                qkv: device.alloc_sums(max_rows, heads.qkv_len())?,
                q: device.alloc_inputs(max_rows, heads.q_len())?,
                attended: device.alloc_inputs(max_rows, heads.q_len())?,
                inner: device.alloc_inputs(max_rows, spec.max_intermediate_size())?,
            },
        })
    }

    /// Computes a step except for the logits: stores keys and values in `cache`, and leaves the normalised
    /// hidden states of the kept rows.
    pub(super) fn forward(
        &mut self,
        device: &mut D,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        probe: &mut impl Probe,
    ) {
        let run = &mut Probed { device, probe };
        let mut num_rows = inputs.token_ids.len();
        self.residual
            .embed(run, step, num_rows, self.weights.embedding());
        let first = &self.weights.layers[0];
        self.residual.norm(run, num_rows, &first.attention_norm);
        let num_layers = self.weights.layers.len();
        for index in 0..num_layers {
            self.attend(run, cache, step, inputs, index);
            if index + 1 == num_layers {
                // The cache is complete. From here on only the kept rows matter.
                num_rows = inputs.kept_rows.len();
                if num_rows == 0 {
                    return;
                }
                let attended = &mut self.buffers.attended;
                self.residual.keep_rows(run.device, step, attended);
            }
            self.feed_forward(run, index, num_rows);
        }
    }

    /// Computes the logits of the first `num_rows` kept rows.
    pub(super) fn logits(
        &mut self,
        device: &mut D,
        num_rows: usize,
        out: &mut D::Logits,
        probe: &mut impl Probe,
    ) {
        if num_rows == 0 {
            return;
        }
        let lm_head = &self.weights.lm_head;
        device.logits(num_rows, self.residual.normed(), lm_head, out);
        probe.ended(Operation::LmHead, || {
            Work::product(num_rows, lm_head, false)
        });
    }

    /// Computes the logits of some of the kept rows in memory of the host, `[rows.len(), vocab_size]`.
    pub(super) fn context_logits(
        &mut self,
        device: &mut D,
        rows: Range<usize>,
        out: &mut [f32],
        probe: &mut impl Probe,
    ) {
        let num_rows = rows.len();
        let lm_head = &self.weights.lm_head;
        device.context_logits(self.residual.normed(), rows, lm_head, out);
        probe.ended(Operation::LmHead, || {
            Work::product(num_rows, lm_head, false)
        });
    }

    /// Leaves only the sampled rows of the kept ones.
    pub(super) fn keep_sampled_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        device.keep_sampled_rows(step, self.residual.normed_mut());
    }

    /// `attended = attention(rope(qkv(normed)))`.
    fn attend<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        index: usize,
    ) {
        let Layer { qkv, qk_norm, .. } = &self.weights.layers[index];
        let num_rows = inputs.token_ids.len();
        let heads = self.heads;
        let LayerAttention { params, angles } = self.attention[index];
        let buffers = &mut self.buffers;
        run.project_qkv(num_rows, self.residual.normed(), qkv, &mut buffers.qkv);
        let rope = RopeParams {
            heads,
            qk_norm: qk_norm.as_ref().map(|[q, k]| QkNorm {
                q,
                k,
                eps: self.rms_norm_eps,
            }),
            angles: &self.angles[angles],
        };
        run.device
            .rope_and_store(step, rope, &buffers.qkv, cache, index, &mut buffers.q);
        let kv_bytes = self.kv_bytes_per_position;
        run.probe.ended(Operation::Rope, || {
            let read = Work::elements(num_rows, heads.qkv_len(), 4, 0);
            let rotated = Work::elements(num_rows, heads.q_len(), 2, 3);
            Work {
                num_bytes: read.num_bytes + rotated.num_bytes + (num_rows * kv_bytes) as u64,
                num_operations: rotated.num_operations,
            }
        });
        let (q, attended) = (&buffers.q, &mut buffers.attended);
        run.device
            .paged_attention(step, &params, q, cache, index, attended);
        run.probe.ended(Operation::Attention, || {
            Work::attention(inputs.spans, &params, kv_bytes as u64)
        });
    }

    /// `hidden += o(attended)`, then `hidden += down(silu(gate) * up)` of `norm(hidden)`, and the norm of
    /// what comes next.
    fn feed_forward<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        index: usize,
        num_rows: usize,
    ) {
        let layer = &self.weights.layers[index];
        let Buffers {
            attended, inner, ..
        } = &mut self.buffers;
        let (o, norm) = (&layer.o, &layer.mlp_norm);
        self.residual
            .add(run, Operation::O, num_rows, attended, o, norm);
        run.project_gated(num_rows, self.residual.normed(), &layer.gate_up, inner);
        let next = self.weights.layers.get(index + 1);
        let norm = next.map_or(&self.weights.final_norm, |next| &next.attention_norm);
        self.residual
            .add(run, Operation::Down, num_rows, inner, &layer.down, norm);
    }
}

/// The attention of each layer, and the position embeddings that it refers to.
fn layer_attention<'a>(
    spec: &'a ModelSpec,
    limits: &RunnerLimits,
) -> (Vec<LayerAttention>, Vec<&'a Rope>) {
    let mut ropes: Vec<&Rope> = Vec::new();
    let windows = spec.windows_within(&limits.attention);
    let layers = spec.layers.iter().zip(windows).map(|(layer, window)| {
        // The forward pass computes these norms and this activation. The compiler rejects the pattern when there are
        // others, which have to be added to the forward pass as well.
        let LayerSpec {
            norms: Norms::Pre { .. },
            attention,
            feed_forward:
                FeedForward::Gated {
                    activation: Activation::Silu,
                    ..
                },
        } = layer;
        let known = ropes.iter().position(|&rope| *rope == attention.rope);
        let angles = known.unwrap_or_else(|| {
            ropes.push(&attention.rope);
            ropes.len() - 1
        });
        LayerAttention {
            params: AttentionParams {
                shape: head_shape(spec),
                scale: attention.scale,
                window,
                num_sinks: limits.attention.num_sinks.0,
            },
            angles,
        }
    });
    (layers.collect(), ropes)
}

/// The cosines and sines of each position embedding.
fn upload_angles<D: Device>(
    device: &mut D,
    spec: &ModelSpec,
    ropes: &[&Rope],
    max_seq_len: Tokens,
    num_positions: Tokens,
) -> Result<Vec<D::Angles>, LoadError> {
    let tables = ropes.iter().map(|rope| {
        let frequencies = rope.frequencies(spec.head_dim, max_seq_len.index());
        let factor = rope.attention_factor();
        let table = RopeTable::new(&frequencies, factor, num_positions.index())?;
        device.upload_angles(table)
    });
    tables.collect()
}

/// The heads of a model's attention.
pub(super) fn head_shape(spec: &ModelSpec) -> HeadShape {
    HeadShape {
        num_q_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
    }
}

/// The blocks of a model's KV cache.
pub(super) fn kv_layout(spec: &ModelSpec, block_size: BlockSize, dtype: KvDtype) -> KvLayout {
    KvLayout {
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        block_size,
        dtype,
    }
}
