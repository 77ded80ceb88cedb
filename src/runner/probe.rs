//! What a step's time goes into, for those who ask.
//!
//! A runner is made with its probe, and the probe that asks nothing, `()`, is no code at all.

use crate::device::{AttentionParams, KvSpan, PackedWeights};

/// A part of a step, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// The plan is checked and turned into what the device understands.
    Plan,
    /// Token ids become hidden states.
    Embed,
    /// All normalisations of the residual stream.
    Norm,
    /// Queries, keys and values.
    Qkv,
    /// They are turned, and keys and values stored.
    Rope,
    /// Attention.
    Attention,
    /// The output projection of attention.
    O,
    /// Gate and up projections, their activation and product.
    GateUp,
    /// The down projection.
    Down,
    /// Logits.
    LmHead,
    /// Tokens are chosen.
    Sampling,
}

impl Operation {
    /// All of them, in order.
    pub const ALL: [Self; 11] = [
        Self::Plan,
        Self::Embed,
        Self::Norm,
        Self::Qkv,
        Self::Rope,
        Self::Attention,
        Self::O,
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
            Self::O => "o",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::LmHead => "lm_head",
            Self::Sampling => "sampling",
        }
    }
}

/// What an operation must move between memory and registers, and compute, at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of its operands, each once.
    pub num_bytes: u64,
    /// Multiplications and additions.
    pub num_operations: u64,
}

/// Whoever wants to know.
pub trait Probe {
    /// An operation has ended, which began where the one before it did. Several of one name follow each
    /// other in a step, one for each layer.
    fn ended(&mut self, operation: Operation, work: impl FnOnce() -> Work);
}

impl Probe for () {
    #[inline(always)]
    fn ended(&mut self, _: Operation, _: impl FnOnce() -> Work) {}
}

impl Work {
    /// Of something that takes as much for each element of a `[num_rows, width]`.
    pub(super) fn elements(num_rows: usize, width: usize, bytes: usize, operations: usize) -> Self {
        let num = (num_rows * width) as u64;
        Self {
            num_bytes: num * bytes as u64,
            num_operations: num * operations as u64,
        }
    }

    /// Of a product of bf16 rows with a matrix, its results in f32; `is_added` if they are added to what
    /// is there.
    pub(super) fn product(num_rows: usize, matrix: &impl PackedWeights, is_added: bool) -> Self {
        let results = if is_added { 8 } else { 4 };
        let activations = num_rows * (2 * matrix.k() + results * matrix.n());
        Self {
            num_bytes: (matrix.num_bytes() + activations) as u64,
            num_operations: (2 * num_rows * matrix.k() * matrix.n()) as u64,
        }
    }

    /// Of a product whose results are a gate and an up for each element of bf16 rows, which are all that is written.
    pub(super) fn gated_product(num_rows: usize, gate_up: &impl PackedWeights) -> Self {
        let inter = gate_up.n() / 2;
        let activations = num_rows * (2 * gate_up.k() + 2 * inter);
        Self {
            num_bytes: (gate_up.num_bytes() + activations) as u64,
            num_operations: Self::product(num_rows, gate_up, false).num_operations
                + (4 * num_rows * inter) as u64,
        }
    }

    /// Of attention over what each span sees: its last positions within the window, and the sinks before.
    /// `kv_bytes` are those of one position's keys and values.
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::device::HeadShape;

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
            },
            scale: 1.0,
            window: None,
            num_sinks: 0,
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
            num_sinks: 1,
            ..params
        };
        let windowed = Work::attention(&spans, &windowed, 100);
        assert_eq!(windowed.num_operations, (3 + 3 + 3 + 3) * 4 * 6);
        assert_eq!(windowed.num_bytes, (5 + 3) * 100 + 4 * 6 * 4);
    }
}
