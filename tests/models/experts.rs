//! Mixtures of experts: checkpoints that are refused, what they take in memory, GGUF files, and devices.

use std::fs;
use std::num::NonZeroU32;

use inflight_device::{Gating, RoutingRule};
use inflight_numbers::CodeBits;
use inflight_runner::spec::FeedForward;
use inflight_runner::{ModelSource, ModelSpec, RopeScaling, WeightPrecision};
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::copy::Copy;
use crate::devices::{assert_near, requests, setups};
use crate::support::{fixture, serve};
use crate::transformers::{agree, agrees_within};
use inflight_reference_device::{Reference, ReferenceOptions};

/// As for other quantised weights.
fn gguf_agrees(name: &str) {
    agrees_within(name, 1.5);
}

agree! {
    gguf_agrees;
    a_mixtral_of_q8_0_in_a_gguf_file_agrees_with_transformers: "mixtral-gguf",
    a_qwen_2_moe_in_a_gguf_file_agrees_with_transformers: "qwen2-moe-gguf",
    a_qwen_3_moe_of_q8_0_in_a_gguf_file_agrees_with_transformers: "qwen3-moe-gguf",
    a_gpt_oss_in_mxfp4_agrees_with_transformers: "gpt-oss-mxfp4",
}

fn source(name: &str) -> ModelSource {
    ModelSource::open(&fixture(name)).expect("the fixture opens")
}

/// Experts, chosen ones, and the widths of experts and of the shared one, of each layer; `None` for a layer without.
fn mixtures(source: &ModelSource) -> Vec<Option<[usize; 4]>> {
    let layers = source.spec().layers.iter();
    let mixtures = layers.map(|layer| match &layer.feed_forward {
        FeedForward::Experts(experts) => {
            let shape = experts.shape();
            let routing = shape.routing;
            Some([
                routing.num_experts,
                routing.num_chosen,
                shape.expert_size,
                shape.shared_size,
            ])
        }
        _ => None,
    });
    mixtures.collect()
}

#[test]
fn layers_have_the_experts_that_the_config_gives_them() {
    assert_eq!(mixtures(&source("mixtral")), [Some([5, 2, 40, 0]); 2]);
    let qwen2 = Some([7, 3, 26, 50]);
    assert_eq!(mixtures(&source("qwen2-moe")), [qwen2, None, qwen2]);
    let qwen3 = source("qwen3-moe");
    assert_eq!(mixtures(&qwen3), [None, Some([9, 4, 22, 0]), None]);
    let rule = qwen3.spec().mixture().expect("experts").routing.rule;
    let is_normalised = true;
    assert_eq!(rule, RoutingRule::Softmax { is_normalised });
}

/// Which layers have experts.
fn has_experts(name: &str, changes: serde_json::Value) -> Vec<bool> {
    let copy = Copy::of(name).config(changes);
    let source = ModelSource::open(copy.dir()).expect("it opens");
    mixtures(&source).iter().map(Option::is_some).collect()
}

#[test]
fn configs_tell_which_layers_have_experts() {
    let cases = [
        ("ernie4-5-moe", json!({}), [0, 1, 1, 0]),
        (
            "ernie4-5-moe",
            json!({"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2}),
            [0, 1, 0, 1],
        ),
        ("glm4-moe-lite", json!({}), [0, 1, 0, 1]),
        (
            "glm4-moe-lite",
            json!({"mlp_layer_types": null}),
            [0, 1, 1, 1],
        ),
        ("exaone-moe", json!({}), [0, 0, 1, 1]),
        ("solar-open", json!({}), [1, 1, 1, 1]),
        ("mellum", json!({}), [1, 0, 1, 1]),
        ("mellum", json!({"mlp_layer_types": null}), [1, 1, 1, 1]),
        ("hy3", json!({}), [0, 1, 1, 0]),
        ("hy3", json!({"mlp_layer_types": null}), [0, 1, 1, 1]),
        ("afmoe", json!({}), [0, 1, 1, 1]),
        ("afmoe", json!({"num_dense_layers": 3}), [0, 0, 0, 1]),
    ];
    for (name, changes, expected) in cases {
        let expected = expected.map(|is| is == 1);
        assert_eq!(has_experts(name, changes), expected, "{name}");
    }
    Copy::of("glm4-moe-lite")
        .config(json!({"mlp_layer_types": ["dense", "moe", "dense", "dense"]}))
        .refused(&["mlp_layer_types", "each 'dense' or 'sparse'"]);
    let no_norms = Copy::of("minimax-m2").config(json!({"use_qk_norm": false}));
    no_norms.refused(&["use_qk_norm: false is not supported"]);
    let no_sum = Copy::of("hy3").config(json!({"route_norm": false}));
    no_sum.refused(&["route_norm: false is not supported"]);
    let dense =
        Copy::of("hy3").config(json!({"mlp_layer_types": null, "first_k_dense_replace": 3}));
    dense.refused(&[
        "first_k_dense_replace: 3 is not supported",
        "mlp_layer_types",
    ]);
    let softmax = Copy::of("minimax-m2").config(json!({"scoring_func": "softmax"}));
    softmax.refused(&["scoring_func: 'softmax' is not 'sigmoid'"]);
    let window = Copy::of("afmoe").config(json!({"sliding_window": null}));
    window.refused(&["sliding_window: null is not a number"]);
    let floor = Copy::of("ernie4-5-moe").config(json!({"moe_norm_min": 0.5}));
    floor.refused(&["moe_norm_min: 0.5 is not"]);
}

#[test]
fn a_minimax_rotates_the_share_of_a_head_that_the_config_tells() {
    for (changes, expected) in [
        (json!({}), 8),
        (json!({"rope_parameters": null}), 8),
        (json!({"rope_parameters": null, "rotary_dim": null}), 12),
    ] {
        let copy = Copy::of("minimax-m2").config(changes);
        let source = ModelSource::open(copy.dir()).expect("it opens");
        let rope = &source.spec().layers[0].attention.rope;
        assert_eq!(rope.rotary_dim, expected);
    }
}

#[test]
fn a_phi_moe_has_the_defaults_of_its_family_and_is_refused_where_it_differs() {
    let phimoe = source("phimoe");
    let spec = phimoe.spec();
    assert_eq!(mixtures(&phimoe), [Some([6, 2, 38, 0]); 2]);
    assert!(spec.output_bias && spec.layers[0].attention.o.has_bias);
    assert_eq!(
        spec.mixture().expect("experts").routing.rule,
        RoutingRule::SparseMixer { jitter: 0.2 }
    );
    // As on the Hub.
    let original = Copy::of("phimoe").config(json!({"architectures": ["PhiMoEForCausalLM"]}));
    let original = ModelSource::open(original.dir()).expect("it opens");
    assert_eq!(original.spec(), spec);
    let silent = Copy::of("phimoe").config(json!({
        "router_jitter_noise": null, "lm_head_bias": null, "attention_bias": null, "sliding_window": null,
        "num_key_value_heads": null, "num_experts_per_tok": null, "rms_norm_eps": null,
    }));
    // An explicit null is no window, and as many key heads as query heads.
    let silent = ModelSource::open(silent.dir()).expect("it opens");
    let spec = silent.spec();
    assert!(!spec.output_bias && !spec.layers[0].attention.qkv.has_bias);
    assert!(spec.windows().all(|window| window.is_none()) && spec.num_kv_heads == 6);
    assert_eq!(spec.norm.eps, 1e-5);
    assert_eq!(
        spec.mixture().expect("experts").routing.rule,
        RoutingRule::SparseMixer { jitter: 0.01 }
    );

    let rope = |changes: serde_json::Value| {
        let mut rope = json!({
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1, 1, 1, 1, 1], "long_factor": [1, 2, 3, 4, 5],
            "short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 64,
        });
        for (key, value) in changes.as_object().expect("an object") {
            rope[key] = value.clone();
        }
        Copy::of("phimoe").config(json!({"rope_parameters": rope}))
    };
    let long = ModelSource::open(rope(json!({})).dir()).expect("it opens");
    let long = &long.spec().layers[0].attention.rope;
    assert_eq!([64, 65].map(|len| long.attention_factor(len)), [1.2, 1.4]);
    rope(json!({"long_mscale": null})).refused(&["long_mscale is missing"]);
    rope(json!({"short_mscale": "1"})).refused(&["short_mscale", "not a number"]);
    rope(json!({"rope_type": "linear", "factor": 2.0})).refused(&["rope_type", "'longrope'"]);
    for (changes, expected) in [
        (
            json!({"num_experts_per_tok": 3}),
            "num_experts_per_tok: 3 is not 2",
        ),
        (
            json!({"router_jitter_noise": -0.5}),
            "router_jitter_noise: -0.5 is not",
        ),
        (json!({"lm_head_bias": 1}), "lm_head_bias"),
    ] {
        Copy::of("phimoe").config(changes).refused(&[expected]);
    }
    Copy::of("phimoe")
        .tensor("lm_head.bias", |_| None)
        .refused(&["lm_head.bias", "is missing", "[160]"]);
}

#[test]
fn a_gpt_oss_has_the_defaults_of_its_family() {
    let source = source("gpt-oss");
    let spec = source.spec();
    assert_eq!(mixtures(&source), [Some([6, 3, 36, 0]); 3]);
    let windows = |spec: &ModelSpec| {
        let windows = spec.windows();
        windows
            .map(|w| w.map_or(0, NonZeroU32::get))
            .collect::<Vec<_>>()
    };
    assert_eq!(windows(spec), [20, 0, 20]);
    let gating = |spec: &ModelSpec| match &spec.layers[0].feed_forward {
        FeedForward::Experts(experts) => experts.gating,
        _ => panic!("experts"),
    };
    let (alpha, limit) = (1.702, 1.5);
    assert_eq!(gating(spec), Gating::Clamped { alpha, limit });

    let silent = Copy::of("gpt-oss");
    let path = silent.path("config.json");
    let text = fs::read_to_string(&path).expect("the file");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let object = config.as_object_mut().expect("an object");
    for key in [
        "sliding_window",
        "layer_types",
        "rope_parameters",
        "swiglu_limit",
        "swiglu_alpha",
        "attention_bias",
        "num_experts_per_tok",
        "rms_norm_eps",
        "head_dim",
        "num_key_value_heads",
    ] {
        assert!(object.remove(key).is_some(), "{key}");
    }
    object["num_attention_heads"] = json!(16);
    fs::write(&path, config.to_string()).expect("written");
    let silent = ModelSource::open(silent.dir()).expect("it opens");
    let spec = silent.spec();
    assert_eq!(windows(spec), [128, 0, 128]);
    let limit = 7.0;
    assert_eq!(gating(spec), Gating::Clamped { alpha, limit });
    assert_eq!(
        (spec.head_dim, spec.num_kv_heads, spec.norm.eps),
        (64, 8, 1e-5)
    );
    assert_eq!(spec.mixture().expect("experts").routing.num_chosen, 4);
    let attention = &spec.layers[0].attention;
    assert!(attention.qkv.has_bias && attention.o.has_bias);
    assert_eq!(attention.rope.theta, 150_000.0);
    assert_eq!(
        attention.rope.scaling,
        RopeScaling::Yarn {
            factor: 32.0,
            attention_factor: 0.1 * 32_f64.ln() + 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_len: 4096.0,
            truncate: false,
        }
    );
}

#[test]
fn a_gpt_oss_that_lacks_something_is_refused() {
    for (tensor, shape) in [
        ("model.layers.2.self_attn.sinks", "[6]"),
        ("model.layers.1.mlp.router.bias", "[6]"),
        ("model.layers.0.mlp.experts.gate_up_proj", "[6, 40, 72]"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "[6, 72]"),
        ("model.layers.1.mlp.experts.down_proj_bias", "[6, 40]"),
    ] {
        Copy::of("gpt-oss")
            .tensor(tensor, |_| None)
            .refused(&[tensor, "is missing", shape]);
    }
    for (changes, expected) in [
        (json!({"swiglu_limit": 0.0}), "swiglu_limit: 0.0 is not"),
        (json!({"swiglu_alpha": "1"}), "swiglu_alpha"),
        (json!({"num_local_experts": 5}), "calls for [5, 40]"),
        (
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            "layer_types",
        ),
    ] {
        Copy::of("gpt-oss").config(changes).refused(&[expected]);
    }
    let blocks = "model.layers.1.mlp.experts.down_proj_blocks";
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let mxfp4 = || Copy::of("gpt-oss-mxfp4");
    mxfp4()
        .tensor(scales, |_| None)
        .refused(&[scales, "is missing", "[6, 64, 3]"]);
    mxfp4()
        .tensor(blocks, |view| {
            let data = view.data().to_vec();
            Some((Dtype::U8, vec![6, 64, 6, 8], data))
        })
        .refused(&[blocks, "[6, 64, 6, 8]", "calls for [6, 64, 3, 16]"]);
    mxfp4()
        .tensor(scales, |view| {
            let data = view.data().to_vec();
            Some((Dtype::I8, view.shape().to_vec(), data))
        })
        .refused(&[scales, "I8", "MXFP4 has U8"]);
    // 255 stands for what is not a number.
    mxfp4()
        .tensor(scales, |view| {
            let mut data = view.data().to_vec();
            data[5] = 255;
            Some((view.dtype(), view.shape().to_vec(), data))
        })
        .refused(&[blocks, "output 1 has a scale", "damaged"]);
    let experts = "model.layers.0.mlp.experts";
    mxfp4()
        .config(json!({"intermediate_size": 80}))
        .tensor(&format!("{experts}.gate_up_proj_blocks"), |_| {
            Some((Dtype::U8, vec![6, 160, 2, 16], vec![0; 6 * 160 * 2 * 16]))
        })
        .tensor(&format!("{experts}.gate_up_proj_scales"), |_| {
            Some((Dtype::U8, vec![6, 160, 2], vec![0; 6 * 160 * 2]))
        })
        .tensor(&format!("{experts}.gate_up_proj_bias"), |_| {
            Some((Dtype::BF16, vec![6, 160], vec![0; 6 * 160 * 2]))
        })
        .refused(&["down_proj", "rows of 80 weights", "multiples of 32"]);
    // Without the method, its tensors are not looked for.
    mxfp4()
        .config(json!({"quantization_config": null}))
        .refused(&["model.layers.0.mlp.experts.gate_up_proj", "is missing"]);
}

#[test]
fn the_bytes_of_all_experts_are_counted() {
    for name in [
        "mixtral",
        "mixtral-stacked",
        "qwen2-moe",
        "phimoe",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v2-lite",
    ] {
        let source = source(name);
        let counted = source.num_weight_bytes(None).expect("all tensors");
        assert_eq!(counted, source.spec().num_weight_bytes(), "{name}");
    }
    // Two layers of attention and of five experts, which are rounded, and routers, which are not.
    let attention = 32 * (60 + 30 + 30) + 60 * 32;
    let rounded = 2 * (attention + 5 * 3 * 32 * 40);
    let int8 = source("mixtral")
        .num_weight_bytes(Some(WeightPrecision::new(CodeBits::Eight)))
        .expect("all tensors");
    let in_bf16 = 2 * (2 * 5 * 32);
    let outside = int8 - in_bf16 - rounded;
    // The output layer in 8 bits, the embedding in bf16, and scales.
    assert!((3 * 160 * 32..rounded / 2).contains(&outside), "{outside}");
    let of_token = source("mixtral").spec().num_layer_weights_of_token();
    assert_eq!(of_token, 2 * (attention + 2 * 3 * 32 * 40 + 5 * 32));
}

#[test]
fn a_missing_or_misshapen_expert_is_named() {
    Copy::of("mixtral")
        .tensor(
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            |_| None,
        )
        .refused(&[
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "is missing",
            "[32, 40]",
        ]);
    Copy::of("mixtral-stacked")
        .config(json!({"num_local_experts": 5}))
        .refused(&[
            "model.layers.0.mlp.gate.weight",
            "[4, 32]",
            "calls for [5, 32]",
        ]);
    Copy::of("mixtral-stacked")
        .tensor("model.layers.1.mlp.experts.down_proj", |_| None)
        .refused(&[
            "model.layers.1.mlp.experts.down_proj",
            "is missing",
            "[4, 32, 64]",
        ]);
    Copy::of("qwen2-moe")
        .tensor("model.layers.2.mlp.shared_expert_gate.weight", |_| None)
        .refused(&[
            "model.layers.2.mlp.shared_expert_gate.weight",
            "is missing",
            "[1, 32]",
        ]);
    Copy::of("qwen3-moe")
        .config(json!({"num_local_experts": 10}))
        .refused(&[
            "model.layers.1.mlp.gate.weight",
            "[9, 32]",
            "calls for [10, 32]",
        ]);
    // A NaN in the last row of an expert's gate.
    let gate = "model.layers.1.mlp.experts.8.gate_proj.weight";
    Copy::of("qwen3-moe")
        .tensor(gate, |view| {
            let mut data = view.data().to_vec();
            let last = data.len() - 2;
            data[last..].copy_from_slice(&[0xc0, 0x7f]);
            Some((view.dtype(), view.shape().to_vec(), data))
        })
        .refused(&[gate, "row 21", "NaN"]);
}

#[test]
fn configs_that_make_no_sense_are_refused() {
    for (changes, expected) in [
        (
            json!({"num_experts_per_tok": 8}),
            "num_experts_per_tok: 8 is not at most the number of experts, 7",
        ),
        (
            json!({"num_experts_per_tok": 0}),
            "num_experts_per_tok: 0 is not",
        ),
        (json!({"num_experts": 0}), "num_experts: 0 is not"),
        (
            json!({"num_experts": 1_000_000}),
            "num_experts: 1000000 is not",
        ),
        (
            json!({"moe_intermediate_size": 1 << 30}),
            "moe_intermediate_size: 1073741824 is not",
        ),
        (
            json!({"mlp_only_layers": [3]}),
            "mlp_only_layers: [3] is not a list of layers below 3",
        ),
        (
            json!({"mlp_only_layers": 1}),
            "mlp_only_layers: 1 is not a list of layers below 3",
        ),
        (
            json!({"decoder_sparse_step": 0}),
            "decoder_sparse_step: 0 is not",
        ),
        (json!({"norm_topk_prob": "yes"}), "norm_topk_prob"),
    ] {
        Copy::of("qwen2-moe").config(changes).refused(&[expected]);
    }
}

#[test]
fn the_cpu_and_the_reference_device_agree_on_experts() {
    for (name, has_whole_sums) in [
        ("mixtral", true),
        ("qwen2-moe", false),
        ("qwen3-moe", true),
        ("phimoe", false),
        ("gpt-oss", true),
        ("deepseek-v2", true),
        ("deepseek-v3", false),
    ] {
        let options = ReferenceOptions {
            has_whole_sums,
            ..ReferenceOptions::default()
        };
        // Where a number of 8 bits is rounded the other way, another expert may be chosen.
        for (what, setup) in setups()
            .into_iter()
            .filter(|(what, _)| *what != "int8 cache")
        {
            let (ours, _) = serve(&mut setup.load(name), &setup, &requests());
            let mut other = setup.load_on::<Reference>(&fixture(name), &options);
            let (theirs, _) = serve(&mut other, &setup, &requests());
            assert_near(&format!("{name}, {what}"), &ours, &theirs, 0.1);
        }
    }
}
