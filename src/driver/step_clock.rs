//! The times of a step.

use std::time::Instant;

use inflight_manager::LandedStep;
use inflight_triton::{Timestamps, now_ns};

/// The times of a step, on the records' clock and on Triton's.
pub(super) struct StepClock {
    pub(super) start: Instant,
    timestamps: Timestamps,
    /// The step that landed in this call.
    pub(super) landed: Option<LandedStep>,
}

impl StepClock {
    pub(super) fn start() -> Self {
        Self {
            start: Instant::now(),
            timestamps: instant_timestamps(),
            landed: None,
        }
    }

    pub(super) fn model_started(&mut self) {
        self.timestamps.compute_start = now_ns();
    }

    pub(super) fn model_ended(&mut self, landed: Option<LandedStep>) {
        self.timestamps.compute_end = now_ns();
        self.landed = landed;
    }

    /// Sequences of the step that landed; `None` if nothing was computed.
    pub(super) fn num_computed(&self) -> Option<u64> {
        let landed = self.landed.as_ref()?;
        Some(landed.stats.num_scheduled as u64).filter(|num_sequences| *num_sequences > 0)
    }

    /// The timestamps for Triton; the step ends now.
    pub(super) fn finish(&mut self) -> Timestamps {
        self.timestamps.exec_end = now_ns();
        self.timestamps
    }
}

/// The timestamps of a request that no model has seen.
pub(super) fn instant_timestamps() -> Timestamps {
    let now = now_ns();
    Timestamps {
        exec_start: now,
        compute_start: now,
        compute_end: now,
        exec_end: now,
    }
}
