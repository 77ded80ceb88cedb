//! One model whose layers are in stages, each on a rank or on several: threads that serve the same requests.
//!
//! The oracle of stages of one rank is the runner of one process, and that of others is one stage of as many ranks:
//! every bit is the same. Only the first rank samples; the others take its results.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use inflight_base::{BlockSize, LoadError, StepError};
use inflight_collective::{Collective, Grid, Local};
use inflight_device::{KvDtype, RankRole};
use inflight_engine::{StepOutput, StepPlan};
use inflight_machines::load_rank_on_cpus;
use inflight_numbers::CodeBits;
use inflight_runner::{
    AdapterRoom, CpuRunner, ModelSource, ModelSpec, RankOptions, Runner, RunnerLimits,
    WeightPrecision,
};

use crate::batching;
use crate::devices::{requests, setups};
use crate::ranks::{MODELS, PATIENT, Sizes, assert_same, random_llama, together};
use crate::schedules::{assert_happened, beams, grid, schedules};
use crate::support::{CallRunner, Happened, Request, Served, Setup, fixture, serve, simds};

pub const fn stages(num_stages: usize) -> Grid {
    grid(num_stages, 1)
}

/// What the first rank has computed: results, and logits.
type Results = (StepOutput, Vec<f32>);

/// The first rank.
struct First {
    runner: Box<dyn Runner>,
    others: Vec<Sender<Results>>,
}

/// Another rank.
struct Other {
    runner: Box<dyn Runner>,
    first: Receiver<Results>,
    logits: Vec<f32>,
}

impl CallRunner for First {
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.runner.run(plan, output)?;
        for other in &self.others {
            let results = (output.clone(), self.runner.logits().to_vec());
            // One that has failed says so itself.
            let _ = other.send(results);
        }
        Ok(())
    }

    fn keep_all_logits(&mut self) {
        self.runner.keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        self.runner.logits()
    }

    fn vocab_size(&self) -> usize {
        self.runner.vocab_size()
    }
}

impl CallRunner for Other {
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        let own = (output.sampled.len(), output.extra_outputs.len());
        self.runner.run(plan, output)?;
        assert_eq!(own, (output.sampled.len(), output.extra_outputs.len()));
        (*output, self.logits) = self.first.recv().expect("the first rank has results");
        Ok(())
    }

    fn keep_all_logits(&mut self) {
        self.runner.keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        &self.logits
    }

    fn vocab_size(&self) -> usize {
        self.runner.vocab_size()
    }
}

fn load(
    dir: &Path,
    setup: &Setup,
    collective: Box<dyn Collective>,
    role: RankRole,
) -> Result<Box<dyn Runner>, LoadError> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let limits = RunnerLimits {
        adapters: AdapterRoom::default(),
        ..setup.runner_limits()
    };
    let rank = RankOptions {
        collective,
        role,
        time_limit: PATIENT,
    };
    load_rank_on_cpus(&source, limits, &setup.cpu_options(), rank)
}

/// Serves requests on stages, each rank in a thread with an engine of its own.
fn serve_on(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    grid: Grid,
) -> (Vec<Served>, Happened) {
    let mut ranks = Local::world(grid, PATIENT).into_iter();
    let first = ranks.next().expect("a rank");
    thread::scope(|scope| {
        let others = ranks.map(|rank| {
            let (results, first) = channel();
            scope.spawn(move || {
                let runner = load(dir, setup, Box::new(rank), RankRole::Computes);
                let mut other = Other {
                    runner: runner.expect("it loads"),
                    first,
                    logits: Vec::new(),
                };
                serve(&mut other, setup, requests);
            });
            results
        });
        let others = others.collect();
        let runner = load(dir, setup, Box::new(first), RankRole::Samples);
        let runner = runner.expect("it loads");
        serve(&mut First { runner, others }, setup, requests)
    })
}

/// The same, where each rank samples for its own engine, and has all results.
fn serve_on_all(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    grid: Grid,
) -> Vec<(Vec<Served>, Happened)> {
    thread::scope(|scope| {
        let ranks = Local::world(grid, PATIENT).into_iter();
        let threads = ranks.map(|rank| {
            scope.spawn(move || {
                let runner = load(dir, setup, Box::new(rank), RankRole::AllSample);
                serve(&mut runner.expect("it loads"), setup, requests)
            })
        });
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("no panic")).collect()
    })
}

/// Serves requests in one process, in stages, and in stages of two ranks, and compares every bit.
pub fn assert_stages_change_nothing(
    dir: &Path,
    what: &str,
    setup: &Setup,
    requests: &[Request],
    grids: &[Grid],
) -> Happened {
    let (alone, happened) = serve(&mut setup.load_from(dir), setup, requests);
    let mut of_two = None;
    for &grid in grids {
        let (served, _) = serve_on(dir, setup, requests, grid);
        let expected = match grid.ranks_per_stage {
            1 => &alone,
            num_ranks => of_two.get_or_insert_with(|| together(dir, setup, requests, num_ranks)),
        };
        assert_same(
            &format!("{}, {what}, {grid:?}", dir.display()),
            expected,
            &served,
        );
    }
    happened
}

#[test]
fn ranks_that_collect_only_the_largest_logits_choose_the_same_tokens() {
    // Greedy ones, of which no logits are wanted, among others.
    let mut requests = requests();
    requests.extend(batching::requests());
    for name in ["llama3", "phi3", "gemma2"] {
        let dir = fixture(name);
        for (what, setup) in setups() {
            let whole = together(&dir, &setup, &requests, 2);
            let as_needed = Setup {
                keeps_all_logits: false,
                ..setup
            };
            let mut all = serve_on_all(&dir, &as_needed, &requests, Grid::from(2));
            all.push(serve_on(&dir, &as_needed, &requests, Grid::from(2)));
            for (served, _) in all {
                for (expected, got) in whole.iter().zip(&served) {
                    let what = format!("{name}, {what}");
                    assert_eq!(expected.tokens, got.tokens, "{what}");
                    assert_eq!(expected.log_probs, got.log_probs, "{what}");
                    let (expected, got) = (&expected.generation_logits, &got.generation_logits);
                    assert!(expected == got, "{what}: generation logits");
                }
            }
        }
    }
}

pub const TWO_BY_TWO: Grid = grid(2, 2);

#[test]
fn every_family_is_the_same_in_2_stages() {
    let (what, setup) = setups().swap_remove(0);
    let others = [
        "deepseek-v3",
        "gpt-oss",
        "gpt-oss-mxfp4",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2-moe",
        "qwen3-moe",
        "quantised/awq",
        "quantised/gptq",
    ];
    for name in MODELS.into_iter().chain(others) {
        assert_stages_change_nothing(&fixture(name), what, &setup, &requests(), &[stages(2)]);
    }
}

#[test]
fn every_rank_of_every_stage_can_sample() {
    // 3 layers: results pass through two stages.
    let dir = fixture("qwen3-windows");
    for (what, setup, requests) in [schedules().swap_remove(0), beams()] {
        let (whole, _) = serve(&mut setup.load_from(&dir), &setup, &requests);
        let of_two = together(&dir, &setup, &requests, 2);
        for (grid, expected) in [(stages(3), &whole), (grid(3, 2), &of_two)] {
            for (rank, (served, _)) in serve_on_all(&dir, &setup, &requests, grid)
                .iter()
                .enumerate()
            {
                assert_same(
                    &format!("{what}, rank {rank} of {grid:?}"),
                    expected,
                    served,
                );
            }
        }
    }
}

#[test]
fn stages_change_nothing_however_requests_are_scheduled() {
    // 3 layers, each with a window of its own, and queries that the ranks of a stage share.
    let dir = fixture("qwen3-windows");
    let grids = [stages(2), stages(3), TWO_BY_TWO];
    let of_layers = Setup {
        windows: &[40, 24, 16],
        ..Setup::default()
    };
    let mut cases = schedules();
    cases.extend([("windows of layers", of_layers, requests()), beams()]);
    for (what, setup, requests) in cases {
        let happened = assert_stages_change_nothing(&dir, what, &setup, &requests, &grids);
        assert_happened(what, &happened);
    }
}

#[test]
fn any_cut_of_the_layers_changes_nothing() {
    let copy = random_llama(
        Sizes {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 8,
            intermediate_size: 46,
            vocab_size: 101,
        },
        5,
    );
    let grids: Vec<_> = (1..=5).map(stages).chain([TWO_BY_TWO]).collect();
    let (what, setup) = setups().swap_remove(0);
    assert_stages_change_nothing(copy.dir(), what, &setup, &requests(), &grids);
}

#[test]
fn stages_of_one_rank_can_have_the_bits_of_several() {
    let setup = Setup {
        deterministic: true,
        ..setups().swap_remove(0).1
    };
    for name in ["phi3", "mixtral", "deepseek-v3"] {
        let dir = fixture(name);
        let (served, _) = serve_on(&dir, &setup, &requests(), stages(2));
        let of_two = together(&dir, &setup, &requests(), 2);
        assert_same(&format!("{name}, stages with tiles"), &of_two, &served);
    }
}

#[test]
fn stages_change_nothing_on_any_instruction_set_or_with_rounded_weights() {
    let dir = fixture("qwen3-windows");
    for simd in simds() {
        let setup = Setup {
            simd: Some(simd),
            ..Setup::default()
        };
        let what = simd.to_string();
        assert_stages_change_nothing(&dir, &what, &setup, &requests(), &[stages(2)]);
    }
    let setup = Setup {
        weights: WeightPrecision::new(CodeBits::Eight).into(),
        ..Setup::default()
    };
    assert_stages_change_nothing(&dir, "int8 weights", &setup, &requests(), &[stages(3)]);
}

#[test]
fn stages_take_the_memory_of_one_process_and_a_second_embedding() {
    for (name, is_tied) in [("llama3", true), ("qwen3-windows", false)] {
        let source = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
        let spec = source.spec();
        assert_eq!(spec.tied_embeddings, is_tied);
        let num_bytes = |num_stages| {
            source
                .num_weight_bytes_in(None, num_stages)
                .expect("its weights")
        };
        let second = if is_tied {
            2 * spec.num_output_weights()
        } else {
            0
        };
        assert_eq!(num_bytes(2), num_bytes(1) + second);
        let block_size = BlockSize::new(16).expect("not zero");
        let per_block =
            |spec: &ModelSpec| CpuRunner::kv_bytes_per_block(spec, block_size, KvDtype::Bf16);
        for grid in [stages(2), TWO_BY_TWO] {
            let specs = source.specs_of_ranks(grid).expect("it can be cut");
            assert_eq!(specs.len(), grid.num_ranks());
            // No key head is on two ranks.
            assert_eq!(specs.iter().map(per_block).sum::<usize>(), per_block(spec));
        }
    }
}

#[test]
fn what_cannot_be_cut_into_stages_is_refused() {
    let fail = |name: &str, grid: Grid, role| {
        let rank = Local::world(grid, PATIENT).pop().expect("a rank");
        match load(&fixture(name), &Setup::default(), Box::new(rank), role) {
            Ok(_) => panic!("{name} is refused on {grid:?}"),
            Err(error) => error.to_string(),
        }
    };
    for (error, part) in [
        (
            fail("llama3", stages(3), RankRole::Computes),
            "3 stages: the model has only 2 layers",
        ),
        (fail("llama3", stages(2), RankRole::Samples), "only rank 0"),
        (
            fail("llama3", Grid::from(2), RankRole::Samples),
            "only rank 0",
        ),
    ] {
        assert!(error.contains(part), "{error}");
    }
}
