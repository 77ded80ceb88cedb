//! The engine's own cost: `schedule` and `apply` of one generation step, and the lookup of a long cached
//! prompt.
//!
//! `cargo bench --bench engine`

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{CapacityPolicy, Engine, EngineConfig, NewRequest, Sampled, StepOutput};

const NUM_PROMPT_TOKENS: u32 = 512;
const NUM_STEPS: u32 = 512;
const BLOCK_SIZE: u32 = 32;

/// An engine with `num_requests` sequences whose contexts are computed.
fn generating(num_requests: u32, policy: CapacityPolicy) -> Engine {
    let max_seq_len = NUM_PROMPT_TOKENS + NUM_STEPS + 2;
    let mut engine = Engine::new(EngineConfig {
        max_num_requests: num_requests,
        max_seq_len: Tokens(max_seq_len),
        max_num_tokens: Tokens(NUM_PROMPT_TOKENS * num_requests),
        block_size: BlockSize::new(BLOCK_SIZE).expect("not zero"),
        num_blocks: Blocks(num_requests * max_seq_len.div_ceil(BLOCK_SIZE)),
        policy,
        ..EngineConfig::default()
    });
    for id in 0..num_requests {
        engine
            .add(NewRequest::new(
                SequenceId(u64::from(id)),
                vec![id; NUM_PROMPT_TOKENS as usize],
                Tokens(NUM_STEPS + 2),
            ))
            .expect("fits");
    }
    step(&mut engine, &mut StepOutput::default(), &mut Vec::new());
    engine
}

/// Runs one step; returns the engine's time.
fn step(
    engine: &mut Engine,
    output: &mut StepOutput,
    events: &mut Vec<inflight_engine::Event>,
) -> Duration {
    let start = Instant::now();
    let decided = engine.schedule();
    let scheduled = start.elapsed();
    output.sampled.clear();
    let sampled = decided
        .sequences()
        .iter()
        .map(|planned| (planned.slot, Sampled::Token(7)));
    output.sampled.extend(sampled);
    events.clear();
    let start = Instant::now();
    engine.apply(decided, output, events);
    scheduled + start.elapsed()
}

fn generation_step(criterion: &mut Criterion) {
    for policy in [
        CapacityPolicy::GuaranteedNoEvict,
        CapacityPolicy::MaxUtilization,
    ] {
        let mut group = criterion.benchmark_group(format!("generation step, {policy:?}"));
        for num_requests in [1, 64, 512, 2048] {
            group.bench_function(BenchmarkId::from_parameter(num_requests), |bencher| {
                let mut output = StepOutput::default();
                let mut events = Vec::new();
                bencher.iter_custom(|num_steps| {
                    let mut total = Duration::ZERO;
                    for n in 0..num_steps.div_ceil(u64::from(NUM_STEPS)) {
                        let done = n * u64::from(NUM_STEPS);
                        let mut engine = generating(num_requests, policy);
                        for _ in done..num_steps.min(done + u64::from(NUM_STEPS)) {
                            total += step(&mut engine, &mut output, &mut events);
                        }
                    }
                    total
                });
            });
        }
        group.finish();
    }
}

/// `schedule` of a step that admits a fully cached prompt: it is looked up, its blocks are shared, and its
/// last token is packed.
fn cached_prompt(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("start of a cached prompt");
    for num_tokens in [1024, 32_768] {
        group.bench_function(BenchmarkId::from_parameter(num_tokens), |bencher| {
            let mut engine = Engine::new(EngineConfig {
                max_seq_len: Tokens(num_tokens + 1),
                max_num_tokens: Tokens(num_tokens),
                block_size: BlockSize::new(BLOCK_SIZE).expect("not zero"),
                num_blocks: Blocks(2 * (num_tokens + 1).div_ceil(BLOCK_SIZE)),
                ..EngineConfig::default()
            });
            let prompt: Vec<_> = (0..num_tokens)
                .map(|n| n.wrapping_mul(2_654_435_761) >> 17)
                .collect();
            let mut output = StepOutput::default();
            let mut events = Vec::new();
            let mut num_requests = 0;
            let mut start = |engine: &mut Engine| {
                let request = NewRequest::new(SequenceId(num_requests), prompt.clone(), Tokens(1));
                num_requests += 1;
                engine.add(request).expect("fits");
                let start = Instant::now();
                let decided = engine.schedule();
                let took = start.elapsed();
                let num_computed = decided.num_tokens();
                output.sampled.clear();
                let slot = decided.sequences()[0].slot;
                output.sampled.push((slot, Sampled::Token(7)));
                engine.apply(decided, &mut output, &mut events);
                events.clear();
                (took, num_computed)
            };
            start(&mut engine);
            bencher.iter_custom(|num_starts| {
                let one = |_| {
                    let (took, num_computed) = start(&mut engine);
                    assert_eq!(
                        num_computed,
                        Tokens(1),
                        "everything but the last token is reused"
                    );
                    took
                };
                (0..num_starts).map(one).sum()
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500));
    targets = generation_step, cached_prompt
}
criterion_main!(benches);
