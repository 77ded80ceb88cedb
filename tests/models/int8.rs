//! What an int8 KV cache costs in quality, on the model that the repository has trained.

use std::path::Path;

use triton_inflight::device::cpu::KvDtype;
use triton_inflight::text::Tokenizer;

use crate::support::{Request, Served, Setup, serve};

const BEGINNINGS: [&str; 6] = [
    "Once there was a fox",
    "One morning a little girl named",
    "The old miller and the rabbit",
    "It was raining, and the boat",
    "In a small house by the river there lived",
    "<|user|>Tell me a story about a bear.<|assistant|>",
];
const NUM_TOKENS: usize = 160;
/// Of how many of these tokens the logits are compared.
const STRIDE: usize = 4;

fn setup(kv_dtype: KvDtype) -> Setup {
    Setup {
        max_seq_len: 256,
        num_blocks: 16 * 8,
        kv_dtype,
        ..Setup::default()
    }
}

fn run(setup: &Setup, requests: &[Request]) -> Vec<Served> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1");
    serve(&mut setup.load_from(&dir), setup, requests).0
}

#[test]
fn an_int8_cache_changes_the_demo_models_answers_hardly() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1");
    let tokenizer = Tokenizer::load(&dir).expect("the tokenizer loads");
    let prompts: Vec<_> = BEGINNINGS
        .iter()
        .map(|text| tokenizer.encode(text, true).expect("text"))
        .collect();
    let requests: Vec<_> = prompts
        .iter()
        .map(|prompt| Request::greedy(prompt, NUM_TOKENS as u32))
        .collect();
    let expected = run(&setup(KvDtype::Bf16), &requests);
    // The same texts, with what precedes each of some tokens as the prompt.
    let (mut prefixes, mut logits) = (Vec::new(), Vec::new());
    for (prompt, expected) in prompts.iter().zip(&expected) {
        for len in (0..NUM_TOKENS).step_by(STRIDE) {
            let prefix = [prompt, &expected.tokens[..len]].concat();
            prefixes.push(Request::greedy(&prefix, 1));
            logits.push(&expected.logits[len]);
        }
    }
    let got = run(&setup(KvDtype::Int8), &prefixes);
    let mut num_agree = 0;
    let mut divergences = Vec::new();
    for (got, expected) in got.iter().zip(logits) {
        divergences.push(divergence(expected, &got.logits[0]));
        num_agree += usize::from(got.tokens[0] == argmax(expected));
    }
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    let largest = divergences.iter().copied().fold(0.0, f64::max);
    let agreement = num_agree as f64 / got.len() as f64;
    println!(
        "KL divergence of int8 from bf16: mean {mean:.1e} nats, largest {largest:.1e}; greedy agreement \
         {:.1} % of {}",
        100.0 * agreement,
        got.len()
    );
    assert!(mean < 1e-4 && largest < 1e-2 && agreement > 0.98);
    // It is another cache indeed.
    assert!(mean > 0.0);

    // And where each goes on from its own tokens.
    let own = run(&setup(KvDtype::Int8), &requests);
    let num_equal: usize = own
        .iter()
        .zip(&expected)
        .map(|(own, expected)| {
            let tokens = own.tokens.iter().zip(&expected.tokens);
            tokens.take_while(|(own, expected)| own == expected).count()
        })
        .sum();
    let num_tokens = requests.len() * NUM_TOKENS;
    println!("greedy texts part after {num_equal} of {num_tokens} tokens");
    assert!(num_equal * 10 > num_tokens * 8);
}

/// The Kullback-Leibler divergence of the second's probabilities from the first's.
fn divergence(expected: &[f32], got: &[f32]) -> f64 {
    let (expected, got) = (log_probs(expected), log_probs(got));
    let terms = expected.iter().zip(got).map(|(p, q)| p.exp() * (p - q));
    terms.sum::<f64>().max(0.0)
}

fn log_probs(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    logits
        .iter()
        .map(|l| f64::from(l - max) - sum.ln())
        .collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let largest = (0..logits.len()).reduce(|best, i| match logits[i] > logits[best] {
        true => i,
        false => best,
    });
    largest.expect("logits") as u32
}
