//! Checkpoints that are damaged, inconsistent or unsupported: each fails to load with the reason, without a
//! panic and without a large allocation.
//!
//! Each test damages a copy of a fixture.

use std::fs;
use std::path::Path;

use inflight_base::LoadError;
use inflight_runner::ModelSource;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::support::Setup;

const EMBEDDING: &str = "model.embed_tokens.weight";
const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

#[test]
fn an_undamaged_copy_loads() {
    for name in ["llama2", "sharded"] {
        assert!(Copy::of(name).load().is_ok());
    }
}

#[test]
fn a_missing_file_is_named() {
    for (name, file, reason) in [
        ("llama2", "config.json", "cannot be read"),
        (
            "llama2",
            "model.safetensors",
            "neither model.safetensors nor",
        ),
        ("sharded", "model-00002-of-00002.safetensors", "is missing"),
    ] {
        let copy = Copy::of(name);
        fs::remove_file(copy.path(file)).expect("there");
        copy.refused(&[file, reason]);
    }
    let nowhere = ModelSource::open(Path::new("/nowhere/at/all"));
    let error = nowhere.err().expect("refused").to_string();
    for words in [
        "/nowhere/at/all: is not a folder",
        "config.json",
        "gpt_model_path",
    ] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn an_adapter_is_rejected_instead_of_ignored() {
    for name in ["llama2", "quantised/gguf-q8_0"] {
        let copy = Copy::of(name);
        let adapter = copy.path("adapter_config.json");
        fs::write(adapter, r#"{"peft_type": "LORA"}"#).expect("written");
        copy.refused(&["adapter_config.json", "no model by itself", "merge"]);
    }
}

#[test]
fn files_without_an_index_are_read_together() {
    let copy = Copy::of("sharded");
    fs::remove_file(copy.path("model.safetensors.index.json")).expect("there");
    assert!(copy.load().is_ok());
    // A copy of a file changes nothing, unless it is another one's.
    let twice = copy.path("more.safetensors");
    fs::copy(copy.path("model-00001-of-00002.safetensors"), &twice).expect("a copy");
    assert!(copy.load().is_ok());
    let mut bytes = fs::read(&twice).expect("the copy");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&twice, bytes).expect("written");
    copy.refused(&[
        "more.safetensors",
        "is in",
        "model-00001-of-00002.safetensors as well",
    ]);
}

#[test]
fn files_of_pytorch_are_refused_with_what_converts_them() {
    for (file, target) in [
        ("pytorch_model.bin", "'model.safetensors'"),
        (
            "pytorch_model-00001-of-00002.bin",
            "'pytorch_model-00001-of-00002.safetensors'",
        ),
        ("consolidated.00.pth", "'consolidated.00.safetensors'"),
    ] {
        let copy = Copy::of("llama2");
        fs::rename(copy.path("model.safetensors"), copy.path(file)).expect("renamed");
        fs::write(copy.path("training_args.bin"), "").expect("written");
        copy.refused(&[file, "runs code", target]);
    }
}

#[test]
fn end_tokens_outside_of_the_vocabulary_end_nothing() {
    let copy = Copy::of("llama2").json(
        "generation_config.json",
        json!({"eos_token_id": [7, 160, 99_999, -1]}),
    );
    let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
    assert_eq!(source.end_ids(), [7]);
}

#[test]
fn numbers_that_only_python_writes_are_refused_where_a_number_is_needed() {
    let with = |text: &str| {
        let copy = Copy::of("llama2");
        let path = copy.path("config.json");
        let config = fs::read_to_string(&path).expect("the file");
        let config = config.replacen('{', &format!("{{ {text},"), 1);
        fs::write(path, config).expect("written");
        copy
    };
    assert!(with("\"x\": [NaN, Infinity, -Infinity]").load().is_ok());
    with("\"partial_rotary_factor\": NaN").refused(&["partial_rotary_factor: \"NaN\""]);
    with("\"partial_rotary_factor\": Infinity").refused(&["partial_rotary_factor: 1.79"]);
}

#[test]
fn decoders_are_found_under_the_names_of_models_with_images_and_of_wrappers() {
    for (inner, outer) in [
        ("model.language_model.", ""),
        ("language_model.model.", "language_model."),
        ("language_model.", ""),
        ("model.language_model.model.", "model.language_model."),
        ("model.text_model.", ""),
        ("_orig_mod.model.", "_orig_mod."),
        ("module.model.language_model.", "module."),
        ("", ""),
    ] {
        let copy = Copy::of("llama2").renamed(|name| match name.strip_prefix("model.") {
            Some(rest) => format!("{inner}{rest}"),
            None => format!("{outer}{name}"),
        });
        assert!(copy.load().is_ok(), "{inner} {outer}");
    }
    Copy::of("llama2")
        .renamed(|name| format!("another.{name}"))
        .refused(&[EMBEDDING, "is missing"]);
}

#[test]
fn a_truncated_file_is_rejected_wherever_it_ends() {
    let copy = Copy::of("llama2");
    let path = copy.path("model.safetensors");
    let whole = fs::read(&path).expect("the file");
    for len in [0, 4, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).expect("written");
        let size = format!("it has {len} bytes");
        copy.refused(&[
            "model.safetensors",
            "is not a whole safetensors file",
            &size,
        ]);
    }
    let longer = [whole.as_slice(), &[0; 8]].concat();
    fs::write(&path, longer).expect("written");
    copy.refused(&["is not a whole safetensors file"]);
}

#[test]
fn a_header_with_false_sizes_costs_no_memory() {
    let huge = u64::MAX / 2;
    let copy = Copy::of("llama2");
    let mut bytes = huge.to_le_bytes().to_vec();
    bytes.extend([b'{'; 64]);
    fs::write(copy.path("model.safetensors"), bytes).expect("written");
    copy.refused(&["is not a whole safetensors file"]);

    let tensor = |shape: &str, end: u64| {
        format!(r#"{{"{EMBEDDING}":{{"dtype":"BF16","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    for header in [
        // Beyond the end of the file, with a matching shape.
        tensor("[1000000000,1000000]", 2_000_000_000_000_000),
        // A product that overflows.
        tensor("[4294967296,4294967296,4294967296]", 64),
        // A size that does not match the shape.
        tensor("[2,2]", 64),
        // Not JSON, not an object, not UTF-8.
        "{".to_owned(),
        "[]".to_owned(),
        tensor("[-1]", 64),
        tensor(&"[".repeat(10_000), 64),
    ] {
        Copy::of("llama2")
            .header(&header, 64)
            .refused(&["is not a whole safetensors file"]);
    }
    Copy::of("llama2")
        .header("{}", 0)
        .refused(&[EMBEDDING, "is missing"]);
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    Copy::of("llama2")
        .tensor(DOWN, |_| None)
        .refused(&[DOWN, "is missing", "[32, 64]"]);
    // Untied according to its config, but without an output projection.
    Copy::of("qwen2")
        .config(json!({"tie_word_embeddings": false}))
        .refused(&["lm_head.weight", "is missing"]);
    // One architecture's tensors under another's name.
    Copy::of("llama2")
        .config(json!({"architectures": ["Qwen3ForCausalLM"]}))
        .refused(&["q_norm", "is missing"]);
}

#[test]
fn a_wrong_shape_is_reported_with_the_right_one() {
    Copy::of("llama2")
        .tensor(DOWN, |view| {
            Some((view.dtype(), vec![64, 32], view.data().to_vec()))
        })
        .refused(&[DOWN, "has shape [64, 32]", "calls for [32, 64]"]);
    Copy::of("llama2")
        .config(json!({"vocab_size": 4096}))
        .refused(&[EMBEDDING, "has shape [160, 32]", "calls for [4096, 32]"]);
}

#[test]
fn a_wrong_type_is_named_with_the_supported_ones() {
    Copy::of("llama2")
        .tensor(DOWN, |view| {
            Some((Dtype::F8_E4M3, vec![32, 64], view.data()[..2048].to_vec()))
        })
        .refused(&[DOWN, "F8_E4M3", "BF16, F16 and F32"]);
}

#[test]
fn a_weight_that_is_not_finite_is_found_in_every_kind_of_tensor() {
    let nan = 0x7fc0_u16.to_le_bytes();
    let infinity = 0xff80_u16.to_le_bytes();
    for (name, tensor, row) in [
        ("llama2", DOWN, 31),
        ("llama2", EMBEDDING, 159),
        ("llama2", "lm_head.weight", 159),
        ("qwen3", EMBEDDING, 159),
        ("llama2", "model.norm.weight", 31),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", 15),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", 15),
    ] {
        for bad in [nan, infinity] {
            Copy::of(name)
                .tensor(tensor, |view| {
                    let mut data = view.data().to_vec();
                    let last = data.len() - 2;
                    data[last..].copy_from_slice(&bad);
                    Some((view.dtype(), view.shape().to_vec(), data))
                })
                .refused(&[tensor, &format!("{row} has a value that is NaN, infinite")]);
        }
    }
    // A float32 weight that bf16 rounds to infinity.
    Copy::of("stored-f32")
        .tensor(DOWN, |view| {
            let mut data = view.data().to_vec();
            data[..4].copy_from_slice(&f32::MAX.to_le_bytes());
            Some((view.dtype(), view.shape().to_vec(), data))
        })
        .refused(&[DOWN, "too large for bf16"]);
}

#[test]
fn an_index_that_refers_to_other_folders_is_rejected() {
    for file in ["../model.safetensors", "/etc/passwd", "a/b", "..", ""] {
        Copy::of("sharded")
            .json(
                "model.safetensors.index.json",
                json!({"weight_map": {"x": file}}),
            )
            .refused(&[
                "model.safetensors.index.json",
                "the name of a file beside it",
            ]);
    }
    for (weight_map, reason) in [
        (json!({}), "weight_map is empty"),
        (Value::Null, "weight_map is missing"),
        (json!([1]), "not an object"),
        (json!({"x": 1}), "the name of a file beside it"),
    ] {
        Copy::of("sharded")
            .json(
                "model.safetensors.index.json",
                json!({"weight_map": weight_map}),
            )
            .refused(&["model.safetensors.index.json", reason]);
    }
}

#[test]
fn an_unknown_architecture_is_rejected_with_the_known_ones() {
    for unknown in [
        json!(["MptForMaskedLM"]),
        json!("LlamaForCausalLM"),
        json!([]),
        json!(7),
        Value::Null,
    ] {
        Copy::of("llama2")
            .config(json!({"architectures": unknown}))
            .refused(&[
                "config.json: architectures",
                "one of LlamaForCausalLM, ArceeForCausalLM, MistralForCausalLM, MinistralForCausalLM, Qwen2ForCausalLM",
            ]);
    }
}

#[test]
fn a_family_that_is_not_supported_is_rejected_with_the_nearest_one() {
    for (class, hint) in [
        (
            "DiffLlamaForCausalLM",
            "the nearest supported family is LlamaForCausalLM, but its attention is the difference of two",
        ),
        ("xLSTMForCausalLM", "a recurrent state instead of attention"),
        ("LLamaForCausalLM", "did you mean LlamaForCausalLM?"),
    ] {
        Copy::of("llama2")
            .config(json!({"architectures": [class]}))
            .refused(&["config.json: architectures", class, hint]);
    }
}

#[test]
fn numbers_out_of_range_are_rejected_with_the_range() {
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(u64::MAX)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(-4)),
        ("num_attention_heads", json!(5)),
        ("num_attention_heads", json!(1_000_000)),
        ("num_key_value_heads", json!(0)),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("intermediate_size", json!(1.5)),
        ("vocab_size", json!(0)),
        ("vocab_size", json!("many")),
        ("max_position_embeddings", json!(0)),
        ("max_position_embeddings", json!(1e300)),
        ("head_dim", json!(7)),
        ("head_dim", json!(100_000)),
        ("rms_norm_eps", json!(-1)),
        ("rms_norm_eps", json!([])),
        ("tie_word_embeddings", json!("yes")),
        ("rope_parameters", json!("none")),
        ("rope_parameters", json!({"rope_theta": 0})),
    ] {
        let last = key.split('_').next_back().expect("a word");
        Copy::of("llama2").config(json!({key: value})).refused(&[
            "config.json: ",
            last,
            " is not ",
        ]);
    }
    Copy::of("llama2")
        .config(json!({"num_key_value_heads": 3}))
        .refused(&["num_attention_heads: 4 is not a multiple of num_key_value_heads 3"]);
    Copy::of("llama2")
        .config(json!({"hidden_size": 33, "head_dim": null}))
        .refused(&["hidden_size: 33 is not a multiple of num_attention_heads 4"]);
    Copy::of("llama2")
        .config(json!({"hidden_size": null}))
        .refused(&["hidden_size is missing"]);
}

#[test]
fn false_sizes_in_a_config_cost_no_memory() {
    // Each within its range, but terabytes in total.
    Copy::of("llama2")
        .config(json!({
            "hidden_size": 1 << 20, "intermediate_size": 1 << 20, "vocab_size": 1 << 24,
            "num_hidden_layers": 4096, "max_position_embeddings": 1 << 30,
        }))
        .refused(&[EMBEDDING, "has shape [160, 32]"]);
}

#[test]
fn unsupported_features_are_rejected_by_name() {
    for (change, parts) in [
        (
            json!({"hidden_act": "mish"}),
            ["hidden_act: 'mish'", "'silu', 'gelu'"],
        ),
        (
            json!({"quantization_config": {"quant_method": "hqq"}}),
            ["quantization_config.quant_method: 'hqq'", "'gptq', 'awq'"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "stretched", "factor": 2.0}}),
            [
                "rope_parameters.rope_type: 'stretched'",
                "'longrope' and 'yarn' are",
            ],
        ),
        (
            json!({"rope_parameters": null, "rope_scaling": {"type": "stretched"}}),
            [
                "rope_scaling.type: 'stretched'",
                "'longrope' and 'yarn' are",
            ],
        ),
        (
            json!({"rope_parameters": {"rope_type": "dynamic"}}),
            ["rope_parameters.factor is missing", "config.json"],
        ),
        (
            json!({"rope_parameters": null, "rope_scaling": {"type": "longrope"}}),
            ["rope_scaling.short_factor: null", "a list of 4 numbers"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "linear"}}),
            ["rope_parameters.factor is missing", "config.json"],
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            ["partial_rotary_factor: 0.5", "only 1 is"],
        ),
        (
            json!({"eos_token_id": "160"}),
            ["eos_token_id: \"160\"", "a token id"],
        ),
    ] {
        let copy = Copy::of("llama2").config(change);
        fs::remove_file(copy.path("generation_config.json")).expect("there");
        copy.refused(&parts);
    }
}

#[test]
fn files_that_are_not_json_objects_are_rejected() {
    for text in ["", "{", "[1, 2]", "\u{feff}", "\u{feff}\u{feff}{}", "null"] {
        for file in ["config.json", "generation_config.json"] {
            let copy = Copy::of("llama2");
            fs::write(copy.path(file), text).expect("written");
            copy.refused(&[file, "JSON"]);
        }
    }
    let copy = Copy::of("llama2");
    fs::write(copy.path("config.json"), [0xff, 0xfe, 0x80]).expect("written");
    copy.refused(&["config.json", "UTF-8"]);
}

#[test]
fn a_max_seq_len_above_the_models_positions_is_rejected() {
    let setup = Setup {
        max_seq_len: 100,
        ..Setup::default()
    };
    let short = Copy::of("llama2").config(json!({"max_position_embeddings": 99}));
    let error = short.load_with(&setup).err().expect("refused").to_string();
    assert!(
        error.contains("max_seq_len 100 is above 99, the model's max_position_embeddings")
            && error.contains("set it to at most 99"),
        "{error}"
    );
}

#[test]
fn limits_beyond_any_machines_memory_are_rejected() {
    let copy = Copy::of("llama2");
    for setup in [
        Setup {
            max_num_tokens: u32::MAX,
            max_num_requests: u32::MAX,
            ..Setup::default()
        },
        Setup {
            num_blocks: u32::MAX,
            block_size: u32::MAX,
            ..Setup::default()
        },
    ] {
        let error = copy.load_with(&setup).err().expect("refused");
        assert!(matches!(error, LoadError::Resource(_)), "{error}");
        assert!(error.to_string().contains("; lower max_"), "{error}");
    }
}
