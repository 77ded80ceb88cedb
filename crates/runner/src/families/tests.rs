//! What transformers' config classes make of missing keys: see tests/fixtures/make_config_fixtures.py.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{FAMILIES, describe};
use crate::spec::{FeedForward, LayerSpec, ModelSpec, Module};
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, Gating, IndexerShape};

/// Values of a config by key.
type Config = Map<String, Value>;

#[derive(Deserialize)]
struct File {
    fixtures: BTreeMap<String, Defaults>,
}

/// What transformers fills in for a fixture.
#[derive(Deserialize)]
struct Defaults {
    /// The value of each key if it alone is missing. `text_config.KEY`: a key of a language model.
    missing: Config,
    /// All values of the class.
    class: Config,
}

/// Fixtures, their configs and what transformers fills in.
fn fixtures() -> Vec<(String, Config, Defaults)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let read = |file: &Path| fs::read_to_string(folder.join(file)).expect("the file");
    let file: File = serde_json::from_str(&read("config_defaults.json".as_ref())).expect("JSON");
    let fixtures = file.fixtures.into_iter().map(|(name, defaults)| {
        let config = read(&Path::new(&name).join("config.json"));
        (name, serde_json::from_str(&config).expect("JSON"), defaults)
    });
    fixtures.collect()
}

fn spec(config: &Config) -> Result<ModelSpec, String> {
    let file = JsonFile::new(Path::new("config.json"), "", config.clone());
    describe(&file).map_err(|error| error.to_string())
}

/// The part of a config that has a key, and its name there.
fn part<'a>(config: &'a mut Config, key: &'a str) -> (&'a mut Config, &'a str) {
    match key.split_once('.') {
        None => (config, key),
        Some((part, key)) => (config[part].as_object_mut().expect("an object"), key),
    }
}

#[test]
fn a_missing_key_has_the_value_that_transformers_fills_in() {
    let mut num_valid = 0;
    for (name, config, defaults) in fixtures() {
        for (key, value) in defaults.missing {
            let (mut silent, mut filled) = (config.clone(), config.clone());
            let (silent_part, key_of_part) = part(&mut silent, &key);
            silent_part.remove(key_of_part);
            let (filled_part, key_of_part) = part(&mut filled, &key);
            filled_part.insert(key_of_part.to_owned(), value.clone());
            let (silent, filled) = (spec(&silent), spec(&filled));
            num_valid += usize::from(filled.is_ok());
            assert_eq!(silent, filled, "{name} without {key}, which is {value}");
        }
    }
    assert!(num_valid > 700, "{num_valid} configs");
}

#[test]
fn a_config_of_nothing_but_its_class_is_what_transformers_makes_of_it() {
    let mut classes = BTreeSet::new();
    for (name, config, defaults) in fixtures() {
        let class = &config["architectures"];
        let mut filled = defaults.class;
        filled.insert("architectures".to_owned(), class.clone());
        let silent = Config::from_iter([("architectures".to_owned(), class.clone())]);
        let (silent, filled) = (spec(&silent), spec(&filled));
        assert_eq!(silent, filled, "{name}");
        // Their classes do not say how many experts there are or a token has, or which layers have attention.
        let says_too_little = name.starts_with("deepseek-v2")
            || ["dots1", "glm4-moe", "lfm2-moe"].contains(&&name[..]);
        assert_eq!(silent.is_ok(), !says_too_little, "{silent:?}");
        classes.insert(class[0].as_str().expect("a class").to_owned());
    }
    let all = FAMILIES.map(|family| family.class);
    // Other names of six that have a fixture, and eleven that transformers has no class of.
    let others = [
        "Gemma3ForConditionalGeneration",
        "PhiMoEForCausalLM",
        "MPTForCausalLM",
        "KimiK25ForConditionalGeneration",
        "BaiChuanForCausalLM",
        "ChatGLMForConditionalGeneration",
        "InternLM2ForCausalLM",
        "MiniCPMForCausalLM",
        "Step3p5ForCausalLM",
        "DeepseekForCausalLM",
        "InternLMForCausalLM",
        "QWenLMHeadModel",
        "BaichuanForCausalLM",
        "ChatGLMModel",
        "BitnetForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeForCausalLM",
    ];
    let expected = all.into_iter().filter(|class| !others.contains(class));
    assert_eq!(classes, expected.map(str::to_owned).collect());
}

/// As in the checkpoints of Gemma 3 4B to 27B, which say no more than this.
#[test]
fn a_gemma_3_with_images_has_the_defaults_of_its_language_model() {
    let text = json!({"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024});
    let config = |class: &str, rest: Value| {
        let mut config = rest.as_object().expect("an object").clone();
        config.insert("architectures".to_owned(), json!([class]));
        spec(&config).expect("a model")
    };
    let alone = config("Gemma3ForCausalLM", text.clone());
    let with_images = config(
        "Gemma3ForConditionalGeneration",
        json!({"text_config": text}),
    );
    assert_eq!((alone.vocab_size, alone.num_heads), (262_208, 8));
    assert_eq!(alone.max_position_embeddings, 131_072);
    let expected = ModelSpec {
        family: with_images.family,
        modules: with_images.modules,
        has_whole_images: true,
        ..alone
    };
    assert_eq!(with_images, expected);
}

#[test]
fn a_language_model_of_another_family_is_refused_by_its_type() {
    for class in [
        "Mistral3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
    ] {
        let config = json!({"architectures": [class], "text_config": {"model_type": "mistral5"}});
        let refused = spec(config.as_object().expect("an object"));
        let error = refused.expect_err("it is none of them");
        let words = "text_config.model_type: 'mistral5' is not one of llama, mistral, ministral, ministral3, mistral4, qwen2, qwen3, \
                     exaone4, exaone4_5_text, deepseek_v3, kimi_k2";
        assert!(error.contains(words), "{error}");
    }
}

/// The description of a class with these keys.
fn described(class: &str, keys: Value) -> Result<ModelSpec, String> {
    let mut config = keys.as_object().expect("an object").clone();
    config.insert("architectures".to_owned(), json!([class]));
    spec(&config)
}

#[test]
fn first_layers_of_a_cohere_2_with_experts_have_positions_of_their_own() {
    let layers = |keys: Value| {
        let spec = described("Cohere2MoeForCausalLM", keys).expect("a model");
        let of_layer = |layer: &LayerSpec| {
            let attention = &layer.attention;
            (
                attention.window.is_some(),
                attention.rope.rotary_dim > 0,
                layer.experts().is_some(),
            )
        };
        spec.layers.iter().map(of_layer).collect::<Vec<_>>()
    };
    let others = [
        (true, true, true),
        (true, true, true),
        (true, true, true),
        (false, false, true),
        (true, true, true),
    ];
    let seven = json!({"num_hidden_layers": 7, "first_k_dense_replace": 2});
    let first = [(false, true, false); 2];
    assert_eq!(layers(seven.clone()), [&first[..], &others].concat());
    let mut with_windows = seven;
    with_windows["prefix_dense_sliding_window_pattern"] = json!(2);
    let first = [(true, true, false), (false, false, false)];
    assert_eq!(layers(with_windows), [&first[..], &others].concat());
    // Lists count, whatever else is there.
    let listed = json!({
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
    });
    assert_eq!(layers(listed), [(true, true, true), (false, true, false)]);
}

#[test]
fn a_cohere_2_with_experts_is_the_mean_of_both_kinds_or_their_sum() {
    let scale = |keys: Value| {
        let spec = described("Cohere2MoeForCausalLM", keys)?;
        Ok(spec.layers[0].experts().expect("experts").scale)
    };
    assert_eq!(scale(json!({})), Ok(None));
    assert_eq!(scale(json!({"num_shared_experts": 2})), Ok(Some(0.5)));
    let key = "shared_expert_combination_strategy";
    assert_eq!(
        scale(json!({"num_shared_experts": 2, key: "sum"})),
        Ok(None)
    );
    for (keys, words) in [
        (json!({"num_shared_experts": 2, key: "product"}), key),
        (
            json!({"expert_selection_fn": "tanh"}),
            "expert_selection_fn: 'tanh'",
        ),
    ] {
        let error: String = scale(keys).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn both_bases_of_a_dbrx_agree() {
    let theta = |of_attention: Value, parameters: Value| {
        let keys = json!({"attn_config": of_attention, "rope_parameters": parameters});
        let spec = described("DbrxForCausalLM", keys)?;
        Ok::<_, String>(spec.layers[0].attention.rope.theta)
    };
    let given = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    assert_eq!(theta(json!({}), Value::Null), Ok(10_000.0));
    assert_eq!(theta(json!({"rope_theta": 5e5}), Value::Null), Ok(5e5));
    assert_eq!(theta(json!({}), given(300.0)), Ok(300.0));
    assert_eq!(theta(json!({"rope_theta": 5e5}), given(5e5)), Ok(5e5));
    let error = theta(json!({"rope_theta": 5e5}), given(300.0)).expect_err("refused");
    let words = "attn_config.rope_theta: 500000 is not rope_parameters.rope_theta, which is 300";
    assert!(error.contains(words), "{error}");
    for (section, words) in [
        (json!({"kv_n_heads": 3}), "3"),
        (json!({"clip_qkv": -1}), "attn_config.clip_qkv: -1"),
    ] {
        let error = theta(section, Value::Null).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn an_internlm_3_has_all_biases_or_none() {
    for class in ["InternLM3ForCausalLM", "LlamaForCausalLM"] {
        let biases = |mut keys: Value| {
            keys["model_type"] = json!("internlm3");
            let spec = described(class, keys)?;
            let layer = &spec.layers[0];
            let all = layer.projections().map(|it| it.has_bias);
            Ok::<_, String>(all.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>())
        };
        assert_eq!(biases(json!({})), Ok(vec![false]));
        let both = json!({"qkv_bias": true, "bias": true});
        assert_eq!(biases(both), Ok(vec![true]));
        let renamed = json!({"attention_bias": true, "mlp_bias": true});
        assert_eq!(biases(renamed), Ok(vec![true]));
        let error = biases(json!({"qkv_bias": true})).expect_err("refused");
        assert!(error.contains("qkv_bias: true is not bias"), "{error}");
    }
}

/// Up to the positions of the first training, which are all that there are.
#[test]
fn a_dynamic_position_embedding_is_none() {
    let spec = |parameters: Value| {
        let keys = json!({"max_position_embeddings": 64, "rope_parameters": parameters});
        described("LlamaForCausalLM", keys).expect("a model")
    };
    let plain = spec(json!({"rope_type": "default", "rope_theta": 500.0}));
    let dynamic = json!({"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0});
    assert_eq!(spec(dynamic), plain);
    assert_eq!(plain.max_seq_len(), 64);
}

#[test]
fn keys_that_change_a_model_in_other_families_only_are_refused() {
    for (class, keys, words) in [
        (
            "LlamaForCausalLM",
            json!({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}}),
            "alpha: 1000",
        ),
        (
            "IQuestCoderForCausalLM",
            json!({"loop_num": 2}),
            "loop_num: 2",
        ),
    ] {
        let error = described(class, keys).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn layers_of_a_laguna_have_the_query_heads_of_its_list() {
    let of_list = |list: Value| {
        let keys = json!({"num_hidden_layers": 3, "num_attention_heads_per_layer": list});
        described("LagunaForCausalLM", keys)
    };
    let spec = of_list(json!([48, 64, 48])).expect("a model");
    let heads = [0, 1, 2].map(|layer| spec.head_shape(layer).num_q_heads);
    assert_eq!(heads, [48, 64, 48]);
    assert_eq!(spec.gate_widths(), [48, 64]);
    for list in [
        json!([48, 48]),
        json!([48, 60, 48]),
        json!([48, 0, 48]),
        json!(48),
    ] {
        let error = of_list(list.clone()).expect_err("it is no list of the heads of three layers");
        assert!(
            error.contains("num_attention_heads_per_layer"),
            "{list}: {error}"
        );
    }
}

#[test]
fn a_longcat_flash_has_two_layers_for_each_of_its_checkpoint() {
    let published = json!({
        "num_layers": 3, "hidden_size": 6144, "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "mla_scale_q_lora": true, "mla_scale_kv_lora": true,
        "attention_method": "MLA",
        "zero_expert_type": "identity", "zero_expert_num": 256, "n_routed_experts": 512, "moe_topk": 12,
        "router_bias": false, "routed_scaling_factor": 6.0, "norm_topk_prob": false, "rope_theta": 1e7,
    });
    let described = |keys| described("LongcatFlashForCausalLM", keys);
    let spec = described(published.clone()).expect("a model");
    assert_eq!(
        described(json!({"num_hidden_layers": 6, "rope_theta": 1e7})),
        Ok(spec.clone())
    );
    let paths = [2, 3].map(|layer| {
        let module = spec.layers[layer].attention.o.parts[0].module;
        spec.module_path(Module::of_layer(layer, module))
    });
    assert_eq!(
        paths,
        [
            "model.layers.1.self_attn.0.o_proj",
            "model.layers.1.self_attn.1.o_proj"
        ]
    );
    let has_experts = spec
        .layers
        .iter()
        .map(|layer| layer.experts_block.is_some());
    assert!(has_experts.eq([true, false, true, false, true, false]));
    let routing = spec.mixture().expect("experts").routing;
    assert_eq!(
        [
            routing.num_experts,
            routing.num_zero_experts,
            routing.num_chosen
        ],
        [768, 256, 12]
    );
    let attention = &spec.layers[5].attention;
    let kv_scale = attention.latent.as_ref().map(|latent| latent.kv_scale);
    assert_eq!(kv_scale, Some(12_f32.sqrt()));
    assert!((attention.scale - 2.0 / 192_f32.sqrt()).abs() < 1e-7);
    for (key, value) in [
        ("num_layers", json!(0)),
        ("num_hidden_layers", json!(5)),
        ("q_lora_rank", json!(null)),
        ("zero_expert_type", json!("drop")),
        ("attention_method", json!("MHA")),
        ("norm_topk_prob", json!(true)),
        ("zero_expert_num", json!(1024)),
        ("moe_topk", json!(1000)),
    ] {
        let mut keys = published.clone();
        if key == "num_hidden_layers" {
            keys["num_layers"].take();
        }
        keys[key] = value;
        let error = described(keys).expect_err(key);
        assert!(
            error.contains(key) || key == "zero_expert_num",
            "{key}: {error}"
        );
    }
}

#[test]
fn no_sequence_of_a_qwen_1_is_longer_than_its_training_unless_its_config_says_so() {
    let positions = |keys| {
        let spec = described("QWenLMHeadModel", keys).expect("a model");
        spec.max_position_embeddings
    };
    let lengths = |dynamic: bool, scaled: bool| {
        json!({
            "seq_length": 2048, "max_position_embeddings": 8192, "use_dynamic_ntk": dynamic, "use_logn_attn": scaled,
        })
    };
    assert_eq!(positions(lengths(false, false)), 8192);
    for (dynamic, scaled) in [(true, true), (false, true), (true, false)] {
        assert_eq!(positions(lengths(dynamic, scaled)), 2048);
    }
    for (key, value) in [
        ("intermediate_size", json!(7)),
        ("visual", json!({"layers": 48})),
    ] {
        let error = described("QWenLMHeadModel", json!({key: value})).expect_err(key);
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_baichuan_without_positions_has_linear_biases_and_the_second_one_unit_outputs() {
    let described = |keys| described("BaichuanForCausalLM", keys);
    for (keys, has_slopes, has_unit_outputs) in [
        (
            json!({"max_position_embeddings": 4096, "model_max_length": 4096}),
            false,
            false,
        ),
        (json!({"model_max_length": 4096}), true, false),
        (
            json!({"model_max_length": 4096, "vocab_size": 125_696}),
            true,
            true,
        ),
        (
            json!({"max_position_embeddings": 4096, "z_loss_weight": 0}),
            false,
            true,
        ),
    ] {
        let spec = described(keys.clone()).expect("a model");
        let found = (spec.slope_factor.is_some(), spec.has_unit_outputs);
        assert_eq!(found, (has_slopes, has_unit_outputs), "{keys}");
    }
    let error = described(json!({"z_loss_weight": 0, "tie_word_embeddings": true}));
    assert!(error.expect_err("refused").contains("tie_word_embeddings"));
}

#[test]
fn older_models_that_are_no_chatglm_2_or_internlm_are_refused() {
    for (class, keys, key) in [
        (
            "ChatGLMModel",
            json!({"position_encoding_2d": true}),
            "position_encoding_2d",
        ),
        (
            "ChatGLMModel",
            json!({"multi_query_attention": false}),
            "multi_query_attention",
        ),
        (
            "ChatGLMModel",
            json!({"multi_query_attention": true, "rmsnorm": false}),
            "rmsnorm",
        ),
        (
            "InternLMForCausalLM",
            json!({"rotary": {"type": "other"}}),
            "rotary.type",
        ),
    ] {
        let error = described(class, keys).expect_err(key);
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_sarvam_is_read_by_the_names_of_transformers_and_of_the_published_model() {
    let published = json!({
        "num_experts": 128, "num_shared_experts": 1, "use_qkv_bias": false, "use_qk_norm": true, "head_dim": 64,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "rope_theta": 8e6, "score_function": "sigmoid",
        "moe_intermediate_size": 1024, "moe_shared_expert_intermediate_size": 1024,
    });
    let spec = described("SarvamMoEForCausalLM", published.clone()).expect("a model");
    let saved = json!({
        "model_type": "sarvam_moe", "n_routed_experts": 128, "n_shared_experts": 1, "attention_bias": false,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6, "partial_rotary_factor": 1.0},
    });
    assert_eq!(described("Glm4MoeForCausalLM", saved), Ok(spec));
    for (key, value) in [
        ("score_function", json!("softmax")),
        ("use_sliding_window", json!(true)),
        ("norm_head", json!(true)),
        ("moe_shared_expert_intermediate_size", json!(512)),
    ] {
        let mut keys = published.clone();
        keys["n_shared_experts"] = json!(1);
        keys[key] = value;
        let error = described("BailingMoeV2ForCausalLM", keys).expect_err(key);
        assert!(error.contains(key), "{error}");
    }
    let first =
        |scores: &str| described("BailingMoeForCausalLM", json!({"score_function": scores}));
    assert!(first("softmax").is_ok() && first("sigmoid").is_err());
    let without = json!({"moe_router_enable_expert_bias": false});
    let spec = described("BailingMoeV2ForCausalLM", without).expect("a model");
    let corrections = spec.layers.iter().filter_map(LayerSpec::experts);
    assert!(corrections.map(|it| it.correction).all(|it| it.is_none()));
}

#[test]
fn a_sarvam_of_105b_is_a_deepseek_with_keys_and_yarn_of_its_own() {
    let config = |num: &str, shared: &str, kind: &str| {
        json!({
            num: 64, shared: 2, "hidden_size": 4096, "head_dim": 576,
            "rope_scaling": {"type": kind, "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
        })
    };
    let described = |keys| described("SarvamMLAForCausalLM", keys);
    let spec = described(config("num_experts", "num_shared_experts", "deepseek_yarn"));
    assert_eq!(
        spec,
        described(config("n_routed_experts", "n_shared_experts", "yarn"))
    );
    let spec = spec.expect("a model");
    let latent = spec.latent().expect("latents");
    assert!(latent.queries.is_none());
    assert_eq!(spec.mixture().expect("experts").routing.num_experts, 64);
    let normed = self::described("BailingMoeForCausalLM", json!({"norm_softmax": true}));
    assert!(normed.expect_err("refused").contains("norm_softmax"));
}

#[test]
fn a_mimo_v2_is_read_by_the_names_of_transformers_and_of_the_published_model() {
    let ours = json!({
        "num_hidden_layers": 4, "rms_norm_eps": 1e-4, "sliding_window": 12, "attention_value_scale": null,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.5},
        },
    });
    let published = json!({
        "num_hidden_layers": 4, "layernorm_epsilon": 1e-4, "sliding_window": 128, "sliding_window_size": 11,
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1], "attention_value_scale": null,
        "partial_rotary_factor": 0.5, "rope_theta": 600.0, "swa_rope_theta": 20.0, "n_shared_experts": null,
        "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "swa_num_attention_heads": 64, "swa_head_dim": 192,
        "swa_v_head_dim": 128, "add_swa_attention_sink_bias": true, "add_full_attention_sink_bias": false,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": null,
    });
    let described = |keys| described("MiMoV2FlashForCausalLM", keys);
    let spec = described(ours).expect("a model");
    assert_eq!(described(published.clone()), Ok(spec.clone()));
    let widths = [1, 3].map(|layer| {
        let heads = spec.head_shape(layer);
        [heads.q_len(), heads.qkv_len(), heads.out_len()]
    });
    assert_eq!(widths, [[12_288, 14_848, 8192], [12_288, 13_568, 8192]]);
    for (key, value) in [
        ("swa_head_dim", json!(128)),
        ("swa_num_key_value_heads", json!(7)),
        ("hybrid_layer_pattern", json!([0, 1, 1])),
        ("moe_layer_freq", json!([0, 1, 2, 1])),
    ] {
        let mut keys = published.clone();
        keys[key] = value;
        let error = described(keys).expect_err("no such model is known");
        assert!(
            error.contains(key) || key.starts_with("hybrid") && error.contains("layer_types"),
            "{key}: {error}"
        );
    }
}

#[test]
fn keys_of_a_step_3_5_that_mean_another_model_are_refused() {
    let keys = json!({
        "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "sliding_window": 16, "moe_layers_enum": "1, 2",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
        "rope_theta": [5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0],
        "swiglu_limits": [null, 7.0, 0.0], "swiglu_limits_shared": [0.0, 16, 0.0],
        "use_head_wise_attn_gate": true, "moe_router_activation": "sigmoid", "yarn_only_types": ["full_attention"],
    });
    let described = |keys| described("Step3p5ForCausalLM", keys);
    let spec = described(keys.clone()).expect("a model");
    let of_layer = |layer: usize| {
        let rope = &spec.layers[layer].attention.rope;
        (
            spec.head_shape(layer).num_q_heads,
            rope.theta,
            rope.rotary_dim,
        )
    };
    assert_eq!([0, 1].map(of_layer), [(64, 5e6, 64), (96, 1e4, 128)]);
    let gatings = spec.layers[1]
        .experts()
        .map(|it| [it.gating, it.shared_gating()]);
    let bounded = |limit| Gating::Bounded(Activation::Silu, limit);
    assert_eq!(gatings, Some([bounded(7.0), bounded(16.0)]));
    assert!(spec.layers[0].experts().is_none());
    for (key, value) in [
        ("use_head_wise_attn_gate", json!(false)),
        ("moe_router_activation", json!("softmax")),
        ("yarn_only_types", json!(["sliding_attention"])),
        ("moe_layers_enum", json!("1;2")),
        ("swiglu_limits", json!([7.0])),
        ("swiglu_limits_shared", json!([16, 16, 0])),
        ("rope_theta", json!([5e6])),
        (
            "attention_other_setting",
            json!({"num_attention_heads": 90}),
        ),
        ("attention_other_setting", json!({"head_dim": 64})),
    ] {
        let mut keys = keys.clone();
        keys[key] = value.clone();
        let error = described(keys).expect_err("no such model is known");
        assert!(error.contains(key), "{key}: {value}: {error}");
    }
    let mut differing = keys.clone();
    differing["num_hidden_layers"] = json!(3);
    differing["rope_theta"] = json!([5e6, 1e4, 1e5]);
    let error = described(differing).expect_err("layers of one kind have one base");
    assert!(error.contains("rope_theta"), "{error}");
}

#[test]
fn gates_of_a_laguna_are_for_heads_or_for_elements() {
    let widths = |gating: Value| {
        let spec = described("LagunaForCausalLM", json!({"gating": gating}))?;
        Ok::<_, String>(spec.gate_widths())
    };
    for (gating, width) in [
        (json!(true), 48),
        (json!("per-head"), 48),
        (json!("per-element"), 48 * 128),
    ] {
        assert_eq!(widths(gating), Ok(vec![width]));
    }
    let error = widths(json!("per-token")).expect_err("there is no such gate");
    assert!(error.contains("gating"), "{error}");
}

#[test]
fn every_second_layer_of_an_lfm_3_has_attention() {
    let silent = described("Lfm3ForCausalLM", json!({"num_hidden_layers": 7})).expect("a model");
    let found: Vec<_> = silent
        .layers
        .iter()
        .map(|layer| (layer.has_cache(), layer.attention.window.is_some()))
        .collect();
    let (convolution, windowed, full) = ((false, false), (true, true), (true, false));
    let expected = [
        convolution,
        convolution,
        full,
        convolution,
        windowed,
        convolution,
        full,
    ];
    assert_eq!(found, expected);
    let keys = json!({"num_hidden_layers": 1, "layer_types": ["attention"]});
    let error = described("Lfm3ForCausalLM", keys).expect_err("there is no such layer");
    assert!(error.contains("layer_types"), "{error}");
    let keys = json!({"sliding_window": null});
    let error = described("Lfm3ForCausalLM", keys).expect_err("some layers have a window");
    assert!(error.contains("sliding_window"), "{error}");
}

#[test]
fn both_kinds_of_attention_of_an_lfm_3_have_their_sections() {
    let of_kinds = |parameters: Value, more: Value| {
        let mut keys = json!({
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": parameters,
        });
        for (key, value) in more.as_object().expect("an object") {
            keys[key] = value.clone();
        }
        described("Lfm3ForCausalLM", keys)
    };
    let sections = json!({"full_attention": {"rope_type": "default"}, "sliding_attention": {}});
    for (more, theta) in [(json!({}), 1e6), (json!({"rope_theta": 5e4}), 5e4)] {
        let spec = of_kinds(sections.clone(), more).expect("a model");
        let found = spec.layers.iter().map(|layer| layer.attention.rope.theta);
        assert_eq!(found.collect::<Vec<_>>(), [theta; 2]);
    }
    for parameters in [
        json!({"sliding_attention": {}}),
        json!({"rope_type": "default", "rope_theta": 1e4}),
    ] {
        let error = of_kinds(parameters, json!({})).expect_err("a section is missing");
        assert!(error.contains("rope_parameters."), "{error}");
    }
    let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}});
    of_kinds(sections, yarn).expect_err("transformers reads rope_scaling alone");
    let keys = json!({
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e5}},
    });
    let spec = described("Lfm3ForCausalLM", keys).expect("no layer has a window");
    assert_eq!(spec.layers[0].attention.rope.theta, 1e5);
}

#[test]
fn a_falcon_mamba_has_the_channels_that_its_config_tells() {
    for (keys, num_channels) in [
        (json!({"hidden_size": 64, "expand": 3}), 192),
        // As the published model has them.
        (
            json!({"hidden_size": 64, "expand": 16, "intermediate_size": 128}),
            128,
        ),
    ] {
        let spec = described("FalconMambaForCausalLM", keys).expect("a model");
        assert_eq!(spec.layers[0].attention.o.num_inputs, num_channels);
    }
    let keys = json!({"hidden_size": 1 << 20, "expand": 16});
    let error = described("FalconMambaForCausalLM", keys).expect_err("too many channels");
    assert!(error.contains("expand"), "{error}");
}

#[test]
fn a_jamba_with_one_expert_has_none() {
    let keys = json!({"num_experts": 1, "num_experts_per_tok": 2, "num_hidden_layers": 2});
    let spec = described("JambaForCausalLM", keys).expect("a model");
    let mut layers = spec.layers.iter();
    assert!(layers.all(|layer| !matches!(layer.feed_forward, FeedForward::Experts(_))));
}

#[test]
fn only_layers_with_experts_of_an_ax_k1_have_norms_behind_them() {
    let spec = described("AXK1ForCausalLM", json!({"num_hidden_layers": 3})).expect("a model");
    let has_norms: Vec<_> = spec
        .layers
        .iter()
        .map(|layer| layer.norms.has_after())
        .collect();
    assert_eq!(has_norms, [false, true, true]);
}

#[test]
fn a_minicpm_scales_embedded_tokens_blocks_and_logits() {
    let keys = json!({
        "num_hidden_layers": 4, "hidden_size": 2304, "num_attention_heads": 36, "scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 256,
    });
    let spec = described("MiniCPMForCausalLM", keys).expect("a model");
    let residual = 1.4 / 2.0;
    assert_eq!(spec.embedding_scale, (12.0 / residual) as f32);
    assert_eq!(spec.logits.scale, 256.0 / 2304.0);
    for (key, value) in [
        ("sparse_config", json!({"topk": 64})),
        ("num_experts", json!(8)),
    ] {
        let error = described("MiniCPMForCausalLM", json!({key: value}));
        let error = error.expect_err("it is not supported");
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn an_internlm_2_has_biases_of_attention_unless_its_config_says_otherwise() {
    let has_biases = |keys: Value| {
        let spec = described("InternLM2ForCausalLM", keys).expect("a model");
        let attention = &spec.layers[0].attention;
        [attention.qkv.has_bias, attention.o.has_bias]
    };
    assert_eq!(has_biases(json!({})), [true; 2]);
    assert_eq!(has_biases(json!({"bias": false})), [false; 2]);
}

/// Which layers of a GLM-5 with four layers have an indexer.
fn layers_with_indexers(keys: Value) -> Result<Vec<bool>, String> {
    let mut config = json!({"num_hidden_layers": 4});
    for (key, value) in keys.as_object().expect("keys") {
        config[key] = value.clone();
    }
    let spec = described("GlmMoeDsaForCausalLM", config)?;
    Ok(spec
        .layers
        .iter()
        .map(|it| it.indexer().is_some())
        .collect())
}

#[test]
fn layers_of_a_glm_5_share_selections_as_its_list_its_pattern_or_its_schedule_says() {
    let [full, shared] = ["full", "shared"];
    for (keys, expected) in [
        (json!({}), [true; 4]),
        (json!({"index_topk_freq": 2}), [true, true, false, true]),
        (
            json!({"index_topk_freq": 3, "index_skip_topk_offset": 1}),
            [true, false, false, true],
        ),
        (json!({"index_topk_freq": 0}), [true; 4]),
        (
            json!({"index_topk_pattern": "FSSF", "index_topk_freq": 2}),
            [true, false, false, true],
        ),
        (
            json!({"index_topk_pattern": [full, full, shared, shared]}),
            [true, true, false, false],
        ),
        (
            json!({"indexer_types": [full, shared, full, full], "index_topk_pattern": "FFFF"}),
            [true, false, true, true],
        ),
    ] {
        assert_eq!(
            layers_with_indexers(keys.clone()),
            Ok(expected.to_vec()),
            "{keys}"
        );
    }
    for (keys, parts) in [
        (
            json!({"indexer_types": [full]}),
            ["indexer_types", "4 entries"],
        ),
        (
            json!({"index_topk_pattern": "FSXF"}),
            ["index_topk_pattern", "'F' or 'S'"],
        ),
        (
            json!({"index_topk_pattern": "SFFF"}),
            ["index_topk_pattern", "the first layer"],
        ),
    ] {
        let error = layers_with_indexers(keys).expect_err("refused");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn indexers_are_as_large_as_their_keys_say_and_can_be() {
    for (class, num_heads, is_interleaved) in [
        ("DeepseekV32ForCausalLM", 64, false),
        ("GlmMoeDsaForCausalLM", 32, true),
    ] {
        let shape = |keys: Value| {
            let spec = described(class, keys)?;
            Ok::<_, String>(spec.indexer_shape().expect("indexers"))
        };
        let defaults = IndexerShape {
            num_heads,
            head_dim: 128,
            rotary_dim: 64,
            is_interleaved,
            max_selected: 2048,
        };
        assert_eq!(shape(json!({})), Ok(defaults));
        let keys = json!({"index_n_heads": 6, "index_head_dim": 96, "index_topk": 512});
        let expected = IndexerShape {
            num_heads: 6,
            head_dim: 96,
            max_selected: 512,
            ..defaults
        };
        assert_eq!(shape(keys), Ok(expected));
        for (keys, parts) in [
            (json!({"index_topk": 0}), ["index_topk: 0", "from 1"]),
            (
                json!({"index_head_dim": 33}),
                ["index_head_dim: 33", "an even number"],
            ),
            (
                json!({"index_head_dim": 62}),
                ["index_head_dim: 62", "at least qk_rope_head_dim, 64"],
            ),
            (
                json!({"q_lora_rank": null}),
                ["q_lora_rank: null", "the indexer"],
            ),
        ] {
            let error = shape(keys).expect_err("refused");
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
