//! Adapters on several ranks, each of which has a part of them.
//!
//! The oracle is one process, whose sums are cut into the same tiles: every bit is the same. That one is near the
//! runner that cuts nothing.

use std::path::Path;

use inflight_engine::Adapter;

use crate::adapters::{adapter, adapter_of_processes, adapter_of_rank, cut_adapter, in_turns};
use crate::devices::assert_near;
use crate::rank_processes::{self, PROGRAM, load};
use crate::ranks::{assert_same, numbers_of_ranks, serve_each_on};
use crate::schedules::grid;
use crate::support::{Served, Setup, fixture, serve};

/// Serves requests with two adapters, and with none, on ranks that are threads.
fn serve_on(dir: &Path, names: [&str; 2], num_ranks: usize) -> Vec<Served> {
    let of_rank =
        |rank: usize| in_turns(&names.map(|name| adapter_of_rank(name, dir, rank, num_ranks)));
    serve_each_on(dir, &Setup::default(), num_ranks, of_rank).0
}

/// The same in one process, with the tiles of several ranks.
fn serve_alone(dir: &Path, names: [&str; 2]) -> Vec<Served> {
    let setup = Setup {
        deterministic: true,
        ..Setup::default()
    };
    let requests = in_turns(&names.map(|name| cut_adapter(name, dir)));
    serve(&mut setup.load_from(dir), &setup, &requests).0
}

#[test]
fn adapters_are_the_same_on_1_2_and_4_ranks() {
    // Also with factors, biases, other weights of the embedding and of the output layer, rows in other orders, norms of
    // results, and recurrent states.
    for (base, names) in [
        ("llama3", ["all-modules", "rank-33"]),
        ("llama3", ["outside-layers", "all-modules"]),
        ("llama2", ["saved-modules", "dora-output-layer"]),
        ("llama-biases", ["trained-biases", "biases"]),
        ("llama-biases", ["dora", "rows-dora"]),
        ("phi3", ["dora-fused", "rows"]),
        ("gemma2", ["dora-norms-after", "soft-cap"]),
        ("gpt2", ["stored-by-columns", "stored-by-columns"]),
        ("gpt-neox", ["head-by-head", "head-by-head"]),
        ("glm", ["reordered-heads", "reordered-heads"]),
        ("qwen3-5", ["delta-rule", "delta-rule"]),
        ("granite4-dense", ["state-space", "state-space"]),
    ] {
        let dir = fixture(base);
        let alone = serve_alone(&dir, names);
        for num_ranks in numbers_of_ranks(&dir) {
            let what = format!("{base}, {names:?}, {num_ranks} ranks");
            assert_same(&what, &alone, &serve_on(&dir, names, num_ranks));
        }
        let setup = Setup::default();
        let requests = in_turns(&names.map(|name| adapter(name, &dir)));
        let (whole, _) = serve(&mut setup.load_from(&dir), &setup, &requests);
        // The requests are sampled: up to the first token that differs, logits are near.
        let whole: Vec<_> = whole.iter().step_by(3).cloned().collect();
        let alone: Vec<_> = alone.iter().step_by(3).cloned().collect();
        assert_near(&format!("{base}, {names:?}"), &whole, &alone, 0.2);
    }
}

#[test]
fn processes_get_their_parts_of_adapters_when_they_need_them() {
    let (dir, setup) = (fixture("llama3"), Setup::default());
    for grid in [2.into(), 4.into(), grid(2, 2), grid(2, 1)] {
        let limits = rank_processes::PATIENT;
        let runner = load(Path::new(PROGRAM), &dir, &setup, grid, limits);
        let mut runner = runner.expect("it loads");
        // What was sent is dropped between the rounds, and the first adapters come back.
        for names in [
            ["all-modules", "rank-33"],
            ["outside-layers", "all-modules"],
            ["all-modules", "rank-33"],
        ] {
            let adapters: [Adapter; 2] = names.map(|name| adapter_of_processes(name, &dir, grid));
            let (served, _) = serve(&mut runner, &setup, &in_turns(&adapters));
            let what = format!("{names:?}, {grid:?}");
            let expected = match grid.ranks_per_stage {
                // Whole layers are computed as in one process.
                1 => {
                    let requests = in_turns(&names.map(|name| adapter(name, &dir)));
                    serve(&mut setup.load_from(&dir), &setup, &requests).0
                }
                _ => serve_alone(&dir, names),
            };
            assert_same(&what, &expected, &served);
        }
    }
}
