//! How long the GPU waits for the host between two steps: what a step takes, less what its graph takes when it is
//! launched again and again.

use std::time::{Duration, Instant};

use inflight_engine::{EngineConfig, StepOutput};
use inflight_machines::CudaRunner;

use crate::Result;
use crate::load::{Load, step};

/// Launches of a graph that are timed together.
const NUM_REPEATS: u32 = 8;

/// The means of some generation steps with the same number of sequences.
#[derive(Clone, Copy, Debug)]
pub struct HostGap {
    /// A step: scheduled, computed, its tokens given to the engine.
    pub step: Duration,
    /// Its part on the GPU.
    pub graph: Duration,
}

impl HostGap {
    /// Measures steps of a load. `None` if no step has a graph.
    ///
    /// # Errors
    /// A step fails.
    pub fn measure(
        runner: &mut CudaRunner,
        config: &EngineConfig,
        load: &Load,
    ) -> Result<Option<Self>> {
        let mut engine = load.start(runner.vocab_size(), config)?;
        let mut output = StepOutput::default();
        let (mut steps, mut graphs, mut num_steps) = (Duration::ZERO, Duration::ZERO, 0);
        // The first step of a shape that has a graph also records it.
        let mut is_recorded = false;
        while !engine.is_idle() {
            let start = Instant::now();
            step(&mut engine, &mut output, &mut Vec::new(), |plan, output| {
                runner.run(plan, output)
            })?;
            let period = start.elapsed();
            let start = Instant::now();
            let has_graph = runner.device().repeat_step(NUM_REPEATS)?;
            if has_graph && is_recorded {
                steps += period;
                graphs += start.elapsed() / NUM_REPEATS;
                num_steps += 1;
            }
            is_recorded = has_graph;
        }
        Ok((num_steps > 0).then(|| Self {
            step: steps / num_steps,
            graph: graphs / num_steps,
        }))
    }

    /// Microseconds.
    pub fn us(&self) -> f64 {
        1e6 * (self.step.as_secs_f64() - self.graph.as_secs_f64())
    }
}
