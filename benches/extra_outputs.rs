//! The cost of extra outputs: whole steps of the demo model, with and without.
//!
//! `cargo bench --bench extra_outputs`. A generation step of 8 sequences, and a context of 512 tokens. The
//! model is small (vocabulary 1536), so that extra outputs weigh more than with any other model. The last
//! group is the work on one row of logits of a vocabulary of Llama 3's size.

mod support;

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{BlockReuse, Engine, EngineConfig, NewRequest, OutputOptions};
use inflight_sampling::LogProbs;

use support::{NUM_STEPS, demo_model, generation_steps, logits, step};

const NUM_REQUESTS: u32 = 8;
const NUM_PROMPT_TOKENS: u32 = 512;
const VOCAB_SIZE: usize = 128_256;

/// Every extra output on its own.
fn asks() -> [(&'static str, OutputOptions); 6] {
    let log_probs = |num_top| OutputOptions {
        log_probs: Some(num_top),
        ..OutputOptions::default()
    };
    [
        ("nothing", OutputOptions::default()),
        ("log-probs", log_probs(0)),
        ("log-probs, top 20", log_probs(20)),
        (
            "generation logits",
            OutputOptions {
                generation_logits: true,
                ..OutputOptions::default()
            },
        ),
        (
            "context logits",
            OutputOptions {
                context_logits: true,
                ..OutputOptions::default()
            },
        ),
        (
            "KV blocks",
            OutputOptions {
                kv_blocks: true,
                ..OutputOptions::default()
            },
        ),
    ]
}

fn config() -> EngineConfig {
    EngineConfig {
        max_num_requests: NUM_REQUESTS,
        max_seq_len: Tokens(1024),
        max_num_tokens: Tokens(NUM_PROMPT_TOKENS * NUM_REQUESTS),
        block_size: BlockSize::new(32).expect("not zero"),
        num_blocks: Blocks(NUM_REQUESTS * 32),
        reuse: BlockReuse::Off,
        ..EngineConfig::default()
    }
}

/// An engine with `num_requests` equal requests.
fn engine(num_requests: u32, num_prompt_tokens: u32, outputs: OutputOptions) -> Engine {
    let mut engine = Engine::new(config());
    for id in 0..num_requests {
        let prompt = (0..num_prompt_tokens).map(|n| 5 + n * 7 % 1500).collect();
        let id = SequenceId(u64::from(id));
        let request = NewRequest {
            outputs,
            ..NewRequest::new(id, prompt, Tokens(NUM_STEPS + 1))
        };
        engine.add(request).expect("fits");
    }
    engine
}

fn generation(criterion: &mut Criterion) {
    let mut runner = demo_model(&config());
    let mut group = criterion.benchmark_group("generation step of 8");
    for (name, outputs) in asks() {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|num_steps| {
                generation_steps(num_steps, &mut runner, || engine(NUM_REQUESTS, 16, outputs))
            });
        });
    }
    group.finish();
}

fn context(criterion: &mut Criterion) {
    let mut runner = demo_model(&config());
    let mut group = criterion.benchmark_group("context of 512");
    for (name, outputs) in asks() {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|num_contexts| {
                let one = |_| step(&mut engine(1, NUM_PROMPT_TOKENS, outputs), &mut runner);
                (0..num_contexts).map(one).sum()
            });
        });
    }
    group.finish();
}

fn row(criterion: &mut Criterion) {
    let mut log_probs = LogProbs::new(VOCAB_SIZE);
    let logits = logits(VOCAB_SIZE);
    let mut group = criterion.benchmark_group("row of 128256");
    for num_top in [0, 5, 20] {
        group.bench_function(format!("log-probs, top {num_top}"), |bencher| {
            bencher.iter(|| {
                log_probs.keep(black_box(&logits));
                log_probs.of(7, num_top)
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = generation, context, row
}
criterion_main!(benches);
