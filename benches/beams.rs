//! The cost of beams: a step of one request with `W` beams, compared with a step of `W` requests.
//!
//! `cargo bench --bench beams`. Runs the demo model: its vocabulary (1536) is small, so the work per beam
//! outside of the model weighs more than with any other model. No step ends an output.

mod support;

use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{Engine, EngineConfig, NewRequest};
use inflight_sampling::{BeamSearch, EarlyStopping, SamplingParams};

use support::{NUM_STEPS, demo_model, generation_steps};

const NUM_PROMPT_TOKENS: u32 = 128;
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

/// An engine with `num_requests` requests of `width` beams each; a width of 1 means no beam search.
fn engine(num_requests: u32, width: u32) -> Engine {
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
        // Different first tokens, so that no blocks are shared.
        let prompt = (0..NUM_PROMPT_TOKENS).map(|n| 5 + (id + n * 7) % 1500);
        let id = SequenceId(u64::from(id));
        let request = NewRequest {
            sampling: Arc::clone(&sampling),
            ..NewRequest::new(id, prompt.collect(), Tokens(NUM_STEPS + 2))
        };
        engine.add(request).expect("fits");
    }
    engine
}

fn generation(criterion: &mut Criterion) {
    let mut runner = demo_model(&config());
    for num in [4, MAX_WIDTH] {
        let mut group = criterion.benchmark_group(format!("generation step of {num}"));
        for (name, num_requests, width) in [("requests", num, 1), ("beams of one", 1, num)] {
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|num_steps| {
                    generation_steps(num_steps, &mut runner, || engine(num_requests, width))
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
