//! Weights of every format on several ranks: rounded at load, or quantised by the checkpoint.
//!
//! The oracle is one process, whose sums are cut into the same tiles: every bit is the same. That one is near the
//! runner that cuts nothing.

use std::path::Path;

use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;
use serde_json::json;

use crate::devices::{assert_near_by_cost, largest_first_error};
use crate::family_gguf::gguf;
use crate::fp8::{Scales, copies, copies_of};
use crate::ranks::{alone, assert_ranks_change_nothing, numbers_of_ranks};
use crate::schedules::requests_of_few_tokens;
use crate::support::{Setup, fixture, serve};
use crate::transformers::bf16_cost;

/// How far logits of sums in tiles may be from logits of whole sums, in costs of rounding.
const SHARE: f32 = 1.0;
/// The factor of that for quantised weights, whose activations are rounded anew where one of 32 neighbours is: 1.5
/// costs a side, as beside transformers.
const QUANTISED_SHARE: f32 = 3.0;

/// Serves requests on 1, 2 and 4 ranks, as far as the model can be split, and without ranks. `cost` is what rounding
/// costs a logit; `None` if it may decide which experts are chosen, or rounds other groups of weights.
fn assert_ranks_change_only_rounding(
    dir: &Path,
    setup: &Setup,
    num_ranks: &[usize],
    cost: Option<f32>,
) {
    assert_eq!(numbers_of_ranks(dir), num_ranks, "{}", dir.display());
    // One of the fixtures has only 64 tokens.
    let requests = requests_of_few_tokens();
    assert_ranks_change_nothing(dir, "weights", setup, &requests);
    let Some(cost) = cost else {
        return;
    };
    let (whole, _) = serve(&mut setup.load_from(dir), setup, &requests);
    let (cut, _) = alone(dir, setup, &requests);
    assert_near_by_cost(&dir.display().to_string(), &whole, &cut, SHARE * cost);
}

/// The largest error of a logit from rounding weights at load.
fn cost_of_weights(dir: &Path, setup: &Setup) -> f32 {
    let requests = requests_of_few_tokens();
    let exact = Setup {
        weights: None,
        ..setup.clone()
    };
    let [rounded, exact] =
        [setup, &exact].map(|setup| serve(&mut setup.load_from(dir), setup, &requests).0);
    largest_first_error(&rounded, &exact)
}

#[test]
fn weights_that_are_rounded_at_load_are_the_same_on_1_2_and_4_ranks() {
    let whole_rows = WeightPrecision {
        group_size: WeightPrecision::WHOLE_ROWS,
        ..WeightPrecision::new(CodeBits::Eight)
    };
    for weights in [WeightPrecision::new(CodeBits::Eight), whole_rows] {
        let setup = Setup {
            weights: Some(weights),
            ..Setup::default()
        };
        // Also weights that are stored by columns, of 3 query heads.
        for (name, num_ranks) in [("llama3", &[2, 4][..]), ("gpt2", &[2]), ("phi3", &[2, 4])] {
            let dir = fixture(name);
            let cost = cost_of_weights(&dir, &setup);
            assert_ranks_change_only_rounding(&dir, &setup, num_ranks, Some(cost));
        }
    }
    // Groups that begin with a tile are others than those of the runner that cuts nothing: 4 bits are not near it.
    let setup = Setup {
        weights: Some(WeightPrecision::new(CodeBits::Four)),
        ..Setup::default()
    };
    assert_ranks_change_only_rounding(&fixture("qwen3"), &setup, &[2, 4], None);
}

#[test]
fn quantised_checkpoints_are_the_same_on_1_2_and_4_ranks() {
    // Where 32 inputs share a scale, pairs of heads of 16 stay together.
    for (name, num_ranks) in [
        ("awq", &[2][..]),
        ("bitnet-llama", &[2, 4]),
        ("bnb-int8", &[2, 4]),
        ("bnb-nf4", &[2, 4]),
        ("awq-group-16", &[2]),
        ("compressed-act-order", &[2, 4]),
        ("compressed-fp4", &[2]),
        ("compressed-group-16", &[2]),
        ("compressed-w4a16", &[2]),
        ("compressed-w8a8", &[2, 4]),
        ("gguf-iq4_nl", &[2]),
        ("gguf-mixed", &[2]),
        ("gguf-q3_k", &[2, 4]),
        ("gguf-q4_k", &[2, 4]),
        ("gptq", &[2]),
        ("gptq-8bit-v2", &[2, 4]),
        ("gptq-act-order", &[2, 4]),
        ("gptq-group-24", &[2, 4]),
        ("modelopt-mixed", &[2, 4]),
    ] {
        let name = format!("quantised/{name}");
        let cost = Some(QUANTISED_SHARE * bf16_cost(&name));
        assert_ranks_change_only_rounding(&fixture(&name), &Setup::default(), num_ranks, cost);
    }
    let blocks = Scales::Blocks([24, 40]);
    let config = json!({"quant_method": "fp8", "weight_block_size": [24, 40]});
    let [fp8, _] = copies(blocks, "weight_scale_inv", config);
    let cost = Some(QUANTISED_SHARE * bf16_cost("llama3"));
    assert_ranks_change_only_rounding(fp8.dir(), &Setup::default(), &[2, 4], cost);
}

#[test]
fn experts_are_the_same_on_1_2_and_4_ranks() {
    // With norms over all heads, with a shared expert, with biases, clamped gates and attention-sink logits, with norms
    // of results, all in one tensor, in GGUF files, and in MXFP4, whose 3 groups of inputs leave the first of 4 ranks
    // nothing.
    for name in [
        "cohere2-moe",
        "deepseek",
        "flint",
        "kolibri1",
        "mixtral",
        "mixtral-stacked",
        "qwen2-moe",
        "qwen2-moe-gguf",
        "qwen3-moe",
        "olmoe",
        "phimoe",
        "gpt-oss",
    ] {
        let setup = Setup::default();
        let cost = Some(bf16_cost(name));
        assert_ranks_change_only_rounding(&fixture(name), &setup, &[2, 4], cost);
    }
    // Rounded activations may choose other experts.
    for (name, num_ranks) in [
        ("mixtral-gguf", &[2, 4][..]),
        ("qwen3-moe-gguf", &[2]),
        ("gpt-oss-mxfp4", &[2, 4]),
    ] {
        assert_ranks_change_only_rounding(&fixture(name), &Setup::default(), num_ranks, None);
    }
    let rounded = Setup {
        weights: Some(WeightPrecision::new(CodeBits::Eight)),
        ..Setup::default()
    };
    assert_ranks_change_only_rounding(&fixture("qwen2-moe"), &rounded, &[2, 4], None);
}

#[test]
fn latent_attention_is_the_same_on_1_2_and_4_ranks() {
    // 3, 5 and 4 heads, with and without latents of queries.
    for (name, num_ranks) in [
        ("deepseek-v2", &[2][..]),
        ("deepseek-v2-lite", &[2, 4]),
        ("deepseek-v3", &[2, 4]),
    ] {
        let setup = Setup::default();
        let cost = Some(bf16_cost(name));
        assert_ranks_change_only_rounding(&fixture(name), &setup, num_ranks, cost);
        // Its keys and values are in tensors of their own, or in one.
        assert_ranks_change_only_rounding(gguf(name).dir(), &setup, num_ranks, cost);
    }
    // Each rank selects the positions that its heads see.
    for name in ["deepseek-v32", "glm-moe-dsa"] {
        assert_ranks_change_only_rounding(&fixture(name), &Setup::default(), &[2], None);
    }
    let rounded = Setup {
        weights: Some(WeightPrecision::new(CodeBits::Eight)),
        ..Setup::default()
    };
    assert_ranks_change_only_rounding(&fixture("deepseek-v2-lite"), &rounded, &[2, 4], None);
    // Heads begin within a block of weights, and tiles of the output projection end with one.
    let blocks = Scales::Blocks([16, 8]);
    let config = json!({"quant_method": "fp8", "weight_block_size": [16, 8]});
    let [fp8, _] = copies_of("deepseek-v3", blocks, "weight_scale_inv", config);
    let num_ranks = numbers_of_ranks(fp8.dir());
    assert!(num_ranks.contains(&2), "{num_ranks:?}");
    let cost = Some(bf16_cost("deepseek-v3"));
    assert_ranks_change_only_rounding(fp8.dir(), &Setup::default(), &num_ranks, cost);
}
