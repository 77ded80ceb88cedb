//! One model on several GPUs, over NCCL: threads with the stand-ins for GPUs and for NCCL.

use std::path::Path;
use std::time::{Duration, Instant};

use inflight_base::{LoadError, StepError};
use inflight_collective::Grid;
use inflight_cuda_stand_in::{StandIn, set};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::{BlockReuse, Engine, OutputOptions, StepOutput};
use inflight_machines::{LeadingRunner, RankLimits, RankTransport, load_rank_on_gpu};
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, RankOptions, WeightPrecision};
use serde_json::json;

use crate::adapters::{adapter, adapter_of_gpus, in_turns};
use crate::cuda::{on_stand_in, sampled_requests};
use crate::cuda_fp8::{mean_difference, with_fp8_activations};
use crate::cuda_quantised::{fp8_checkpoint, long_requests};
use crate::devices::{
    assert_near, assert_near_by_cost, largest_first_error, requests, setups, with_sinks_that_shift,
};
use crate::fp8::{Scales, copies};
use crate::rank_states;
use crate::ranks::{PATIENT, RankRunner, RankThread, assert_same, on_ranks};
use crate::schedules::{grid, requests_of_few_tokens};
use crate::support::{CallRunner, Request, Served, Setup, fixture, new_request, serve};
use crate::transformers::bf16_cost;

pub fn options(gpu: usize, deterministic: bool, max_graphs: usize) -> CudaOptions {
    CudaOptions {
        gpu,
        deterministic,
        max_graphs,
        ..CudaOptions::default()
    }
}

pub fn load(
    dir: &Path,
    setup: &Setup,
    options: &CudaOptions,
    rank: RankThread,
    time_limit: Duration,
) -> Result<RankRunner, LoadError> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    rank.load(|collective| {
        let rank = RankOptions {
            collective,
            time_limit,
        };
        load_rank_on_gpu(&source, setup.runner_limits(), options, rank)
    })
}

/// Serves requests on so many GPUs, each with an engine of its own.
pub fn serve_on(
    name: &str,
    setup: &Setup,
    requests: &[Request],
    num_ranks: usize,
    how: (bool, usize),
) -> Vec<Served> {
    serve_dir_on(&fixture(name), setup, requests, num_ranks, how)
}

/// The same with the checkpoint in a folder.
pub fn serve_dir_on(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    num_ranks: usize,
    (deterministic, max_graphs): (bool, usize),
) -> Vec<Served> {
    let options = options(0, deterministic, max_graphs);
    serve_with(dir, setup, requests, num_ranks, &options)
}

/// The same with these options, but for the GPU.
fn serve_with(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    num_ranks: usize,
    options: &CudaOptions,
) -> Vec<Served> {
    let mut served = on_ranks(num_ranks, |rank| {
        let options = CudaOptions {
            gpu: rank.rank,
            ..options.clone()
        };
        let runner = load(dir, setup, &options, rank, PATIENT);
        serve(&mut runner.expect("it loads"), setup, requests).0
    });
    served.swap_remove(0)
}

/// Tied embeddings, biases, blocks side by side, norms behind blocks, slopes of heads, norms of residual
/// sums, narrow embeddings, and 3 key heads that divide by nothing.
#[test]
fn several_gpus_compute_what_the_cpu_does() {
    let test = "cuda_ranks::several_gpus_compute_what_the_cpu_does";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let setups = setups();
        for (name, num_ranks, (what, setup)) in [
            ("llama3", 2, &setups[0]),
            ("qwen2", 4, &setups[1]),
            ("gemma3", 2, &setups[2]),
            ("phi3", 3, &setups[1]),
            ("falcon", 2, &setups[0]),
            ("bloom", 2, &setups[0]),
            ("opt-350m", 2, &setups[1]),
        ] {
            let (ours, _) = serve(&mut setup.load(name), setup, &requests());
            for deterministic in [false, true] {
                let how = (deterministic, 64);
                let theirs = serve_on(name, setup, &requests(), num_ranks, how);
                assert_near(
                    &format!("{name}, {what}, {num_ranks} GPUs"),
                    &ours,
                    &theirs,
                    0.1,
                );
            }
        }
    });
}

/// Their squares are summed over the GPUs. On 4 GPUs a key head is on two of them, and counts once.
#[test]
fn several_gpus_normalise_queries_and_keys_over_all_heads() {
    let test = "cuda_ranks::several_gpus_normalise_queries_and_keys_over_all_heads";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        for (num_ranks, (what, setup)) in [2, 3, 4].into_iter().zip(setups()) {
            let what = format!("{what}, {num_ranks} GPUs");
            let (ours, _) = serve(&mut setup.load("olmo2"), &setup, &requests());
            let together = serve_on("olmo2", &setup, &requests(), num_ranks, (true, 64));
            assert_near(&what, &ours, &together, 0.1);
            let alone = serve_on("olmo2", &setup, &requests()[1..2], num_ranks, (true, 0));
            assert_same(&what, &alone, &together[1..2]);
        }
    });
}

/// Channels, value heads with and without late inputs, heads of a norm, and channels with common keys.
#[test]
fn several_gpus_have_the_states_of_their_heads() {
    let test = "cuda_ranks::several_gpus_have_the_states_of_their_heads";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        for (name, num_ranks) in [
            ("lfm2", 2),
            ("qwen3-5", 2),
            ("kimi-linear", 2),
            ("nemotron-h", 2),
            ("falcon-h1", 2),
            ("mamba", 2),
        ] {
            let what = format!("{name}, {num_ranks} GPUs");
            let setup = Setup::default();
            let (ours, _) = serve(&mut setup.load(name), &setup, &requests());
            let theirs = serve_on(name, &setup, &requests(), num_ranks, (false, 64));
            // A CPU and GPUs that cut sums, of which each rounds.
            assert_near_by_cost(&what, &ours, &theirs, 2.0 * bf16_cost(name));
        }
        let name = "qwen3-5";
        for (what, setup, requests) in rank_states::schedules(name) {
            let together = serve_on(name, &setup, &requests, 2, (true, 64));
            let roomy = Setup {
                num_blocks: 64,
                reuse: BlockReuse::Off,
                num_state_snapshots: 0,
                num_host_state_snapshots: 0,
                num_host_blocks: 0,
                ..setup
            };
            for index in [0, 5] {
                let alone = serve_on(name, &roomy, &requests[index..=index], 2, (true, 0));
                assert_same(what, &alone, &together[index..=index]);
            }
        }
    });
}

#[test]
fn sinks_shift_on_several_gpus() {
    let test = "cuda_ranks::sinks_shift_on_several_gpus";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let (name, setup) = ("qwen3", with_sinks_that_shift());
        let (ours, _) = serve(&mut setup.load(name), &setup, &requests());
        let together = serve_on(name, &setup, &requests(), 2, (true, 64));
        assert_near(name, &ours, &together, 0.1);
        let alone = serve_on(name, &setup, &requests()[3..4], 2, (true, 0));
        assert_same(name, &alone, &together[3..4]);
    });
}

/// NCCL sums so many values in one order, and more in another one.
#[test]
fn deterministic_sums_of_gpus_do_not_depend_on_the_batch_nor_on_graphs() {
    let test = "cuda_ranks::deterministic_sums_of_gpus_do_not_depend_on_the_batch_nor_on_graphs";
    on_stand_in(StandIn::new().set("DEVICES", 3), test, || {
        let (_, setup) = setups().swap_remove(0);
        let mut all = requests();
        all.extend(sampled_requests());
        let together = serve_on("llama3", &setup, &all, 3, (true, 64));
        let launched = serve_on("llama3", &setup, &all, 3, (true, 0));
        assert_same("without graphs", &together, &launched);
        let alone = Setup {
            max_num_requests: 1,
            enable_chunked_context: false,
            max_num_tokens: 256,
            ..setup
        };
        for (request, together) in all.iter().zip(together).step_by(3) {
            let request = std::slice::from_ref(request);
            let alone = serve_on("llama3", &alone, request, 3, (true, 64));
            assert_same("alone", &alone, &[together]);
        }
    });
}

/// Steps of 1100 and 2300 rows, whose sums have two and four pieces.
#[test]
fn sums_of_many_rows_run_beside_products() {
    let test = "cuda_ranks::sums_of_many_rows_run_beside_products";
    on_stand_in(StandIn::new().set("DEVICES", 3), test, || {
        for (name, num_requests, num_ranks) in [("llama3", 11, 2), ("qwen2", 23, 3)] {
            let setup = one_step_of(num_requests);
            let requests = requests_of_100_tokens(num_requests);
            let (ours, _) = serve(&mut setup.load(name), &setup, &requests);
            let theirs = serve_on(name, &setup, &requests, num_ranks, (false, 64));
            let what = format!("{name}, {num_requests} requests, {num_ranks} GPUs");
            assert_near(&what, &ours, &theirs, 0.1);
        }
    });
}

fn one_step_of(num_requests: u32) -> Setup {
    Setup {
        max_num_requests: num_requests,
        max_seq_len: 128,
        max_num_tokens: 4096,
        num_blocks: 1024,
        ..Setup::default()
    }
}

fn requests_of_100_tokens(num_requests: u32) -> Vec<Request> {
    let prompt = |index| (0..100).map(move |i| (i * 37 + 11 * index) % 60 + 3);
    let request = |index| Request {
        outputs: OutputOptions {
            context_logits: true,
            ..OutputOptions::default()
        },
        ..Request::greedy(&prompt(index).collect::<Vec<_>>(), 3)
    };
    (0..num_requests).map(request).collect()
}

/// Serves requests to the first error.
fn failure(runner: &mut RankRunner, setup: &Setup, requests: &[Request]) -> Option<StepError> {
    let mut engine = Engine::new(setup.engine_config());
    for (index, request) in requests.iter().enumerate() {
        let request = new_request(index, request);
        engine.add(request).expect("a valid request");
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    while !engine.is_idle() {
        let step = engine.schedule();
        output.clear();
        for plan in step.plans() {
            if let Err(error) = runner.run(plan, &mut output) {
                return Some(error);
            }
        }
        engine.apply(step, &mut output, &mut events);
    }
    None
}

#[test]
fn a_gpu_that_fails_or_stalls_is_an_error_on_all_ranks_within_the_time_limit() {
    let test =
        "cuda_ranks::a_gpu_that_fails_or_stalls_is_an_error_on_all_ranks_within_the_time_limit";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let few_rows = (setups().swap_remove(0).1, requests(), 50);
        let many_rows = (one_step_of(11), requests_of_100_tokens(11), 10);
        for (setup, requests, at) in [few_rows, many_rows] {
            for (fault, reason) in [
                ("FAIL_COLLECTIVE", "internal error"),
                ("STALL_COLLECTIVE", "has waited for its GPU"),
                ("LOSE_DEVICE", "ILLEGAL_ADDRESS"),
            ] {
                let started = Instant::now();
                let errors = on_ranks(2, |rank| {
                    let index = rank.rank;
                    let (options, limit) = (options(index, false, 0), Duration::from_secs(2));
                    let runner = load(&fixture("llama3"), &setup, &options, rank, limit);
                    let mut runner = runner.expect("it loads");
                    if index == 0 {
                        // Among the operations of any of the ranks.
                        set(fault, at);
                    }
                    let error = failure(&mut runner, &setup, &requests);
                    error.expect("a rank fails").0
                });
                assert!(started.elapsed() < PATIENT / 2, "{fault}");
                let is_reason = |error: &String| error.contains(reason);
                assert!(errors.iter().any(is_reason), "{fault}: {errors:?}");
                let is_of_gpu = |error: &String| error.contains("GPU");
                assert!(errors.iter().all(is_of_gpu), "{errors:?}");
            }
        }
    });
}

/// Also with factors, biases, weights of the embedding and of the output layer in place of the model's, and stages.
#[test]
fn several_gpus_have_parts_of_adapters() {
    let test = "cuda_ranks::several_gpus_have_parts_of_adapters";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let (two, four) = (Grid::from(2), Grid::from(4));
        for (base, names, grid) in [
            ("llama3", ["outside-layers", "all-modules"], four),
            ("llama2", ["saved-modules", "dora-output-layer"], two),
            ("llama-biases", ["trained-biases", "dora"], grid(2, 2)),
            ("llama3", ["outside-layers", "rank-33"], grid(2, 1)),
        ] {
            let (dir, setup) = (fixture(base), Setup::default());
            let gpus: Vec<_> = (0..grid.num_ranks()).collect();
            let mut leader = lead_on(base, &setup, &gpus, grid, PATIENT).expect("it loads");
            let parts = names.map(|name| adapter_of_gpus(name, &dir, grid));
            let all = in_turns(&parts);
            let (together, _) = serve(&mut leader, &setup, &all);
            let what = format!("{base}, {names:?}, {grid:?}");
            for (request, together) in all.iter().zip(&together).take(2) {
                let (alone, _) = serve(&mut leader, &setup, std::slice::from_ref(request));
                assert_same(&what, &alone, std::slice::from_ref(together));
            }
            let whole = in_turns(&names.map(|name| adapter(name, &dir)));
            let mut one = setup.load_on::<Cuda>(&dir, &options(0, true, 64));
            let (expected, _) = serve(&mut one, &setup, &whole);
            match grid.ranks_per_stage {
                1 => assert_same(&what, &expected, &together),
                // The requests are sampled: up to the first token that differs, logits are near.
                _ => {
                    let third =
                        |all: &[Served]| -> Vec<_> { all.iter().step_by(3).cloned().collect() };
                    assert_near(&what, &third(&expected), &third(&together), 0.2);
                }
            }
        }
    });
}

#[test]
fn a_rank_that_ends_is_noticed_by_the_others() {
    let test = "cuda_ranks::a_rank_that_ends_is_noticed_by_the_others";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let (_, setup) = setups().swap_remove(0);
        let errors = on_ranks(2, |rank| {
            let index = rank.rank;
            let options = options(index, false, 64);
            let runner = load(&fixture("llama3"), &setup, &options, rank, PATIENT);
            let mut runner = runner.expect("it loads");
            // Rank 1 has nothing to compute, and ends.
            (index == 0).then(|| {
                failure(&mut runner, &setup, &requests())
                    .expect("it is alone")
                    .0
            })
        });
        let error = errors[0].as_ref().expect("an error");
        assert!(error.contains("rank 1 has ended"), "{error}");
    });
}

#[test]
fn two_ranks_need_two_gpus() {
    let test = "cuda_ranks::two_ranks_need_two_gpus";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let setup = Setup::default();
        let fail = |gpus: [usize; 2]| {
            let errors = on_ranks(2, |rank| {
                let options = options(gpus[rank.rank], false, 0);
                let loaded = load(&fixture("llama3"), &setup, &options, rank, PATIENT);
                loaded.err().expect("it is refused").to_string()
            });
            errors.join("\n")
        };
        assert!(fail([0, 0]).contains("invalid usage"));
        assert!(fail([0, 2]).contains("there is no GPU 2: the driver shows 2"));
    });
}

/// How far logits of several GPUs may be from one GPU's, in costs of rounding: a GPU rounds activations in more places
/// than the fixtures.
const MAX_COSTS: f32 = 1.5;

/// Checkpoints with codes of 4 and 8 bits, blocks of them, act order, blocks of FP8, and what is rounded at load.
#[test]
fn several_gpus_have_parts_of_quantised_weights() {
    let test = "cuda_ranks::several_gpus_have_parts_of_quantised_weights";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let float = Setup::default();
        let int8 = Setup {
            weights: WeightPrecision::new(CodeBits::Eight).into(),
            ..Setup::default()
        };
        let config = json!({"quant_method": "fp8", "weight_block_size": [24, 40]});
        let [fp8, _] = copies(Scales::Blocks([24, 40]), "weight_scale_inv", config);
        let quantised = |name| (fixture(name), name);
        let of_llama3 = |dir: &Path| (dir.to_owned(), "llama3");
        for ((dir, of), setup, num_ranks) in [
            (quantised("quantised/awq"), &float, 2),
            (quantised("quantised/gptq-act-order"), &float, 2),
            (quantised("quantised/compressed-w8a8"), &float, 3),
            (quantised("quantised/gguf-mixed"), &float, 2),
            (of_llama3(fp8.dir()), &float, 2),
            (of_llama3(&fixture("llama3")), &int8, 4),
        ] {
            let what = format!("{}, {num_ranks} GPUs", dir.display());
            let requests = requests_of_few_tokens();
            let mut one = setup.load_on::<Cuda>(&dir, &options(0, true, 64));
            let (expected, _) = serve(&mut one, setup, &requests);
            let together = serve_dir_on(&dir, setup, &requests, num_ranks, (true, 64));
            // Groups of a part begin elsewhere, so that other weights round to one scale.
            let cost = match setup.weights {
                Some(_) => {
                    let mut exact = float.load_on::<Cuda>(&dir, &options(0, true, 64));
                    let (exact, _) = serve(&mut exact, &float, &requests);
                    largest_first_error(&expected, &exact)
                }
                None => bf16_cost(of),
            };
            assert_near_by_cost(&what, &expected, &together, MAX_COSTS * cost);
            let alone = serve_dir_on(&dir, setup, &requests[1..2], num_ranks, (true, 0));
            assert_same(&what, &alone, &together[1..2]);
        }
    });
}

/// Each GPU rounds its part of a row by a scale of its own.
#[test]
fn several_gpus_round_activations_to_fp8() {
    let test = "cuda_ranks::several_gpus_round_activations_to_fp8";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let setup = Setup::default();
        let (fp8, exact) = (with_fp8_activations(), options(0, true, 64));
        for (scales, num_ranks) in [(Scales::Tensor, 2), (Scales::Channels, 4)] {
            let checkpoint = fp8_checkpoint(scales);
            let dir = checkpoint.dir();
            let mut one = setup.load_on::<Cuda>(dir, &fp8);
            let (one, _) = serve(&mut one, &setup, &long_requests());
            let together = serve_with(dir, &setup, &long_requests(), num_ranks, &fp8);
            let exact = serve_with(dir, &setup, &long_requests(), num_ranks, &exact);
            assert!(mean_difference(&together, &exact) > 0.0, "{scales:?}");
            // Two independent roundings would differ by 1.4 times what each does.
            let [of_rounding, of_parts] =
                [&exact, &together].map(|other| mean_difference(&one, other));
            println!("{scales:?}: {of_rounding} by rounding, {of_parts} by parts");
            assert!(of_parts < 1.4 * of_rounding, "{scales:?}");
            let alone = serve_with(dir, &setup, &long_requests()[1..2], num_ranks, &fp8);
            assert_same("alone", &alone, &together[1..2]);
        }
    });
}

/// The program of the other ranks: this one.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/rank.sh");

fn lead(gpus: &[usize], step: Duration) -> Result<LeadingRunner<Cuda>, LoadError> {
    lead_on("llama3", &leading_setup(), gpus, gpus.len(), step)
}

/// The first of the ranks of a grid, each a process with one of these GPUs. Sums do not depend on the batch.
pub fn lead_on(
    name: &str,
    setup: &Setup,
    gpus: &[usize],
    grid: impl Into<Grid>,
    step: Duration,
) -> Result<LeadingRunner<Cuda>, LoadError> {
    let source = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    let options = CudaOptions {
        rank_gpus: gpus.to_vec(),
        ..options(gpus[0], true, 64)
    };
    let time_limits = RankLimits {
        load: PATIENT,
        step,
    };
    let transport = RankTransport::Processes(PROGRAM.into());
    let ranks = transport.connect(grid, time_limits.load)?;
    LeadingRunner::new(ranks, &source, setup.runner_limits(), &options, time_limits)
}

fn leading_setup() -> Setup {
    setups().swap_remove(1).1
}

/// In a model that has no experts, a rank decides nothing by what its GPU computes.
#[test]
fn gpus_of_two_kinds_compute_the_same_bits_in_any_batch() {
    let test = "cuda_ranks::gpus_of_two_kinds_compute_the_same_bits_in_any_batch";
    let two_kinds = StandIn::new().set("DEVICES", 2).set("OTHER_CAPABILITY", 80);
    on_stand_in(two_kinds, test, || {
        let int4 = Setup {
            weights: Some(WeightPrecision::new(CodeBits::Four)),
            ..Setup::default()
        };
        for setup in [leading_setup(), int4] {
            let together = serve_on("llama3", &setup, &requests(), 2, (true, 64));
            let alone = serve_on("llama3", &setup, &requests()[1..2], 2, (true, 0));
            assert_same("alone", &alone, &together[1..2]);
            let (on_cpu, _) = serve(&mut setup.load("llama3"), &setup, &requests());
            assert_near("the CPU", &on_cpu, &together, 0.2);
        }
        // One of them cannot multiply FP8.
        let (setup, checkpoint) = (Setup::default(), fp8_checkpoint(Scales::Tensor));
        let errors = on_ranks(2, |rank| {
            let options = CudaOptions {
                gpu: rank.rank,
                ..with_fp8_activations()
            };
            let loaded = load(checkpoint.dir(), &setup, &options, rank, PATIENT);
            loaded.err().map(|error| error.to_string())
        });
        let error = errors[1].as_ref().expect("it is refused");
        let capability = "GPU 1 has compute capability 8.0";
        assert!(error.contains(capability), "{error}");
    });
}

/// Only rank 0 has an engine and samples; the others are told what to compute.
#[test]
fn processes_compute_what_threads_do_with_a_gpu_each() {
    let test = "cuda_ranks::processes_compute_what_threads_do_with_a_gpu_each";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let mut requests = requests();
        requests.extend(sampled_requests());
        let setup = leading_setup();
        let threads = serve_on("llama3", &setup, &requests, 2, (true, 64));
        // In any order of the GPUs.
        let mut leader = lead(&[1, 0], PATIENT).expect("it loads");
        let (processes, happened) = serve(&mut leader, &setup, &requests);
        assert_same("processes", &threads, &processes);
        assert!(happened.num_copies > 0 && happened.drafts.num_accepted > 0);
    });
}
