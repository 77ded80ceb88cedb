//! The memory of several GPUs: what is counted before a model is loaded is what each takes, as the KV cache gets the rest.

use std::path::Path;

use inflight_cuda_stand_in::StandIn;
use serde_json::json;
use triton_inflight::base::BlockSize;
use triton_inflight::device::CodeBits;
use triton_inflight::device::cuda::free_memory_bytes;
use triton_inflight::runner::{CudaRunner, ModelSource, WeightPrecision};

use crate::copy::Copy;
use crate::cuda::on_stand_in;
use crate::cuda_rank_experts::with_wide_experts;
use crate::cuda_ranks::{PATIENT, load, on_ranks, options};
use crate::ranks::{Sizes, random_llama};
use crate::support::{Setup, fixture};

/// What allocations are rounded up by, and small ones that are not counted one by one.
const SMALL: u64 = 192 << 10;

/// Bytes that a model takes on each of so many GPUs.
fn taken(dir: &Path, setup: &Setup, num_ranks: usize) -> Vec<u64> {
    on_ranks(num_ranks, |rank, collective| {
        let free = || free_memory_bytes(rank).expect("a GPU");
        let before = free();
        let runner = load(dir, setup, &options(rank, false, 0), collective, PATIENT);
        let runner = runner.expect("it loads");
        let taken = before - free();
        drop(runner);
        taken
    })
}

/// Bytes of keys and values on each of so many GPUs.
fn keys_and_values(dir: &Path, setup: &Setup, num_ranks: usize) -> Vec<u64> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let specs = source.specs_of_ranks_with(num_ranks, false);
    let block_size = BlockSize::new(setup.block_size).expect("not zero");
    let of_ranks = specs.expect("it can be split").into_iter().map(|spec| {
        let num_bytes = CudaRunner::kv_bytes_per_block(&spec, block_size, setup.kv_dtype);
        u64::from(setup.num_blocks) * num_bytes as u64
    });
    of_ranks.collect()
}

/// Bytes of weights, keys and values on each of so many GPUs.
fn counted(dir: &Path, setup: &Setup, num_ranks: usize) -> Vec<u64> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let weights = CudaRunner::num_weight_bytes_of_ranks(&source, setup.weights, num_ranks);
    let weights = weights.expect("all tensors").into_iter();
    let both = weights.zip(keys_and_values(dir, setup, num_ranks));
    both.map(|(weights, keys_and_values)| weights + keys_and_values)
        .collect()
}

fn differences(large: &[u64], small: &[u64]) -> Vec<u64> {
    large.iter().zip(small).map(|(a, b)| a - b).collect()
}

/// Setups with few tokens, so that activations are small.
fn setup(weights: Option<WeightPrecision>) -> Setup {
    Setup {
        weights,
        max_num_tokens: 32,
        max_num_requests: 4,
        enable_chunked_context: true,
        ..Setup::default()
    }
}

fn assert_counted(what: &str, sizes: [&Copy; 2], setup: &Setup, num_ranks: usize) {
    let [small, large] = sizes.map(Copy::dir);
    let [taken, counted] = [taken, counted].map(|bytes| {
        let [small, large] = [small, large].map(|dir| bytes(dir, setup, num_ranks));
        differences(&large, &small)
    });
    println!("{what}, {num_ranks} GPUs: {counted:?} bytes counted, {taken:?} taken");
    for (counted, taken) in counted.iter().zip(&taken) {
        assert!(*counted > 3 * SMALL, "{what}");
        assert!(counted.abs_diff(*taken) < SMALL, "{what}");
    }
}

/// 3 key heads, which GPUs do not share evenly, and experts, in groups that are cut as well.
#[test]
fn the_weights_of_each_gpu_are_counted() {
    let test = "cuda_rank_memory::the_weights_of_each_gpu_are_counted";
    on_stand_in(StandIn::new().set("DEVICES", 3), test, || {
        // Models that differ by layers have the same activations.
        let sizes = Sizes {
            num_heads: 6,
            num_kv_heads: 3,
            head_dim: 32,
            intermediate_size: 4096,
            vocab_size: 96,
        };
        let dense = [1, 5].map(|num_layers| random_llama(sizes, num_layers));
        let experts = [1, 3].map(|num_layers| {
            with_wide_experts(192 * 20).config(json!({"num_hidden_layers": num_layers}))
        });
        let int4 = WeightPrecision {
            bits: CodeBits::Four,
            group_size: 128,
        };
        for (what, sizes, weights, num_ranks) in [
            ("dense", &dense, None, 2),
            ("dense", &dense, None, 3),
            ("experts", &experts, None, 2),
            ("experts", &experts, Some(int4), 2),
        ] {
            assert_counted(what, sizes.each_ref(), &setup(weights), num_ranks);
        }
    });
}

#[test]
fn the_keys_and_values_of_each_gpu_are_counted() {
    let test = "cuda_rank_memory::the_keys_and_values_of_each_gpu_are_counted";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        // 3 key heads, and latents, which each GPU has.
        for (name, num_ranks) in [("phi3", 2), ("phimoe", 4), ("deepseek-v3", 2)] {
            let dir = fixture(name);
            let few = setup(None);
            let many = Setup {
                num_blocks: few.num_blocks + 2000,
                ..few.clone()
            };
            let [taken, counted] = [taken, keys_and_values].map(|bytes| {
                let [few, many] = [&few, &many].map(|setup| bytes(&dir, setup, num_ranks));
                differences(&many, &few)
            });
            println!("{name}: {counted:?} bytes counted, {taken:?} taken");
            for (counted, taken) in counted.iter().zip(&taken) {
                assert!(counted.abs_diff(*taken) < SMALL, "{name}");
            }
        }
    });
}

/// Activations, and rows of experts and of logits.
#[test]
fn the_steps_of_each_gpu_are_counted() {
    let test = "cuda_rank_memory::the_steps_of_each_gpu_are_counted";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        for name in ["llama3", "qwen2-moe"] {
            let dir = fixture(name);
            let source = ModelSource::open(&dir).expect("the checkpoint opens");
            let [small, large] = [1 << 10, 1 << 16].map(|max_num_tokens| Setup {
                max_num_tokens,
                ..setup(None)
            });
            let counted = |setup: &Setup| {
                let limits = setup.runner_limits();
                let counted =
                    CudaRunner::num_step_bytes(&source, &limits, &options(0, false, 0), 2);
                counted.expect("all tensors")
            };
            let counted = differences(&counted(&large), &counted(&small));
            let taken = differences(&taken(&dir, &large, 2), &taken(&dir, &small, 2));
            println!("{name}: {counted:?} bytes counted, {taken:?} taken");
            for (counted, taken) in counted.iter().zip(&taken) {
                // What a step uploads is counted with all other small things.
                assert!(*taken <= counted + (4 << 20), "{name}");
                assert!(*taken >= counted * 3 / 4, "{name}");
            }
        }
    });
}
