//! One model whose layers are in stages, each on a rank or on several: threads that serve the same requests.
//!
//! The oracle of stages of one rank is the runner of one process, and that of others is one stage of as many ranks:
//! every bit is the same. Only the first rank samples; the others take its results.

use std::path::Path;

use inflight_base::BlockSize;
use inflight_collective::Grid;
use inflight_device::KvDtype;
use inflight_numbers::CodeBits;
use inflight_runner::{CpuRunner, ModelSource, ModelSpec, WeightPrecision};

use crate::batching;
use crate::devices::{requests, setups};
use crate::ranks::{MODELS, Sizes, assert_same, load, on_ranks, random_llama, serve_on, together};
use crate::schedules::{assert_happened, beams, grid, schedules};
use crate::support::{Happened, Request, Setup, fixture, serve, simds};

pub const fn stages(num_stages: usize) -> Grid {
    grid(num_stages, 1)
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
            let served = together(&dir, &as_needed, &requests, 2);
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
    let part = "3 stages: the model has only 2 layers";
    for loaded in on_ranks(stages(3), |rank| {
        load(&fixture("llama3"), &Setup::default(), rank).map(drop)
    }) {
        let error = loaded.expect_err("it is refused").to_string();
        assert!(error.contains(part), "{error}");
    }
}
