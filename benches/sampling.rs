//! Microseconds per token of the sampler, over a vocabulary of Llama 3's size.
//!
//! `cargo bench --bench sampling`. Two shapes of logits: *peaked*, as from a language model (a few likely
//! tokens over a long tail), and *flat*, normally distributed, where a nucleus has tens of thousands of
//! tokens: the worst case that a client can cause.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use inflight_sampling::{Owner, Sampler, SamplingInput, SamplingParams, TopPDecay};

const VOCAB_SIZE: usize = 128_256;

fn sampling(criterion: &mut Criterion) {
    let greedy = SamplingParams::default();
    let random = SamplingParams {
        temperature: 1.0,
        ..greedy.clone()
    };
    let penalties = SamplingParams {
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        ..greedy.clone()
    };
    let options = [
        ("greedy", greedy),
        ("greedy, penalties over 4096 tokens", penalties),
        ("temperature", random.clone()),
        (
            "top_k 50",
            SamplingParams {
                top_k: 50,
                ..random.clone()
            },
        ),
        (
            "top_p 0.9",
            SamplingParams {
                top_p: 0.9,
                ..random.clone()
            },
        ),
        (
            "top_k 50, top_p 0.9",
            SamplingParams {
                top_k: 50,
                top_p: 0.9,
                ..random.clone()
            },
        ),
        (
            "min_p 0.05",
            SamplingParams {
                min_p: 0.05,
                ..random.clone()
            },
        ),
        (
            "typical_p 0.9",
            SamplingParams {
                typical_p: 0.9,
                ..random.clone()
            },
        ),
        (
            "top_p 0.9, decay 0.99",
            SamplingParams {
                top_p: 0.9,
                top_p_decay: Some(TopPDecay {
                    factor: 0.99,
                    min: 0.5,
                    reset_ids: vec![1, 2],
                }),
                ..random
            },
        ),
        (
            "greedy, no_repeat_ngram_size 3 over 4096 tokens",
            SamplingParams {
                no_repeat_ngram_size: 3,
                ..SamplingParams::default()
            },
        ),
        (
            "greedy, 1000 allowed_token_ids",
            SamplingParams {
                allowed_token_ids: Some((0..1000).map(|id| id * 128).collect()),
                ..SamplingParams::default()
            },
        ),
    ];
    let tokens: Vec<u32> = (0..4096).map(|i| (i * 7919) % VOCAB_SIZE as u32).collect();
    for (shape, logits) in [("peaked", peaked()), ("flat", flat())] {
        let mut group = criterion.benchmark_group(shape);
        for (name, params) in &options {
            let mut sampler = Sampler::new(VOCAB_SIZE);
            let input = SamplingInput {
                params,
                tokens: &tokens,
                num_prompt_tokens: 2048,
                beam: 0,
                owner: Owner::default(),
            };
            group.bench_function(*name, |bencher| {
                bencher.iter_batched_ref(
                    || logits.clone(),
                    |logits| sampler.sample(black_box(logits), input),
                    BatchSize::LargeInput,
                );
            });
        }
        group.finish();
    }
}

/// The logarithms of a Zipf distribution in random order, with a little noise.
fn peaked() -> Vec<f32> {
    let noise = flat();
    (0..VOCAB_SIZE)
        .map(|id| {
            let rank = id * 50_021 % VOCAB_SIZE;
            10.0 - 1.5 * ((rank + 1) as f32).ln() + noise[id]
        })
        .collect()
}

/// Normally distributed numbers from a linear congruential generator.
fn flat() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..VOCAB_SIZE)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
        .collect()
}

criterion_group!(benches, sampling);
criterion_main!(benches);
