//! Gemma 4: layers with heads, inputs and factors of their own, and keys and values of other layers.

use inflight_base::BlockSize;
use inflight_cuda_stand_in::StandIn;
use inflight_device::{HeadShape, KvDtype, Tiling};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_runner::{CpuRunner, ModelRunner, ModelSource, ModelSpec};
use serde_json::{Value, json};

use crate::batching::serves_as_alone;
use crate::copy::Copy;
use crate::cuda::on_any_gpu;
use crate::support::{Setup, fixture};

const NAMES: [&str; 3] = ["gemma4", "gemma4-vl", "gemma4-moe"];

fn spec_of(copy: &Copy) -> ModelSpec {
    let source = ModelSource::open(copy.dir()).expect("it opens");
    source.spec().clone()
}

fn spec(name: &str) -> ModelSpec {
    spec_of(&Copy::of(name))
}

/// A change of the language model's config.
fn config(name: &str, change: Value) -> Copy {
    let copy = Copy::of(name);
    match name.ends_with("-vl") {
        false => copy.config(change),
        true => {
            let file = std::fs::read(fixture(name).join("config.json")).expect("the file");
            let config: Value = serde_json::from_slice(&file).expect("JSON");
            let mut text = config["text_config"].as_object().expect("a config").clone();
            text.extend(change.as_object().expect("an object").clone());
            copy.config(json!({"text_config": text}))
        }
    }
}

#[test]
fn layers_have_heads_of_their_own_and_share_keys_and_values() {
    let gemma4 = spec("gemma4");
    let heads = |spec: &ModelSpec| -> Vec<_> {
        let heads = (0..spec.num_layers()).map(|layer| spec.head_shape(layer));
        heads
            .map(
                |HeadShape {
                     num_kv_heads,
                     head_dim,
                     ..
                 }| (num_kv_heads, head_dim),
            )
            .collect()
    };
    assert_eq!(
        heads(&gemma4),
        [(3, 10), (3, 10), (3, 14), (3, 10), (3, 14)]
    );
    assert_eq!(
        heads(&spec("gemma4-vl")),
        [(3, 10), (2, 14), (3, 10), (2, 14)]
    );
    let sources: Vec<_> = gemma4
        .layers
        .iter()
        .map(|layer| layer.attention.kv_source)
        .collect();
    assert_eq!(sources, [None, None, None, Some(1), Some(2)]);
    let widths: Vec<_> = gemma4
        .layers
        .iter()
        .map(|it| it.feed_forward.width())
        .collect();
    assert_eq!(widths, [44, 44, 44, 88, 88]);
    // Three layers have keys and values; values of 10 elements are padded to 16.
    assert_eq!(gemma4.num_cached_layers(), 3);
    let block_size = BlockSize::new(16).expect("not zero");
    let bytes = CpuRunner::kv_bytes_per_block(&gemma4, block_size, KvDtype::Bf16);
    assert_eq!(bytes, 2 * 16 * 3 * (2 * (10 + 16) + (14 + 16)));
}

/// As the first checkpoints have them.
#[test]
fn heads_may_be_told_for_all_layers_that_see_everything() {
    let told =
        json!({"per_layer_config": null, "global_head_dim": 14, "num_global_key_value_heads": 2});
    for name in NAMES {
        assert_eq!(spec_of(&config(name, told.clone())), spec(name), "{name}");
    }
    // Only where keys are values, their number counts.
    let copy = config("gemma4-vl", json!({"attention_k_eq_v": false}));
    assert_eq!(spec_of(&copy).head_shape(1).num_kv_heads, 2);
    let mut told = told;
    told["attention_k_eq_v"] = json!(false);
    let copy = config("gemma4-vl", told);
    assert_eq!(spec_of(&copy).head_shape(1).num_kv_heads, 3);
}

#[test]
fn bad_configs_are_refused_by_their_keys() {
    for (change, words) in [
        (
            json!({"num_kv_shared_layers": 4}),
            "num_kv_shared_layers: 4 of 5 layers, and no full_attention layer before them has keys and values is not fewer",
        ),
        (json!({"num_kv_shared_layers": 6}), "num_kv_shared_layers"),
        (
            json!({"per_layer_config": {"2": {"head_dim": 14}}}),
            "layer 4 reads the keys and values of layer 2, and has 3 heads of 10 elements instead of 3 of 14",
        ),
        (
            json!({"sliding_window": null}),
            "sliding_window: null is not a number",
        ),
        (
            json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 5}),
            "top_k_experts: 5 is not at most the number of experts, 4",
        ),
        (
            json!({"enable_moe_block": true, "num_experts": 4}),
            "top_k_experts is missing",
        ),
        (
            json!({"use_bidirectional_attention": "all"}),
            "use_bidirectional_attention: \"all\" is not null or 'vision'",
        ),
        (
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention: true is not null or 'vision'",
        ),
        (
            json!({"vocab_size_per_layer_input": 100}),
            "vocab_size_per_layer_input: 100 is not at least 160, the vocab_size",
        ),
        (
            json!({"per_layer_config": {"5": {"head_dim": 14}}}),
            "5 is no layer of 5",
        ),
        (
            json!({"per_layer_config": {"1": {"sliding_window": 14}}}),
            "sliding_window is set, and only head_dim and num_key_value_heads are read",
        ),
        (
            json!({"per_layer_config": {"1": {"num_key_value_heads": 4}}}),
            "their number has to divide 6",
        ),
        (
            json!({"per_layer_config": {"1": {"head_dim": 7}}}),
            "their size to be even",
        ),
        (
            json!({"rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"}
            }}),
            "rope_parameters.full_attention.rope_type: 'dynamic' is not 'proportional' or 'default'",
        ),
    ] {
        let copy = config("gemma4", change.clone());
        let error = ModelSource::open(copy.dir()).err().expect("refused");
        let error = error.to_string();
        assert!(error.contains(words), "{change}: {error}");
    }
    // A tensor has other heads than the config.
    let heads = json!({"2": {"head_dim": 20}, "4": {"head_dim": 20}});
    let copy = config("gemma4", json!({"per_layer_config": heads}));
    let source = ModelSource::open(copy.dir()).expect("it opens");
    let limits = Setup::default().runner_limits();
    let error = CpuRunner::new(&source, limits, &Setup::default().cpu_options());
    let error = error.err().expect("refused").to_string();
    assert!(error.contains("model.layers.2.self_attn"), "{error}");
}

#[test]
fn the_language_model_of_one_with_images_is_the_same_in_any_batch() {
    for num_threads in [1, 3] {
        let setup = Setup {
            num_threads,
            block_size: 4,
            num_blocks: 60,
            max_num_tokens: 20,
            enable_chunked_context: true,
            ..Setup::default()
        };
        serves_as_alone("gemma4-vl", &setup);
    }
}

#[test]
fn several_processes_and_gpus_are_refused() {
    for name in NAMES {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        for (grid, tiling) in [
            (2, Tiling::OfRanks),
            (2, Tiling::Never),
            (1, Tiling::Always),
        ] {
            let error = source
                .check_ranks(grid.into(), tiling)
                .expect_err("refused");
            let words = "which are computed by one process and whose sums are not cut";
            let error = error.to_string();
            assert!(
                error.contains(words) && error.contains("layer scalars"),
                "{name}: {error}"
            );
        }
    }
    on_any_gpu(
        StandIn::new(),
        "gemma4::several_processes_and_gpus_are_refused",
        || {
            // Llama 4 has experts that no GPU routes to.
            for name in NAMES.into_iter().chain(["llama4"]) {
                let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
                let limits = Setup::default().runner_limits();
                let refused = ModelRunner::<Cuda>::new(&source, limits, &CudaOptions::default());
                let error = refused.err().expect("refused").to_string();
                let words =
                    "which are computed on the CPU only: use an instance_group of kind KIND_CPU";
                assert!(error.contains(words), "{name}: {error}");
            }
        },
    );
}
