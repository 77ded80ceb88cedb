//! Heads for multi-token prediction: the drafts of transformers' own modules, and the bits of a run without drafts.

use std::path::Path;

use half::bf16;
use inflight_base::{BlockSize, Tokens};
use inflight_config::Settings;
use inflight_engine::{BlockReuse, DraftTotals};
use inflight_manager::ManagerOptions;
use inflight_manager::sizing::{ConfiguredModel, ModelDimensions};
use inflight_runner::ModelSource;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::batching::each_as_alone;
use crate::copy::Copy;
use crate::draft_heads::{drafted, greedy_requests, has_drafts_of};
use crate::draft_models::{chunked, paused, serves_as_without};
use crate::families::on_shares;
use crate::family_rounding::{INT4, INT8};
use crate::support::{Setup, fixture};

/// A hybrid model, one inside of a model with images, one with experts, and one with latent attention.
const RANDOM: [&str; 4] = [
    "mtp/qwen3-5",
    "mtp/qwen3-5-moe-vl",
    "mtp/glm4-moe",
    "mtp/deepseek-v3",
];
const RIGHT: &str = "mtp/right";

fn roomy() -> Setup {
    Setup {
        speculation: drafted(5),
        has_mtp_head: true,
        ..Setup::default()
    }
}

/// Recurrent states are reused from snapshots, behind whole blocks.
fn with_snapshots(setup: Setup) -> Setup {
    match setup.reuse {
        BlockReuse::Off => setup,
        _ => Setup {
            reuse: BlockReuse::WholeBlocks,
            num_state_snapshots: 16,
            ..setup
        },
    }
}

fn is_hybrid(name: &str) -> bool {
    let source = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    source.spec().recurrence().is_some()
}

/// Enough memory, chunks, and pauses.
fn setups(name: &str) -> [Setup; 3] {
    let setups = [roomy(), chunked(roomy()), paused(roomy())];
    match is_hybrid(name) {
        true => setups.map(with_snapshots),
        false => setups,
    }
}

#[test]
fn drafts_are_those_of_transformers() {
    for name in RANDOM {
        let [roomy, chunked, _] = setups(name);
        has_drafts_of(&format!("{name}/expected.json"), name, &[roomy, chunked]);
    }
}

#[test]
fn a_request_is_the_same_with_a_head() {
    for name in RANDOM {
        let mut requests = greedy_requests(160);
        for request in requests.iter_mut().skip(1).step_by(3) {
            request.sampling.temperature = 0.2;
            request.sampling.end_ids = (0..8).collect();
        }
        for setup in setups(name) {
            let happened = serves_as_without(name, &setup, &requests);
            assert!(happened.drafts.num_drafted > 100, "{name}: {happened:?}");
        }
    }
}

#[test]
fn all_drafts_of_a_head_that_knows_the_model_are_right() {
    let requests = greedy_requests(64);
    for setup in setups(RIGHT) {
        let DraftTotals {
            num_drafted,
            num_accepted,
        } = serves_as_without(RIGHT, &setup, &requests).drafts;
        assert!(num_drafted > 80, "{num_drafted}");
        assert_eq!(num_accepted, num_drafted, "{setup:?}");
    }
}

on_shares! { rounded_weights: 4 of RANDOM, rounded_weights_change_nothing_of_it }

fn rounded_weights_change_nothing_of_it(names: &[&str]) {
    let requests = greedy_requests(160);
    for name in names {
        for weights in [INT8, INT4] {
            let [_, chunked, _] = setups(name);
            let setup = Setup {
                weights: Some(weights),
                ..chunked
            };
            let happened = each_as_alone(name, &setup, &requests);
            assert!(happened.drafts.num_drafted > 100, "{name}: {happened:?}");
        }
    }
}

#[test]
fn requests_that_are_cancelled_leave_those_beside_them_the_same() {
    let name = RANDOM[0];
    let mut requests = greedy_requests(160);
    for (index, request) in requests.iter_mut().enumerate().step_by(2) {
        request.cancelled_at = Some(1 + index / 2);
    }
    for setup in setups(name) {
        let happened = serves_as_without(name, &setup, &requests);
        assert!(happened.drafts.num_drafted > 60, "{happened:?}");
    }
}

fn refused(dir: &Path) -> String {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let error = source.with_mtp_head().err().expect("it is refused");
    error.to_string()
}

#[test]
fn models_without_a_head_are_refused() {
    for (name, words) in [
        ("llama3", "LlamaForCausalLM is not known to have a head"),
        (
            "qwen3-5",
            "there is no mtp.norm.weight: the checkpoint has no head",
        ),
        (
            "glm4-moe",
            "there is no model.layers.4.shared_head.norm.weight: the checkpoint has no head",
        ),
    ] {
        let error = refused(&fixture(name));
        assert!(error.contains(words), "{name}: {error}");
    }
    for (name, key) in [
        (RANDOM[0], "mtp_num_hidden_layers"),
        (RANDOM[3], "num_nextn_predict_layers"),
    ] {
        let error = refused(Copy::of(name).config(json!({key: 0})).dir());
        let words = format!("{key}: 0 is not 1 or more, and speculation is mtp");
        assert!(error.contains(&words), "{name}: {error}");
    }
}

/// Before any memory is taken.
#[test]
fn tensors_of_other_shapes_are_refused_with_both() {
    for (name, tensor, words) in [
        (RANDOM[0], "mtp.fc.weight", "[60, 120]"),
        (RANDOM[2], "model.layers.4.eh_proj.weight", "[60, 120]"),
        (
            RANDOM[0],
            "mtp.layers.0.self_attn.q_proj.weight",
            "[144, 60]",
        ),
    ] {
        let of_two = |_: TensorView<'_>| Some((Dtype::BF16, vec![2, 3], vec![0; 12]));
        let copy = Copy::of(name).tensor(tensor, of_two);
        let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
        let source = source.with_mtp_head().expect("it has a head");
        let error = source.num_weight_bytes(None).expect_err("refused");
        let error = error.to_string();
        for words in [tensor, "[2, 3]", words] {
            assert!(error.contains(words), "{name}: {words} is not in {error}");
        }
    }
}

#[test]
fn a_head_counts_towards_the_size_of_the_model() {
    for (name, num_own_rows, kv_len) in [
        // Three heads of 12 for keys, and for values.
        (RANDOM[0], 0, 2 * 3 * 12),
        (RANDOM[2], 0, 2 * 3 * 12),
        // A latent of 34, and 8 rotated elements.
        (RANDOM[3], 2 * 160, 34 + 8),
    ] {
        let open = || ModelSource::open(&fixture(name)).expect("the checkpoint opens");
        let with_head = open().with_mtp_head().expect("it has a head");
        let num_bytes = |source: &ModelSource, weights| {
            source.num_weight_bytes(weights).expect("all are there") as usize
        };
        let hidden_size = with_head.spec().hidden_size;
        let of_projection = 2 * hidden_size * hidden_size;
        let of_head = |weights| num_bytes(&with_head, weights) - num_bytes(&open(), weights);
        assert!(of_head(None) > 2 * (of_projection + num_own_rows * hidden_size));
        assert!(of_head(Some(INT8)) < of_head(None), "{name}");
        assert!(of_head(Some(INT4)) < of_head(Some(INT8)), "{name}");
        let bytes_per_block = |source: &ModelSource| {
            let model = ConfiguredModel {
                settings: &Settings::default(),
                source: Some(source),
                gpu: None,
            };
            let groups = model.layer_groups(Tokens(128), true);
            model.kv_bytes_per_block(BlockSize::new(16).expect("not zero"), &groups) as usize
        };
        let least = 16 * 2 * (hidden_size + kv_len);
        assert!(bytes_per_block(&with_head) >= bytes_per_block(&open()) + least);
    }
}

#[test]
fn copies_of_the_embedding_and_the_output_layer_take_no_memory() {
    let num_bytes = |dir: &Path| {
        let source = ModelSource::open(dir).expect("the checkpoint opens");
        let source = source.with_mtp_head().expect("it has a head");
        source.num_weight_bytes(None).expect("all are there")
    };
    let name = "mtp/glm4-moe";
    for own in [
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    ] {
        let copy = Copy::of(name).values(|name, _, values| {
            if name == own {
                values[0] += bf16::ONE;
            }
        });
        let of_rows = num_bytes(copy.dir()) - num_bytes(&fixture(name));
        assert_eq!(of_rows, 2 * 160 * 60, "{own}");
    }
}

#[test]
fn a_batch_manager_loads_a_head() {
    let options = json!({
        "gpt_model_path": fixture(RIGHT), "speculation": "mtp", "max_seq_len": 64, "max_draft_tokens": 2,
        "max_num_requests": 4, "max_tokens_in_paged_kv_cache": 256
    });
    let load = |options: &Value| {
        let options = ManagerOptions::parse(&options.to_string()).expect("good options");
        options.load().map(|_| ())
    };
    load(&options).expect("it loads");
    for (key, value, words) in [
        (
            "draft_model_path",
            json!("/models/head"),
            "draft_model_path is set, and speculation is not draft_model or eagle3",
        ),
        ("tensor_parallel_size", json!(2), "computed by one process"),
        (
            "gpt_model_path",
            json!(fixture("llama3")),
            "LlamaForCausalLM is not known to have a head",
        ),
    ] {
        let mut options = options.clone();
        options[key] = value;
        let error = load(&options).expect_err("it is refused").to_string();
        assert!(error.contains(words), "{error}");
    }
}
