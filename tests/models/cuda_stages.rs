//! One model whose layers are in stages on several GPUs: processes with the stand-ins for GPUs and for NCCL.
//!
//! The oracle is one GPU, or as many as a stage has: every bit is the same.

use std::time::{Duration, Instant};

use inflight_cuda_stand_in::{StandIn, set};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::OutputOptions;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;

use crate::cuda::{on_stand_in, sampled_requests};
use crate::cuda_ranks::{lead_on, serve_on};
use crate::devices::{requests, setups};
use crate::rank_processes::compute;
use crate::ranks::{PATIENT, assert_same};
use crate::schedules::{grid, requests_of_few_tokens, requests_with_outputs};
use crate::stage_processes::serve_overlapped;
use crate::support::{Request, Served, Setup, fixture, serve};

/// 3 layers.
const MODEL: &str = "qwen3-windows";

/// Those of several setups, and some that a GPU samples itself if it is alone.
fn all_requests() -> Vec<Request> {
    let mut all = requests();
    all.extend(sampled_requests());
    for request in all.iter_mut().step_by(2) {
        request.outputs = OutputOptions {
            context_logits: true,
            generation_logits: true,
            ..request.outputs
        };
    }
    all
}

fn serve_on_one(name: &str, setup: &Setup, requests: &[Request]) -> Vec<Served> {
    let options = CudaOptions {
        deterministic: true,
        max_graphs: 64,
        ..CudaOptions::default()
    };
    let mut runner = setup.load_on::<Cuda>(&fixture(name), &options);
    serve(&mut runner, setup, requests).0
}

#[test]
fn stages_on_gpus_have_the_bits_of_one_gpu() {
    let test = "cuda_stages::stages_on_gpus_have_the_bits_of_one_gpu";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let all = all_requests();
        let grids = [(grid(2, 1), &[1, 0][..]), (grid(3, 1), &[0, 1, 2])];
        for ((what, setup), (grid, gpus)) in setups().into_iter().zip(grids.into_iter().cycle()) {
            let alone = serve_on_one(MODEL, &setup, &all);
            let leader = lead_on(MODEL, &setup, gpus, grid, PATIENT);
            let (served, _) = serve(&mut leader.expect("it loads"), &setup, &all);
            assert_same(&format!("{what}, {grid:?}"), &alone, &served);
        }
        let (what, setup) = setups().swap_remove(1);
        let of_two = serve_on(MODEL, &setup, &all, 2, (true, 64));
        let leader = lead_on(MODEL, &setup, &[0, 1, 2, 3], grid(2, 2), PATIENT);
        let (served, _) = serve(&mut leader.expect("it loads"), &setup, &all);
        assert_same(&format!("{what}, stages of two GPUs"), &of_two, &served);
    });
}

/// A stage of one GPU has whole layers, of all that one GPU computes.
#[test]
fn stages_of_one_gpu_have_quantised_weights_and_experts() {
    let test = "cuda_stages::stages_of_one_gpu_have_quantised_weights_and_experts";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let float = Setup::default();
        let rounded = |bits| Setup {
            weights: WeightPrecision::new(bits).into(),
            ..Setup::default()
        };
        let (int8, fp8) = (rounded(CodeBits::Eight), rounded(CodeBits::Fp8));
        for (name, setup) in [
            ("quantised/awq", &float),
            ("qwen2-moe", &float),
            ("olmo2", &float),
            ("deepseek-v3", &float),
            ("llama3", &int8),
            ("qwen2", &fp8),
        ] {
            let requests = requests_of_few_tokens();
            let alone = serve_on_one(name, setup, &requests);
            let leader = lead_on(name, setup, &[0, 1], grid(2, 1), PATIENT);
            let (served, _) = serve(&mut leader.expect("it loads"), setup, &requests);
            assert_same(name, &alone, &served);
        }
    });
}

#[test]
fn micro_batches_on_stages_of_gpus_change_nothing() {
    let test = "cuda_stages::micro_batches_on_stages_of_gpus_change_nothing";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let asked = requests_with_outputs();
        let (what, setup) = setups().swap_remove(1);
        let one = CudaOptions {
            deterministic: true,
            max_graphs: 64,
            ..CudaOptions::default()
        };
        let one = setup.load_on::<Cuda>(&fixture(MODEL), &one);
        let expected = serve_overlapped(one, &setup, &asked);
        let leader = lead_on(MODEL, &setup, &[0, 1, 2], grid(3, 1), PATIENT);
        let leader = Box::new(leader.expect("it loads"));
        let served = serve_overlapped(leader, &setup, &asked);
        assert_same(&format!("{what}, micro-batches"), &expected, &served);
        // Stages of two GPUs, and one stage of two.
        let [expected, served] = [grid(1, 2), grid(2, 2)].map(|grid| {
            let gpus: Vec<_> = (0..grid.num_ranks()).collect();
            let leader = lead_on(MODEL, &setup, &gpus, grid, PATIENT);
            let leader = Box::new(leader.expect("it loads"));
            serve_overlapped(leader, &setup, &asked)
        });
        let what = format!("{what}, micro-batches on stages of two GPUs");
        assert_same(&what, &expected, &served);
    });
}

#[test]
fn a_gpu_of_a_stage_that_fails_is_an_error_within_the_time_limit() {
    let test = "cuda_stages::a_gpu_of_a_stage_that_fails_is_an_error_within_the_time_limit";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let setup = Setup::default();
        let time_limit = Duration::from_secs(2);
        let leader = lead_on(MODEL, &setup, &[0, 1], grid(2, 1), time_limit);
        let mut leader = leader.expect("it loads");
        compute(&mut leader, &setup).expect("it computes");
        let started = Instant::now();
        set("LOSE_DEVICE", 20);
        let failed = compute(&mut leader, &setup);
        let error = failed.expect_err("GPU 0 is lost").0;
        assert!(
            error.contains("GPU 0") && error.contains("ILLEGAL_ADDRESS"),
            "{error}"
        );
        assert!(started.elapsed() < PATIENT / 2);
    });
}
