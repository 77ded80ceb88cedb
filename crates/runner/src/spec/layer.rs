//! One decoder layer.

use super::attention::{AttentionSpec, IndexerSpec, LatentSelection, LatentSpec};
use super::feed_forward::{ExpertsSpec, FeedForward};
use super::norms::{Block, Norms};
use super::projection::Projection;
use crate::recurrence_spec::RecurrenceSpec;
use inflight_device::Activation;

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The norms of the residual stream, `[hidden_size]` each.
    pub norms: Norms,
    /// The attention block.
    pub attention: AttentionSpec,
    /// A recurrence beside attention.
    pub recurrence_block: Option<RecurrenceBlock>,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
    /// Experts beside that, which has no experts itself.
    pub experts_block: Option<ExpertsBlock>,
    /// The block behind it that reads the layer's own inputs. All layers have one, or none.
    pub input_block: Option<InputBlock>,
    /// The factor of the residual stream behind all blocks: its parameter, `[1]`, below the layer.
    pub scale: Option<&'static str>,
    /// The factors of what its blocks compute, in a layer with [sequential](Norms::Sequential) norms in front of them.
    pub multipliers: Option<Multipliers>,
    /// The factors of the columns of what its blocks compute, in a layer with [sequential](Norms::Sequential) norms in
    /// front of them, and without experts.
    pub column_factors: Option<ColumnFactors>,
    /// The cutoff of the feed-forward block's gates, in standard deviations above the mean of a token's gates. It is
    /// subtracted from each gate, and negative results become 0. The block has all gates in front of ups then. Only in
    /// a model with [streams](StreamsSpec).
    pub gate_cutoff: Option<f32>,
    /// The norms of what `o` and `down` read, in a layer with [sequential](Norms::Sequential) norms and without
    /// experts.
    pub inner_norms: Option<InnerNorms>,
}

/// RMS norms inside of blocks: `o(norm(attended))` and `down(norm(inside))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnerNorms {
    /// Of what attention gives, `[q_width]`.
    pub attended: &'static str,
    /// Of the inside of the feed-forward block, `[intermediate_size]`.
    pub inside: &'static str,
}

/// A recurrence that reads what attention reads: `x += scale * output(rule(input(norm(x))))`.
#[derive(Clone, Debug, PartialEq)]
pub struct RecurrenceBlock {
    /// `[input_len, hidden_size]`.
    pub input: Projection,
    /// The rule.
    pub recurrence: RecurrenceSpec,
    /// `[hidden_size, out_len]`.
    pub output: Projection,
    /// The factor of its result.
    pub scale: f32,
}

/// Factors of what blocks compute. Those of a feed-forward block are 1 where it has experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Of the result of attention.
    pub attention: f32,
    /// Of gates, in front of the activation.
    pub gate: f32,
    /// Of the result of the feed-forward block.
    pub feed_forward: f32,
}

/// Factors of the columns of what blocks compute (LayerScale; Touvron et al., arXiv:2103.17239): parameters below the
/// layer, `[hidden_size]` each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnFactors {
    /// Of the result of attention.
    pub attention: &'static str,
    /// Of the result of the feed-forward block.
    pub feed_forward: &'static str,
}

/// How the [inputs](inflight_device::LayerInputOps) of all layers are made of a step's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerInputsSpec {
    /// The embeddings of all layers: their module, `[num_rows, num_layers * width]`.
    pub embedding: &'static str,
    /// Rows of the embedding, at least `vocab_size`.
    pub num_rows: usize,
    /// Their factor.
    pub embedding_scale: f32,
    /// From embedded tokens to all layers, `[num_layers * width, hidden_size]`.
    pub projection: Projection,
    /// The factor of its results.
    pub projection_scale: f32,
    /// The RMS norm of a layer's results, `[width]`.
    pub norm: &'static str,
    /// The factor of the sum of both.
    pub scale: f32,
    /// Elements of the inputs of a layer.
    pub width: usize,
}

/// Several residual streams (AltUp), of which layers compute the first one, and a low-rank block beside attention
/// (LAuReL). Layers have [sequential](Norms::Sequential) norms in front of blocks and behind them, and [`InputBlock`]s,
/// whose results are added to the other streams.
///
/// ```text
/// predict   all streams, by the first one;        x = the first one;        n = norm(x)
/// x = (x + after(attention(n)) + n + laurel_norm(right(left(n)))) / sqrt(2);    x += after(feed_forward(before(x)))
/// correct   all streams, by x
/// ```
///
/// Modules of streams are counted from the second one: `{}` stands for the index. Coefficients are as in
/// [`StreamCoefs`](inflight_device::StreamCoefs).
#[derive(Clone, Debug, PartialEq)]
pub struct StreamsSpec {
    /// All streams, the first one included; at most [`MAX_STREAMS`](inflight_device::MAX_STREAMS).
    pub num: usize,
    /// From embedded tokens to another stream, whose rows get the magnitudes of theirs, `[hidden_size, hidden_size]`.
    pub inputs: &'static str,
    /// From another stream to what is added behind the last layer, likewise. The mean of all streams is left.
    pub outputs: &'static str,
    /// The norm of what chooses coefficients, whose results the hidden size divides, `[hidden_size]`.
    pub router_norm: &'static str,
    /// The projection that chooses coefficients, `[num, hidden_size]`. Never quantised.
    pub router: Projection,
    /// The coefficients of predictions, `[num * num, num]`.
    pub prediction: &'static str,
    /// The coefficients of corrections, `[num, num]`.
    pub correction: &'static str,
    /// The factors of the columns that an [`InputBlock`] reads: the parameter, `[hidden_size]`. `None`: all are 1.
    pub output_scale: Option<&'static str>,
    /// `[rank, hidden_size]`.
    pub left: Projection,
    /// `[hidden_size, rank]`.
    pub right: Projection,
    /// The norm of its result, `[hidden_size]`.
    pub laurel_norm: &'static str,
}

/// Experts beside a feed-forward block, in a layer with [sequential](Norms::Sequential) norms.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsBlock {
    /// The experts, without a shared one.
    pub experts: ExpertsSpec,
    /// Their norms and factors. `None`: they read what the feed-forward block reads, and their result is added to the
    /// residual stream behind the attention of the next layer, which has no such experts (a shortcut).
    pub norms: Option<ExpertsNorms>,
}

/// The norms, `[hidden_size]` each, and factors of experts whose result is added to the feed-forward block's.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsNorms {
    /// The scale of the router's input, which the root of the hidden size divides: the parameter, `[hidden_size]`,
    /// below the layer.
    pub router_scale: &'static str,
    /// The factors of the weights of experts: the parameter, `[num_experts]`, below the layer.
    pub expert_scales: &'static str,
    /// The norm of the feed-forward block's result.
    pub dense_after: &'static str,
    /// The norm of what the experts read, the residual stream.
    pub before: &'static str,
    /// The norm of their result.
    pub after: &'static str,
}

/// A block that reads the layer's own inputs: `x += after(down(activation(gate(x)) * inputs))`.
#[derive(Clone, Debug, PartialEq)]
pub struct InputBlock {
    /// `[width, hidden_size]`.
    pub gate: Projection,
    /// The activation of the gate.
    pub activation: Activation,
    /// `[hidden_size, width]`.
    pub down: Projection,
    /// The norm of its result, `[hidden_size]`.
    pub after: &'static str,
}

impl LayerSpec {
    /// All projections, attention's first; of experts, the projections of one.
    pub fn projections(&self) -> impl Iterator<Item = &Projection> {
        let own = self.attention_block();
        let latent = own.and_then(|own| own.latent.as_ref());
        let indexer = latent.and_then(LatentSpec::indexer).into_iter();
        let indexer = indexer.flat_map(IndexerSpec::projections);
        let latent = latent
            .map(|latent| &latent.heads)
            .into_iter()
            .chain(indexer);
        let attention = own.into_iter().flat_map(AttentionSpec::projections);
        let beside = self.recurrence_block.iter();
        let beside = beside.flat_map(RecurrenceBlock::projections);
        let attention = attention.chain(latent).chain(beside);
        let inputs = self.input_block.iter().flat_map(InputBlock::projections);
        let experts = self.experts_block.iter();
        let feed_forward = self.feed_forward_block().into_iter();
        let feed_forward = feed_forward.flat_map(FeedForward::projections);
        let feed_forward = feed_forward.chain(experts.flat_map(|it| it.experts.projections()));
        attention.chain(feed_forward).chain(inputs)
    }

    /// Its experts, in place of a feed-forward block or beside it.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match (self.feed_forward_block(), &self.experts_block) {
            (Some(FeedForward::Experts(experts)), _) => Some(experts),
            (_, block) => block.as_ref().map(|block| &block.experts),
        }
    }

    /// The projections that adapters can change.
    pub fn adaptable_projections(&self) -> Vec<&Projection> {
        let attention = self.attention_block().map(AttentionSpec::projections);
        let mut all = attention.unwrap_or_default();
        let beside = self.recurrence_block.iter();
        all.extend(beside.flat_map(RecurrenceBlock::projections));
        let feed_forward = self.feed_forward_block();
        if let Some(block @ (FeedForward::Gated { .. } | FeedForward::Plain { .. })) = feed_forward
        {
            all.extend(block.projections());
        }
        all.extend(self.input_block.iter().flat_map(InputBlock::projections));
        all
    }

    /// The indexer of its attention, if it has one.
    pub fn indexer(&self) -> Option<&IndexerSpec> {
        self.attention_block()?.latent.as_ref()?.indexer()
    }

    /// Whether its queries see the positions that a layer before it selects.
    pub fn shares_selection(&self) -> bool {
        let latent = self.attention_block().and_then(|own| own.latent.as_ref());
        latent.is_some_and(|it| it.selection == Some(LatentSelection::Shared))
    }

    /// Whether it keeps keys and values of its own.
    pub fn has_cache(&self) -> bool {
        let own = self.attention_block();
        own.is_some_and(|own| own.recurrence.is_none() && own.kv_source.is_none())
    }

    /// Its attention, or the recurrence in its place, if it has some.
    pub fn attention_block(&self) -> Option<&AttentionSpec> {
        let attention = &self.attention;
        self.norms.has(Block::Attention).then_some(attention)
    }

    /// Its feed-forward block or experts, if it has some.
    pub fn feed_forward_block(&self) -> Option<&FeedForward> {
        let feed_forward = &self.feed_forward;
        self.norms.has(Block::FeedForward).then_some(feed_forward)
    }

    /// Its recurrence, in place of attention or beside it, if it has one.
    pub fn recurrence(&self) -> Option<&RecurrenceSpec> {
        let beside = self.recurrence_block.as_ref();
        let beside = beside.map(|block| &block.recurrence);
        self.attention_block()?.recurrence.as_ref().or(beside)
    }

    /// [`LayerSpec::recurrence`], to be changed.
    pub fn recurrence_mut(&mut self) -> Option<&mut RecurrenceSpec> {
        if !self.norms.has(Block::Attention) {
            return None;
        }
        let beside = self.recurrence_block.as_mut();
        let beside = beside.map(|block| &mut block.recurrence);
        self.attention.recurrence.as_mut().or(beside)
    }

    /// The weights of all projections.
    pub fn num_weights(&self) -> u64 {
        let of_other_experts = self.experts().map_or(0, |experts| {
            (experts.routing.num_computed_experts() - 1) as u64 * experts.num_weights_of_expert()
        });
        let projections = self.projections().map(Projection::num_weights);
        projections.sum::<u64>() + of_other_experts
    }
}

impl RecurrenceBlock {
    fn projections(&self) -> [&Projection; 2] {
        [&self.input, &self.output]
    }
}

impl InputBlock {
    fn projections(&self) -> [&Projection; 2] {
        [&self.gate, &self.down]
    }
}
