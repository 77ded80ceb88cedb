//! The quality lost by 8-bit and 4-bit weights and caches, on the demo model.

use inflight_device::KvDtype;
use inflight_engine::BlockReuse;
use inflight_measure::divergence::Divergence;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;
use inflight_tests::checkout;
use inflight_text::Tokenizer;

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
/// Every how many of these tokens the logits are compared.
const STRIDE: usize = 8;

fn bf16() -> Setup {
    Setup {
        max_seq_len: 256,
        num_blocks: 16 * 8,
        ..Setup::default()
    }
}

/// The bounds of a comparison.
struct Bounds {
    mean_divergence: f64,
    largest_divergence: f64,
    /// Minimum share of tokens that are also the most likely ones with bf16.
    agreement: f64,
    /// Minimum share of tokens before greedy texts diverge.
    common: f64,
}

fn run(setup: &Setup, requests: &[Request]) -> Vec<Served> {
    let dir = checkout().join("model_repository/stories/1");
    serve(&mut setup.load_from(&dir), setup, requests).0
}

#[test]
fn an_int8_cache_hardly_changes_the_demo_models_answers() {
    let setup = Setup {
        kv_dtype: KvDtype::Int8,
        ..bf16()
    };
    let bounds = Bounds {
        mean_divergence: 1e-4,
        largest_divergence: 1e-2,
        agreement: 0.98,
        common: 0.8,
    };
    assert_near_bf16("int8 keys and values", &setup, &bounds);
}

#[test]
fn int8_weights_hardly_change_the_demo_models_answers() {
    let bounds = Bounds {
        mean_divergence: 1e-3,
        largest_divergence: 5e-2,
        agreement: 0.97,
        common: 0.5,
    };
    for group_size in [128, 1 << 20] {
        let setup = rounded(CodeBits::Eight, group_size);
        assert_near_bf16(
            &format!("int8 weights, groups of {group_size}"),
            &setup,
            &bounds,
        );
    }
}

#[test]
fn int4_weights_change_the_demo_models_answers_somewhat() {
    let bounds = Bounds {
        mean_divergence: 1e-2,
        largest_divergence: 0.5,
        agreement: 0.93,
        common: 0.02,
    };
    for group_size in [32, 128] {
        let setup = rounded(CodeBits::Four, group_size);
        assert_near_bf16(
            &format!("int4 weights, groups of {group_size}"),
            &setup,
            &bounds,
        );
    }
}

fn rounded(bits: CodeBits, group_size: usize) -> Setup {
    Setup {
        weights: Some(WeightPrecision { bits, group_size }),
        ..bf16()
    }
}

/// Compares the logits along bf16's greedy texts, and prints the results.
fn assert_near_bf16(what: &str, setup: &Setup, bounds: &Bounds) {
    let dir = checkout().join("model_repository/stories/1");
    let tokenizer = Tokenizer::load(&dir).expect("the tokenizer loads");
    let prompts: Vec<_> = BEGINNINGS
        .iter()
        .map(|text| tokenizer.encode(text, true).expect("text"))
        .collect();
    let requests: Vec<_> = prompts
        .iter()
        .map(|prompt| Request::greedy(prompt, NUM_TOKENS as u32))
        .collect();
    let expected = run(&bf16(), &requests);
    // The same texts; the prefix of every compared token becomes a prompt.
    let (mut prefixes, mut logits) = (Vec::new(), Vec::new());
    for (prompt, expected) in prompts.iter().zip(&expected) {
        for len in (0..NUM_TOKENS).step_by(STRIDE) {
            let prefix = [prompt, &expected.tokens[..len]].concat();
            prefixes.push(Request::greedy(&prefix, 1));
            logits.push(&expected.logits[len]);
        }
    }
    // A prefix is computed once, behind the shorter one.
    let reusing = Setup {
        reuse: BlockReuse::WholeBlocks,
        ..setup.clone()
    };
    let got = run(&reusing, &prefixes);
    let mut num_agree = 0;
    let mut divergences = Vec::new();
    for (got, expected) in got.iter().zip(logits) {
        let divergence = Divergence::of(expected, &got.logits[0]);
        divergences.push(divergence.nats);
        num_agree += usize::from(divergence.same_top);
    }
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    assert!(!divergences.iter().any(|divergence| divergence.is_nan()));
    let largest = divergences.iter().copied().fold(0.0, f64::max);
    let agreement = num_agree as f64 / got.len() as f64;
    println!(
        "KL divergence of {what} from bf16: mean {mean:.1e} nats, largest {largest:.1e}; greedy agreement \
         {:.1} % of {}",
        100.0 * agreement,
        got.len()
    );
    assert!(mean < bounds.mean_divergence && largest < bounds.largest_divergence);
    assert!(agreement > bounds.agreement);
    // The results differ, so the setup has an effect.
    assert!(mean > 0.0);

    // Greedy generation of both, each continuing from its own tokens.
    let own = run(setup, &requests);
    let num_equal: usize = own
        .iter()
        .zip(&expected)
        .map(|(own, expected)| {
            let tokens = own.tokens.iter().zip(&expected.tokens);
            tokens.take_while(|(own, expected)| own == expected).count()
        })
        .sum();
    let num_tokens = requests.len() * NUM_TOKENS;
    println!("greedy texts diverge after {num_equal} of {num_tokens} tokens");
    assert!(num_equal as f64 > bounds.common * num_tokens as f64);
}
