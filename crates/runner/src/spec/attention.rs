//! The attention block of a layer.

use std::num::NonZeroU32;

use super::projection::Projection;
use crate::recurrence_spec::RecurrenceSpec;
use crate::rope::Rope;
use inflight_device::{GateFunction, IndexerShape, LatentShape, QkNormKind};

/// An attention block: `o(attention(rope(qkv(x))))`.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Queries, keys and values, in this order: `[qkv_len, hidden_size]`, by its [heads](inflight_device::HeadShape).
    /// With latent attention only the queries, or their latents.
    pub qkv: Projection,
    /// The latents of queries, keys and values. All layers with attention have them, or none.
    pub latent: Option<LatentSpec>,
    /// The recurrence in place of attention: `qkv` projects its inputs, `[input_len, hidden_size]`, and `o` its
    /// results, `[hidden_size, out_len]`.
    pub recurrence: Option<RecurrenceSpec>,
    /// The late inputs of the recurrence, if it has any.
    pub late: Option<LateInputsSpec>,
    /// The gates of attention.
    pub gate: Option<GateSpec>,
    /// Its heads, if they are not [the model's](super::ModelSpec::num_kv_heads).
    pub kv_heads: Option<KvHeads>,
    /// The earlier layer whose keys and values it reads, which has the same heads: `qkv` makes only queries then.
    pub kv_source: Option<usize>,
    /// The largest magnitude of queries, keys and values, which are clipped to it in front of norms. Not of latent
    /// attention.
    pub clip: Option<f32>,
    /// The norms of queries and keys.
    pub qk_norm: Option<QkNormSpec>,
    /// The position embedding.
    pub rope: Rope,
    /// The factor of the products of queries and keys.
    pub scale: f32,
    /// The bound `c` of a score `s`, which becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// The positions that a query sees, its own included; `None` for all.
    pub window: Option<NonZeroU32>,
    /// The length of the chunks that a text is cut into: of the window, a query sees only the positions of its own
    /// chunk.
    pub chunk: Option<NonZeroU32>,
    /// The logits of each query head for no position, `[num_heads]`: their parameter, below the layer.
    pub sink_logits: Option<&'static str>,
    /// The output projection, `[hidden_size, q_width]`, or `[hidden_size, num_heads * value_dim]`.
    pub o: Projection,
}

/// The [late inputs](inflight_device::LateInputs) of a recurrence. By low rank, the second projection reads what the
/// first one makes.
#[derive(Clone, Debug, PartialEq)]
pub enum LateInputsSpec {
    /// Of the gated delta rule by channels. Both have an equal rank.
    LowRank {
        /// `[rank, hidden_size]` and `[value_len, rank]`.
        gates: [Projection; 2],
        /// `[rank, hidden_size]` and `[num_decays, rank]`.
        decays: [Projection; 2],
    },
    /// Of a selective scan.
    Selected {
        /// `[rank, num_channels]` and `[num_channels, rank]`.
        times: [Projection; 2],
        /// The norm between them.
        time_norm: Option<TimeNorm>,
        /// Keys and queries, `[2 * state_dim, num_channels]`.
        keys: Projection,
    },
}

/// The RMS norm of what the first projection of times makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeNorm {
    /// Its module, `[rank]`; `None`: all weights are 1.
    pub module: Option<&'static str>,
    /// Added to the mean square.
    pub eps: f32,
}

impl LateInputsSpec {
    /// Results of the first projections.
    pub fn rank(&self) -> usize {
        let (Self::LowRank { gates: pair, .. } | Self::Selected { times: pair, .. }) = self;
        pair[0].num_outputs()
    }

    /// Results of the last projection of each of the two.
    pub fn widths(&self) -> [usize; 2] {
        let [first, second] = match self {
            Self::LowRank { gates, decays } => [&gates[1], &decays[1]],
            Self::Selected { times, keys, .. } => [&times[1], keys],
        };
        [first, second].map(Projection::num_outputs)
    }

    /// All projections, in order.
    pub fn projections(&self) -> Vec<&Projection> {
        match self {
            Self::LowRank { gates, decays } => gates.iter().chain(decays).collect(),
            Self::Selected { times, keys, .. } => times.iter().chain([keys]).collect(),
        }
    }
}

/// Gates of attention: `o` reads its results times a function of these.
#[derive(Clone, Debug, PartialEq)]
pub struct GateSpec {
    /// `[q_width, hidden_size]`, or `[num_heads, hidden_size]`, where a gate is for all elements of a head.
    pub projection: Projection,
    /// The function.
    pub function: GateFunction,
}

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    /// Query heads.
    pub num_q: usize,
    /// Key and value heads; divides the query heads.
    pub num: usize,
    /// Width of a key head, and of a query head; even.
    pub dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

impl KvHeads {
    /// Heads whose values are as wide as their keys.
    pub const fn of_dim(num_q: usize, num: usize, dim: usize) -> Self {
        Self {
            num_q,
            num,
            dim,
            value_dim: dim,
        }
    }
}

/// The parts of [latent attention](LatentShape).
#[derive(Clone, Debug, PartialEq)]
pub struct LatentSpec {
    /// The sizes.
    pub shape: LatentShape,
    /// How queries are made of their latents. `None`: they have none.
    pub queries: Option<LatentQueries>,
    /// The latent of keys and values, and the shared key: `[latent_dim + rotary_dim, hidden_size]`.
    pub kv: Projection,
    /// The RMS norm of that latent, `[latent_dim]`.
    pub kv_norm: &'static str,
    /// The factor of that norm.
    pub kv_scale: f32,
    /// From that latent to the contents of keys, then to values, head by head: `[num_heads * (content_dim + value_dim),
    /// latent_dim]`.
    pub heads: Projection,
    /// `heads` as two modules of GGUF files: for each head, from the contents of queries to latents,
    /// `[latent_dim, content_dim]`, and from latents to values, `[value_dim, latent_dim]`.
    pub parted_heads: [&'static str; 2],
    /// Added to the mean squares of latents.
    pub norm_eps: f32,
    /// How the positions that queries see are selected. `None`: they see all up to their own.
    pub selection: Option<LatentSelection>,
}

/// The selection of positions that the queries of a layer see.
#[derive(Clone, Debug, PartialEq)]
pub enum LatentSelection {
    /// By an indexer of the layer.
    Own(IndexerSpec),
    /// The selection of the last layer before it with an indexer.
    Shared,
}

/// An [indexer](IndexerShape), which queries with latents need.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerSpec {
    /// The sizes.
    pub shape: IndexerShape,
    /// The queries, of the latents of queries: `[num_heads * head_dim, num_inputs]`.
    pub queries: Projection,
    /// The keys, `[head_dim, hidden_size]`.
    pub keys: Projection,
    /// The layer norm of keys, with biases, `[head_dim]`.
    pub key_norm: &'static str,
    /// Added to the variance of a key.
    pub norm_eps: f32,
    /// The weights of heads, `[num_heads, hidden_size]`.
    pub head_weights: Projection,
}

impl LatentSpec {
    /// The layer's own indexer, if it has one.
    pub fn indexer(&self) -> Option<&IndexerSpec> {
        match &self.selection {
            Some(LatentSelection::Own(indexer)) => Some(indexer),
            Some(LatentSelection::Shared) | None => None,
        }
    }
}

impl IndexerSpec {
    /// Its projections.
    pub fn projections(&self) -> [&Projection; 3] {
        [&self.queries, &self.keys, &self.head_weights]
    }
}

/// How queries are made of their latents.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentQueries {
    /// The RMS norm of the latents, `[num_inputs]`.
    pub norm: &'static str,
    /// `[num_heads * (content_dim + rotary_dim), num_inputs]`.
    pub projection: Projection,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormSpec {
    /// The module for queries. `{}` stands for the index of a head, where each has a module of its own. Empty: all
    /// weights are 1.
    pub q: &'static str,
    /// The module for keys, likewise.
    pub k: &'static str,
    /// Which norms they are.
    pub kind: QkNormKind,
    /// Whether values have an RMS norm of each head, too, without weights.
    pub has_values: bool,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

impl QkNormSpec {
    /// An RMS norm of each head, under the usual names.
    pub const fn of_heads(eps: f32) -> Self {
        Self {
            q: "self_attn.q_norm",
            k: "self_attn.k_norm",
            kind: QkNormKind::Head,
            has_values: false,
            eps,
        }
    }
}

impl AttentionSpec {
    /// Its projections, without what heads make of latents.
    pub(super) fn projections(&self) -> Vec<&Projection> {
        let mut all = vec![&self.qkv, &self.o];
        all.extend(self.gate.as_ref().map(|gate| &gate.projection));
        all.extend(self.late.iter().flat_map(LateInputsSpec::projections));
        if let Some(latent) = &self.latent {
            all.push(&latent.kv);
            all.extend(latent.queries.iter().map(|queries| &queries.projection));
        }
        all
    }

    /// Whether a gate is for all elements of a head.
    pub fn has_gates_of_heads(&self, head_dim: usize) -> bool {
        let width = self.o.num_inputs;
        let gate = self.gate.as_ref();
        gate.is_some_and(|it| it.projection.num_outputs() * head_dim == width)
    }

    /// Sets whether its projections have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        self.qkv.has_bias = has_bias;
        self.o.has_bias = has_bias;
        if let Some(gate) = &mut self.gate {
            gate.projection.has_bias = has_bias;
        }
    }
}
