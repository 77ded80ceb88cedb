//! Mixtures of experts on the stand-in for a GPU; `cuda.rs` compares them with the reference device.

use inflight_cuda_stand_in::StandIn;
use triton_inflight::device::CodeBits;
use triton_inflight::device::cuda::{Cuda, CudaOptions, free_memory_bytes};
use triton_inflight::runner::{CudaRunner, ModelRunner, ModelSource, WeightPrecision};

use crate::cuda::on_stand_in;
use crate::devices::{assert_devices_agree, assert_same_bits};
use crate::support::{Request, Setup, fixture, serve};

/// Steps of 9 to 12 sequences are rounded up to 16 rows for a graph: no row depends on those that fill it up.
#[test]
fn graphs_change_no_bits_of_mixtures() {
    let test = "cuda_experts::graphs_change_no_bits_of_mixtures";
    on_stand_in(StandIn::new().set("SEED", 9), test, || {
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
        for name in ["qwen2-moe", "phimoe"] {
            let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
            let memory = |max_num_tokens| {
                let limits = Setup {
                    max_num_tokens,
                    ..Setup::default()
                }
                .runner_limits();
                let counted = CudaRunner::num_step_bytes(&source, &limits, &options);
                let free = || free_memory_bytes(0).expect("a GPU");
                let before = free();
                let runner = ModelRunner::<Cuda>::new(&source, limits, &options);
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

#[test]
fn quantised_experts_are_refused_on_a_gpu() {
    let test = "cuda_experts::quantised_experts_are_refused_on_a_gpu";
    on_stand_in(StandIn::new(), test, || {
        let options = CudaOptions::default();
        let rounded = Setup {
            weights: Some(WeightPrecision {
                bits: CodeBits::Eight,
                group_size: 32,
            }),
            ..Setup::default()
        };
        let refused = |name: &str, setup: &Setup, parts: &[&str]| {
            let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
            let error = CudaRunner::new(&source, setup.runner_limits(), &options).err();
            let error = error.expect("refused").to_string();
            for part in parts {
                assert!(error.contains(part), "{error}");
            }
        };
        let quantised = ["quantised", "bf16 only", "KIND_CPU"];
        let of = |name| [&[name], &quantised[..]].concat();
        let w1 = "model.layers.0.block_sparse_moe.experts.0.w1.weight";
        refused("mixtral", &rounded, &of(w1));
        let all = "model.layers.0.mlp.experts.gate_up_proj";
        refused("gpt-oss-mxfp4", &Setup::default(), &of(all));
        let latent = ["DeepseekV2ForCausalLM", "latent attention", "KIND_CPU"];
        refused("deepseek-v2", &Setup::default(), &latent);
        // The GPU is as good as before.
        assert_devices_agree::<Cuda>("llama3", &options);
    });
}
