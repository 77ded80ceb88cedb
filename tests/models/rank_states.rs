//! Models with recurrent states, and attention with gates, on several ranks and in stages.
//!
//! The oracle is one process, whose sums are cut into the tiles of ranks: every bit is the same. That one is near the
//! runner that cuts nothing. Stages of one rank have the bits of that runner.

use std::path::Path;

use inflight_collective::Grid;
use inflight_device::Tiling;
use inflight_engine::BlockReuse;
use inflight_runner::ModelSource;

use crate::batching::{requests_that_share, requests_with_beams};
use crate::devices::{assert_near_by_cost, requests};
use crate::families::{Family, RECURRENT, WITH_GATES, on_shares};
use crate::family_gguf::gguf;
use crate::family_rounding::{INT4, INT8};
use crate::rank_processes::{self, PATIENT, PROGRAM};
use crate::ranks::{alone, assert_ranks_change_nothing, assert_same, numbers_of_ranks};
use crate::recurrent_reuse::with_drafts;
use crate::schedules::{grid, pausing_with_drafts, states_in_host_memory, twice};
use crate::stages::{TWO_BY_TWO, assert_stages_change_nothing, stages};
use crate::support::{Request, Setup, fixture, serve, simds};
use crate::transformers::bf16_cost;

/// The families that are cut, with the numbers of ranks that each can have. A value head, or a group of heads whose
/// results have one norm, is on one rank.
const CUT: [(&str, &[usize]); 20] = [
    ("afmoe", &[2, 4]),
    ("bamba", &[2]),
    ("falcon-h1", &[2, 4]),
    ("falcon-h1-norm", &[2]),
    ("falcon-mamba", &[2, 4]),
    ("granite4", &[2]),
    ("granite4-dense", &[]),
    ("jamba", &[2, 4]),
    ("kimi-linear", &[2]),
    ("lara-mini", &[2, 4]),
    ("lfm2", &[2, 4]),
    ("lfm2-moe", &[2, 4]),
    ("lfm3", &[2, 4]),
    ("mamba", &[2, 4]),
    ("nemotron-h", &[2]),
    ("nemotron-h-moe", &[2]),
    ("olmo-hybrid", &[2, 4]),
    ("qwen3-5", &[2, 4]),
    ("qwen3-5-moe", &[2, 4]),
    ("qwen3-next", &[2, 4]),
];

/// With chunks, and prefixes that are reused behind snapshots.
fn reusing() -> Setup {
    Setup {
        max_num_tokens: 24,
        enable_chunked_context: true,
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 16,
        ..Setup::default()
    }
}

pub fn schedules(name: &str) -> [(&'static str, Setup, Vec<Request>); 3] {
    let drafted = with_drafts(name, &pausing_with_drafts(), requests_that_share());
    [
        ("reuse", reusing(), twice(requests_that_share())),
        (
            "host memory",
            states_in_host_memory(),
            twice(requests_that_share()),
        ),
        ("pauses and drafts", pausing_with_drafts(), twice(drafted)),
    ]
}

/// Serves requests on 1, 2 and 4 ranks, and without ranks.
fn assert_ranks_change_only_rounding(dir: &Path, setup: &Setup, cost: Option<f32>) {
    let requests = requests();
    assert_ranks_change_nothing(dir, "states", setup, &requests);
    let Some(cost) = cost else {
        return;
    };
    let (whole, _) = serve(&mut setup.load_from(dir), setup, &requests);
    let (cut, _) = alone(dir, setup, &requests);
    assert_near_by_cost(&dir.display().to_string(), &whole, &cut, cost);
}

#[test]
fn each_family_is_cut() {
    let families = RECURRENT.into_iter().chain(WITH_GATES);
    let mut names: Vec<_> = families.map(|(name, _)| name).collect();
    names.sort_unstable();
    let mut known: Vec<_> = CUT.into_iter().map(|(name, _)| name).collect();
    known.sort_unstable();
    assert_eq!(names, known);
    for (name, num_ranks) in CUT {
        assert_eq!(numbers_of_ranks(&fixture(name)), num_ranks, "{name}");
    }
}

#[test]
fn states_are_the_same_on_1_2_and_4_ranks() {
    for (name, _) in CUT {
        let cost = Some(bf16_cost(name));
        assert_ranks_change_only_rounding(&fixture(name), &Setup::default(), cost);
    }
}

on_shares! { schedules_of_ranks: 4 of SCHEDULED, ranks_restore_save_and_roll_back_states }
on_shares! { states_in_stages: 4 of RECURRENT, states_in_stages_are_the_same }
on_shares! { schedules_in_stages: 4 of IN_STAGES, schedules_in_stages_are_the_same }

const IN_STAGES: [&str; 4] = ["lfm2", "qwen3-next", "nemotron-h", "kimi-linear"];

/// Families with each kind of state.
const SCHEDULED: [&str; 7] = [
    "lfm2",
    "qwen3-5",
    "olmo-hybrid",
    "nemotron-h",
    "falcon-h1",
    "kimi-linear",
    "jamba",
];

fn ranks_restore_save_and_roll_back_states(names: &[&str]) {
    for name in names {
        for (what, setup, requests) in schedules(name) {
            let happened = assert_ranks_change_nothing(&fixture(name), what, &setup, &requests);
            assert!(happened.num_reused > 0, "{name}, {what}: {happened:?}");
            let is_drafting = setup.speculation.is_some();
            assert_eq!(
                happened.drafts.num_accepted > 0,
                is_drafting,
                "{name}: {happened:?}"
            );
            let are_moved = setup.num_host_state_snapshots > 0;
            assert_eq!(
                happened.num_onboarded_states > 0,
                are_moved,
                "{name}: {happened:?}"
            );
            assert!(
                !is_drafting || happened.num_pauses > 0,
                "{name}: {happened:?}"
            );
        }
    }
}

#[test]
fn ranks_copy_the_states_of_beams() {
    let setup = Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 16,
        ..Setup::for_beams()
    };
    for name in ["lfm2", "qwen3-5"] {
        let requests = requests_with_beams();
        assert_ranks_change_nothing(&fixture(name), "beams", &setup, &requests);
        let grids = [stages(2)];
        assert_stages_change_nothing(&fixture(name), "beams", &setup, &requests, &grids);
    }
    let (dir, requests) = (fixture("lfm2"), requests_with_beams());
    let (expected, _) = alone(&dir, &setup, &requests);
    let runner = rank_processes::load(Path::new(PROGRAM), &dir, &setup, 2, PATIENT);
    let (served, _) = serve(&mut runner.expect("it loads"), &setup, &requests);
    assert_same("beams of processes", &expected, &served);
}

fn states_in_stages_are_the_same(families: &[Family]) {
    for (name, _) in families {
        let dir = fixture(name);
        let num_layers = ModelSource::open(&dir)
            .expect("it opens")
            .spec()
            .num_layers();
        // Some stages have no layer with attention, or none with a state.
        let grids = [stages(2), stages(num_layers)];
        let (setup, requests) = (Setup::default(), requests());
        assert_stages_change_nothing(&dir, "states", &setup, &requests, &grids);
    }
}

fn schedules_in_stages_are_the_same(names: &[&str]) {
    for name in names {
        for (what, setup, requests) in schedules(name) {
            let grids = [stages(2), TWO_BY_TWO];
            let dir = fixture(name);
            let happened = assert_stages_change_nothing(&dir, what, &setup, &requests, &grids);
            assert!(happened.num_reused > 0, "{name}, {what}: {happened:?}");
        }
    }
}

#[test]
fn states_of_ranks_that_are_processes_are_the_same() {
    let name = "qwen3-5";
    for (what, setup, requests) in schedules(name) {
        let dir = fixture(name);
        let (expected, _) = alone(&dir, &setup, &requests);
        for grid in [Grid::from(2), grid(2, 2)] {
            let runner = rank_processes::load(Path::new(PROGRAM), &dir, &setup, grid, PATIENT);
            let (served, happened) = serve(&mut runner.expect("it loads"), &setup, &requests);
            assert_same(&format!("{what}, {grid:?}"), &expected, &served);
            assert!(happened.num_reused > 0, "{what}: {happened:?}");
        }
    }
}

#[test]
fn states_on_ranks_are_the_same_on_any_instruction_set() {
    for simd in simds() {
        let setup = Setup {
            simd: Some(simd),
            ..Setup::default()
        };
        for name in ["lfm2", "qwen3-5", "nemotron-h"] {
            assert_ranks_change_nothing(&fixture(name), &simd.to_string(), &setup, &requests());
        }
    }
}

#[test]
fn states_behind_rounded_weights_are_the_same_on_1_2_and_4_ranks() {
    for weights in [INT8, INT4] {
        let setup = Setup {
            weights: Some(weights),
            ..Setup::default()
        };
        for name in [
            "lfm2",
            "qwen3-next",
            "nemotron-h",
            "falcon-h1",
            "kimi-linear",
            "mamba",
        ] {
            assert_ranks_change_only_rounding(&fixture(name), &setup, None);
        }
    }
}

/// llama.cpp orders values, and the inputs behind them, in tiles; weights have blocks of 32 inputs.
#[test]
fn states_of_gguf_files_are_the_same_on_1_2_and_4_ranks() {
    for name in ["qwen3-5", "nemotron-h", "kimi-linear", "mamba"] {
        assert_ranks_change_only_rounding(gguf(name).dir(), &Setup::default(), None);
    }
}

#[test]
fn heads_that_ranks_cannot_share_are_refused() {
    for (name, num_ranks, words) in [
        (
            "nemotron-h",
            4,
            "of the 6 value heads of layers with recurrent states, 3 have one norm of their results",
        ),
        (
            "kimi-linear",
            4,
            "the model has only 3 value heads in layers with recurrent states",
        ),
    ] {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        let error = source.check_ranks(num_ranks.into(), Tiling::OfRanks);
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(words), "{name}: {error}");
    }
    let source = ModelSource::open(&fixture("qwen3-5")).expect("the fixture opens");
    let error = source.check_ranks(4.into(), Tiling::Never);
    let error = error.expect_err("heads of 7 values").to_string();
    assert!(error.contains("a rank would have 7 inputs"), "{error}");
}
