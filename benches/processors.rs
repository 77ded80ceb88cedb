//! The cost of a logits post-processor: one token over a vocabulary of Llama 3's size, and whole steps of the
//! demo model.
//!
//! `cargo bench --bench processors`; needs a C compiler. The library's processors change nothing, so only the
//! cost of calling them is measured: a copy between guard pages, the call, the checks.

mod support;

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{BlockReuse, Engine, EngineConfig, NewRequest};
use inflight_post_processors::{PostProcessors, ProcessedRequest};
use inflight_sampling::{Owner, Sampler, SamplingInput, SamplingParams, prepare_batches};

use support::{NUM_STEPS, demo_model, generation_steps, logits};

const VOCAB_SIZE: usize = 128_256;
const NUM_REQUESTS: u32 = 8;

/// Processor of all requests of a step, or of one of them: name and arguments.
const KINDS: [(&str, &str); 5] = [
    ("", ""),
    ("ban_tokens", r#"{"tokens": [5, 6, 7]}"#),
    ("nothing", ""),
    ("nothing_batched", ""),
    ("one of eight: nothing_batched", ""),
];

fn library() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::temp_dir().join(format!("inflight-bench-{}.so", std::process::id()));
    let status = Command::new("cc")
        .args(["-std=c11", "-O2", "-shared", "-fPIC", "-I"])
        .arg(root.join("include"))
        .arg("-o")
        .args([&library, &root.join("benches/processors.c")])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    library
}

fn sampling(processors: &PostProcessors, id: u64, name: &str, arguments: &str) -> SamplingParams {
    let request = ProcessedRequest {
        id: SequenceId(id),
        client_request_id: None,
        client_id: None,
        vocab_size: 1000,
    };
    let start = || {
        let processor = processors.start(name, arguments, request);
        processor.expect("good arguments")
    };
    SamplingParams {
        logits_processor: (!name.is_empty()).then(start),
        ..SamplingParams::default()
    }
}

/// The rows of one step, in sequence.
fn rows(criterion: &mut Criterion) {
    let processors = PostProcessors::with_library(&library()).expect("it opens");
    let logits = logits(VOCAB_SIZE);
    let tokens = [7; 100];
    let mut sampler = Sampler::new(VOCAB_SIZE);
    for num_rows in [1, 8] {
        let mut group = criterion.benchmark_group(format!("greedy, rows of a step: {num_rows}"));
        for (name, arguments) in &KINDS[..4] {
            let params: Vec<_> = (0..num_rows)
                .map(|id| sampling(&processors, id, name, arguments))
                .collect();
            group.bench_function(if name.is_empty() { "none" } else { *name }, |bencher| {
                bencher.iter_batched_ref(
                    || logits.repeat(params.len()),
                    |logits| {
                        let input = |params| SamplingInput {
                            params,
                            tokens: &tokens,
                            num_prompt_tokens: 50,
                            beam: 0,
                            owner: Owner::default(),
                        };
                        let rows = logits.chunks_exact(VOCAB_SIZE).zip(&params);
                        prepare_batches(rows.map(|(logits, params)| (logits, input(params))));
                        for (logits, params) in logits.chunks_exact_mut(VOCAB_SIZE).zip(&params) {
                            let token = sampler.sample(black_box(logits), input(params));
                            black_box(token).expect("numbers");
                        }
                    },
                    BatchSize::LargeInput,
                );
            });
        }
        group.finish();
    }
}

fn config() -> EngineConfig {
    EngineConfig {
        max_num_requests: NUM_REQUESTS,
        max_seq_len: Tokens(512),
        max_num_tokens: Tokens(512),
        block_size: BlockSize::new(32).expect("not zero"),
        num_blocks: Blocks(NUM_REQUESTS * 16),
        reuse: BlockReuse::Off,
        ..EngineConfig::default()
    }
}

/// An engine with eight requests.
fn engine(processors: &PostProcessors, name: &str, arguments: &str) -> Engine {
    let mut engine = Engine::new(config());
    for id in 0..u64::from(NUM_REQUESTS) {
        let name = match name.strip_prefix("one of eight: ") {
            Some(name) if id == 0 => name,
            Some(_) => "",
            None => name,
        };
        let prompt = (0..16).map(|n| 5 + n * 7).collect();
        let request = NewRequest {
            sampling: Arc::new(sampling(processors, id, name, arguments)),
            ..NewRequest::new(SequenceId(id), prompt, Tokens(NUM_STEPS + 1))
        };
        engine.add(request).expect("fits");
    }
    engine
}

fn steps(criterion: &mut Criterion) {
    let processors = PostProcessors::with_library(&library()).expect("it opens");
    let mut runner = demo_model(&config());
    let mut group = criterion.benchmark_group("generation step of 8, demo model");
    for (name, arguments) in KINDS {
        group.bench_function(if name.is_empty() { "none" } else { name }, |bencher| {
            bencher.iter_custom(|num_steps| {
                generation_steps(num_steps, &mut runner, || {
                    engine(&processors, name, arguments)
                })
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rows, steps);
criterion_main!(benches);
