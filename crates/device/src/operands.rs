//! The operands of a device's operations.

use std::ops::Range;

use half::bf16;

use super::kv_batch::KvSpan;
use super::low_rank::AdapterRun;
use super::rope::AxisPositions;
use inflight_base::{BlockId, TokenId};
use inflight_sampling::{DeviceSampling, SampleError};

/// Everything about a step that comes from the host. By default there is nothing.
#[derive(Clone, Copy, Default)]
pub struct StepInputs<'a> {
    /// The packed tokens of all sequences. Each id is below the rows of the embedding.
    pub token_ids: &'a [TokenId],
    /// The sequences, in the order of their tokens.
    pub spans: &'a [KvSpan],
    /// Their block tables.
    pub block_tables: &'a [BlockId],
    /// The slot of each sequence, for models with recurrent states; others need not have any.
    pub state_slots: &'a [u32],
    /// Recurrent states to be copied to other slots, in order of their tokens.
    pub saved_states: &'a [SavedState],
    /// Whether the only token of each sequence is the last one that its recurrent states sum up: it is computed again,
    /// and changes no state. As many as `state_slots`.
    pub is_repeated: &'a [bool],
    /// The tokens whose hidden states are needed after the last layer's attention, ascending.
    pub kept_rows: &'a [u32],
    /// Which of the kept rows tokens are sampled from, ascending, as indices into `kept_rows`.
    pub sampled_rows: &'a [u32],
    /// The tokens that the step before samples, in order; 0 is in their place.
    pub in_flight: &'a [TokenInFlight],
    /// Of which of the sampled rows nothing but the largest logit is needed, ascending, as indices into `sampled_rows`.
    pub greedy_rows: &'a [u32],
    /// How tokens are sampled from these rows where the device may do it, one for each of them; empty: nowhere.
    pub sampling: &'a [Option<DeviceSampling>],
    /// The words of the lists of [`StepInputs::sampling`].
    pub change_lists: &'a [u32],
    /// The tokens that have an adapter, by row.
    pub adapters: &'a [AdapterRun],
    /// Which of the kept rows have one, as indices into `kept_rows`.
    pub kept_adapters: &'a [AdapterRun],
    /// Which of the sampled rows have one, as indices into `sampled_rows`.
    pub sampled_adapters: &'a [AdapterRun],
    /// The tokens of second texts, in prompts of two.
    pub second_texts: &'a [Range<u32>],
    /// The tokens whose embeddings are rows of images, in order. Only on devices that [pool](super::Device::STATES).
    pub images: &'a [ImageRows<'a>],
    /// For each of the first layers, the rows of images that are added behind it.
    pub deep_images: &'a [Vec<ImageRows<'a>>],
    /// The positions of each token for [angles with axes](super::RopeTable::with_axes); empty: its position in the
    /// sequence on all axes. Only on devices that [pool](super::Device::STATES).
    pub positions: &'a [AxisPositions],
    /// Runs of tokens that see each other, see [`KvBatch::with_mutual`](super::KvBatch::with_mutual). Only on devices
    /// that pool.
    pub mutual: &'a [Range<u32>],
    /// Whether [`Ops::context_logits`](super::Ops::context_logits) is called in this step.
    pub has_context_logits: bool,
}

/// Rows of an image in place of the embeddings of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageRows<'a> {
    /// The first token, among the tokens of the step.
    pub first_token: u32,
    /// `[num_tokens, hidden_size]`.
    pub rows: &'a [bf16],
}

/// The recurrent states of a sequence behind one of its tokens, copied to a slot without a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedState {
    /// The last token that the states sum up, among the tokens of the step.
    pub token: u32,
    /// The slot.
    pub slot: u32,
}

/// A token that the step before samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenInFlight {
    /// Its index among the tokens of the step.
    pub token: u32,
    /// The row that it is sampled from, as an index of that step's sampled rows.
    pub sampled_row: u32,
}

/// What a device has sampled from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSample {
    /// A token, or why there is none.
    Sampled(Result<TokenId, SampleError>),
    /// Nothing, for it was not asked to: the host samples.
    Skipped,
    /// Nothing: rounding decides, so the host samples, from logits that were changed as the options say.
    Unclear,
}

/// The results of a step in memory of the host.
pub struct StepResults<'l> {
    /// `[num_rows, vocab_size]`. Rows that the device has sampled from may hold anything.
    pub logits: &'l mut [f32],
    /// What the device has sampled, one for each row; empty: nothing.
    pub samples: &'l [DeviceSample],
}

/// The largest step that a device has to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCapacity {
    /// Tokens of all sequences.
    pub max_num_tokens: usize,
    /// Sequences.
    pub max_num_sequences: usize,
    /// Positions of a sequence.
    pub max_seq_len: usize,
    /// Blocks in the table of a sequence.
    pub max_blocks_per_sequence: usize,
    /// Groups of layers with blocks of their own.
    pub num_layer_groups: usize,
    /// Query heads of a layer.
    pub num_q_heads: usize,
    /// Whether scores have [linear biases](super::HeadBiases::slopes).
    pub has_slopes: bool,
    /// The adapters of sequences.
    pub adapters: AdapterCapacity,
}

/// The largest adapters of a step. The default is that of sequences without adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterCapacity {
    /// The largest rank; 0: there are none.
    pub max_rank: usize,
    /// Bytes of the packed weights of all adapters of a step.
    pub max_bytes: usize,
    /// Places of a model that adapters have weights for.
    pub num_places: usize,
}

/// The widths of a model's activations, in elements per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWidths {
    /// All rows of sums.
    pub sums: usize,
    /// All rows of inputs.
    pub inputs: usize,
    /// The widest rows of inputs.
    pub widest_inputs: usize,
    /// Rows of logits.
    pub logits: usize,
    /// Products with quantised weights.
    pub quantised: QuantisedWidths,
}

/// A generation step that only prepares a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstStep {
    /// Sequences, of one token each.
    pub num_sequences: usize,
    /// Positions of each in the cache after the step.
    pub kv_len: usize,
}

/// The largest products with quantised weights of a model. All are 0 if it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantisedWidths {
    /// The most outputs of a matrix.
    pub outputs: usize,
    /// The most inputs of a matrix.
    pub inputs: usize,
    /// The most inputs of a matrix with an [input order](inflight_numbers::QuantisedRows::input_order).
    pub reordered_inputs: usize,
}

impl QuantisedWidths {
    /// Includes a matrix `[n, k]`.
    pub fn add(&mut self, n: usize, k: usize, is_reordered: bool) {
        self.outputs = self.outputs.max(n);
        self.inputs = self.inputs.max(k);
        if is_reordered {
            self.reordered_inputs = self.reordered_inputs.max(k);
        }
    }
}

/// When sums over the inputs of a product are cut into tiles. Their number is the same on 1, 2 and 4 ranks, and so are
/// the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiling {
    /// A rank sums over all of its inputs at once.
    Never,
    /// Where ranks share layers.
    OfRanks,
    /// Also where a rank has whole layers.
    Always,
}

impl Tiling {
    /// The tiling of CPUs, by `deterministic` of the configuration.
    pub fn of_cpus(deterministic: bool) -> Self {
        match deterministic {
            true => Self::Always,
            false => Self::OfRanks,
        }
    }
}

/// How a matrix product stores its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The product replaces the contents of the output.
    Store,
    /// The product is added to the output: a residual connection.
    Add,
}

/// The size of packed weights `[n, k]`.
pub trait PackedWeights {
    /// Outputs.
    fn n(&self) -> usize;

    /// Inputs.
    fn k(&self) -> usize;

    /// Bytes of memory, padding included.
    fn num_bytes(&self) -> usize;

    /// Whether they can serve as an [embedding table](super::EmbeddingTable::Tied) too.
    fn has_rows(&self) -> bool;
}

/// A norm of rows.
pub enum Norm<'a, V: ?Sized> {
    /// No norm: the rows stay as they are.
    Identity,
    /// `x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, arXiv:1910.07467).
    Rms {
        /// Its weights.
        weight: &'a V,
        /// Added to the mean square.
        eps: f32,
    },
    /// `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias` (Ba, Kiros, Hinton, arXiv:1607.06450).
    Layer {
        /// Its weights.
        weight: &'a V,
        /// Its bias; `None` for zeros.
        bias: Option<&'a V>,
        /// Added to the variance.
        eps: f32,
    },
}

/// A layer norm of rows, as [`Norm::Layer`].
pub struct LayerNorm<'a, V: ?Sized> {
    /// Its weights.
    pub weight: &'a V,
    /// Its bias; `None` for zeros.
    pub bias: Option<&'a V>,
    /// Added to the variance.
    pub eps: f32,
}

impl<'a, V: ?Sized> From<LayerNorm<'a, V>> for Norm<'a, V> {
    fn from(norm: LayerNorm<'a, V>) -> Self {
        let LayerNorm { weight, bias, eps } = norm;
        Self::Layer { weight, bias, eps }
    }
}

impl<V: ?Sized> Clone for Norm<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V: ?Sized> Copy for Norm<'_, V> {}

/// A function of one element, without parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * P(X <= x)` for a standard normal `X` (Hendrycks and Gimpel, arXiv:1606.08415).
    Gelu,
    /// Its approximation `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2` (So et al., arXiv:2109.08668).
    SquaredRelu,
}

/// A function of one element that is not a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlainActivation {
    /// One that may be a gate as well.
    Of(Activation),
    /// `x / 2 + positive * x^2` above 0, else `x / 2 + negative * (expm1(min(x, -1e-6)) - x)` (xIELU; Huang and Schlag,
    /// arXiv:2411.13010).
    Xielu {
        /// The factor above 0.
        positive: f32,
        /// The factor below.
        negative: f32,
    },
    /// `x * sigmoid(1.702 * x)`, an approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415).
    QuickGelu,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Silu,
        Self::Gelu,
        Self::GeluTanh,
        Self::Relu,
        Self::SquaredRelu,
    ];
}

/// The activation in front of a down projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InnerActivation {
    /// `activation(gate) * up`, where gate and up are the [interleaved](inflight_numbers::Stacking::Interleaved) parts
    /// of the products: half as wide. Their bias is gate's, then up's.
    Gated(Activation),
    /// `activation(factor * gate) * up`, likewise.
    ScaledGate(Activation, f32),
    /// `activation(products)`.
    Plain(PlainActivation),
}

/// How the parts of an expert's inside are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gating {
    /// `activation(gate) * up`.
    Product(Activation),
    /// `activation(factor * gate) * up`.
    Scaled(Activation, f32),
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = max(-limit, min(up, limit))` (OpenAI,
    /// gpt-oss model card, arXiv:2508.10925).
    Clamped {
        /// The factor inside of the sigmoid.
        alpha: f32,
        /// The bound.
        limit: f32,
    },
    /// `min(activation(gate), limit) * max(-limit, min(up, limit))`. Only on devices with
    /// [layer inputs](super::Device::LAYER_INPUTS).
    Bounded(Activation, f32),
    /// `activation(up)`, without a gate.
    Plain(Activation),
}

impl Gating {
    /// Whether there is a gate.
    pub const fn has_gate(self) -> bool {
        match self {
            Self::Product(_) | Self::Scaled(..) | Self::Clamped { .. } | Self::Bounded(..) => true,
            Self::Plain(_) => false,
        }
    }
}

impl From<Activation> for Gating {
    fn from(activation: Activation) -> Self {
        Self::Product(activation)
    }
}

/// What becomes of logits `x` when they are computed: `c * tanh(scale * x / c)` with a soft cap `c`, else `scale * x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsTransform {
    /// Their factor.
    pub scale: f32,
    /// The bound of their magnitude.
    pub soft_cap: Option<f32>,
}

impl LogitsTransform {
    /// The logits stay as they are.
    pub const IDENTITY: Self = Self {
        scale: 1.0,
        soft_cap: None,
    };
}
