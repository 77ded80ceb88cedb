//! Layers that keep a recurrent state instead of keys and values.
//!
//! ```text
//! x        [num_tokens, input_len]    products of the layer's input projection
//!
//!            gated convolution          b | c | x                                            [num_channels] each
//!            gated delta rule           queries | keys | values | gates | strengths | decays
//!            it, by channels            queries | keys | values | strengths
//!            state space                values | keys | queries | gates | times
//!            selective scan             values | gates                                       [num_channels] each
//!
//! late     other inputs of the gated delta rule by channels and of the selective scan: see LateInputs
//!
//! state    [state_len] f32 of a sequence: the last kernel_len inputs of the convolution, [_, num_channels], then what
//!          the rule keeps
//! out      [num_tokens, out_len]      inputs of the layer's output projection
//! ```
//!
//! A token changes the state that the token before it has left, so the chunks of a prompt do not change its bits. The
//! results of a token are read from the state that it has left itself, so that a repetition of the token gives its bits
//! again.

use super::load::Load;
use super::step_io::StepIo;
use inflight_base::LoadError;

/// The sizes of a layer with a state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrenceShape {
    /// Positions that the causal convolution of each channel reads, the token's own included.
    pub kernel_len: usize,
    /// The rule around the convolution.
    pub rule: RecurrentRule,
}

/// How a layer with a state mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecurrentRule {
    /// `c * convolution(b * x)` (Liquid AI, LFM2 technical report, arXiv:2511.23404).
    GatedConvolution {
        /// Channels.
        num_channels: usize,
    },
    /// The gated delta rule (Yang, Kautz, Hatamizadeh, arXiv:2412.06464), behind a convolution with SiLU.
    GatedDelta(DeltaShape),
    /// The selective state space of Mamba-2 (Dao and Gu, arXiv:2405.21060), behind a convolution with SiLU.
    StateSpace(StateSpaceShape),
    /// The selective scan of Mamba (Gu and Dao, arXiv:2312.00752), behind a convolution with SiLU that is [an operation
    /// of its own](RecurrentOps::convolve).
    SelectiveScan(ScanShape),
}

/// The sizes of the gated delta rule. For each value head, with the state `S [key_dim, value_dim]`, the normalised
/// query `q` and key `k`, and the value `v`:
///
/// ```text
/// S = exp(-rate * softplus(decay + time_bias)) * S
/// S += k^T * strength_scale * sigmoid(strength) * (v - k * S)
/// out = norm(q * S / sqrt(key_dim)) * silu(gate)
/// ```
///
/// Queries and keys are divided by their lengths; the norm is an RMS norm over `value_dim`. In another
/// [form](DeltaForm), each row of `S` has a decay of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaShape {
    /// Where decays apply.
    pub form: DeltaForm,
    /// Heads of queries and of keys; divides `num_value_heads`.
    pub num_key_heads: usize,
    /// Heads of values, gates, strengths and decays. Heads that share a key follow one another.
    pub num_value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value or gate.
    pub value_dim: usize,
    /// The factor of strengths.
    pub strength_scale: f32,
    /// Added to the mean square of an output.
    pub norm_eps: f32,
}

/// Where the decays of the gated delta rule apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaForm {
    /// Each value head.
    Heads,
    /// Each element of a head's key, with a time bias of its own; gates have a sigmoid in place of SiLU (Kimi Delta
    /// Attention; Kimi Team, arXiv:2510.26692). Gates and decays are [late](LateInputs).
    Channels,
}

/// The sizes of a selective state space. For each head, with the state `S [state_dim, head_dim]`, the value `x`, and
/// the key `b` and the query `c` of its group:
///
/// ```text
/// time = clamp(softplus(time + time_bias), times)
/// S = exp(-rate * time) * S + b^T * time * x
/// out = norm((c * S + skip * x) * silu(gate))
/// ```
///
/// The norm is an RMS norm over all heads of a norm group, at this place or [another](SpaceNorm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpaceShape {
    /// Heads of values, gates and times.
    pub num_heads: usize,
    /// Elements of a value or gate.
    pub head_dim: usize,
    /// Groups of consecutive heads that share keys and queries; divides `num_heads`.
    pub num_groups: usize,
    /// Elements of a key or query.
    pub state_dim: usize,
    /// The factors of values, keys, queries, gates and times, as the input projection gives them.
    pub input_scales: [f32; 5],
    /// The order of gate and norm.
    pub norm: SpaceNorm,
    /// Groups of outputs that are normalised together; divides `num_heads * head_dim`.
    pub num_norm_groups: usize,
    /// Added to the mean square of outputs.
    pub norm_eps: f32,
    /// The least and the largest time.
    pub times: [f32; 2],
}

/// The sizes of a selective scan. For each channel, with the state `s [state_dim]`, the value `x`, and the key `b` and
/// the query `c` that all channels share:
///
/// ```text
/// time = softplus(time + time_bias)
/// s = exp(-rate * time) * s + b * time * x        rate: [state_dim]
/// out = (c * s + skip * x) * silu(gate)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanShape {
    /// Channels: values, gates and times.
    pub num_channels: usize,
    /// Elements of a key, of a query, and of a channel's state.
    pub state_dim: usize,
    /// Added to the mean squares of keys and of queries, which have an RMS norm each; `None`: they have none.
    pub norm_eps: Option<f32>,
}

/// The norm of a state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceNorm {
    /// Of gated results: `norm(x * silu(gate))`.
    Gated,
    /// Of results in front of their gates: `norm(x) * silu(gate)`.
    Ungated,
    /// There is none: `x * silu(gate)`.
    Absent,
}

/// The weights of a layer with a state, besides its projections.
pub struct RecurrenceWeights<D: Load> {
    /// `[kernel_len, num_channels]`, the token's own position last.
    pub convolution: D::Vector,
    /// `[num_channels]`.
    pub convolution_bias: Option<D::Vector>,
    /// The rule's, if it has more than a convolution.
    pub rule: Option<RuleWeights<D>>,
}

/// The weights of the gated delta rule, of a state space, or of a selective scan.
pub struct RuleWeights<D: Load> {
    /// One for each head of values, above 0; of a selective scan `[state_dim, num_channels]`.
    pub rates: D::Vector,
    /// One for each head of values, or each channel; of the gated delta rule [by channels](DeltaForm::Channels)
    /// `[num_value_heads * key_dim]`.
    pub time_biases: D::Vector,
    /// Of a state space or a selective scan: one for each head of values, or each channel.
    pub skips: Option<D::Vector>,
    /// `[value_dim]`; of a state space `[num_heads * head_dim]`; of a selective scan with a norm `[2 * state_dim]`, of
    /// keys first.
    pub norm: Option<D::Vector>,
}

/// The operands of a layer with a state.
pub struct RecurrenceParams<'a, D: Load> {
    /// The sizes.
    pub shape: &'a RecurrenceShape,
    /// The weights.
    pub weights: &'a RecurrenceWeights<D>,
    /// Which of the layers with a state it is.
    pub layer: usize,
    /// The late inputs of the rule, if it has any.
    pub late: Option<LateInputs<'a, D>>,
}

/// Inputs of a rule that the input projection does not make.
pub enum LateInputs<'a, D: Load> {
    /// Of the gated delta rule by channels, projected by low rank.
    LowRank {
        /// `[num_tokens, value_len]`.
        gates: &'a D::Sums,
        /// `[num_tokens, num_value_heads * key_dim]`.
        decays: &'a D::Sums,
    },
    /// Of a selective scan, projected from convolved values.
    Selected {
        /// `[num_tokens, num_channels]`.
        times: &'a D::Sums,
        /// Keys and queries, in front of their norms, `[num_tokens, 2 * state_dim]`.
        keys: &'a D::Sums,
    },
}

/// The function of a gate, by which results of attention are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `ln(1 + e^x)`.
    Softplus,
}

/// Operations of layers with recurrent states, and gates of attention.
pub trait RecurrentOps: StepIo {
    /// The states of all slots, in all layers that have one.
    type RecurrentStates;
    /// Copies of the states of slots in memory of the host.
    type HostStates;

    /// Reserves `num_slots` states for each of these layers.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn alloc_recurrent_states(
        &mut self,
        layers: &[RecurrenceShape],
        num_slots: usize,
    ) -> Result<Self::RecurrentStates, LoadError>;

    /// Copies the states of a slot to another one, in all layers.
    fn copy_recurrent_states(&mut self, states: &mut Self::RecurrentStates, from: u32, to: u32);

    /// Reserves memory of the host for copies of the states of `num_slots` slots.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn alloc_host_states(
        &mut self,
        states: &Self::RecurrentStates,
        num_slots: usize,
    ) -> Result<Self::HostStates, LoadError>;

    /// Copies the states of a slot to one in memory of the host, in all layers.
    fn offload_states(
        &mut self,
        states: &Self::RecurrentStates,
        source: u32,
        host: &mut Self::HostStates,
        target: u32,
    );

    /// Copies the states of a slot in memory of the host to one of the device, in all layers.
    fn onboard_states(
        &mut self,
        host: &Self::HostStates,
        source: u32,
        states: &mut Self::RecurrentStates,
        target: u32,
    );

    /// Replaces the values of all tokens of a step by `silu(convolution(values))`, rounds these to `out`,
    /// `[num_tokens, num_channels]`, and replaces the convolution's part of the states: what a selective scan begins
    /// with. States are saved and repeated as by [`RecurrentOps::mix_recurrence`].
    fn convolve(
        &mut self,
        step: &Self::Step<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Self::Sums,
        states: &mut Self::RecurrentStates,
        out: &mut Self::Inputs,
    );

    /// Computes a layer for all tokens of a step, and replaces the states of their sequences, which are in
    /// [`StepInputs::state_slots`](super::StepInputs::state_slots). The convolution of a selective scan has run before.
    /// A sequence begins with zeros. `x` may hold anything afterwards. States behind the tokens in
    /// [`StepInputs::saved_states`](super::StepInputs::saved_states) are copied as well.
    fn mix_recurrence(
        &mut self,
        step: &Self::Step<'_>,
        params: RecurrenceParams<'_, Self>,
        x: &mut Self::Sums,
        states: &mut Self::RecurrentStates,
        out: &mut Self::Inputs,
    );

    /// `attended *= function(gates)`. `attended` is `[num_rows, width]`, and `gates` are `[num_rows, num_gates]`: each
    /// gate is for `width / num_gates` neighbouring elements.
    fn gate_attention(
        &mut self,
        num_rows: usize,
        function: GateFunction,
        gates: &Self::Sums,
        attended: &mut Self::Inputs,
    );
}

impl RecurrenceShape {
    /// Channels of the convolution.
    pub fn num_channels(&self) -> usize {
        match self.rule {
            RecurrentRule::GatedConvolution { num_channels } => num_channels,
            RecurrentRule::GatedDelta(delta) => 2 * delta.key_len() + delta.value_len(),
            RecurrentRule::StateSpace(space) => space.value_len() + 2 * space.key_len(),
            RecurrentRule::SelectiveScan(scan) => scan.num_channels,
        }
    }

    /// Elements of a token's products of the input projection.
    pub fn input_len(&self) -> usize {
        match self.rule {
            RecurrentRule::GatedConvolution { num_channels } => 3 * num_channels,
            RecurrentRule::GatedDelta(delta) => {
                let by_heads = delta.value_len() + delta.num_value_heads;
                self.num_channels()
                    + delta.num_value_heads
                    + match delta.form {
                        DeltaForm::Heads => by_heads,
                        DeltaForm::Channels => 0,
                    }
            }
            RecurrentRule::StateSpace(space) => {
                2 * (space.key_len() + space.value_len()) + space.num_heads
            }
            RecurrentRule::SelectiveScan(scan) => 2 * scan.num_channels,
        }
    }

    /// Elements of a token's inputs of the output projection.
    pub fn out_len(&self) -> usize {
        match self.rule {
            RecurrentRule::GatedConvolution { num_channels } => num_channels,
            RecurrentRule::GatedDelta(delta) => delta.value_len(),
            RecurrentRule::StateSpace(space) => space.value_len(),
            RecurrentRule::SelectiveScan(scan) => scan.num_channels,
        }
    }

    /// Elements of a state that are inputs of the convolution.
    pub fn convolution_len(&self) -> usize {
        self.kernel_len * self.num_channels()
    }

    /// Elements of a state.
    pub fn state_len(&self) -> usize {
        self.convolution_len()
            + match self.rule {
                RecurrentRule::GatedConvolution { .. } => 0,
                RecurrentRule::GatedDelta(delta) => delta.num_value_heads * delta.matrix_len(),
                RecurrentRule::StateSpace(space) => space.num_heads * space.matrix_len(),
                RecurrentRule::SelectiveScan(scan) => scan.num_channels * scan.state_dim,
            }
    }
}

impl DeltaShape {
    /// Elements of the queries of a token, and of its keys.
    pub fn key_len(&self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// Elements of the values of a token, and of its gates.
    pub fn value_len(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// Decays of a token, and time biases.
    pub fn num_decays(&self) -> usize {
        match self.form {
            DeltaForm::Heads => self.num_value_heads,
            DeltaForm::Channels => self.num_value_heads * self.key_dim,
        }
    }

    /// Elements of the state of a value head.
    pub fn matrix_len(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

impl StateSpaceShape {
    /// Elements of the keys of a token, and of its queries.
    pub fn key_len(&self) -> usize {
        self.num_groups * self.state_dim
    }

    /// Elements of the values of a token, and of its gates.
    pub fn value_len(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of the state of a head.
    pub fn matrix_len(&self) -> usize {
        self.state_dim * self.head_dim
    }
}
