//! Models of mixed windows on the stand-in for a GPU, with KV cache blocks by windows.

use inflight_cuda_stand_in::StandIn;
use inflight_device::KvDtype;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::BlockReuse;

use crate::batching::requests_that_share;
use crate::cuda::{on_any_gpu, on_stand_in};
use crate::cuda_ranks::{lead_on, serve_on};
use crate::kv_groups::{in_one, setup, with_pauses};
use crate::rank_processes::PATIENT;
use crate::ranks::assert_same;
use crate::schedules::grid;
use crate::support::{Setup, fixture, serve};

#[test]
fn blocks_by_windows_change_nothing_on_a_gpu() {
    let test = "cuda_kv_groups::blocks_by_windows_change_nothing_on_a_gpu";
    on_any_gpu(StandIn::new(), test, || {
        let requests = requests_that_share();
        for (name, kv_dtype) in [("gemma3", KvDtype::Int8), ("gpt-oss", KvDtype::Fp8)] {
            let served = |setup: &Setup, max_graphs: usize| {
                let options = CudaOptions {
                    deterministic: true,
                    max_graphs,
                    ..CudaOptions::default()
                };
                let mut runner = setup.load_on::<Cuda>(&fixture(name), &options);
                serve(&mut runner, setup, &requests)
            };
            let chunked = setup(name, &[]);
            // Blocks that a group does not see are taken away from the runner.
            let moving = Setup {
                moves_blocks: true,
                num_runner_blocks: Some(330),
                reuse: BlockReuse::Off,
                ..chunked.clone()
            };
            let (expected, _) = served(&in_one(&chunked), 64);
            let (same, happened) = served(&chunked, 64);
            assert_same(name, &expected, &same);
            assert!(
                happened.num_holes > 50 && happened.num_copies > 5,
                "{name}: {happened:?}"
            );
            let (same, happened) = served(&moving, 0);
            assert_same(&format!("{name}, moves"), &expected, &same);
            assert!(happened.num_moves > 50, "{name}: {happened:?}");
            let paused = with_pauses(kv_dtype, &chunked);
            let (expected, _) = served(&in_one(&paused), 64);
            let (same, happened) = served(&paused, 64);
            assert_same(&format!("{name}, {kv_dtype}"), &expected, &same);
            assert!(
                happened.num_pauses > 0 && happened.num_onboarded > 0,
                "{name}: {happened:?}"
            );
        }
    });
}

#[test]
fn several_gpus_keep_the_same_groups() {
    let test = "cuda_kv_groups::several_gpus_keep_the_same_groups";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let requests = requests_that_share();
        let name = "gemma3";
        let chunked = setup(name, &[]);
        let (many, few) = ((true, 64), with_pauses(KvDtype::Bf16, &chunked));
        let expected = serve_on(name, &in_one(&chunked), &requests, 2, many);
        for setup in [&chunked, &few] {
            assert_same(
                "2 GPUs",
                &expected,
                &serve_on(name, setup, &requests, 2, many),
            );
        }
        let expected = serve_on(name, &in_one(&chunked), &requests, 1, many);
        for setup in [&chunked, &few] {
            let stages = lead_on(name, setup, &[0, 1], grid(2, 1), PATIENT.step);
            let (served, happened) = serve(&mut stages.expect("it loads"), setup, &requests);
            assert_same("2 stages", &expected, &served);
            assert!(happened.num_holes > 50, "{happened:?}");
        }
    });
}
