//! Adapters on the stand-in for a GPU: against PEFT over transformers, beside each other, and with little memory.

use std::path::Path;

use inflight_cuda_stand_in::StandIn;
use inflight_device::KvDtype;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::BlockReuse;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;

use crate::adapters::{adapter, agrees_on, mixed, num_bytes};
use crate::cuda::on_any_gpu;
use crate::devices::{assert_same_alone, assert_same_bits};
use crate::support::{Request, Served, Setup, fixture, serve};

fn options() -> CudaOptions {
    CudaOptions {
        deterministic: true,
        ..CudaOptions::default()
    }
}

fn run(test: &str, body: impl FnOnce()) {
    on_any_gpu(StandIn::new(), &format!("cuda_adapters::{test}"), body);
}

#[test]
fn adapters_agree_with_peft() {
    run("adapters_agree_with_peft", || {
        for name in [
            "all-modules",
            "rank-33",
            "rank-1",
            "patterns",
            "biases",
            "fused",
            "reordered-heads",
            "dora",
            "dora-fused",
            "dora-norms-after",
            "trained-biases",
            "outside-layers",
            "soft-cap",
            "saved-modules",
            "dora-output-layer",
        ] {
            agrees_on::<Cuda>(name, 2.0, &options());
        }
    });
}

#[test]
fn whatever_an_adapter_changes_others_keep_their_bits() {
    run("whatever_an_adapter_changes_others_keep_their_bits", || {
        let chunks = Setup {
            max_num_tokens: 24,
            enable_chunked_context: true,
            block_size: 8,
            reuse: BlockReuse::PartialBlocks,
            ..Setup::default()
        };
        for (base, names) in [
            ("llama3", ["outside-layers", "rank-33"]),
            ("llama-biases", ["dora", "trained-biases"]),
            ("llama2", ["dora-output-layer", "saved-modules"]),
        ] {
            assert_each_alone(base, names, &chunks);
        }
    });
}

#[test]
fn adapters_are_added_to_rounded_weights() {
    run("adapters_are_added_to_rounded_weights", || {
        let setup = Setup {
            weights: Some(WeightPrecision {
                bits: CodeBits::Four,
                group_size: 32,
            }),
            kv_dtype: KvDtype::Int8,
            ..Setup::default()
        };
        assert_each_alone("llama3", ["all-modules", "rank-33"], &setup);
    });
}

/// Serves requests with two adapters and with none in the same steps, and compares each with its run alone.
fn assert_each_alone(base: &str, names: [&str; 2], setup: &Setup) {
    let dir = fixture(base);
    let requests = mixed(&dir, names);
    let what = format!("{base} with {names:?}");
    assert_same_alone::<Cuda>(&what, &dir, &options(), setup, requests.clone());
    let plain = requests.iter().map(|request| Request {
        adapter: None,
        ..request.clone()
    });
    let answers = |requests: &[Request]| {
        let mut runner = setup.load_on::<Cuda>(&dir, &options());
        serve(&mut runner, setup, requests).0
    };
    let (with, without) = (answers(&requests), answers(&plain.collect::<Vec<_>>()));
    let pairs = requests.iter().zip(with.iter().zip(&without));
    for (request, (with, without)) in pairs {
        let is_changed = with.logits != without.logits;
        assert_eq!(is_changed, request.adapter.is_some(), "{what}");
    }
}

/// Adapters that have left the GPU's memory come back, to another place and in the end as they were.
#[test]
fn adapters_take_turns_in_memory_for_the_largest() {
    run("adapters_take_turns_in_memory_for_the_largest", || {
        let base = fixture("llama3");
        let names = ["all-modules", "rank-33", "outside-layers"];
        let all = requests_one_by_one(&base, &names);
        let roomy = Setup {
            max_num_requests: 1,
            ..Setup::default()
        };
        let expected = answers(&base, &roomy, &all);
        let sizes = names.iter().map(|name| num_bytes(name, &base));
        let tight = Setup {
            adapter_bytes: sizes.max().expect("three"),
            ..roomy
        };
        for (expected, answer) in expected.iter().zip(answers(&base, &tight, &all)) {
            assert_same_bits("taking turns", expected, &answer);
        }
    });
}

fn requests_one_by_one(base: &Path, names: &[&str]) -> Vec<Request> {
    let adapters: Vec<_> = names.iter().map(|name| adapter(name, base)).collect();
    let order = [0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 1, 0];
    order
        .iter()
        .map(|&index| Request {
            adapter: Some(adapters[index].clone()),
            ..Request::greedy(&[5, 9, 31, 7], 4)
        })
        .collect()
}

fn answers(base: &Path, setup: &Setup, requests: &[Request]) -> Vec<Served> {
    let mut runner = setup.load_on::<Cuda>(base, &options());
    serve(&mut runner, setup, requests).0
}
