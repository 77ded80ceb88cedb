//! BitNet: norms inside of blocks, and weights of three values.

use inflight_cuda_stand_in::StandIn;
use inflight_device::Tiling;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_runner::{ModelRunner, ModelSource};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::cuda::on_any_gpu;
use crate::support::{Request, Setup, fixture, serve_alone};

const Q_PROJ: &str = "model.layers.0.self_attn.q_proj";
const INNER_NORM: &str = "model.layers.2.mlp.ffn_sub_norm.weight";

#[test]
fn norms_that_contradict_the_config_are_refused() {
    let longer = |view: TensorView<'_>| {
        let mut bytes = view.data().to_vec();
        bytes.extend([0, 0]);
        Some((view.dtype(), vec![view.shape()[0] + 1], bytes))
    };
    let copy = Copy::of("bitnet").tensor(INNER_NORM, longer);
    copy.refused(&[INNER_NORM, "[65]", "[64]"]);
    Copy::of("bitnet")
        .tensor(INNER_NORM, |_| None)
        .refused(&[INNER_NORM]);
}

#[test]
fn weights_of_three_values_take_4_bits() {
    let projections = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96);
    let embeddings = 2 * 2 * 96 * 64;
    // Two bytes for the scale of each output.
    let num_outputs = 2 * (2 * 64 + 2 * 32 + 2 * 96 + 64);
    for name in ["bitnet", "bitnet-online", "bitnet-llama"] {
        let source = ModelSource::open(&fixture(&format!("quantised/{name}")));
        let source = source.expect("the fixture opens");
        let num_bytes = source.num_weight_bytes(None).expect("all tensors");
        let expected = embeddings + projections / 2 + 2 * num_outputs;
        assert_eq!(num_bytes, expected, "{name}");
    }
}

#[test]
fn settings_of_other_weights_are_refused() {
    for (key, value, words) in [
        ("linear_class", json!("linear"), "linear_class: 'linear'"),
        (
            "quantization_mode",
            json!("lazy"),
            "quantization_mode: 'lazy'",
        ),
        (
            "quantization_mode",
            json!("online"),
            "quantization_mode: 'online'",
        ),
        ("use_rms_norm", json!(true), "use_rms_norm: true"),
        (
            "modules_to_not_convert",
            json!("lm_head"),
            "a list of names",
        ),
    ] {
        let mut section: Value = json!({"quant_method": "bitnet"});
        section[key] = value;
        let copy = Copy::of("quantised/bitnet");
        copy.config(json!({"quantization_config": section}))
            .refused(&[words]);
    }
}

#[test]
fn codes_and_scales_that_are_no_weights_are_refused() {
    let (weight, scale) = (format!("{Q_PROJ}.weight"), format!("{Q_PROJ}.weight_scale"));
    let copy = || Copy::of("quantised/bitnet");
    copy()
        .tensor(&scale, |_| None)
        .refused(&["is packed", &scale]);
    // Not a number, and infinite.
    for bits in [0x7fc0_u16, 0x7f80] {
        let bytes = bits.to_le_bytes().to_vec();
        copy()
            .tensor(&scale, |_| Some((Dtype::BF16, vec![1], bytes)))
            .refused(&[&scale, "is no scale"]);
    }
    let with_fourth_value = |view: TensorView<'_>| {
        let mut bytes = view.data().to_vec();
        // Of the last quarter of the outputs.
        bytes[64] |= 0xc0;
        Some((view.dtype(), view.shape().to_vec(), bytes))
    };
    copy()
        .tensor(&weight, with_fourth_value)
        .refused(&[&weight, "output 49"]);
    let shorter = |view: TensorView<'_>| {
        let bytes = view.data()[..view.data().len() / 2].to_vec();
        Some((view.dtype(), vec![view.shape()[0] / 2, 64], bytes))
    };
    copy()
        .tensor(&weight, shorter)
        .refused(&[&weight, "[8, 64]", "[16, 64]"]);
    let as_floats = |_: TensorView<'_>| Some((Dtype::BF16, vec![64, 64], vec![0; 2 * 64 * 64]));
    copy()
        .tensor(&weight, as_floats)
        .refused(&[&scale, "BF16", "U8"]);
    let llama = Copy::of("quantised/bitnet-llama").tensor(&scale, |_| None);
    llama
        .tensor(&weight, as_floats)
        .refused(&[&weight, "BF16", "modules_to_not_convert"]);
}

#[test]
fn floats_of_its_authors_become_three_values_as_online() {
    let online = json!({
        "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
    });
    let logits = |changes: Value| {
        let (copy, setup) = (Copy::of("bitnet-3b").config(changes), Setup::default());
        let request = Request::greedy(&[5, 60, 7, 31, 12], 3);
        serve_alone(&mut setup.load_from(copy.dir()), &setup, &request).logits
    };
    let rounded = logits(json!({"weight_bits": 1}));
    assert!(rounded == logits(json!({"quantization_config": online})));
    assert!(rounded != logits(json!({})));
    let copy = Copy::of("bitnet-3b").config(json!({"weight_bits": 2}));
    copy.refused(&["weight_bits", "2"]);
}

/// transformers rounds linear layers alone, whatever their names are.
#[test]
fn routers_and_embeddings_of_other_names_are_not_rounded() {
    for (name, module) in [("qwen3-moe", "mlp."), ("gpt-neox", "gpt_neox.embed_in")] {
        let online = json!({"quantization_config": {
            "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
        }});
        let copy = Copy::of(name).config(online);
        copy.refused(&[module, "is no linear layer of a model like Llama"]);
    }
}

#[test]
fn a_gpu_and_several_ranks_refuse_norms_inside_of_blocks() {
    let source = ModelSource::open(&fixture("bitnet")).expect("the fixture opens");
    let part = "norms inside of blocks";
    let error = source.check_ranks(2.into(), Tiling::OfRanks);
    let error = error.expect_err("refused").to_string();
    assert!(error.contains(part), "{error}");
    on_any_gpu(
        StandIn::new(),
        "bitnet::a_gpu_and_several_ranks_refuse_norms_inside_of_blocks",
        || {
            let limits = Setup::default().runner_limits();
            let refused = ModelRunner::<Cuda>::new(&source, limits, &CudaOptions::default());
            let error = refused.err().expect("refused").to_string();
            assert!(error.contains(part), "{error}");
        },
    );
}
