//! Mixtures of experts: checkpoints that are refused, what they take in memory, GGUF files, and devices.

use inflight_cuda_stand_in::StandIn;
use serde_json::json;
use triton_inflight::device::cuda::{Cuda, CudaOptions};
use triton_inflight::device::{CodeBits, RoutingRule};
use triton_inflight::runner::spec::FeedForward;
use triton_inflight::runner::{CudaRunner, ModelSource, WeightPrecision};

use crate::copy::Copy;
use crate::cuda::on_stand_in;
use crate::devices::{assert_devices_agree, assert_near, requests, setups};
use crate::reference_device::{Reference, ReferenceOptions};
use crate::support::{Setup, fixture, serve};
use crate::transformers::{agree, agrees_within};

/// As for other quantised weights.
fn gguf_agrees(name: &str) {
    agrees_within(name, 1.5);
}

agree! {
    gguf_agrees;
    a_mixtral_of_q8_0_in_a_gguf_file_agrees_with_transformers: "mixtral-gguf",
    a_qwen_2_moe_in_a_gguf_file_agrees_with_transformers: "qwen2-moe-gguf",
    a_qwen_3_moe_of_q8_0_in_a_gguf_file_agrees_with_transformers: "qwen3-moe-gguf",
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

#[test]
fn the_bytes_of_all_experts_are_counted() {
    for name in ["mixtral", "mixtral-stacked", "qwen2-moe"] {
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
    for (name, has_whole_sums) in [("mixtral", true), ("qwen2-moe", false), ("qwen3-moe", true)] {
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

#[test]
fn a_model_with_experts_is_refused_on_a_gpu() {
    let test = "experts::a_model_with_experts_is_refused_on_a_gpu";
    on_stand_in(StandIn::new(), test, || {
        let options = CudaOptions::default();
        let limits = Setup::default().runner_limits();
        let error = CudaRunner::new(&source("mixtral"), limits, &options).err();
        let error = error.expect("refused").to_string();
        for part in ["5 experts", "CPU only", "KIND_CPU"] {
            assert!(error.contains(part), "{error}");
        }
        assert_devices_agree::<Cuda>("llama3", &options);
    });
}
