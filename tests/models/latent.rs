//! Latent attention in models: what its cache holds, what configs say, and what is refused.

use std::fs;

use inflight_base::BlockSize;
use inflight_device::{GroupedRouting, KvDtype, LatentShape, RouterScores, RoutingRule};
use inflight_runner::spec::FeedForward;
use inflight_runner::{CpuRunner, ModelSource, ModelSpec};
use serde_json::json;

use crate::copy::Copy;
use crate::support::{Setup, fixture};

fn spec(name: &str) -> ModelSpec {
    let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
    source.spec().clone()
}

fn rule(spec: &ModelSpec) -> GroupedRouting {
    match spec.mixture().expect("experts").routing.rule {
        RoutingRule::Grouped(rule) => rule,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_cache_holds_a_latent_and_a_rotated_key_of_each_position() {
    for (name, key_dim) in [
        ("deepseek-v2", 22 + 6),
        ("deepseek-v2-lite", 26 + 4),
        ("deepseek-v3", 34 + 8),
    ] {
        let block_size = BlockSize::new(16).expect("not zero");
        let bytes = CpuRunner::kv_bytes_per_block(&spec(name), block_size, KvDtype::Bf16);
        assert_eq!(bytes, 2 * 16 * 2 * key_dim, "{name}: of two layers");
    }
}

#[test]
fn configs_describe_attention_and_experts() {
    let v2 = spec("deepseek-v2");
    let shape = LatentShape {
        num_heads: 3,
        content_dim: 10,
        rotary_dim: 6,
        latent_dim: 22,
        value_dim: 14,
    };
    assert_eq!(v2.latent_shape(), Some(shape));
    let attention = &v2.layers[0].attention;
    assert!(attention.qkv.has_bias && attention.o.has_bias);
    assert_eq!(attention.qkv.num_outputs(), 20);
    assert_eq!(
        rule(&v2),
        GroupedRouting {
            scores: RouterScores::Softmax,
            num_groups: 3,
            num_chosen_groups: 2,
            num_group_scores: 1,
            is_normalised: false,
            scale: 1.5,
        }
    );
    let mixture = v2.mixture().expect("experts");
    assert_eq!((mixture.expert_size, mixture.shared_size), (14, 28));

    let lite = spec("deepseek-v2-lite");
    let attention = &lite.layers[0].attention;
    assert_eq!(attention.qkv.num_outputs(), 5 * (8 + 4));
    let temperature = 0.1 * 0.9 * 8_f64.ln() + 1.0;
    let scale = temperature.powi(2) / 12_f64.sqrt();
    assert!((f64::from(attention.scale) - scale).abs() < 1e-6);
    let factor = (0.1 * 0.707 * 8_f64.ln() + 1.0) / temperature;
    let rope = &attention.rope;
    assert!((f64::from(rope.attention_factor(64)) - factor).abs() < 1e-6);
    assert_eq!((rule(&lite).num_groups, rule(&lite).scale), (1, 1.0));
    let has_experts =
        |layer: usize| matches!(lite.layers[layer].feed_forward, FeedForward::Experts(_));
    assert!(!has_experts(0) && has_experts(1));

    let v3 = rule(&spec("deepseek-v3"));
    assert_eq!(
        v3,
        GroupedRouting {
            scores: RouterScores::Sigmoid,
            num_groups: 4,
            num_chosen_groups: 2,
            num_group_scores: 2,
            is_normalised: true,
            scale: 2.5,
        }
    );
}

#[test]
fn missing_keys_have_the_defaults_of_the_family() {
    let without = |name: &str, keys: &[&str]| {
        let copy = Copy::of(name);
        let path = copy.path("config.json");
        let text = fs::read_to_string(&path).expect("the file");
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let object = config.as_object_mut().expect("an object");
        for key in keys {
            assert!(object.remove(*key).is_some(), "{key}");
        }
        fs::write(&path, config.to_string()).expect("written");
        let source = ModelSource::open(copy.dir()).expect("it opens");
        source.spec().clone()
    };
    let sizes = [
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_shared_experts",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "n_routed_experts",
        "n_group",
        "topk_group",
        "head_dim",
    ];
    let shape = LatentShape {
        num_heads: 3,
        content_dim: 128,
        rotary_dim: 64,
        latent_dim: 512,
        value_dim: 128,
    };
    let v2 = without("deepseek-v2", &sizes);
    assert_eq!(v2.latent_shape(), Some(shape));
    assert_eq!(v2.layers[0].attention.qkv.num_outputs(), 1536);
    let mixture = v2.mixture().expect("experts");
    assert_eq!(mixture.routing.num_experts, 64);
    assert_eq!((mixture.expert_size, mixture.shared_size), (1407, 2814));
    assert!(matches!(v2.layers[0].feed_forward, FeedForward::Experts(_)));
    assert_eq!((rule(&v2).num_groups, rule(&v2).num_chosen_groups), (1, 1));

    let all = [
        &sizes[..],
        &[
            "routed_scaling_factor",
            "norm_topk_prob",
            "num_experts_per_tok",
        ],
    ];
    let v3 = without("deepseek-v3", &all.concat());
    let is_dense = |layer: &inflight_runner::spec::LayerSpec| {
        matches!(layer.feed_forward, FeedForward::Gated { .. })
    };
    assert!(v3.layers.iter().all(is_dense), "the first three");
    let with_experts = Copy::of("deepseek-v3").config(json!({
        "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": null, "norm_topk_prob": null,
        "routed_scaling_factor": null,
    }));
    let source = ModelSource::open(with_experts.dir()).expect("it opens");
    let routing = source.spec().mixture().expect("experts").routing;
    assert_eq!(routing.num_chosen, 8);
    assert!(rule(source.spec()).is_normalised && rule(source.spec()).scale == 2.5);
}

#[test]
fn configs_that_make_no_sense_are_refused() {
    for (name, changes, parts) in [
        (
            "deepseek-v2",
            json!({"kv_lora_rank": 21}),
            ["kv_lora_rank: 21", "an even number"],
        ),
        (
            "deepseek-v2",
            json!({"qk_rope_head_dim": 0}),
            ["qk_rope_head_dim: 0", "from 1"],
        ),
        (
            "deepseek-v2",
            json!({"n_group": 4}),
            ["n_group: 4", "a divisor of the number of experts, 6"],
        ),
        (
            "deepseek-v2",
            json!({"topk_group": 4}),
            ["topk_group: 4", "at most the number of groups, 3"],
        ),
        (
            "deepseek-v2",
            json!({"num_experts_per_tok": 5}),
            ["num_experts_per_tok: 5", "at most 4"],
        ),
        (
            "deepseek-v2",
            json!({"num_experts_per_tok": null}),
            ["num_experts_per_tok", "is missing"],
        ),
        (
            "deepseek-v2",
            json!({"topk_method": "noaux_tc"}),
            ["topk_method: 'noaux_tc'", "'greedy'"],
        ),
        (
            "deepseek-v2",
            json!({"norm_topk_prob": true}),
            ["norm_topk_prob: true", "ignores"],
        ),
        (
            "deepseek-v3",
            json!({"scoring_func": "softmax"}),
            ["scoring_func: 'softmax'", "'sigmoid'"],
        ),
        (
            "deepseek-v3",
            json!({"n_group": 8}),
            ["n_group: 8", "groups of at least 2"],
        ),
        (
            "deepseek-v3",
            json!({"moe_layer_freq": 2}),
            ["moe_layer_freq: 2", "only 1"],
        ),
        (
            "deepseek-v3",
            json!({"qk_nope_head_dim": 13}),
            ["q_b_proj", "calls for [84, 24]"],
        ),
    ] {
        Copy::of(name).config(changes).refused(&parts);
    }
    for tensor in [
        "self_attn.kv_b_proj.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "mlp.gate.e_score_correction_bias",
    ] {
        let tensor = format!("model.layers.1.{tensor}");
        let damaged = Copy::of("deepseek-v3").tensor(&tensor, |_| None);
        damaged.refused(&[&tensor, "is missing"]);
    }
}

#[test]
fn latents_are_stored_in_bf16_only() {
    let int8 = Setup {
        kv_dtype: KvDtype::Int8,
        ..Setup::default()
    };
    let error = Copy::of("deepseek-v2").load_with(&int8).err();
    let error = error.expect("refused").to_string();
    for part in [
        "kv_cache_dtype is int8",
        "latents",
        "write bf16",
        "56 bytes",
    ] {
        assert!(error.contains(part), "{error}");
    }
}
