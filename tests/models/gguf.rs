//! GGUF files, written by llama.cpp's own Python package: see tests/fixtures/make_quantised_fixtures.py.

use std::fs;
use std::path::Path;

use inflight_runner::spec::LayerSpec;
use inflight_runner::{ModelSource, ModelSpec, RopeScaling};
use serde_json::json;

use crate::copy::Copy;
use crate::support::fixture;
use crate::transformers::{agree, quantised_agrees_with_transformers};

const Q8_0: &str = "quantised/gguf-q8_0";
const Q8_0_FILE: &str = "gguf-q8_0.gguf";
const Q4_K: &str = "quantised/gguf-q4_k";
const Q4_K_FILE: &str = "gguf-q4_k.gguf";
const SPLIT: &str = "quantised/gguf-q4_0-split";
const MIXED: &str = "quantised/gguf-mixed";

agree! {
    quantised_agrees_with_transformers;
    a_qwen_3_of_q8_0_agrees_with_transformers: "gguf-q8_0",
    a_llama_3_of_q4_0_in_several_files_agrees_with_transformers: "gguf-q4_0-split",
    a_llama_of_q4_k_q5_k_and_q6_k_agrees_with_transformers: "gguf-q4_k",
    a_qwen_2_of_many_types_agrees_with_transformers: "gguf-mixed",
    a_qwen_3_of_iq4_nl_and_mxfp4_agrees_with_transformers: "gguf-iq4_nl",
    a_llama_of_q2_k_q3_k_and_iq4_xs_agrees_with_transformers: "gguf-q3_k",
}

fn spec(dir: &Path) -> ModelSpec {
    let checkpoint = ModelSource::open(dir).expect("the checkpoint opens");
    checkpoint.spec().clone()
}

/// Whether queries, keys and values have biases, and the feed-forward block.
fn biases(layer: &LayerSpec) -> (bool, bool) {
    let projections = layer.feed_forward.projections();
    let [gate_up, down] = projections[..] else {
        panic!("a model without experts");
    };
    assert_eq!(gate_up.has_bias, down.has_bias);
    (layer.attention.qkv.has_bias, gate_up.has_bias)
}

#[test]
fn the_models_shape_is_read_from_the_metadata() {
    let qwen = spec(&fixture(Q8_0));
    assert_eq!(qwen.family, "Qwen3ForCausalLM");
    let layer = &qwen.layers[0];
    assert!(qwen.tied_embeddings && layer.attention.qk_norm.is_some());
    assert_eq!(biases(layer), (false, false));
    assert_eq!(
        (qwen.hidden_size, qwen.head_dim, qwen.vocab_size),
        (64, 16, 96)
    );
    assert_eq!(layer.attention.rope.scaling, RopeScaling::None);
    let llama = spec(&fixture(SPLIT));
    assert_eq!(llama.family, "LlamaForCausalLM");
    let layer = &llama.layers[0];
    assert!(!llama.tied_embeddings);
    assert_eq!(biases(layer), (false, false));
    assert_eq!((llama.num_heads, llama.num_kv_heads), (4, 2));
    let rope = &layer.attention.rope;
    assert_eq!(rope.theta, 500_000.0);
    assert!(matches!(&rope.scaling, RopeScaling::Divided { divisors } if divisors.len() == 8));
    let checkpoint = ModelSource::open(&fixture(SPLIT)).expect("the checkpoint opens");
    assert_eq!(checkpoint.end_ids(), [2, 7]);
}

#[test]
fn a_config_with_the_same_values_can_be_omitted() {
    let copy = Copy::of(MIXED);
    let with_config = spec(copy.dir());
    fs::remove_file(copy.path("config.json")).expect("there");
    let without = spec(copy.dir());
    assert_eq!(without.family, "Qwen2ForCausalLM");
    assert_eq!(biases(&without.layers[0]), (true, false));
    assert_eq!(with_config, without);
    assert!(copy.load().is_ok());
}

#[test]
fn a_config_beside_the_file_takes_precedence() {
    let copy = Copy::of(MIXED).config(json!({
        "eos_token_id": 5, "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        "quantization_config": {"quant_method": "of another folder"},
    }));
    let checkpoint = ModelSource::open(copy.dir()).expect("the checkpoint opens");
    assert_eq!(checkpoint.end_ids(), [5]);
    assert_eq!(
        checkpoint.spec().layers[0].attention.rope.scaling,
        RopeScaling::Linear { factor: 4.0 }
    );
    Copy::of(MIXED)
        .config(json!({"hidden_size": 128}))
        .refused(&[
            "token_embd.weight",
            "has shape [96, 64]",
            "calls for [96, 128]",
        ]);
}

#[test]
fn all_parts_of_one_model_must_exist_without_other_files() {
    let parts = |copy: &Copy| {
        let entries = fs::read_dir(copy.dir()).expect("the folder");
        let paths = entries.map(|entry| entry.expect("the folder").path());
        let mut parts: Vec<_> = paths
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "gguf")
            })
            .collect();
        parts.sort();
        parts
    };
    let num_parts = parts(&Copy::of(SPLIT)).len();
    assert!(num_parts > 2);
    for index in 0..num_parts {
        let copy = Copy::of(SPLIT);
        let part = &parts(&copy)[index];
        fs::remove_file(part).expect("there");
        let name = part
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        copy.refused(&[&name, "is missing", &format!("there are {num_parts} parts")]);
    }
    let copy = Copy::of(SPLIT);
    fs::copy(fixture(Q8_0).join(Q8_0_FILE), copy.path("other.gguf")).expect("a copy");
    copy.refused(&["other.gguf", "is not a part of the same model"]);
    let copy = Copy::of(Q8_0);
    fs::copy(copy.path(Q8_0_FILE), copy.path("other.gguf")).expect("a copy");
    copy.refused(&["other.gguf", Q8_0_FILE, "leave the one"]);
    // A name without a part number.
    let copy = Copy::of(SPLIT);
    for part in &parts(&copy)[1..] {
        fs::remove_file(part).expect("there");
    }
    fs::rename(&parts(&copy)[0], copy.path("model.gguf")).expect("renamed");
    copy.refused(&["model.gguf", "is one of", "keep their names"]);
}

#[test]
fn a_truncated_file_is_rejected_wherever_it_ends() {
    let copy = Copy::of(Q8_0);
    let path = copy.path(Q8_0_FILE);
    let whole = fs::read(&path).expect("the file");
    let lens = (0..64).chain((64..whole.len()).step_by(509));
    // The padding to 32 bytes after the last tensor is not needed.
    for len in lens.chain([whole.len() - 40]) {
        fs::write(&path, &whole[..len]).expect("written");
        copy.refused(&[Q8_0_FILE, "is cut short"]);
    }
}

/// A copy with changed bytes at `offset` after `text` in its file.
fn patched(name: &str, file: &str, text: &str, offset: usize, bytes: &[u8]) -> Copy {
    let copy = Copy::of(name);
    let mut contents = fs::read(copy.path(file)).expect("the file");
    let found = contents
        .windows(text.len())
        .position(|window| window == text.as_bytes());
    let start = found.expect("in the file") + text.len() + offset;
    contents[start..start + bytes.len()].copy_from_slice(bytes);
    fs::write(copy.path(file), contents).expect("written");
    copy
}

#[test]
fn headers_with_false_sizes_cost_no_memory() {
    let many = u64::MAX.to_le_bytes();
    let huge = (1_u64 << 40).to_le_bytes();
    for (text, offset, bytes, parts) in [
        (
            "GGUF",
            0,
            &1_u32.to_le_bytes()[..],
            &["is of GGUF version 1"][..],
        ),
        ("GGUF", 0, &3_u32.to_be_bytes(), &["is big-endian"]),
        ("GGUF", 4, &many, &["damaged"]),
        ("GGUF", 12, &many, &["damaged"]),
        // The length of the token list, and that of a text.
        ("tokenizer.ggml.tokens", 8, &many, &["damaged"]),
        (
            "tokenizer.ggml.model",
            4,
            &huge,
            &["a text of 1099511627776 bytes"],
        ),
        (
            "tokenizer.ggml.model",
            0,
            &77_u32.to_le_bytes(),
            &["a value of type 77"],
        ),
        // The number of a tensor's dimensions, two of them, and its position.
        (
            "token_embd.weight",
            0,
            &9_u32.to_le_bytes(),
            &["9 dimensions", "token_embd"],
        ),
        (
            "token_embd.weight",
            4,
            &many,
            &["token_embd.weight", "rows are not whole blocks"],
        ),
        (
            "token_embd.weight",
            4,
            &huge,
            &["is cut short", "token_embd.weight"],
        ),
        ("token_embd.weight", 12, &many, &["token_embd.weight"]),
        (
            "token_embd.weight",
            24,
            &many,
            &["is cut short", "token_embd.weight"],
        ),
        (
            "token_embd.weight",
            24,
            &huge,
            &["is cut short", "token_embd.weight"],
        ),
    ] {
        patched(Q8_0, Q8_0_FILE, text, offset, bytes).refused(&[&[Q8_0_FILE], parts].concat());
    }
    let copy = Copy::of(Q8_0);
    fs::write(copy.path(Q8_0_FILE), "GGML and more").expect("written");
    copy.refused(&[Q8_0_FILE, "is not a GGUF file"]);
}

#[test]
fn an_unsupported_type_or_model_is_rejected_by_name_with_a_way_out() {
    let iq3_s = 21_u32.to_le_bytes();
    patched(Q4_K, Q4_K_FILE, "blk.0.ffn_up.weight", 20, &iq3_s).refused(&[
        "blk.0.ffn_up.weight",
        "is of type IQ3_S",
        "Q4_K_M",
    ]);
    patched(
        Q4_K,
        Q4_K_FILE,
        "blk.0.ffn_up.weight",
        20,
        &99_u32.to_le_bytes(),
    )
    .refused(&["blk.0.ffn_up.weight", "is of type number 99"]);
    let other = ("general.architecture", text("gptj"));
    with_keys(Q4_K, Q4_K_FILE, &[other]).refused(&[
        "general.architecture: 'gptj'",
        "llama",
        "qwen3",
        "serve the checkpoint of safetensors",
    ]);
    patched(Q4_K, Q4_K_FILE, "general.architecture", 12, b"rwkv6").refused(&[
        "general.architecture: 'rwkv6'",
        "its layers, or most of them, have a recurrent state",
    ]);
    patched(Q4_K, Q4_K_FILE, "llama.block_coun", 0, b"X").refused(&[
        "llama.block_count",
        "is missing",
        "config.json",
    ]);
    patched(
        Q4_K,
        Q4_K_FILE,
        "llama.block_count",
        4,
        &u32::MAX.to_le_bytes(),
    )
    .refused(&[Q4_K_FILE, "num_hidden_layers: 4294967295"]);
    patched(
        Q4_K,
        Q4_K_FILE,
        "llama.block_count",
        4,
        &2_u32.to_le_bytes(),
    )
    .refused(&["blk.1.attn_norm.weight", "is missing"]);
    patched(
        Q4_K,
        Q4_K_FILE,
        "llama.attention.head_count",
        4,
        &3_u32.to_le_bytes(),
    )
    .refused(&["attn_q.weight", "calls for [192, 256]"]);
    patched(
        Q4_K,
        Q4_K_FILE,
        "llama.rope.dimension_count",
        4,
        &32_u32.to_le_bytes(),
    )
    .refused(&["attn_q.weight", "has shape [256, 256]"]);
    // A quantised norm.
    patched(
        Q4_K,
        Q4_K_FILE,
        "output_norm.weight",
        12,
        &14_u32.to_le_bytes(),
    )
    .refused(&["output_norm.weight", "is of type Q6_K", "norms and biases"]);
}

#[test]
fn safetensors_take_precedence_over_gguf() {
    let copy = Copy::of("llama2");
    fs::copy(fixture(Q8_0).join(Q8_0_FILE), copy.path(Q8_0_FILE)).expect("a copy");
    assert_eq!(spec(copy.dir()), spec(&fixture("llama2")));
}

/// The bytes of a text, and of a number, as values.
fn text(value: &str) -> (u32, Vec<u8>) {
    let len = (value.len() as u64).to_le_bytes();
    (8, [&len, value.as_bytes()].concat())
}

fn float(value: f32) -> (u32, Vec<u8>) {
    (6, value.to_le_bytes().to_vec())
}

pub fn unsigned(values: &[u32]) -> (u32, Vec<u8>) {
    let values: Vec<_> = values.iter().map(|value| value.to_le_bytes()).collect();
    match &values[..] {
        [value] => (4, value.to_vec()),
        values => {
            let len = (values.len() as u64).to_le_bytes();
            (
                9,
                [&4_u32.to_le_bytes(), &len[..], &values.concat()].concat(),
            )
        }
    }
}

/// A copy with further keys, in place of those of the same name.
fn with_keys(name: &str, file: &str, keys: &[(&str, (u32, Vec<u8>))]) -> Copy {
    add_keys(Copy::of(name), file, keys)
}

/// Adds keys to a copy, in place of keys of the same name.
pub fn add_keys(copy: Copy, file: &str, keys: &[(&str, (u32, Vec<u8>))]) -> Copy {
    const FIRST_KEY: usize = 24;
    const ALIGNMENT: usize = 32;
    let mut contents = fs::read(copy.path(file)).expect("the file");
    let entry = |key: &str, (kind, value): &(u32, Vec<u8>)| {
        let (_, key) = text(key);
        [&key[..], &kind.to_le_bytes(), value].concat()
    };
    let mut added = Vec::new();
    for (key, value) in keys {
        let (_, known) = text(key);
        let found = contents.windows(known.len()).position(|it| it == known);
        if let Some(at) = found {
            contents[at + 8] = b'X';
        }
        added.extend(entry(key, value));
    }
    // The tensors stay aligned.
    let padding = (added.len() + entry("x", &text("")).len()).next_multiple_of(ALIGNMENT)
        - (added.len() + entry("x", &text("")).len());
    added.extend(entry("x", &text(&"x".repeat(padding))));
    let num_keys = u64::from_le_bytes(*contents[16..].first_chunk().expect("a header"));
    let num_keys = num_keys + keys.len() as u64 + 1;
    contents[16..FIRST_KEY].copy_from_slice(&num_keys.to_le_bytes());
    contents.splice(FIRST_KEY..FIRST_KEY, added);
    fs::write(copy.path(file), contents).expect("written");
    copy
}

#[test]
fn a_factor_of_positions_means_what_llama_cpp_makes_of_it() {
    let scaling = |keys: &[(&str, (u32, Vec<u8>))]| {
        let copy = with_keys(Q4_K, Q4_K_FILE, keys);
        assert!(copy.load().is_ok());
        spec(copy.dir()).layers[0].attention.rope.scaling.clone()
    };
    let (kind, factor, older) = (
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scale_linear",
    );
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[(factor, float(4.0))]), linear);
    assert_eq!(scaling(&[(older, float(4.0))]), linear);
    let both = [(kind, text("linear")), (older, float(4.0))];
    assert_eq!(scaling(&both), linear);
    // The newer key counts.
    let both = [(factor, float(4.0)), (older, float(2.0))];
    assert_eq!(scaling(&both), linear);
    for keys in [
        &[(kind, text("none")), (factor, float(4.0))][..],
        &[(kind, text("linear"))],
        &[(factor, float(0.0))],
        &[(older, float(1.0))],
    ] {
        assert_eq!(scaling(keys), RopeScaling::None);
    }
    let yarn = scaling(&[(kind, text("yarn")), (factor, float(2.0))]);
    assert!(matches!(yarn, RopeScaling::Yarn { factor: 2.0, .. }));
}

#[test]
fn a_key_that_may_change_numbers_is_refused_unless_it_is_known() {
    for (key, value) in [
        ("llama.rope.new", float(2.0)),
        ("llama.rope.dimension_sections", unsigned(&[4, 4])),
        ("llama.attention.scale", float(0.05)),
        ("llama.attention.clamp_kqv", float(8.0)),
        ("llama.attention.causal", (7, vec![0])),
        ("llama.attention.layer_norm", text("new")),
        ("llama.expert_group_scale", float(0.5)),
        ("llama.expert_group_count", unsigned(&[4])),
        ("llama.logit_scale", float(0.5)),
    ] {
        let copy = with_keys(Q4_K, Q4_K_FILE, &[(key, value)]);
        copy.refused(&[Q4_K_FILE, key, "is not known", "config.json"]);
    }
    for (key, value) in [
        ("llama.attention.scale", float(0.0)),
        ("llama.attention.causal", (7, vec![1])),
        ("llama.expert_count", unsigned(&[0])),
        ("llama.expert_used_count", unsigned(&[0])),
        ("llama.logit_scale", float(1.0)),
        ("llama.rope.scaling.finetuned", (7, vec![1])),
        ("llama.training.new", float(2.0)),
        ("another.attention.scale", float(2.0)),
    ] {
        let copy = with_keys(Q4_K, Q4_K_FILE, &[(key, value)]);
        assert!(copy.load().is_ok(), "{key}");
    }
}

#[test]
fn an_array_of_equal_numbers_is_a_number() {
    let width = spec(&fixture(Q4_K)).layers[0].feed_forward.width() as u32;
    let key = "llama.feed_forward_length";
    let equal = with_keys(Q4_K, Q4_K_FILE, &[(key, unsigned(&[width; 2]))]);
    assert_eq!(spec(equal.dir()), spec(&fixture(Q4_K)));
    let other = [width, width + 32];
    with_keys(Q4_K, Q4_K_FILE, &[(key, unsigned(&other))])
        .refused(&[key, "differs from layer to layer"]);
}

#[test]
fn files_that_are_published_beside_a_model_are_not_the_model() {
    let copy = Copy::of(Q8_0);
    for name in ["mmproj-model-f16.gguf", "imatrix.gguf", "a.imatrix.gguf"] {
        fs::write(copy.path(name), "GGUF").expect("written");
    }
    let adapter = with_keys(Q8_0, Q8_0_FILE, &[("general.type", text("adapter"))]);
    fs::copy(adapter.path(Q8_0_FILE), copy.path("other.gguf")).expect("a copy");
    assert_eq!(spec(copy.dir()), spec(&fixture(Q8_0)));
    fs::rename(copy.path(Q8_0_FILE), copy.path("Q8_0.GGUF")).expect("renamed");
    assert_eq!(spec(copy.dir()), spec(&fixture(Q8_0)));
}
