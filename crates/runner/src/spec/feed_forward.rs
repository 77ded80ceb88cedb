//! The feed-forward block of a layer.

use super::projection::Projection;
use inflight_device::{Activation, Gating, MixtureShape, PlainActivation, Routing};

/// A feed-forward block.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a model has one a layer")]
pub enum FeedForward {
    /// `down(activation(gate(x)) * up(x))`.
    Gated {
        /// Gate and up, interleaved: `[2 * intermediate_size, hidden_size]`.
        gate_up: Projection,
        /// The activation of the gate.
        activation: Activation,
        /// `[hidden_size, intermediate_size]`.
        down: Projection,
    },
    /// `down(activation(up(x)))`.
    Plain {
        /// `[intermediate_size, hidden_size]`.
        up: Projection,
        /// The activation, unless tensors have its parameters.
        activation: PlainActivation,
        /// The parameters above 0 and below it, `[1]` each, below the layer, if the activation is
        /// [xIELU](PlainActivation::Xielu). Its factors are their softplus, and below 0 a half more.
        alphas: Option<[&'static str; 2]>,
        /// `[hidden_size, intermediate_size]`.
        down: Projection,
    },
    /// Several gated blocks, a few of which are chosen for each token.
    Experts(ExpertsSpec),
}

/// A mixture of experts. All mixtures of a model have the same sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// The logits of the experts, and the shared one's if it has a gate: `[num_logits, hidden_size]`. Never
    /// quantised.
    pub router: Projection,
    /// How experts are chosen.
    pub routing: Routing,
    /// The corrections of their scores, `[num_experts]`: their parameter, below the layer.
    pub correction: Option<&'static str>,
    /// Whether a checkpoint may lack the corrections, which are 0 then.
    pub may_lack_correction: bool,
    /// Gate and up of an expert, interleaved: `[2 * expert_size, hidden_size]`, or up alone. In names of modules, `{}`
    /// stands for its index.
    pub gate_up: Projection,
    /// How the gates act, if there are some.
    pub gating: Gating,
    /// `[hidden_size, expert_size]`.
    pub down: Projection,
    /// An expert that all tokens have.
    pub shared: Option<SharedExpert>,
    /// The factor of the result.
    pub scale: Option<f32>,
    /// The names of a checkpoint that holds all experts of a layer in one tensor.
    pub stacked: StackedExperts,
}

/// The expert that all tokens have.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    /// Gate and up, interleaved: `[2 * shared_size, hidden_size]`, or up alone.
    pub gate_up: Projection,
    /// `[hidden_size, shared_size]`.
    pub down: Projection,
    /// How its gate acts, if not as the others'.
    pub gating: Option<Gating>,
}

/// The names of tensors with the weights of all experts, as transformers 5 has them in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackedExperts {
    /// The module of the router's logits.
    pub router: &'static str,
    /// Gate and up of all experts, or up alone.
    pub gate_up: &'static str,
    /// Their down projections.
    pub down: &'static str,
    /// How these tensors are laid out.
    pub layout: StackedLayout,
}

/// The order of the weights of all experts in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackedLayout {
    /// `[num_experts, outputs, inputs]`, all outputs of gate before those of up. A checkpoint may have tensors of each
    /// expert instead.
    Outputs,
    /// `[num_experts, inputs, outputs]`, or `[num_experts, outputs, inputs]` in MXFP4; the outputs of gate and up take
    /// turns. Biases are tensors `[num_experts, outputs]`, with `_bias` behind the name. Checkpoints have no other
    /// tensors.
    Inputs,
    /// `[num_experts, inputs, outputs]`, gate's outputs before up's, or, by its shape, [`Self::Outputs`]. A checkpoint
    /// may have tensors of each expert instead.
    InputsInParts,
    /// Three tensors, `[num_experts * expert_size, hidden_size]` each: of gate and of up, whose names are those of
    /// their linear layers, and of down, by inputs. Checkpoints have no other tensors.
    Rows,
    /// Three tensors, `[num_experts, outputs, inputs]` each, of gate, up and down, with the names of linear layers.
    /// Checkpoints have no other tensors.
    Parts,
}

impl ExpertsSpec {
    /// How the gate of the shared expert acts.
    pub fn shared_gating(&self) -> Gating {
        let own = self.shared.as_ref().and_then(|shared| shared.gating);
        own.unwrap_or(self.gating)
    }

    /// Its sizes.
    pub fn shape(&self) -> MixtureShape {
        let shared = self.shared.as_ref();
        MixtureShape {
            routing: self.routing,
            hidden_size: self.gate_up.num_inputs,
            expert_size: self.down.num_inputs,
            shared_size: shared.map_or(0, |shared| shared.down.num_inputs),
        }
    }

    /// The router, the projections of one, and the shared one's.
    pub(super) fn projections(&self) -> Vec<&Projection> {
        let mut all = vec![&self.router, &self.gate_up, &self.down];
        if let Some(shared) = &self.shared {
            all.extend([&shared.gate_up, &shared.down]);
        }
        all
    }

    /// The weights of one of the experts.
    pub(super) fn num_weights_of_expert(&self) -> u64 {
        self.gate_up.num_weights() + self.down.num_weights()
    }
}

impl FeedForward {
    /// Sets whether the projections of a block without experts have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        match self {
            Self::Gated {
                gate_up: up, down, ..
            }
            | Self::Plain { up, down, .. } => {
                up.has_bias = has_bias;
                down.has_bias = has_bias;
            }
            Self::Experts(_) => {}
        }
    }

    /// Its projections; of experts, the router, the projections of one, and the shared one's.
    pub fn projections(&self) -> Vec<&Projection> {
        match self {
            Self::Gated {
                gate_up: up, down, ..
            }
            | Self::Plain { up, down, .. } => vec![up, down],
            Self::Experts(experts) => experts.projections(),
        }
    }

    /// The projections from its inside; of experts, the projection of one, and the shared one's.
    pub fn downs_mut(&mut self) -> Vec<&mut Projection> {
        match self {
            Self::Gated { down, .. } | Self::Plain { down, .. } => vec![down],
            Self::Experts(ExpertsSpec { down, shared, .. }) => {
                let shared = shared.as_mut().map(|shared| &mut shared.down);
                [down].into_iter().chain(shared).collect()
            }
        }
    }

    /// The width inside of a block without experts; 0 if it has some.
    pub fn width(&self) -> usize {
        match self {
            Self::Gated { down, .. } | Self::Plain { down, .. } => down.num_inputs,
            Self::Experts(_) => 0,
        }
    }
}
