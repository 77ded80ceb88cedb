//! What the benches of whole steps share: the demo model, a step and its time, logits like a model's.

// Each bench is a program of its own, and none uses all of it.
#![allow(dead_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use triton_inflight::device::cpu::CpuOptions;
use triton_inflight::engine::{Engine, EngineConfig, StepOutput};
use triton_inflight::runner::{CpuRunner, ModelSource, RunnerLimits};

/// Generation steps that are taken of one engine, at most.
pub const NUM_STEPS: u32 = 200;

pub fn demo_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1")
}

/// The demo model, for an engine of this configuration.
pub fn demo_model(config: &EngineConfig) -> CpuRunner {
    let checkpoint = ModelSource::open(&demo_folder()).expect("the demo model opens");
    runner(&checkpoint, config)
}

pub fn runner(checkpoint: &ModelSource, config: &EngineConfig) -> CpuRunner {
    let limits = RunnerLimits::of(config);
    CpuRunner::new(checkpoint, limits, &CpuOptions::default()).expect("the model loads")
}

/// One step, and how long engine and runner took for it.
pub fn step(engine: &mut Engine, runner: &mut CpuRunner) -> Duration {
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let start = Instant::now();
    let decided = engine.schedule();
    for plan in decided.plans() {
        runner.run(plan, &mut output).expect("the step runs");
    }
    engine.apply(decided, &mut output, &mut events);
    start.elapsed()
}

/// How long `num_steps` generation steps take, of as many engines as they need, whose contexts are all one
/// step.
pub fn generation_steps(
    num_steps: u64,
    runner: &mut CpuRunner,
    new_engine: impl Fn() -> Engine,
) -> Duration {
    let mut total = Duration::ZERO;
    for n in 0..num_steps.div_ceil(u64::from(NUM_STEPS)) {
        let done = n * u64::from(NUM_STEPS);
        let mut engine = new_engine();
        step(&mut engine, runner);
        for _ in done..num_steps.min(done + u64::from(NUM_STEPS)) {
            total += step(&mut engine, runner);
        }
    }
    total
}

/// Logits of a vocabulary, a few tokens of which are likely and most are not, in no order.
pub fn logits(vocab_size: usize) -> Vec<f32> {
    (0..vocab_size)
        .map(|id| 10.0 - 1.5 * ((id * 50_021 % vocab_size + 1) as f32).ln())
        .collect()
}
