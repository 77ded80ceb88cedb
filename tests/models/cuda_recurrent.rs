//! Models with recurrent states on the stand-in for a GPU.

use std::collections::BTreeSet;

use inflight_cuda_stand_in::StandIn;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::BlockReuse;

use crate::batching::requests_that_share;
use crate::cuda::{MAX_FAR, assert_logits_of_transformers, in_chunks, on_any_gpu, on_fixtures};
use crate::cuda_quantised;
use crate::devices::{assert_agrees_with_reference, assert_same_bits, requests};
use crate::families::RECURRENT;
use crate::family_rounding::INT8;
use crate::schedules::{pausing_with_drafts, states_in_host_memory, twice};
use crate::support::{Happened, Request, Served, Setup, fixture, serve};

// Convolutions alone, the gated delta rule, and state spaces, with norms at each place.
on_fixtures! {
    dense: super::is_right_on_a_gpu;
    bamba: "bamba",
    falcon_h1: "falcon-h1",
    falcon_h1_norm: "falcon-h1-norm",
    falcon_mamba: "falcon-mamba",
    granite4_dense: "granite4-dense",
    lfm2: "lfm2",
    lfm3: "lfm3",
    mamba: "mamba",
    nemotron_h: "nemotron-h",
    olmo_hybrid: "olmo-hybrid",
    qwen3_5: "qwen3-5",
}
// Recurrent rules beside experts.
on_fixtures! {
    with_experts: super::is_right_on_a_gpu;
    granite4: "granite4",
    jamba: "jamba",
    kimi_linear: "kimi-linear",
    lara_mini: "lara-mini",
    lfm2_moe: "lfm2-moe",
    nemotron_h_moe: "nemotron-h-moe",
    qwen3_5_moe: "qwen3-5-moe",
    qwen3_next: "qwen3-next",
}

/// Products that do not depend on the number of rows.
fn deterministic() -> CudaOptions {
    CudaOptions {
        deterministic: true,
        ..CudaOptions::default()
    }
}

/// [`on_any_gpu`] for a test of this file.
fn on_a_gpu(test: &str, body: impl FnOnce(CudaOptions)) {
    on_any_gpu(StandIn::new(), &format!("cuda_recurrent::{test}"), || {
        body(deterministic());
    });
}

/// With chunks, prefixes that are reused and, in the second setup, sequences that pause and drafts of which some are
/// rejected.
fn setups() -> [Setup; 2] {
    let reusing = Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 16,
        ..in_chunks()
    };
    [reusing, pausing_with_drafts()]
}

fn serve_on(
    name: &str,
    setup: &Setup,
    options: &CudaOptions,
    requests: &[Request],
) -> (Vec<Served>, Happened) {
    let mut runner = setup.load_on::<Cuda>(&fixture(name), options);
    serve(&mut runner, setup, requests)
}

#[test]
fn states_behind_weights_of_8_bits_agree_with_the_reference_on_a_gpu() {
    let test = "states_behind_weights_of_8_bits_agree_with_the_reference_on_a_gpu";
    on_a_gpu(test, |options| {
        for name in ["lfm2", "qwen3-5"] {
            let setup = Setup {
                weights: Some(INT8),
                ..in_chunks()
            };
            let (dir, tolerance) = (fixture(name), cuda_quantised::TOLERANCE);
            let requests = &requests()[..4];
            assert_agrees_with_reference::<Cuda>(name, &dir, &options, &setup, requests, tolerance);
        }
    });
}

#[test]
fn every_family_with_states_is_computed_on_a_gpu() {
    let all = [dense::FIXTURES, with_experts::FIXTURES].concat();
    let all: BTreeSet<_> = all.into_iter().collect();
    assert_eq!(all, RECURRENT.map(|(name, _)| name).into());
}

fn is_right_on_a_gpu(path: &str, name: &str) {
    let options = deterministic();
    on_any_gpu(StandIn::new(), path, || {
        let max_far = match with_experts::FIXTURES.contains(&name) {
            true => MAX_FAR,
            false => 0,
        };
        assert_logits_of_transformers(name, &options, max_far);
        for setup in setups() {
            is_the_same_alone(name, &setup, &options);
        }
    });
}

/// Serves some requests alone, where nothing is reused, no sequence pauses and nothing is drafted.
fn is_the_same_alone(name: &str, setup: &Setup, options: &CudaOptions) -> Happened {
    let has_drafts = setup.speculation.is_some();
    let requests = match has_drafts || setup.num_host_state_snapshots > 0 {
        false => requests_that_share(),
        true => twice(requests_that_share()),
    };
    let (together, happened) = serve_on(name, setup, options, &requests);
    assert!(happened.num_reused > 0, "{name}: {happened:?}");
    if has_drafts {
        let drafts = &happened.drafts;
        assert!(happened.num_pauses > 0, "{name}: {happened:?}");
        assert!(
            drafts.num_accepted < drafts.num_drafted,
            "{name}: {happened:?}"
        );
    }
    let alone = Setup {
        max_num_requests: 1,
        enable_chunked_context: false,
        max_num_tokens: 256,
        speculation: None,
        reuse: BlockReuse::Off,
        num_state_snapshots: 0,
        num_host_state_snapshots: 0,
        num_host_blocks: 0,
        ..setup.clone()
    };
    let pairs = requests.iter().zip(&together);
    for (request, together) in pairs.skip(name.len() % 3).step_by(3) {
        let (alone, _) = serve_on(name, &alone, options, std::slice::from_ref(request));
        assert_same_bits(name, &alone[0], together);
    }
    happened
}

/// Blocks and states are copied to pinned memory and back, also where blocks are empty.
#[test]
fn states_come_back_from_the_host_to_a_gpu() {
    on_a_gpu("states_come_back_from_the_host_to_a_gpu", |options| {
        for name in ["lfm2", "qwen3-5", "granite4-dense", "jamba", "mamba"] {
            let happened = is_the_same_alone(name, &states_in_host_memory(), &options);
            let num_moved = (happened.num_offloaded_states, happened.num_onboarded_states);
            assert!(num_moved.0 > 10 && num_moved.1 > 3, "{name}: {happened:?}");
        }
    });
}

/// A graph reads its sequences, and where their states are saved, from the upload of its step.
#[test]
fn steps_with_states_are_the_same_as_graphs() {
    on_a_gpu("steps_with_states_are_the_same_as_graphs", |options| {
        for name in ["lfm2", "qwen3-5", "granite4-dense"] {
            let [setup, _] = setups();
            let requests = requests_that_share();
            let launched = CudaOptions {
                max_graphs: 0,
                ..options.clone()
            };
            let [recorded, launched] =
                [&options, &launched].map(|it| serve_on(name, &setup, it, &requests));
            assert!(recorded.1.num_reused > 0, "{name}: {:?}", recorded.1);
            for (recorded, launched) in recorded.0.iter().zip(&launched.0) {
                assert_same_bits(name, recorded, launched);
            }
        }
    });
}
