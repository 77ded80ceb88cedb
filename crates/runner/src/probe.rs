//! The profiling probe.
//!
//! A runner reports the end of each operation to its probe. The default probe, `()`, compiles to nothing.

use inflight_device::{
    AttentionParams, Device, Expert, Experts, IndexerShape, KvSpan, LatentHeads, PackedWeights,
};

/// An operation of a step, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// The plan is checked and prepared for the device.
    Plan,
    /// The embedding lookup.
    Embed,
    /// All norms of the residual stream.
    Norm,
    /// The projection to queries, keys and values, or to what a rule with recurrent states reads.
    Qkv,
    /// Rotation of queries and keys, and storing keys and values.
    Rope,
    /// Attention.
    Attention,
    /// A rule with recurrent states.
    Recurrence,
    /// The output projection of attention, or of a rule with recurrent states.
    O,
    /// The logits of experts, and the choice of them.
    Router,
    /// The gate, up and down projections of the chosen experts, and the sum of their results.
    Experts,
    /// The gate and up projections, their activation and product.
    GateUp,
    /// The down projection.
    Down,
    /// The logits.
    LmHead,
    /// Sampling.
    Sampling,
}

impl Operation {
    /// All of them, in order.
    pub const ALL: [Self; 14] = [
        Self::Plan,
        Self::Embed,
        Self::Norm,
        Self::Qkv,
        Self::Rope,
        Self::Attention,
        Self::Recurrence,
        Self::O,
        Self::Router,
        Self::Experts,
        Self::GateUp,
        Self::Down,
        Self::LmHead,
        Self::Sampling,
    ];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Embed => "embed",
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::Rope => "rope_and_store",
            Self::Attention => "attention",
            Self::Recurrence => "recurrence",
            Self::O => "o",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::LmHead => "lm_head",
            Self::Sampling => "sampling",
        }
    }
}

/// The least that an operation must load, store and compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of its operands, each counted once.
    pub num_bytes: u64,
    /// Multiplications and additions.
    pub num_operations: u64,
}

/// Observes the operations of a step.
pub trait Probe {
    /// An operation has ended. It began when the one before it ended. Most operations occur once per layer.
    fn ended(&mut self, operation: Operation, work: impl FnOnce() -> Work);
}

impl Probe for () {
    #[inline(always)]
    fn ended(&mut self, _: Operation, _: impl FnOnce() -> Work) {}
}

/// One of several experts whose weights are one matrix.
struct OneOf<'m, M>(usize, &'m M);

impl<M: PackedWeights> PackedWeights for OneOf<'_, M> {
    fn n(&self) -> usize {
        self.1.n() / self.0
    }

    fn k(&self) -> usize {
        self.1.k()
    }

    fn num_bytes(&self) -> usize {
        self.1.num_bytes() / self.0
    }

    fn has_rows(&self) -> bool {
        self.1.has_rows()
    }
}

impl Work {
    /// The work of an operation with the same cost for each element of `[num_rows, width]`.
    pub(super) fn elements(num_rows: usize, width: usize, bytes: usize, operations: usize) -> Self {
        let num = (num_rows * width) as u64;
        Self {
            num_bytes: num * bytes as u64,
            num_operations: num * operations as u64,
        }
    }

    /// The work of a product of bf16 rows with a matrix, with f32 results; `is_added` if they are added to the
    /// output.
    pub(super) fn product(num_rows: usize, matrix: &impl PackedWeights, is_added: bool) -> Self {
        let results = if is_added { 8 } else { 4 };
        let activations = num_rows * (2 * matrix.k() + results * matrix.n());
        Self {
            num_bytes: (matrix.num_bytes() + activations) as u64,
            num_operations: (2 * num_rows * matrix.k() * matrix.n()) as u64,
        }
    }

    /// The work of a gate and up projection with its activation; only its bf16 result is written.
    pub(super) fn gated_product(num_rows: usize, gate_up: &impl PackedWeights) -> Self {
        let inter = gate_up.n() / 2;
        let activations = num_rows * (2 * gate_up.k() + 2 * inter);
        Self {
            num_bytes: (gate_up.num_bytes() + activations) as u64,
            num_operations: Self::product(num_rows, gate_up, false).num_operations
                + (4 * num_rows * inter) as u64,
        }
    }

    /// The sum of both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            num_bytes: self.num_bytes + other.num_bytes,
            num_operations: self.num_operations + other.num_operations,
        }
    }

    /// The work of a mixture of experts of which `num_touched` have any rows, `num_chosen` for each row.
    pub(super) fn experts<D: Device>(
        num_rows: usize,
        experts: &Experts<D>,
        num_touched: usize,
        num_chosen: usize,
    ) -> Self {
        let of = |expert: &Expert<D>, num_rows| {
            let (gate_up, down) = (&expert.gate_up.matrix, &expert.down.matrix);
            let num_stacked = gate_up.n() / (2 * down.k());
            let gate_up = Self::gated_product(num_rows, &OneOf(num_stacked, gate_up));
            let down = Self::product(num_rows, &OneOf(num_stacked, down), true);
            gate_up.plus(down)
        };
        let shared = experts.shared.as_ref();
        let mut work = shared.map_or_else(Self::default, |expert| of(expert, num_rows));
        if let Some(expert) = experts.chosen.first() {
            let weight_bytes = of(expert, 0).num_bytes;
            let rows = of(expert, num_rows * num_chosen);
            work.num_bytes += rows.num_bytes - weight_bytes + num_touched as u64 * weight_bytes;
            work.num_operations += rows.num_operations;
        }
        work
    }

    /// The work of attention over the positions that each span sees. `kv_bytes` are the bytes of the keys and values
    /// of one position.
    pub(super) fn attention(spans: &[KvSpan], params: &AttentionParams, kv_bytes: u64) -> Self {
        let q_width = params.shape.q_len();
        let mut num_tokens = 0;
        let mut num_positions = 0;
        let mut num_pairs = 0;
        for span in spans {
            let num_queries = span.tokens.end - span.tokens.start;
            let sees = params.window.map_or(u32::MAX, |window| {
                window.get().saturating_add(params.num_sinks)
            });
            num_tokens += num_queries as usize;
            num_positions += u64::from(span.kv_len.min(sees.saturating_add(num_queries - 1)));
            let first = span.kv_len - num_queries + 1;
            num_pairs += (first..=span.kv_len)
                .map(|position| u64::from(position.min(sees)))
                .sum::<u64>();
        }
        // Queries in and sums of values out, bf16 both.
        let rows = (num_tokens * q_width * 4) as u64;
        Self {
            num_bytes: num_positions * kv_bytes + rows,
            num_operations: num_pairs * 4 * q_width as u64,
        }
    }
}

impl Work {
    /// The work of an [indexer](inflight_device::IndexerShape) that meets all positions of each span.
    pub(super) fn selection(spans: &[KvSpan], shape: &IndexerShape) -> Self {
        let pairs = spans.iter().map(|span| {
            let (num_queries, kv_len) = (span.tokens.len() as u64, u64::from(span.kv_len));
            num_queries * kv_len - num_queries * num_queries.saturating_sub(1) / 2
        });
        let positions = spans.iter().map(|span| u64::from(span.kv_len));
        Self {
            num_bytes: positions.sum::<u64>() * 2 * shape.head_dim as u64,
            num_operations: pairs.sum::<u64>() * 2 * shape.q_len() as u64,
        }
    }

    /// The work of [latent attention](inflight_device::LatentShape), including the products of the heads.
    pub(super) fn latent_attention<D: Device>(
        spans: &[KvSpan],
        params: &AttentionParams,
        kv_bytes: u64,
        heads: &LatentHeads<D>,
    ) -> Self {
        let num_rows = spans.iter().map(|span| span.tokens.len()).sum();
        let linears = heads.keys.iter().chain(&heads.values);
        let attention = Self::attention(spans, params, kv_bytes);
        linears.fold(attention, |sum, linear| {
            let product = Self::product(num_rows, &linear.matrix, false);
            Self {
                num_bytes: sum.num_bytes + product.num_bytes,
                num_operations: sum.num_operations + product.num_operations,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use inflight_device::HeadShape;

    #[test]
    fn every_operation_is_listed_once_in_order() {
        assert!(Operation::ALL.is_sorted());
        let mut names: Vec<_> = Operation::ALL.map(Operation::as_str).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Operation::ALL.len());
    }

    #[test]
    fn attention_reads_each_position_once_and_computes_each_pair() {
        let params = AttentionParams {
            shape: HeadShape {
                num_q_heads: 3,
                num_kv_heads: 1,
                head_dim: 2,
                value_dim: 2,
            },
            scale: 1.0,
            soft_cap: None,
            window: None,
            chunk: None,
            is_bidirectional: false,
            num_sinks: 0,
            shifts_sinks: false,
        };
        // A chunk of 3 tokens that ends at position 5, and a sequence that generates its eighth.
        let spans = [
            KvSpan {
                tokens: 0..3,
                kv_len: 5,
                block_table: 0..2,
            },
            KvSpan {
                tokens: 3..4,
                kv_len: 8,
                block_table: 2..4,
            },
        ];
        let all = Work::attention(&spans, &params, 100);
        assert_eq!(all.num_operations, (3 + 4 + 5 + 8) * 4 * 6);
        assert_eq!(all.num_bytes, (5 + 8) * 100 + 4 * 6 * 4);
        let windowed = AttentionParams {
            window: NonZeroU32::new(2),
            is_bidirectional: false,
            num_sinks: 1,
            ..params
        };
        let windowed = Work::attention(&spans, &windowed, 100);
        assert_eq!(windowed.num_operations, (3 + 3 + 3 + 3) * 4 * 6);
        assert_eq!(windowed.num_bytes, (5 + 3) * 100 + 4 * 6 * 4);
    }
}
