//! The JSON files of checkpoints, as several versions of transformers write them.

use std::fs;
use std::num::NonZeroU32;

use inflight_base::BlockSize;
use inflight_device::KvDtype;
use inflight_runner::{CpuRunner, ModelSource, Rope, RopeAxes, RopeScaling};
use log::Level;
use safetensors::SafeTensors;
use safetensors::tensor::serialize_to_file;
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::families::all_families;
use crate::log_lines;
use crate::support::{Request, Setup, fixture, serve};

/// Fixtures of families that have others, too.
const FIXTURES: [&str; 8] = [
    "llama2",
    "llama-linear",
    "llama-yarn",
    "llama-biases",
    "qwen2-windows",
    "sharded",
    "stored-f16",
    "stored-f32",
];

#[test]
fn yarn_reaches_as_far_as_its_factor_says() {
    let positions = |rope: Value, max: u32| {
        let config =
            json!({"rope_parameters": null, "rope_scaling": rope, "max_position_embeddings": max});
        let copy = Copy::of("llama2").config(config);
        let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
        source.spec().max_seq_len()
    };
    let yarn = |original: Value| json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original});
    // As model cards have it, and as transformers writes it.
    assert_eq!(positions(yarn(json!(64)), 64), 256);
    assert_eq!(positions(yarn(json!(32_768)), 40_960), 131_072);
    assert_eq!(positions(yarn(json!(64)), 256), 256);
    assert_eq!(positions(yarn(json!(64)), 1024), 1024);
    assert_eq!(positions(yarn(json!(null)), 64), 256);
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    assert_eq!(positions(linear, 64), 64);
}

/// A model without experts may say that it has 0, and Llama 4 Scout has one bound for long and short waves.
#[test]
fn values_that_mean_nothing_to_a_model_are_not_refused() {
    for (name, config) in [
        ("llama4", json!({"moe_layers": [], "num_local_experts": 0})),
        (
            "llama4",
            json!({"rope_parameters": null, "rope_theta": 500_000.0, "rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            }}),
        ),
        (
            "nemotron-h",
            json!({"n_routed_experts": 0, "moe_latent_size": 16}),
        ),
    ] {
        let copy = Copy::of(name).config(config);
        let source = ModelSource::open(copy.dir());
        assert!(source.is_ok(), "{name}: {:?}", source.err());
    }
}

#[test]
fn configs_of_older_transformers_mean_the_same() {
    let mut num_without_rope = 0;
    for name in FIXTURES
        .into_iter()
        .chain(all_families().map(|(name, _)| name))
        // No older one knows these.
        .filter(|name| {
            !name.starts_with("gemma4")
                && !["laguna", "lfm3", "mellum", "mimo-v2", "mistral4", "step3p5"].contains(name)
        })
    {
        let copy = Copy::of(name);
        let path = copy.path("config.json");
        let text = fs::read_to_string(&path).expect("the file");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        let mut rope = config["rope_parameters"].take();
        let Some(mut rope) = rope.as_object_mut() else {
            num_without_rope += 1;
            continue;
        };
        // Only Gemma 3 had two bases.
        if let Some(local) = rope.get("sliding_attention") {
            config["rope_local_base_freq"] = local["rope_theta"].clone();
            let whole = rope.get_mut("full_attention").expect("there");
            rope = whole.as_object_mut().expect("an object");
        }
        config["rope_theta"] = rope.remove("rope_theta").expect("there");
        if let Some(share) = rope.remove("partial_rotary_factor") {
            let key = match name {
                "gpt-neox" => "rotary_pct",
                _ => "partial_rotary_factor",
            };
            config[key] = share;
        }
        // The first versions called it `type`.
        let kind = rope.remove("rope_type").expect("there");
        if kind != "default" {
            rope.insert("type".to_owned(), kind);
            config["rope_scaling"] = Value::Object(rope.clone());
        }
        fs::write(&path, config.to_string()).expect("written");

        let old = ModelSource::open(copy.dir());
        let old = old.unwrap_or_else(|error| panic!("{name}: {error}"));
        let new = ModelSource::open(&fixture(name)).expect("the fixture opens");
        assert_eq!(old.spec(), new.spec(), "{name}");
    }
    // GPT-2, StarCoder, OPT and Nemotron-H in two shapes, BLOOM, GPT-J, CodeGen, GPT-Neo, BioGPT, MPT, Kimi
    // Linear, Jamba, Mamba and Falcon Mamba; the configs of EXAONE 3, InternLM 1 to 3, MiniCPM, IQuest-Coder,
    // DeepSeekMoE, Qwen 1, Baichuan in two shapes, ChatGLM, the first BitNet
    // and Ling in two shapes are older ones.
    assert_eq!(num_without_rope, 31);
}

fn rope_of(changes: Value) -> Result<Rope, String> {
    let copy = Copy::of("llama2").config(changes);
    let checkpoint = ModelSource::open(copy.dir()).map_err(|error| error.to_string())?;
    Ok(checkpoint.spec().layers[0].attention.rope.clone())
}

/// What transformers 5.23 makes of the same (`RotaryEmbeddingConfigMixin`).
#[test]
fn rope_scaling_counts_beside_rope_parameters() {
    let parameters = json!({"rope_type": "default", "rope_theta": 500.0});
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    let rope = |theta, scaling| {
        Ok(Rope {
            theta,
            rotary_dim: 8,
            scaling,
            query_factors: None,
            axes: RopeAxes::Sequence,
        })
    };
    let divided = RopeScaling::Linear { factor: 4.0 };
    for (rope_scaling, rope_theta, expected) in [
        // What it does not say is not looked for in the other one.
        (linear.clone(), json!(700.0), rope(700.0, divided.clone())),
        (linear.clone(), Value::Null, rope(10_000.0, divided.clone())),
        (json!({}), json!(700.0), rope(500.0, RopeScaling::None)),
        (Value::Null, json!(700.0), rope(500.0, RopeScaling::None)),
        (
            json!({"type": "linear", "factor": 4.0, "rope_theta": 300.0}),
            json!(700.0),
            rope(300.0, divided),
        ),
    ] {
        let config = json!({
            "rope_parameters": parameters,
            "rope_scaling": rope_scaling,
            "rope_theta": rope_theta,
        });
        assert_eq!(rope_of(config), expected, "{rope_scaling} {rope_theta}");
    }
}

#[test]
fn a_rope_that_divides_by_zero_or_differs_between_layers_is_rejected() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0});
    let layers = json!({"full_attention": {"rope_type": "default", "rope_theta": 10000.0}});
    for (rope_parameters, words) in [
        (yarn, "rope_theta: 1 is not above 1"),
        (layers, "all layers have one"),
    ] {
        let error = rope_of(json!({"rope_parameters": rope_parameters})).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
    let linear = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 1.0});
    assert!(rope_of(json!({"rope_parameters": linear})).is_ok());
}

#[test]
fn a_mistral_with_layer_types_has_the_window_only_in_some_layers() {
    let windows = |changes: Value| {
        let copy = Copy::of("mistral-window").config(changes);
        let checkpoint = ModelSource::open(copy.dir()).expect("it opens");
        checkpoint.spec().windows().collect::<Vec<_>>()
    };
    let all = windows(json!({}));
    assert!(
        all.len() > 1
            && all
                .iter()
                .all(|&window| window == all[0] && window.is_some())
    );
    let mut types = vec!["full_attention"; all.len()];
    types[0] = "sliding_attention";
    let mut expected = vec![None; all.len()];
    expected[0] = all[0];
    assert_eq!(windows(json!({"layer_types": types})), expected);
    types[1] = "chunked_attention";
    Copy::of("mistral-window")
        .config(json!({"layer_types": types}))
        .refused(&["layer_types", "'sliding_attention' or 'full_attention'"]);
}

/// The same as transformers 5.23 (`tie_weights`): two different tensors are not tied, whatever config.json
/// says.
#[test]
fn an_output_layer_that_differs_from_the_embedding_is_used_with_a_warning() {
    log_lines::collect();
    const OUTPUT: &str = "lm_head.weight";
    let tied = json!({"tie_word_embeddings": true});
    let untied = Copy::of("llama2");
    let expected = ModelSource::open(untied.dir()).expect("it opens");
    assert!(!expected.spec().tied_embeddings);
    let copy = Copy::of("llama2").config(tied.clone());
    let checkpoint = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(checkpoint.spec(), expected.spec());
    let lines = log_lines::take(&copy.dir().display().to_string());
    let [(Level::Warn, line)] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert!(
        line.contains(OUTPUT) && line.contains("tie_word_embeddings: false"),
        "{line}"
    );

    // A copy of the embedding, as written by older versions, is not kept twice.
    let path = copy.path("model.safetensors");
    let bytes = fs::read(&path).expect("the file");
    let tensors = SafeTensors::deserialize(&bytes).expect("whole");
    let embedding = tensors.tensor("model.embed_tokens.weight").expect("there");
    let (dtype, shape) = (embedding.dtype(), embedding.shape().to_vec());
    let data = embedding.data().to_vec();
    let copy = copy.tensor(OUTPUT, |_| Some((dtype, shape, data)));
    let checkpoint = ModelSource::open(copy.dir()).expect("it opens");
    assert!(checkpoint.spec().tied_embeddings);
    assert_eq!(log_lines::take(&copy.dir().display().to_string()), []);
}

#[test]
fn end_ids_are_a_number_or_a_list() {
    for (name, end_ids) in [("llama2", &[2][..]), ("llama3", &[2, 7])] {
        let checkpoint = ModelSource::open(&fixture(name)).expect("the fixture opens");
        assert_eq!(checkpoint.end_ids(), end_ids, "{name}");
    }
}

#[test]
fn a_spec_has_the_sizes_for_the_kv_cache() {
    let checkpoint = ModelSource::open(&fixture("llama3")).expect("the fixture opens");
    let spec = checkpoint.spec();
    assert_eq!(spec.family, "LlamaForCausalLM");
    assert_eq!((spec.vocab_size, spec.max_seq_len()), (160, 128));
    // Keys and values, 2 layers, 2 heads of 16, 2 bytes; or 1, and 2 for the scale of each vector.
    let block_size = BlockSize::new(32).expect("not zero");
    let bytes = |dtype| CpuRunner::kv_bytes_per_block(spec, block_size, dtype);
    assert_eq!(bytes(KvDtype::Bf16), 32 * 2 * 2 * 2 * 16 * 2);
    assert_eq!(bytes(KvDtype::Int8), 32 * 2 * 2 * 2 * (16 + 2));
    assert!(matches!(
        spec.layers[0].attention.rope.scaling,
        RopeScaling::Llama3 { .. }
    ));
}

#[test]
fn what_a_config_leaves_out_has_the_default_of_its_family() {
    let spec = |name: &str, changes: Value| {
        let copy = Copy::of(name).config(changes);
        let checkpoint = ModelSource::open(copy.dir()).map_err(|error| error.to_string())?;
        Ok::<_, String>(checkpoint.spec().clone())
    };
    // An explicit null is not the same as nothing.
    let ministral = spec(
        "ministral",
        json!({"num_attention_heads": 16, "num_key_value_heads": null}),
    );
    assert_eq!(ministral.map(|spec| spec.num_kv_heads), Ok(16));
    let smol = spec(
        "smollm3",
        json!({"no_rope_layers": null, "no_rope_layer_interval": 2}),
    );
    let rotary_dims = smol.map(|spec| {
        let layers = spec.layers.iter();
        layers
            .map(|layer| layer.attention.rope.rotary_dim)
            .collect::<Vec<_>>()
    });
    assert_eq!(rotary_dims, Ok(vec![8, 0]));
    let windowed = spec(
        "smollm3",
        json!({"use_sliding_window": true, "sliding_window": 30, "layer_types": null}),
    );
    let windows = windowed.map(|spec| spec.windows().collect::<Vec<_>>());
    assert_eq!(windows, Ok(vec![NonZeroU32::new(30), None]));
}

#[test]
fn a_longrope_or_a_partial_rotation_that_cannot_be_is_rejected() {
    let rope = |changes: Value| {
        let mut rope = json!({
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0],
        });
        for (key, value) in changes.as_object().expect("an object") {
            rope[key] = value.clone();
        }
        let copy = Copy::of("phi4-mini").config(json!({"rope_parameters": rope}));
        let opened = ModelSource::open(copy.dir());
        opened.err().map(|error| error.to_string())
    };
    assert_eq!(rope(json!({})), None);
    for (changes, words) in [
        (
            json!({"long_factor": [1.0, 2.0]}),
            "long_factor: [1.0,2.0] is not a list of 3 numbers",
        ),
        (json!({"short_factor": [1.0, 0.0, 1.0]}), "short_factor"),
        (json!({"long_factor": null}), "long_factor"),
        (
            json!({"partial_rotary_factor": 0.4}),
            "partial_rotary_factor: 0.4 is not",
        ),
        (
            json!({"original_max_position_embeddings": 1}),
            "original_max_position_embeddings",
        ),
    ] {
        let error = rope(changes).expect("refused");
        assert!(error.contains(words), "{error}");
    }
    // A quarter of 20 elements, where the config does not say how many.
    Copy::of("gpt-neox")
        .config(json!({"rope_parameters": null}))
        .refused(&["partial_rotary_factor: 0.25 is not a share of 20 that is even"]);
}

#[test]
fn older_configs_of_families_with_layer_norm_mean_the_same() {
    let spec = |name: &str, changes: Value| {
        let copy = Copy::of(name).config(changes);
        let checkpoint = ModelSource::open(copy.dir()).expect("it opens");
        checkpoint.spec().clone()
    };
    for (name, changes) in [
        (
            "gpt-neox",
            json!({"rope_parameters": null, "rotary_pct": 0.3, "rotary_emb_base": 10000}),
        ),
        (
            "stablelm",
            json!({"rope_parameters": null, "partial_rotary_factor": 0.4, "rope_theta": 10000}),
        ),
        (
            "nemotron",
            json!({"rope_parameters": null, "norm_eps": null, "hidden_act": null}),
        ),
        (
            "opt",
            json!({"word_embed_proj_dim": 48, "activation_function": null}),
        ),
        (
            "gpt2",
            json!({"activation_function": null, "tie_word_embeddings": null}),
        ),
        (
            "cohere2",
            json!({"layer_types": null, "sliding_window_pattern": 2}),
        ),
        ("falcon", json!({"num_kv_heads": null, "multi_query": true})),
        ("falcon-grouped", json!({"num_ln_in_parallel_attn": null})),
        (
            "phi",
            json!({"rope_parameters": null, "partial_rotary_factor": 0.4, "num_key_value_heads": null}),
        ),
        ("gpt-bigcode", json!({"multi_query": null})),
        (
            "exaone",
            json!({
                "architectures": ["LlamaForCausalLM"], "activation_function": null, "layer_norm_epsilon": null,
                "rms_norm_eps": 1e-5, "num_layers": null, "num_hidden_layers": 4,
            }),
        ),
        (
            "bloom",
            json!({
                "n_embed": 60, "hidden_size": null, "n_head": null, "num_attention_heads": 6, "n_layer": null,
                "num_hidden_layers": 2, "seq_length": 2048, "n_inner": null
            }),
        ),
    ] {
        assert_eq!(spec(name, changes), spec(name, json!({})), "{name}");
    }
    let copy = Copy::of("falcon");
    let path = copy.path("config.json");
    let text = fs::read_to_string(&path).expect("the file");
    fs::write(&path, text.replace("max_position_embeddings", "_")).expect("written");
    let falcon = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(falcon.spec().max_position_embeddings, 2048);
    for name in ["gpt2", "gptj", "codegen", "gpt-bigcode"] {
        let spec = spec(name, json!({"n_inner": null}));
        assert_eq!(spec.max_intermediate_size(), 4 * spec.hidden_size);
    }
}

const ROTARY_DIM: &str = "rotary_dim: 12 is not an even number from 2 to 10, the width of a head";

#[test]
fn models_that_their_family_only_almost_describes_are_refused() {
    for (name, changes, words) in [
        (
            "opt",
            json!({"layer_norm_elementwise_affine": false}),
            "layer_norm_elementwise_affine: false",
        ),
        (
            "opt",
            json!({"_remove_final_layer_norm": true}),
            "_remove_final_layer_norm: true",
        ),
        (
            "gpt2",
            json!({"add_cross_attention": true}),
            "add_cross_attention: true",
        ),
        (
            "bloom",
            json!({"apply_residual_connection_post_layernorm": true}),
            "apply_residual_connection_post_layernorm: true",
        ),
        (
            "falcon-grouped",
            json!({"parallel_attn": false}),
            "parallel_attn: false",
        ),
        (
            "gpt-bigcode",
            json!({"add_cross_attention": true}),
            "add_cross_attention: true",
        ),
        (
            "phi",
            json!({"qk_layernorm": true}),
            "qk_layernorm: true is not supported; only false is",
        ),
        (
            "olmo",
            json!({"clip_qkv": 0.0}),
            "clip_qkv: 0.0 is not a number from",
        ),
        ("gptj", json!({"rotary_dim": 12}), ROTARY_DIM),
        ("gptj", json!({"rotary_dim": 3}), "rotary_dim: 3"),
        ("gptj", json!({"rotary_dim": null}), "rotary_dim: 0"),
        (
            "codegen",
            json!({"n_head": 6}),
            "n_head: 6 is not a multiple of 4",
        ),
        (
            "hyperclovax",
            json!({"residual_multiplier": 0.5}),
            "residual_multiplier: 0.5 is not supported with use_post_norm; only 1 is",
        ),
        (
            "granite-swa",
            json!({"layer_rope_theta": [0, 0.5, 2, 2]}),
            "layer_rope_theta: [0,0.5,2,2] is not a list of 4 numbers, each 0 or from 1 on",
        ),
        (
            "granite-swa",
            json!({"layer_rope_theta": [1000]}),
            "layer_rope_theta: [1000]",
        ),
    ] {
        Copy::of(name).config(changes).refused(&[words]);
    }
    // Without the projections to and from another width.
    for (name, width, words) in [
        ("opt", 24, ["embed_tokens.weight", "[160, 48]"]),
        ("opt-350m", 48, ["embed_tokens.weight", "[160, 20]"]),
        ("opt-350m", 21, ["embed_tokens.weight", "[160, 20]"]),
    ] {
        Copy::of(name)
            .config(json!({"word_embed_proj_dim": width}))
            .refused(&words);
    }
    // Grouped queries have one module of another shape.
    Copy::of("falcon-grouped")
        .config(json!({"num_kv_heads": 2}))
        .refused(&["query_key_value.weight", "[100, 60]"]);
}

/// As OpenAI's own checkpoints of GPT-2.
#[test]
fn names_may_lack_the_part_that_stands_for_the_model_below_its_output_layer() {
    for (name, prefix) in [
        ("gpt2", "transformer."),
        ("exaone", "transformer."),
        ("bloom", "transformer."),
        ("opt", "model."),
        ("qwen3", "model."),
    ] {
        let copy = Copy::of(name);
        let path = copy.path("model.safetensors");
        let bytes = fs::read(&path).expect("the file");
        let tensors = SafeTensors::deserialize(&bytes).expect("whole");
        let tensors = tensors.tensors().into_iter().map(|(name, tensor)| {
            // Only an output layer of its own has none.
            let short = name.strip_prefix(prefix);
            let short = short.or((name == "lm_head.weight").then_some(&name));
            (short.expect("a tensor of the model").to_owned(), tensor)
        });
        serialize_to_file(tensors, None, &path).expect("written");
        let setup = Setup::default();
        let requests = [Request::greedy(&[5, 6, 7], 8)];
        let (short, _) = serve(&mut setup.load_from(copy.dir()), &setup, &requests);
        let (long, _) = serve(&mut setup.load(name), &setup, &requests);
        assert_eq!(short[0].logits, long[0].logits, "{name}");
    }
}
