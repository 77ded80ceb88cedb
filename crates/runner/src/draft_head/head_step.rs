//! The inputs and outputs of a head's pass.

use super::shared::SharedWeights;
use inflight_device::{Device, StepInputs};

/// Tokens that are computed together.
pub(super) struct HeadStep<'a, 's, D: Device> {
    pub(super) step: &'a D::Step<'s>,
    pub(super) inputs: StepInputs<'a>,
    /// The state that each token follows, `[num_tokens, hidden_size]`.
    pub(super) states: &'a [f32],
    pub(super) shared: SharedWeights<'a, D>,
}

/// The results for the kept rows, if there are some.
pub(super) struct HeadOutputs<'a, D: Device> {
    /// `[num_kept_rows, draft_vocab_size]`.
    pub(super) logits: &'a mut D::Logits,
    /// The states that drafts follow, `[num_kept_rows, hidden_size]`.
    pub(super) states: &'a mut [f32],
}
