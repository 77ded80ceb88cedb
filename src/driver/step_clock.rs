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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use inflight_engine::{Engine, EngineConfig, StepStats};

    use super::*;

    /// Waits until Triton's clock shows another time. Returns the time before.
    fn tick() -> u64 {
        let before = now_ns();
        while now_ns() == before {}
        before
    }

    #[test]
    fn the_times_of_a_step_are_in_order() {
        let begun = tick();
        let mut clock = StepClock::start();
        let started = tick();
        clock.model_started();
        let ended = tick();
        clock.model_ended(None);
        let finished = tick();
        let times = clock.finish();
        let each = [
            times.exec_start,
            times.compute_start,
            times.compute_end,
            times.exec_end,
        ];
        for (time, after) in each.into_iter().zip([begun, started, ended, finished]) {
            assert!(time > after, "{times:?}");
        }
        assert!(each.is_sorted(), "{times:?}");
    }

    #[test]
    fn only_a_step_with_sequences_has_computed_something() {
        let config = EngineConfig::default();
        let kv = Engine::new(config.clone()).kv_usage();
        let num_computed = |num_scheduled| {
            let stats = StepStats {
                num_scheduled,
                ..StepStats::before_the_first(&config, kv)
            };
            let mut clock = StepClock::start();
            clock.model_ended(Some(LandedStep {
                stats,
                ended_before: None,
                ended: None,
                stages: Vec::new(),
                model: Duration::ZERO,
            }));
            clock.num_computed()
        };
        assert_eq!([0, 1, 3].map(num_computed), [None, Some(1), Some(3)]);
        assert_eq!(StepClock::start().num_computed(), None);
    }
}
