//! A step on CPU.

use inflight_base::TokenId;
use inflight_device::{AxisPositions, KvBatch, SavedState};
use inflight_threads::Turn;

/// A step on CPU.
pub struct CpuStep<'a> {
    pub(super) batch: KvBatch<'a>,
    pub(super) state_slots: &'a [u32],
    pub(super) saved_states: &'a [SavedState],
    pub(super) is_repeated: &'a [bool],
    pub(super) token_ids: &'a [TokenId],
    pub(super) positions: &'a [AxisPositions],
    pub(super) kept_rows: &'a [u32],
    pub(super) sampled_rows: &'a [u32],
    /// Until the step ends; `None` for a rank of several, which waits for the others in the step.
    pub(super) _turn: Option<Turn>,
}
