//! Quantised checkpoints, made by their formats' own tools: see
//! tests/fixtures/make_quantised_fixtures.py.

use std::path::Path;

use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::fp8::assert_same;
use crate::support::fixture;
use crate::transformers::{agree, quantised_agrees_with_transformers};

const Q_PROJ: &str = "model.layers.0.self_attn.q_proj";
const UP_PROJ: &str = "model.layers.1.mlp.up_proj";

agree! {
    quantised_agrees_with_transformers;
    gptq_agrees_with_transformers: "gptq",
    gptq_with_act_order_agrees_with_transformers: "gptq-act-order",
    gptq_of_8_bits_in_the_second_version_agrees_with_transformers: "gptq-8bit-v2",
    awq_agrees_with_transformers: "awq",
    compressed_tensors_w8a8_agrees_with_transformers: "compressed-w8a8",
    compressed_tensors_w4a16_agrees_with_transformers: "compressed-w4a16",
    bitnet_agrees_with_transformers: "bitnet",
    bitnet_rounded_at_load_agrees_with_transformers: "bitnet-online",
    a_llama_of_three_values_agrees_with_transformers: "bitnet-llama",
    bitsandbytes_nf4_agrees_with_transformers: "bnb-nf4",
    bitsandbytes_int8_agrees_with_transformers: "bnb-int8",
    modelopt_in_fp8_and_nvfp4_agrees_with_transformers: "modelopt-mixed",
    compressed_tensors_in_nvfp4_and_mxfp4_agrees_with_transformers: "compressed-fp4",
    compressed_tensors_with_zero_points_and_act_order_agrees_with_transformers: "compressed-act-order",
    compressed_tensors_in_groups_of_16_agrees_with_transformers: "compressed-group-16",
    awq_in_groups_of_16_agrees_with_transformers: "awq-group-16",
    gptq_in_groups_of_24_agrees_with_transformers: "gptq-group-24",
}

#[test]
fn weights_with_4_bits_take_less_memory_than_weights_with_8_and_16() {
    let bytes = |name: &str| {
        let checkpoint = ModelSource::open(&fixture(name)).expect("the fixture opens");
        let in_bf16 = checkpoint.spec().num_weight_bytes();
        (
            checkpoint.num_weight_bytes(None).expect("all tensors"),
            in_bf16,
        )
    };
    // Two layers of projections, and two matrices of 96 x 64 in bf16.
    let projections = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96);
    let embeddings = 2 * 2 * 96 * 64;
    assert_eq!(
        bytes("quantised/gptq"),
        (
            embeddings + projections / 2 + projections / 32 * 2,
            embeddings + projections * 2
        )
    );
    let (in_8_bits, in_bf16) = bytes("quantised/gptq-8bit-v2");
    assert!(in_8_bits > embeddings + projections && in_8_bits < in_bf16);
    assert_eq!(bytes("llama2").0, bytes("llama2").1);
}

#[test]
fn weights_quantised_in_the_checkpoint_are_not_rounded_again() {
    let checkpoint = ModelSource::open(&fixture("quantised/gptq")).expect("the fixture opens");
    let bytes = |precision| checkpoint.num_weight_bytes(precision).expect("all tensors");
    // Only the output projection is floating-point: 96 x 64 weights of 16 bits become 8 bits in groups of 32.
    let int4 = WeightPrecision::new(CodeBits::Four);
    assert_eq!(bytes(None) - bytes(Some(int4)), 96 * 64 - 96 * 64 / 32 * 2);
}

/// A copy with keys of its quantization_config changed.
fn with(name: &str, changes: Value) -> Copy {
    let copy = Copy::of(name);
    let text = std::fs::read_to_string(copy.path("config.json")).expect("the file");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    let mut section = config["quantization_config"].clone();
    for (key, value) in changes.as_object().expect("an object") {
        section[key] = value.clone();
    }
    copy.config(json!({"quantization_config": section}))
}

/// A copy whose quantization_config stands elsewhere, without the name of its method.
pub fn with_section_in(name: &str, file: &str, content: impl FnOnce(Value) -> Value) -> Copy {
    let copy = Copy::of(name);
    let text = std::fs::read_to_string(copy.path("config.json")).expect("the file");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    let mut section = config["quantization_config"].take();
    section["quant_method"].take();
    let copy = copy.config(json!({ "quantization_config": null }));
    let path = copy.path(file);
    match path.exists() {
        true => copy.json(file, content(section)),
        false => {
            std::fs::write(path, content(section).to_string()).expect("written");
            copy
        }
    }
}

#[test]
fn other_places_for_the_description_of_a_quantisation_are_read() {
    let awq = |section: Value| {
        json!({
            "zero_point": section["zero_point"], "q_group_size": section["group_size"],
            "w_bit": section["bits"], "version": "GEMM",
        })
    };
    let gptq = "quantised/gptq-act-order";
    let compressed = "quantised/compressed-w4a16";
    let modelopt = "quantised/modelopt-mixed";
    let of_modelopt = |mut section: Value| {
        section["exclude_modules"] = section["ignore"].take();
        json!({ "producer": {"name": "modelopt"}, "quantization": section })
    };
    for (name, copy) in [
        (
            modelopt,
            with_section_in(modelopt, "hf_quant_config.json", of_modelopt),
        ),
        (gptq, with_section_in(gptq, "quantize_config.json", |it| it)),
        (
            "quantised/awq",
            with_section_in("quantised/awq", "quant_config.json", awq),
        ),
        (
            compressed,
            with_section_in(
                compressed,
                "config.json",
                |it| json!({ "compression_config": it }),
            ),
        ),
    ] {
        let bytes = |dir: &Path| {
            let checkpoint = ModelSource::open(dir).expect("the checkpoint opens");
            checkpoint.num_weight_bytes(None).expect("all tensors")
        };
        assert_eq!(bytes(copy.dir()), bytes(&fixture(name)), "{name}");
        assert!(copy.load().is_ok(), "{name}");
    }
}

#[test]
fn a_method_that_is_not_supported_is_rejected_wherever_it_stands() {
    let gptq = "quantised/gptq";
    let algorithm = |_| json!({ "quantization": { "quant_algo": "W4A16_AWQ" } });
    with_section_in(gptq, "hf_quant_config.json", algorithm).refused(&[
        "hf_quant_config.json",
        "quantization.quant_algo: 'W4A16_AWQ'",
        "'FP8'",
    ]);
}

#[test]
fn unsupported_quantisations_are_rejected_by_name_with_a_way_out() {
    let gptq = "quantised/gptq";
    let compressed = "quantised/compressed-w8a8";
    let group = |key: &str, value: Value| {
        let mut weights =
            json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"});
        weights[key] = value;
        json!({"config_groups": {"group_0": {"weights": weights}}})
    };
    let float_group = |key: &str, value: Value| {
        let mut weights = json!({
            "num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group", "group_size": 16,
        });
        weights[key] = value;
        let groups = json!({"group_0": {"weights": weights}});
        json!({"format": "nvfp4-pack-quantized", "config_groups": groups})
    };
    for (name, changes, parts) in [
        (
            gptq,
            json!({"quant_method": "hqq"}),
            ["quant_method: 'hqq'", "'gptq', 'awq', "],
        ),
        (
            gptq,
            json!({"quant_method": null}),
            ["quant_method: 'none'", "'gptq'"],
        ),
        (gptq, json!({"bits": 3}), ["bits: 3", "4 or 8"]),
        (
            gptq,
            json!({"bits": null}),
            ["bits is missing", "config.json"],
        ),
        (
            gptq,
            json!({"group_size": 12}),
            ["group_size: 12", "a multiple of 8"],
        ),
        (
            gptq,
            json!({"group_size": 0}),
            ["group_size: 0", "a multiple of 8"],
        ),
        (
            gptq,
            json!({"group_size": -32}),
            ["group_size: -32", "-1 or"],
        ),
        (
            gptq,
            json!({"checkpoint_format": "marlin"}),
            ["checkpoint_format: 'marlin'", "'gptq_v2'"],
        ),
        (
            gptq,
            json!({"pack_dtype": "int64"}),
            ["pack_dtype: 'int64'", "'int32'"],
        ),
        (
            gptq,
            json!({"dynamic": {"-:.*o_proj.*": {}, "+:.*down.*": {"bits": 8}}}),
            [
                "dynamic: a rule for '+:.*down.*'",
                "docs/src/checkpoints.md",
            ],
        ),
        ("quantised/awq", json!({"bits": 8}), ["bits: 8", "4 is"]),
        (
            "quantised/awq",
            json!({"version": "gemv"}),
            ["version: 'gemv'", "'gemm'"],
        ),
        (
            compressed,
            json!({"format": "marlin-24"}),
            [
                "format: 'marlin-24'",
                "'int-quantized', 'pack-quantized', 'float-quantized'",
            ],
        ),
        (
            compressed,
            json!({"format": "float-quantized"}),
            ["config_groups.group_0.weights.type: 'int'", "'float'"],
        ),
        (
            gptq,
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}),
            ["quant_algo: 'NVFP4_AWQ'", "'NVFP4'"],
        ),
        (
            gptq,
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}),
            ["group_size: 32", "16 is"],
        ),
        (
            "quantised/modelopt-mixed",
            json!({"quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "MXFP8"}}}),
            [
                "quantized_layers.model.layers.0.mlp.up_proj.quant_algo: 'MXFP8'",
                "'NVFP4'",
            ],
        ),
        (
            gptq,
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            ["weight_block_size: [128]", "such as [128, 128]"],
        ),
        (
            compressed,
            json!({"config_groups": null}),
            ["config_groups is missing", "config"],
        ),
        (
            compressed,
            group("type", json!("float")),
            ["config_groups.group_0.weights.type: 'float'", "'int'"],
        ),
        (
            compressed,
            group("num_bits", json!(4)),
            ["weights.num_bits: 4", "8 is"],
        ),
        (
            compressed,
            float_group("symmetric", json!(false)),
            ["weights.symmetric: false", "true"],
        ),
        (
            compressed,
            float_group("group_size", json!(32)),
            ["weights.group_size: 32", "16 is"],
        ),
        (
            compressed,
            float_group("strategy", json!("channel")),
            ["weights.strategy: 'channel'", "'tensor_group'"],
        ),
        (
            compressed,
            float_group("num_bits", json!(8)),
            ["weights.num_bits: 8", "4 is"],
        ),
        (
            compressed,
            json!({"format": "mixed-precision"}),
            ["format: 'none'", "'nvfp4-pack-quantized'"],
        ),
        (
            compressed,
            group("group_size", json!(20)),
            ["group_size: 20", "a multiple of 8"],
        ),
        (
            compressed,
            group("strategy", json!("block")),
            ["strategy: 'block'", "'channel'"],
        ),
        (
            compressed,
            json!({"sparsity_config": {"format": "sparse-24-bitmask"}}),
            ["sparsity_config.format: 'sparse-24-bitmask'", "'dense'"],
        ),
        (
            compressed,
            json!({"transform_config": {"config_groups": {}}}),
            ["transform_config", "none is"],
        ),
    ] {
        with(name, changes).refused(&[&["quantization_config."], &parts[..]].concat());
    }
}

#[test]
fn rules_that_only_exclude_modules_are_accepted() {
    let copy = with("quantised/gptq", json!({"dynamic": {"-:.*lm_head.*": {}}}));
    assert!(copy.load().is_ok());
}

/// A copy with a changed tensor.
fn tensor(
    name: &str,
    tensor: &str,
    change: impl FnOnce(&TensorView<'_>) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
) -> Copy {
    Copy::of(name).tensor(tensor, |view| change(&view))
}

#[test]
fn tensors_with_the_wrong_shape_or_type_for_the_method_are_rejected() {
    for (name, part, shape) in [
        ("gptq", "qweight", "[8, 64]"),
        ("gptq", "qzeros", "[2, 8]"),
        ("gptq", "scales", "[2, 64]"),
        ("gptq", "g_idx", "[64]"),
        ("awq", "qweight", "[64, 8]"),
        ("awq", "qzeros", "[2, 8]"),
        ("awq", "scales", "[2, 64]"),
        ("compressed-w8a8", "weight", "[64, 64]"),
        ("compressed-w8a8", "weight_scale", "[64, 1]"),
        ("compressed-w4a16", "weight_packed", "[64, 8]"),
        ("compressed-w4a16", "weight_scale", "groups"),
        ("bnb-nf4", "weight", "[2048, 1]"),
        ("bnb-nf4", "weight.absmax", "[64]"),
        ("bnb-nf4", "weight.quant_map", "[16]"),
        ("bnb-nf4", "weight.nested_quant_map", "[256]"),
        ("bnb-int8", "weight", "[64, 64]"),
        ("bnb-int8", "SCB", "[64]"),
    ] {
        let (name, part) = (format!("quantised/{name}"), format!("{Q_PROJ}.{part}"));
        // Half of it.
        tensor(&name, &part, |view| {
            let mut shape = view.shape().to_vec();
            shape[0] /= 2;
            let half = view.data()[..view.data().len() / 2].to_vec();
            Some((view.dtype(), shape, half))
        })
        .refused(&[&part, "has shape", shape]);
        // Without it.
        if !part.ends_with("g_idx") {
            tensor(&name, &part, |_| None).refused(&[Q_PROJ, "is missing"]);
        }
    }
    // Floats instead of codes, and vice versa.
    for (name, part, reason) in [
        ("gptq", "qweight", "codes are packed in I32"),
        ("gptq", "g_idx", "groups are numbered in I32"),
        ("awq", "scales", "BF16, F16 and F32"),
        (
            "compressed-w4a16",
            "weight_packed",
            "codes are packed in I32",
        ),
    ] {
        let (name, part) = (format!("quantised/{name}"), format!("{Q_PROJ}.{part}"));
        tensor(&name, &part, |view| {
            let dtype = match view.dtype() {
                Dtype::I32 => Dtype::F32,
                _ => Dtype::I16,
            };
            Some((dtype, view.shape().to_vec(), view.data().to_vec()))
        })
        .refused(&[&part, reason]);
    }
}

#[test]
fn the_state_of_bitsandbytes_must_be_whole() {
    let part = format!("{Q_PROJ}.weight.quant_state.bitsandbytes__nf4");
    let state = |json: &str, parts: &[&str]| {
        let bytes = json.as_bytes().to_vec();
        tensor("quantised/bnb-nf4", &part, |view| {
            Some((view.dtype(), vec![bytes.len()], bytes))
        })
        .refused(&[&[Q_PROJ], parts].concat());
    };
    state("{", &["is not JSON"]);
    state(r#"{"blocksize": 0}"#, &["a blocksize that is no number"]);
    state(
        r#"{"blocksize": 128}"#,
        &["absmax", "has shape [64]", "[32]"],
    );
    state(
        r#"{"nested_blocksize": 1e3}"#,
        &["a blocksize that is no number"],
    );
    state(
        r#"{"nested_offset": "x"}"#,
        &["a nested_offset that is not a number"],
    );
    tensor("quantised/bnb-nf4", &part, |_| None).refused(&[Q_PROJ, "nf4 is missing"]);
}

#[test]
fn damaged_values_are_found() {
    let scales = format!("{UP_PROJ}.scales");
    tensor("quantised/gptq", &scales, |view| {
        let mut data = view.data().to_vec();
        data[2 * 17..][..2].copy_from_slice(&0x7e00_u16.to_le_bytes());
        Some((view.dtype(), view.shape().to_vec(), data))
    })
    .refused(&[UP_PROJ, "output 17", "a scale or an offset that is NaN"]);
    let order = format!("{UP_PROJ}.g_idx");
    tensor("quantised/gptq-act-order", &order, |view| {
        Some((
            view.dtype(),
            view.shape().to_vec(),
            vec![0; view.data().len()],
        ))
    })
    .refused(&[&order, "group 0 has more inputs"]);
    tensor("quantised/gptq-act-order", &order, |view| {
        Some((
            view.dtype(),
            view.shape().to_vec(),
            vec![9; view.data().len()],
        ))
    })
    .refused(&[&order, "input 0 is in group 151587081, and there are 2"]);
}

const FLOAT_PROJ: &str = "model.layers.0.mlp.up_proj";

/// A tensor with these bytes at a place.
fn with_bytes(name: &str, part: &str, at: usize, bytes: &[u8]) -> Copy {
    tensor(name, part, |view| {
        let mut data = view.data().to_vec();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        Some((view.dtype(), view.shape().to_vec(), data))
    })
}

#[test]
fn floats_of_4_bits_must_fit() {
    let modelopt = "quantised/modelopt-mixed";
    let compressed = "quantised/compressed-fp4";
    for (name, part, shape) in [
        (modelopt, "weight", "[96, 32]"),
        (modelopt, "weight_scale", "[96, 4]"),
        (compressed, "weight_packed", "[96, 32]"),
        (compressed, "weight_scale", "[96, 4]"),
    ] {
        let part = format!("{FLOAT_PROJ}.{part}");
        tensor(name, &part, |view| {
            let mut shape = view.shape().to_vec();
            shape[0] /= 2;
            let half = view.data()[..view.data().len() / 2].to_vec();
            Some((view.dtype(), shape, half))
        })
        .refused(&[&part, "has shape", shape]);
        tensor(name, &part, |_| None).refused(&[FLOAT_PROJ, "is missing"]);
    }
    let factor = format!("{FLOAT_PROJ}.weight_scale_2");
    tensor(modelopt, &factor, |_| None).refused(&[FLOAT_PROJ, "weight_scale_2 is missing"]);
    tensor(modelopt, &factor, |_| {
        Some((Dtype::F32, vec![2], vec![0; 8]))
    })
    .refused(&[&factor, "has shape [2]; [1] is expected"]);
    for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        with_bytes(modelopt, &factor, 0, &bad.to_le_bytes()).refused(&[
            &factor,
            "a scale and its reciprocal are finite numbers above 0",
        ]);
    }
    let divisor = format!("{FLOAT_PROJ}.weight_global_scale");
    for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        with_bytes(compressed, &divisor, 0, &bad.to_le_bytes()).refused(&[
            &divisor,
            "a scale and its reciprocal are finite numbers above 0",
        ]);
    }
    // NaN in e4m3, of the fourth group of the output.
    for name in [modelopt, compressed] {
        let scales = format!("{FLOAT_PROJ}.weight_scale");
        with_bytes(name, &scales, 17 * 4 + 3, &[0x7f]).refused(&[
            FLOAT_PROJ,
            "output 17",
            "a scale or an offset that is NaN",
        ]);
    }
    let scales = format!("{FLOAT_PROJ}.weight_scale");
    tensor(modelopt, &scales, |view| {
        Some((Dtype::U8, view.shape().to_vec(), view.data().to_vec()))
    })
    .refused(&[&scales, "is of type U8; NVFP4 has scales in F8_E4M3"]);
    let scales = "model.layers.0.mlp.down_proj.weight_scale";
    with_bytes(compressed, scales, 5, &[255]).refused(&["down_proj", "output 1 has a scale"]);
}

#[test]
fn tensors_that_a_config_contradicts_are_rejected() {
    let modelopt = "quantised/modelopt-mixed";
    let layers = |name: &str, algorithm: &str| {
        with(
            modelopt,
            json!({"quantized_layers": {name: {"quant_algo": algorithm}}}),
        )
    };
    layers(FLOAT_PROJ, "FP8").refused(&[FLOAT_PROJ, "is of type U8", "calls for F8_E4M3"]);
    layers(Q_PROJ, "NVFP4").refused(&[Q_PROJ, "is of type F8_E4M3", "calls for U8"]);
    let o_proj = "model.layers.0.self_attn.o_proj";
    layers(o_proj, "FP8").refused(&[o_proj, "is of type BF16", "calls for F8_E4M3"]);
    Copy::of(modelopt)
        .renamed(|name| match name {
            "model.layers.0.mlp.up_proj.input_scale" => format!("{FLOAT_PROJ}.pre_quant_scale"),
            other => other.to_owned(),
        })
        .refused(&["up_proj.pre_quant_scale", "plain NVFP4"]);
    let group = |format: &str, weights: Value| json!({"format": format, "config_groups": {"group_0": {"weights": weights}}});
    let integers = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
    for (name, format, weights, found) in [
        (
            "compressed-fp4",
            "pack-quantized",
            integers.clone(),
            "no floats of 4 bits",
        ),
        (
            "compressed-w4a16",
            "nvfp4-pack-quantized",
            json!({"num_bits": 4, "type": "float"}),
            "no packed integers",
        ),
        (
            "compressed-w8a8",
            "pack-quantized",
            integers,
            "no integers of 8 bits",
        ),
    ] {
        let name = format!("quantised/{name}");
        with(&name, group(format, weights)).refused(&[Q_PROJ, "config_groups", found]);
    }
}

/// Each module has the scheme whose tensors lie beside its weight.
#[test]
fn modules_with_and_without_zero_points_have_one_config() {
    let name = "quantised/compressed-act-order";
    let scheme = |is_symmetric: bool| {
        let mut weights = json!({
            "num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": "group",
            "group_size": 32,
        });
        if !is_symmetric {
            weights["actorder"] = json!("group");
        }
        json!({ "weights": weights })
    };
    for order in [[true, false], [false, true]] {
        let [first, second] = order.map(scheme);
        let groups = json!({"config_groups": {"group_0": first, "group_1": second}});
        assert_same("two schemes", [with(name, groups), Copy::of(name)]);
    }
}

#[test]
fn zero_points_and_act_order_of_compressed_tensors_must_fit() {
    let name = "quantised/compressed-act-order";
    let weights = |changes: Value| {
        let mut weights = json!({
            "num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 32,
            "actorder": "group",
        });
        for (key, value) in changes.as_object().expect("an object") {
            weights[key] = value.clone();
        }
        with(
            name,
            json!({"config_groups": {"group_0": {"weights": weights}}}),
        )
    };
    let zeros = format!("{Q_PROJ}.weight_zero_point");
    let order = format!("{Q_PROJ}.weight_g_idx");
    tensor(name, &zeros, |_| None).refused(&[Q_PROJ, "weight_zero_point is missing"]);
    tensor(name, &zeros, |view| {
        Some((view.dtype(), vec![4, 2], view.data()[..32].to_vec()))
    })
    .refused(&[&zeros, "has shape [4, 2]", "[8, 2]"]);
    tensor(name, &zeros, |_| {
        Some((Dtype::I8, vec![64, 1], vec![0; 64]))
    })
    .refused(&[&zeros, "has shape [64, 1]", "[64, 2]"]);
    tensor(name, &zeros, |view| {
        Some((Dtype::F32, view.shape().to_vec(), view.data().to_vec()))
    })
    .refused(&[&zeros, "is of type F32"]);
    weights(json!({"symmetric": true})).refused(&[&zeros, "calls the weights symmetric"]);
    weights(json!({"group_size": 16})).refused(&["weight_scale", "has shape", "16 (group_size of"]);
    tensor(name, &order, |_| None).refused(&[Q_PROJ, "weight_g_idx is missing"]);
    let far = |view: &TensorView<'_>| {
        let data = vec![9; view.data().len()];
        Some((view.dtype(), view.shape().to_vec(), data))
    };
    tensor(name, &order, far).refused(&[&order, "input 0 is in group 151587081, and there are 2"]);
    // Not used: groups are neighbours, as with `weight` and `static`.
    let unused = |view: &TensorView<'_>| {
        let data = vec![0xff; view.data().len()];
        Some((view.dtype(), view.shape().to_vec(), data))
    };
    assert_same(
        "an order that is not used",
        [
            tensor(name, &order, unused),
            weights(json!({"actorder": "weight"})).tensor(&order, |_| None),
        ],
    );
    for known in ["weight", "static", "dynamic"] {
        let copy = weights(json!({ "actorder": known }));
        assert_same(known, [copy, Copy::of(name)]);
    }
    let lost = weights(json!({"actorder": "dynamic"})).tensor(&order, |_| None);
    lost.refused(&[Q_PROJ, "weight_g_idx is missing"]);
    weights(json!({"actorder": "some"})).refused(&[
        "actorder",
        "some",
        "'group', 'weight' or null",
    ]);
    // A scale for all weights has one zero point.
    for (dtype, num_bytes, words) in [
        (Dtype::I8, 64, "[1, 1]"),
        (Dtype::I32, 32, "is of type I32"),
    ] {
        let copy = weights(json!({"strategy": "tensor", "group_size": null}));
        let copy = copy.tensor(&format!("{Q_PROJ}.weight_scale"), |view| {
            Some((view.dtype(), vec![1], view.data()[..2].to_vec()))
        });
        let num_zeros = num_bytes * 8 / dtype.bitsize();
        let copy = copy.tensor(&zeros, |_| {
            Some((dtype, vec![num_zeros, 1], vec![0; num_bytes]))
        });
        copy.refused(&[&zeros, words]);
    }
    // Not packed.
    let zeros = |view: &TensorView<'_>| {
        let words = view.data().as_chunks::<4>().0.iter();
        let words: Vec<_> = words.map(|word| u32::from_le_bytes(*word)).collect();
        let zeros = (0..64 * 2).map(|at| {
            let code = words[at / 2 / 8 * 2 + at % 2] >> (4 * (at / 2 % 8)) & 15;
            (code as i8 - 8).cast_unsigned()
        });
        Some((Dtype::I8, vec![64, 2], zeros.collect()))
    };
    let unpacked = tensor(name, &format!("{Q_PROJ}.weight_zero_point"), zeros);
    assert_same(
        "zero points that are not packed",
        [unpacked, Copy::of(name)],
    );
}
