//! The slots of recurrent states on a device.
//!
//! ```text
//! slots     | sequences and beams | snapshots | behind drafts, [sequences and beams, 1 + max_draft_tokens] |
//! ```

use super::limits::RunnerLimits;
use inflight_base::{SnapshotId, StateRow};

/// Which slot has which states.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateSlots {
    num_rows: u32,
    num_snapshots: u32,
    num_host_snapshots: u32,
    max_draft_tokens: u32,
}

impl StateSlots {
    pub(super) fn new(limits: &RunnerLimits) -> Self {
        Self {
            num_rows: limits.num_state_rows,
            num_snapshots: limits.num_state_snapshots,
            num_host_snapshots: limits.num_host_state_snapshots,
            max_draft_tokens: limits.max_draft_tokens,
        }
    }

    /// Slots in host memory, all of them for snapshots.
    pub(super) fn num_on_host(&self) -> usize {
        self.num_host_snapshots as usize
    }

    /// All slots.
    pub(super) fn num_all(&self) -> usize {
        let of_drafts = self.num_rows as usize * self.num_places() as usize;
        (self.num_rows + self.num_snapshots) as usize + of_drafts
    }

    /// The slots of sequences and of their beams.
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows as usize
    }

    /// The slot of a snapshot.
    pub(super) fn snapshot(&self, id: SnapshotId) -> u32 {
        self.num_rows + id.0
    }

    /// The slot of a sequence's states in a step with drafts: at place 0 before its tokens, and then behind each of the
    /// tokens but the last.
    pub(super) fn draft(&self, row: StateRow, place: u32) -> u32 {
        let first = self.num_rows + self.num_snapshots;
        first + row.0 * self.num_places() + place
    }

    fn num_places(&self) -> u32 {
        match self.max_draft_tokens {
            0 => 0,
            max => 1 + max,
        }
    }
}
