//! Sparse attention by an indexer in models: what its cache holds, and what is refused. That it changes no bit however
//! requests are scheduled is tested with all families.

use inflight_base::BlockSize;
use inflight_cuda_stand_in::StandIn;
use inflight_device::{KvDtype, Tiling};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_runner::{CpuRunner, ModelRunner, ModelSource};
use serde_json::json;

use crate::batching::prompt;
use crate::copy::Copy;
use crate::cuda::on_any_gpu;
use crate::families::WITH_INDEXERS as NAMES;
use crate::stages::TWO_BY_TWO;
use crate::support::{Request, Setup, fixture, serve_alone};

#[test]
fn only_layers_with_an_indexer_have_keys_of_it_in_the_cache() {
    for (name, num_layers, num_indexers) in [(NAMES[0], 4, 4), (NAMES[1], 4, 2)] {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        let block_size = BlockSize::new(16).expect("not zero");
        let bytes = CpuRunner::kv_bytes_per_block(source.spec(), block_size, KvDtype::Bf16);
        let elements = num_layers * (30 + 6) + num_indexers * 10;
        assert_eq!(bytes, 2 * 16 * elements, "{name}");
    }
}

#[test]
fn what_is_selected_matters_beyond_as_many_positions() {
    for (name, num_selected) in NAMES.into_iter().zip([18, 15]) {
        let all = Copy::of(name).config(json!({"index_topk": 512}));
        let setup = Setup::default();
        let logits = |len: usize, dir: &std::path::Path| {
            let request = Request::greedy(&prompt(3, len), 1);
            serve_alone(&mut setup.load_from(dir), &setup, &request).logits
        };
        for (len, is_same) in [(num_selected, true), (num_selected + 1, false), (60, false)] {
            let [some, all] = [&fixture(name), all.dir()].map(|dir| logits(len, dir));
            assert_eq!(some == all, is_same, "{name}, {len} positions");
        }
    }
}

#[test]
fn windows_are_refused() {
    for name in NAMES {
        let setup = Setup {
            windows: &[30],
            ..Setup::default()
        };
        let error = Copy::of(name).load_with(&setup).err();
        let error = error.expect("refused").to_string();
        assert!(
            error.contains("max_attention_window_size is 30") && error.contains("indexer"),
            "{error}"
        );
    }
}

#[test]
fn layers_that_share_a_selection_are_in_one_stage() {
    let [of_each, shared] = NAMES.map(|name| {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        source.check_ranks(TWO_BY_TWO, Tiling::OfRanks)
    });
    of_each.expect("stages");
    let error = shared.expect_err("refused").to_string();
    for part in [
        "GlmMoeDsaForCausalLM",
        "share the selection",
        "pipeline_parallel_size",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn gpus_are_refused() {
    on_any_gpu(StandIn::new(), "indexer::gpus_are_refused", || {
        for name in NAMES {
            let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
            let limits = Setup::default().runner_limits();
            let refused = ModelRunner::<Cuda>::new(&source, limits, &CudaOptions::default());
            let error = refused.err().expect("refused").to_string();
            assert!(
                error.contains("an indexer") && error.contains("kind KIND_CPU"),
                "{error}"
            );
        }
    });
}
