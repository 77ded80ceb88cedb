//! The decoder-only transformer: one parameterised forward pass for every architecture.
//!
//! A step is one pass over the weights for all tokens of all sequences, packed:
//!
//! ```text
//! token ids -> hidden [m, hidden_size], the residual stream, f32
//! each layer:  hidden += o(attention(rope(qkv(norm(hidden)))))
//!              hidden += down(silu(gate) * up of norm(hidden))
//! the rows whose logits are needed -> lm_head(norm(hidden)) -> logits [num_rows, vocab_size], f32
//! ```
//!
//! What goes into a matrix product, and the KV cache, is bf16; every sum is f32. Rows meet nowhere but
//! in attention, and there only rows of their own sequence, so a sequence's numbers do not depend on
//! what else is in the step.

use std::num::NonZeroU32;
use std::ops::Range;

use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_vec;
use half::bf16;

use super::RunnerLimits;
use super::model_source::ModelSource;
use super::probe::{Operation, Probe, Work};
use super::spec::ModelSpec;
use super::weights::{Linear, Weights};
use crate::base::{LoadError, TokenId};
use crate::device::cpu::{Cpu, KvCache, Output};
use crate::device::{AttentionParams, HeadShape, KvBatch, QkNorm, RopeTable};

/// A model's weights and the buffers of its largest step.
pub(super) struct Decoder {
    weights: Weights,
    rope: RopeTable,
    /// But for the window, which each layer has of its own.
    attention: AttentionParams,
    windows: Vec<Option<NonZeroU32>>,
    rms_norm_eps: f32,
    buffers: Buffers,
}

/// Activations, each `[max_num_tokens, width]`.
struct Buffers {
    /// `hidden_size` wide: the residual stream.
    hidden: Rows<f32>,
    /// `hidden_size` wide: normalised, the input of a projection.
    normed: Rows<bf16>,
    /// Queries, keys and values before rotation.
    qkv: Rows<f32>,
    /// Rotated queries.
    q: Rows<bf16>,
    /// What attention gives, as wide as the queries.
    attended: Rows<bf16>,
    /// `intermediate_size` wide: the input of the down projection.
    inner: Rows<bf16>,
}

impl Decoder {
    /// Loads the weights, and sizes everything for `limits`.
    pub(super) fn new(
        source: &ModelSource,
        limits: &RunnerLimits,
        cpu: &mut Cpu,
    ) -> Result<Self, LoadError> {
        let spec = source.spec();
        let weights = Weights::load(source, limits.weights, cpu)?;
        // No sequence is longer than the pool, unless it gives blocks back.
        let longest = limits.num_blocks.tokens(limits.block_size);
        let num_positions = match spec.largest_window(&limits.attention, limits.max_seq_len) {
            Some(_) => limits.max_seq_len,
            None => limits.max_seq_len.min(longest),
        };
        Ok(Self {
            weights,
            rope: RopeTable::new(
                &spec.rope.frequencies(spec.head_dim),
                spec.rope.attention_factor(),
                num_positions.index(),
            )?,
            attention: AttentionParams {
                shape: head_shape(spec),
                scale: (spec.head_dim as f32).sqrt().recip(),
                window: None,
                num_sinks: limits.attention.num_sinks.0,
            },
            windows: spec.windows_within(&limits.attention).collect(),
            rms_norm_eps: spec.rms_norm_eps,
            buffers: Buffers::new(spec, limits.max_num_tokens.index())?,
        })
    }

    /// Computes a step but for the logits: stores the keys and values of `token_ids` in `cache`, and keeps
    /// the hidden states of the tokens at `rows`, which are ascending.
    pub(super) fn forward(
        &mut self,
        cpu: &mut Cpu,
        cache: &mut KvCache,
        batch: &KvBatch<'_>,
        token_ids: &[TokenId],
        rows: &[u32],
        probe: &mut impl Probe,
    ) {
        let mut num_rows = token_ids.len();
        let hidden = self.buffers.hidden.first_mut(num_rows);
        self.weights.embed(cpu, token_ids, hidden);
        let hidden_size = self.weights.final_norm.len();
        probe.ended(Operation::Embed, || {
            Work::elements(num_rows, hidden_size, 6, 0)
        });
        let num_layers = self.weights.layers.len();
        for index in 0..num_layers {
            self.attend(cpu, cache, batch, index, probe);
            if index + 1 == num_layers {
                // The cache is complete. From here on only the rows with logits matter.
                num_rows = rows.len();
                if num_rows == 0 {
                    return;
                }
                self.buffers.hidden.keep(rows);
                self.buffers.attended.keep(rows);
            }
            self.feed_forward(cpu, index, num_rows, probe);
        }
        let hidden = self.buffers.hidden.first(num_rows);
        let normed = self.buffers.normed.first_mut(num_rows);
        cpu.rms_norm(hidden, &self.weights.final_norm, self.rms_norm_eps, normed);
        probe.ended(Operation::Norm, || norm_work(num_rows, hidden_size));
    }

    /// Writes the logits that follow the tokens that [`Decoder::forward`] has kept the states of, or some of
    /// them, `[rows.len(), vocab_size]`.
    pub(super) fn logits(
        &mut self,
        cpu: &mut Cpu,
        rows: Range<usize>,
        logits: &mut [f32],
        probe: &mut impl Probe,
    ) {
        if rows.is_empty() {
            return;
        }
        let states = self.buffers.normed.range(rows.clone());
        let lm_head = &self.weights.lm_head;
        cpu.gemm(states, rows.len(), lm_head, None, Output::Store, logits);
        probe.ended(Operation::LmHead, || {
            Work::product(rows.len(), lm_head, false)
        });
    }

    /// Keeps only these of the states that were kept, which are ascending.
    pub(super) fn keep(&mut self, rows: &[u32]) {
        self.buffers.normed.keep(rows);
    }

    /// `attended = attention(rope(qkv(norm(hidden))))`.
    fn attend(
        &mut self,
        cpu: &mut Cpu,
        cache: &mut KvCache,
        batch: &KvBatch<'_>,
        index: usize,
        probe: &mut impl Probe,
    ) {
        let layer = &self.weights.layers[index];
        let num_rows = batch.num_tokens();
        let eps = self.rms_norm_eps;
        let hidden = self.buffers.hidden.first(num_rows);
        let normed = self.buffers.normed.first_mut(num_rows);
        let qkv = self.buffers.qkv.first_mut(num_rows);
        let q = self.buffers.q.first_mut(num_rows);
        let attended = self.buffers.attended.first_mut(num_rows);

        cpu.rms_norm(hidden, &layer.attention_norm, eps, normed);
        probe.ended(Operation::Norm, || {
            norm_work(num_rows, layer.attention_norm.len())
        });
        project(cpu, normed, num_rows, &layer.qkv, Output::Store, qkv);
        probe.ended(Operation::Qkv, || {
            Work::product(num_rows, &layer.qkv.matrix, false)
        });
        let norm = layer.qk_norm.as_ref().map(|[q, k]| QkNorm { q, k, eps });
        cpu.rope_and_store(
            qkv,
            self.attention.shape,
            norm,
            &self.rope,
            batch,
            cache,
            index,
            q,
        );
        let shape = self.attention.shape;
        let layout = *cache.layout();
        let kv_bytes = || KvCache::bytes_per_block(&layout, 1) / layout.block_size.tokens().index();
        probe.ended(Operation::Rope, || {
            let read = Work::elements(num_rows, shape.qkv_len(), 4, 0);
            let turned = Work::elements(num_rows, shape.q_len(), 2, 3);
            Work {
                num_bytes: read.num_bytes + turned.num_bytes + (num_rows * kv_bytes()) as u64,
                num_operations: turned.num_operations,
            }
        });
        let attention = AttentionParams {
            window: self.windows[index],
            ..self.attention
        };
        cpu.paged_attention(q, &attention, batch, cache, index, attended);
        probe.ended(Operation::Attention, || {
            let window = attention.window.map(NonZeroU32::get);
            let (q_width, num_sinks) = (shape.q_len(), attention.num_sinks);
            Work::attention(batch, q_width, window, num_sinks, kv_bytes() as u64)
        });
    }

    /// `hidden += o(attended)`, then `hidden += down(silu(gate) * up)` of `norm(hidden)`, for the
    /// first `num_rows` rows.
    fn feed_forward(
        &mut self,
        cpu: &mut Cpu,
        index: usize,
        num_rows: usize,
        probe: &mut impl Probe,
    ) {
        let layer = &self.weights.layers[index];
        let attended = self.buffers.attended.first(num_rows);
        let hidden = self.buffers.hidden.first_mut(num_rows);
        let normed = self.buffers.normed.first_mut(num_rows);
        let inner = self.buffers.inner.first_mut(num_rows);

        project(cpu, attended, num_rows, &layer.o, Output::Add, hidden);
        probe.ended(Operation::O, || {
            Work::product(num_rows, &layer.o.matrix, true)
        });
        cpu.rms_norm(hidden, &layer.mlp_norm, self.rms_norm_eps, normed);
        probe.ended(Operation::Norm, || {
            norm_work(num_rows, layer.mlp_norm.len())
        });
        let Linear { matrix, bias } = &layer.gate_up;
        cpu.gemm_silu_mul(normed, num_rows, matrix, bias.as_deref(), inner);
        probe.ended(Operation::GateUp, || Work::gated_product(num_rows, matrix));
        project(cpu, inner, num_rows, &layer.down, Output::Add, hidden);
        probe.ended(Operation::Down, || {
            Work::product(num_rows, &layer.down.matrix, true)
        });
    }
}

/// The heads of a model's attention.
pub(super) fn head_shape(spec: &ModelSpec) -> HeadShape {
    HeadShape {
        num_q_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
    }
}

/// f32 in, bf16 out.
fn norm_work(num_rows: usize, width: usize) -> Work {
    Work::elements(num_rows, width, 6, 4)
}

fn project(
    cpu: &mut Cpu,
    x: &[bf16],
    num_rows: usize,
    linear: &Linear,
    output: Output,
    out: &mut [f32],
) {
    cpu.gemm(
        x,
        num_rows,
        &linear.matrix,
        linear.bias.as_deref(),
        output,
        out,
    );
}

impl Buffers {
    fn new(spec: &ModelSpec, max_rows: usize) -> Result<Self, LoadError> {
        let shape = head_shape(spec);
        Ok(Self {
            hidden: Rows::new(max_rows, spec.hidden_size)?,
            normed: Rows::new(max_rows, spec.hidden_size)?,
            qkv: Rows::new(max_rows, shape.qkv_len())?,
            q: Rows::new(max_rows, shape.q_len())?,
            attended: Rows::new(max_rows, shape.q_len())?,
            inner: Rows::new(max_rows, spec.intermediate_size)?,
        })
    }
}

/// A matrix of which the first rows are in use. Its memory is taken when it is first written.
pub(super) struct Rows<T> {
    values: Vec<T>,
    width: usize,
}

impl<T: Zeroable + Copy> Rows<T> {
    pub(super) fn new(max_rows: usize, width: usize) -> Result<Self, LoadError> {
        let values = max_rows
            .checked_mul(width)
            .and_then(|len| try_zeroed_vec(len).ok())
            .ok_or_else(|| {
                LoadError::Resource(format!(
                    "no memory for a buffer of {max_rows} x {width} x {} bytes; lower max_num_tokens \
                     or max_batch_size",
                    size_of::<T>()
                ))
            })?;
        Ok(Self { values, width })
    }

    pub(super) fn first(&self, num_rows: usize) -> &[T] {
        &self.values[..num_rows * self.width]
    }

    pub(super) fn first_mut(&mut self, num_rows: usize) -> &mut [T] {
        &mut self.values[..num_rows * self.width]
    }

    fn range(&self, rows: Range<usize>) -> &[T] {
        &self.values[rows.start * self.width..rows.end * self.width]
    }

    /// Moves the rows of these ascending indices to the front.
    fn keep(&mut self, rows: &[u32]) {
        for (to, &from) in rows.iter().enumerate() {
            let from = from as usize * self.width;
            self.values
                .copy_within(from..from + self.width, to * self.width);
        }
    }
}
