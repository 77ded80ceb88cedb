//! The weights of a mixture of experts.

use super::linear::Linear;
use super::load::Load;
use super::operands::Gating;

/// The weights of a mixture of experts.
pub struct Experts<D: Load> {
    /// How the gates of the experts to choose from act.
    pub gating: Gating,
    /// How the gates of the shared one act.
    pub shared_gating: Gating,
    /// The experts to choose from; on a device that [stacks](super::Device::STACKS) them, one whose matrices and biases
    /// are those of all, one expert after the other. Empty if only the shared one adds something, in the tile of a rank
    /// of several.
    pub chosen: Vec<Expert<D>>,
    /// One that all tokens have.
    pub shared: Option<Expert<D>>,
}

/// The weights of one expert.
pub struct Expert<D: Load> {
    /// Gate and up, [interleaved](inflight_numbers::Stacking::Interleaved): `[2 * expert_size, hidden_size]`.
    pub gate_up: Linear<D>,
    /// `[hidden_size, expert_size]`.
    pub down: Linear<D>,
}
