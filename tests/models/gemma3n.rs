//! Gemma 3n: several residual streams, sparse gates, and keys and values of other layers.

use inflight_cuda_stand_in::StandIn;
use inflight_device::Tiling;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_runner::{ModelRunner, ModelSource, ModelSpec};
use serde_json::json;

use crate::batching::serves_as_alone;
use crate::copy::Copy;
use crate::cuda::on_any_gpu;
use crate::support::{Request, Setup, fixture, serve_alone};

fn spec(change: serde_json::Value) -> ModelSpec {
    let copy = Copy::of("gemma3n").config(change);
    let source = ModelSource::open(copy.dir()).expect("it opens");
    source.spec().clone()
}

#[test]
fn the_last_layers_read_the_keys_and_values_of_their_kind() {
    let sources = |change| -> Vec<_> {
        let spec = spec(change);
        let sources = spec.layers.iter().map(|it| it.attention.kv_source);
        sources.collect()
    };
    assert_eq!(sources(json!({})), [None, None, None, Some(1), Some(2)]);
    let change = json!({"num_kv_shared_layers": 1});
    assert_eq!(sources(change), [None, None, None, None, Some(2)]);
    Copy::of("gemma3n")
        .config(json!({"num_kv_shared_layers": 3}))
        .refused(&[
            "num_kv_shared_layers",
            "none before them has full_attention",
        ]);
    Copy::of("gemma3n")
        .config(json!({"num_kv_shared_layers": 5}))
        .refused(&["num_kv_shared_layers: 5 is not below the number of layers, 5"]);
}

#[test]
fn layers_have_blocks_and_cutoffs_of_their_own() {
    let of_file = spec(json!({}));
    let widths = of_file.layers.iter().map(|it| it.feed_forward.width());
    assert_eq!(widths.collect::<Vec<_>>(), [44, 44, 50, 56, 50]);
    let cutoffs: Vec<_> = of_file.layers.iter().map(|it| it.gate_cutoff).collect();
    assert_eq!([cutoffs[1], cutoffs[3]], [None; 2]);
    // The quantile of 0.7, from a table.
    let first = cutoffs[0].expect("a cutoff");
    assert!((first - 0.524_400_5).abs() < 1e-6, "{first}");
    for (change, words) in [
        (
            json!({"activation_sparsity_pattern": [0.95, 1.0, 0.0, 0.0, 0.0]}),
            "activation_sparsity_pattern",
        ),
        (
            json!({"activation_sparsity_pattern": 0.5}),
            "a list of 5 numbers",
        ),
        (
            json!({"intermediate_size": [44, 44]}),
            "a list of 5 numbers",
        ),
        (json!({"altup_active_idx": 1}), "altup_active_idx: 1"),
        (json!({"altup_num_inputs": 9}), "altup_num_inputs"),
    ] {
        Copy::of("gemma3n").config(change).refused(&[words]);
    }
}

/// A number of streams that the tensors do not have.
#[test]
fn tensors_that_contradict_the_config_are_refused() {
    let copy = Copy::of("gemma3n").config(json!({"altup_num_inputs": 3}));
    copy.refused(&["altup.modality_router", "[4, 64]"]);
    let copy = Copy::of("gemma3n").config(json!({"laurel_rank": 15}));
    copy.refused(&["laurel.linear_left", "[14, 64]"]);
}

/// The classes of images and sound.
#[test]
fn tokens_behind_the_per_layer_embeddings_have_those_of_token_0() {
    let setup = Setup::default();
    let answer = |prompt: &[u32]| {
        let request = Request::greedy(prompt, 3);
        serve_alone(&mut setup.load("gemma3n"), &setup, &request).logits
    };
    // The table has 150 rows, and the vocabulary 160.
    let last = answer(&[5, 159, 7]);
    assert!(last.concat().iter().all(|logit| logit.is_finite()));
    assert!(last != answer(&[5, 158, 7]), "their embeddings differ");
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
        serves_as_alone("gemma3n-vl", &setup);
    }
}

#[test]
fn a_gpu_and_several_ranks_refuse_streams_by_name() {
    let source = ModelSource::open(&fixture("gemma3n")).expect("the fixture opens");
    let parts = ["several residual streams", "sparse gates"];
    let error = source.check_ranks(2.into(), Tiling::OfRanks);
    let error = error.expect_err("refused").to_string();
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    on_any_gpu(
        StandIn::new(),
        "gemma3n::a_gpu_and_several_ranks_refuse_streams_by_name",
        || {
            let limits = Setup::default().runner_limits();
            let refused = ModelRunner::<Cuda>::new(&source, limits, &CudaOptions::default());
            let error = refused.err().expect("refused").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        },
    );
}
