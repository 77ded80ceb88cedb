//! Shared by the benchmarks of whole steps: the demo model, timed steps, realistic logits.

// Each benchmark is a separate program that uses only a part of this.
#![allow(dead_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use inflight_device_cpu::CpuOptions;
use inflight_engine::{Engine, EngineConfig, StepOutput};
use inflight_runner::{CpuRunner, ModelSource, RunnerLimits};

/// Maximum number of generation steps per engine.
pub const NUM_STEPS: u32 = 200;

pub fn demo_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1")
}

/// The demo model, loaded for an engine with this configuration.
pub fn demo_model(config: &EngineConfig) -> CpuRunner {
    let source = ModelSource::open(&demo_folder()).expect("the demo model opens");
    runner(&source, config)
}

pub fn runner(source: &ModelSource, config: &EngineConfig) -> CpuRunner {
    let limits = RunnerLimits::of(config);
    CpuRunner::new(source, limits, &CpuOptions::default()).expect("the model loads")
}

/// Runs one step; returns the time of engine and runner.
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

/// Time of `num_steps` generation steps. Makes as many engines as needed; the contexts of each are one step,
/// which is not counted.
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

/// Logits of a vocabulary in random order: a few tokens are likely, most are not.
pub fn logits(vocab_size: usize) -> Vec<f32> {
    (0..vocab_size)
        .map(|id| 10.0 - 1.5 * ((id * 50_021 % vocab_size + 1) as f32).ln())
        .collect()
}
