//! What beams cost: a step of one request with `W` beams, beside one of `W` requests.
//!
//! `cargo bench --bench beams`. The demo model, whose vocabulary (1536) is small, so that what is done for
//! each beam besides the model's own work weighs more than it does anywhere else. Steps end no text.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use triton_inflight::base::{BlockSize, Blocks, RequestId, Tokens};
use triton_inflight::device::cpu::{CpuOptions, KvDtype};
use triton_inflight::engine::{Engine, EngineConfig, NewRequest, StepOutput};
use triton_inflight::runner::{AttentionLimits, Checkpoint, CpuRunner, RunnerLimits};
use triton_inflight::sampling::{BeamSearch, EarlyStopping, SamplingParams};

const NUM_PROMPT_TOKENS: u32 = 128;
const NUM_STEPS: u32 = 200;
const MAX_WIDTH: u32 = 16;

fn config() -> EngineConfig {
    EngineConfig {
        max_num_requests: MAX_WIDTH,
        max_beam_width: MAX_WIDTH,
        max_seq_len: Tokens(512),
        max_num_tokens: Tokens(NUM_PROMPT_TOKENS * MAX_WIDTH),
        block_size: BlockSize::new(32).expect("not zero"),
        num_blocks: Blocks(MAX_WIDTH * 16),
        ..EngineConfig::default()
    }
}

fn runner(config: &EngineConfig) -> CpuRunner {
    let limits = RunnerLimits {
        max_num_tokens: config.max_num_tokens,
        max_num_requests: config.max_sequences(),
        max_sampled_rows: config.max_sampled_rows(),
        max_seq_len: config.max_seq_len,
        block_size: config.block_size,
        num_blocks: config.num_blocks,
        kv_dtype: KvDtype::Bf16,
        attention: AttentionLimits::default(),
    };
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1");
    let checkpoint = Checkpoint::open(&dir).expect("the demo model opens");
    CpuRunner::new(&checkpoint, limits, &CpuOptions::default()).expect("the demo model loads")
}

/// An engine with `num_requests` of `width` beams each, 1 for none, whose contexts are computed.
fn engine(num_requests: u32, width: u32, runner: &mut CpuRunner) -> Engine {
    let mut engine = Engine::new(config());
    let search = BeamSearch {
        width,
        num_returned: width,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Never,
        diversity_rate: 0.0,
    };
    let sampling = Arc::new(SamplingParams {
        beam_search: (width > 1).then_some(search),
        ..SamplingParams::default()
    });
    for id in 0..num_requests {
        // They begin differently, so that they share nothing.
        let prompt = (0..NUM_PROMPT_TOKENS).map(|n| 5 + (id + n * 7) % 1500);
        let id = RequestId(u64::from(id));
        let request = NewRequest {
            sampling: Arc::clone(&sampling),
            ..NewRequest::new(id, prompt.collect(), Tokens(NUM_STEPS + 2))
        };
        engine.add(request).expect("fits");
    }
    step(&mut engine, runner);
    engine
}

/// One step, and how long engine and runner took for it.
fn step(engine: &mut Engine, runner: &mut CpuRunner) -> Duration {
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let start = Instant::now();
    let decided = engine.schedule();
    for plan in decided.plans() {
        runner.run(plan, &mut output).expect("the step runs");
    }
    engine.apply(decided, &mut output, &mut events);
    start.elapsed()
}

fn generation(criterion: &mut Criterion) {
    let mut runner = runner(&config());
    for num in [4, MAX_WIDTH] {
        let mut group = criterion.benchmark_group(format!("generation step of {num}"));
        for (name, num_requests, width) in [("requests", num, 1), ("beams of one", 1, num)] {
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|num_steps| {
                    let mut total = Duration::ZERO;
                    for n in 0..num_steps.div_ceil(u64::from(NUM_STEPS)) {
                        let done = n * u64::from(NUM_STEPS);
                        let mut engine = engine(num_requests, width, &mut runner);
                        for _ in done..num_steps.min(done + u64::from(NUM_STEPS)) {
                            total += step(&mut engine, &mut runner);
                        }
                    }
                    total
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = generation
}
criterion_main!(benches);
