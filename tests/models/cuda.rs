//! The decoder on the stand-in for a GPU, compared with the CPU and with itself.

use inflight_cuda_stand_in::StandIn;
use triton_inflight::device::cuda::{Cuda, CudaOptions, has_kernels};

use crate::devices::{
    assert_devices_agree, assert_host_blocks_change_nothing, assert_same_bits, requests, setups,
};
use crate::missing::present_or_reported;
use crate::support::{Setup, fixture, serve};

/// Runs the body of a test, whose path is given, on the stand-in, in a process of its own.
pub fn on_stand_in(stand_in: StandIn, test: &str, body: impl FnOnce()) {
    if present_or_reported(&"CUDA kernels (`cargo xtask kernels`)", has_kernels()) {
        stand_in.run(test, body);
    }
}

/// The same, or on the real GPU whose number `INFLIGHT_TEST_GPU` is.
fn on_a_gpu(stand_in: StandIn, test: &str, body: impl FnOnce(CudaOptions)) {
    let gpu = std::env::var("INFLIGHT_TEST_GPU").ok();
    let options = CudaOptions {
        gpu: gpu
            .as_deref()
            .map_or(0, |gpu| gpu.parse().expect("a number")),
        ..CudaOptions::default()
    };
    match gpu {
        Some(_) => body(options),
        None => on_stand_in(stand_in, &format!("cuda::{test}"), || body(options)),
    }
}

#[test]
fn the_cpu_and_a_gpu_agree() {
    on_a_gpu(StandIn::new(), "the_cpu_and_a_gpu_agree", |options| {
        for name in ["llama3", "qwen2", "qwen3"] {
            assert_devices_agree::<Cuda>(name, &options);
        }
    });
}

#[test]
fn a_request_alone_gives_the_same_bits_on_a_gpu() {
    let test = "a_request_alone_gives_the_same_bits_on_a_gpu";
    on_a_gpu(StandIn::new().set("SEED", 7), test, |options| {
        let options = CudaOptions {
            deterministic: true,
            ..options
        };
        let load = |setup: &Setup| setup.load_on::<Cuda>(&fixture("llama3"), &options);
        for (what, setup) in setups() {
            let (together, _) = serve(&mut load(&setup), &setup, &requests());
            let alone = Setup {
                max_num_requests: 1,
                enable_chunked_context: false,
                max_num_tokens: 256,
                speculation: None,
                ..setup.clone()
            };
            for (request, together) in requests().into_iter().zip(together) {
                let (alone, _) = serve(&mut load(&alone), &alone, &[request]);
                assert_same_bits(what, &alone[0], &together);
            }
        }
    });
}

#[test]
fn what_comes_back_from_pinned_memory_gives_the_same_bits() {
    let test = "cuda::what_comes_back_from_pinned_memory_gives_the_same_bits";
    on_stand_in(StandIn::new().set("SEED", 11), test, || {
        let options = CudaOptions {
            deterministic: true,
            ..CudaOptions::default()
        };
        assert_host_blocks_change_nothing::<Cuda>("llama3", &options);
    });
}
