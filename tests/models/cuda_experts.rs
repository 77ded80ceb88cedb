//! Mixtures of experts on the stand-in for a GPU; `cuda.rs` compares them with the reference device.

use inflight_cuda_stand_in::StandIn;
use inflight_device_cuda::{Cuda, CudaOptions, free_memory_bytes};
use inflight_machines::{CudaRunner, load_on_gpu, num_step_bytes};
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use serde_json::json;

use crate::copy::Copy;
use crate::cuda::{on_any_gpu, on_stand_in};
use crate::cuda_quantised::{TOLERANCE, long_requests, wide};
use crate::devices::{assert_agrees_with_reference, assert_same_alone, assert_same_bits, requests};
use crate::support::{Request, Setup, fixture, serve};

/// Steps of 9 to 12 sequences are rounded up to 16 rows for a graph: no row depends on those that fill it up.
#[test]
fn graphs_change_no_bits_of_mixtures() {
    let test = "cuda_experts::graphs_change_no_bits_of_mixtures";
    on_any_gpu(StandIn::new().set("SEED", 9), test, || {
        let requests: Vec<_> = (0..12)
            .map(|index| {
                let prompt: Vec<_> = (0..5 + index).map(|i| (i * 17 + index) % 90 + 3).collect();
                Request::greedy(&prompt, 4 + index % 5)
            })
            .collect();
        let setup = Setup {
            max_num_requests: 12,
            ..Setup::default()
        };
        let served = |max_graphs| {
            let options = CudaOptions {
                deterministic: true,
                max_graphs,
                ..CudaOptions::default()
            };
            let mut runner = setup.load_on::<Cuda>(&fixture("qwen2-moe"), &options);
            serve(&mut runner, &setup, &requests).0
        };
        for (with, without) in served(16).iter().zip(&served(0)) {
            assert_same_bits("with graphs", with, without);
        }
    });
}

/// The KV cache gets what is left, so that no less may be counted than is reserved.
#[test]
fn the_memory_of_mixtures_is_counted() {
    let test = "cuda_experts::the_memory_of_mixtures_is_counted";
    on_stand_in(StandIn::new(), test, || {
        let options = CudaOptions::default();
        for name in ["qwen2-moe", "phimoe", "deepseek-v2"] {
            let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
            let memory = |max_num_tokens| {
                let limits = Setup {
                    max_num_tokens,
                    ..Setup::default()
                }
                .runner_limits();
                let counted = num_step_bytes(&source, &limits, &options);
                let free = || free_memory_bytes(0).expect("a GPU");
                let before = free();
                let runner = load_on_gpu(&source, limits, &options);
                let runner = runner.expect("the checkpoint loads");
                let taken = before - free();
                drop(runner);
                (counted.expect("all tensors"), taken)
            };
            let [small, large] = [1 << 10, 1 << 16].map(memory);
            let (counted, taken) = (large.0 - small.0, large.1 - small.1);
            println!("{name}: {counted} bytes counted, {taken} taken");
            // What a step uploads is not counted by its tokens, but with all other small things.
            assert!(
                taken > 64 << 20 && taken <= counted + (4 << 20),
                "{name}: {taken} bytes are taken, and {counted} counted"
            );
        }
    });
}

/// Those in MXFP4 have 4 bits, and a scale for 32 weights; each begins with 16 rows of its own.
#[test]
fn the_weights_of_quantised_experts_are_counted_with_their_padding() {
    let source = ModelSource::open(&fixture("gpt-oss-mxfp4")).expect("the fixture opens");
    let spec = source.spec();
    let experts = spec.mixture().expect("experts");
    let (hidden, inner) = (experts.hidden_size, experts.expert_size);
    let tiles = |rows: usize, columns: usize| {
        rows.div_ceil(16) * 16 * (columns.div_ceil(64) * 32 + columns.div_ceil(32) * 2)
    };
    let of_expert = 2 * tiles(inner, hidden) + tiles(hidden, inner);
    let stored_weights = 3 * hidden * inner;
    let num_experts = (spec.layers.len() * experts.routing.num_experts) as u64;
    let in_bf16 = spec.num_weight_bytes() - num_experts * 2 * stored_weights as u64;
    let counted = CudaRunner::num_weight_bytes(&source, None).expect("all tensors");
    assert_eq!(counted, in_bf16 + num_experts * of_expert as u64);
}

/// Which experts a token has depends on rounding, so it has all of them here.
pub fn with_all_experts(name: &str) -> Copy {
    let config = std::fs::read(fixture(name).join("config.json")).expect("a config");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    let num_experts = ["num_local_experts", "num_experts", "n_routed_experts"]
        .iter()
        .find_map(|key| config.get(key));
    let num_experts = num_experts.expect("experts").clone();
    let copy = Copy::of(name).config(json!({"num_experts_per_tok": num_experts}));
    match config.get("n_group") {
        Some(num_groups) => copy.config(json!({"topk_group": num_groups})),
        None => copy,
    }
}

#[test]
fn quantised_experts_agree_with_the_reference_device() {
    let test = "cuda_experts::quantised_experts_agree_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        let rounded = |bits, group_size| Setup {
            weights: Some(WeightPrecision { bits, group_size }),
            ..wide(&Setup::default(), 256)
        };
        for (name, setup) in [
            ("gpt-oss-mxfp4", wide(&Setup::default(), 256)),
            ("mixtral", rounded(CodeBits::Eight, 128)),
            // A group ends within the 40 inputs of down.
            ("mixtral", rounded(CodeBits::Eight, 32)),
            ("qwen2-moe", rounded(CodeBits::Four, 32)),
            ("olmoe", rounded(CodeBits::Fp8, 128)),
        ] {
            let copy = with_all_experts(name);
            let requests = [requests(), long_requests()].concat();
            let options = CudaOptions::default();
            let what = format!("{name}, {:?}", setup.weights);
            assert_agrees_with_reference::<Cuda>(
                &what,
                copy.dir(),
                &options,
                &setup,
                &requests,
                TOLERANCE,
            );
        }
    });
}

#[test]
fn a_request_has_the_same_bits_alone_with_quantised_experts() {
    let test = "cuda_experts::a_request_has_the_same_bits_alone_with_quantised_experts";
    on_any_gpu(StandIn::new(), test, || {
        let options = CudaOptions {
            deterministic: true,
            ..CudaOptions::default()
        };
        let setup = wide(&Setup::default(), 24);
        let folder = fixture("gpt-oss-mxfp4");
        assert_same_alone::<Cuda>("gpt-oss-mxfp4", &folder, &options, &setup, requests());
    });
}
