//! EAGLE-3 heads: the drafts of an independent implementation, and the same bits as without.

use std::fs;
use std::path::{Path, PathBuf};

use inflight_base::{BlockSize, SequenceId, TokenId, Tokens};
use inflight_config::Settings;
use inflight_engine::{DraftTotals, Engine, NewRequest, Speculation, StepOutput};
use inflight_manager::ManagerOptions;
use inflight_manager::sizing::{ConfiguredModel, ModelDimensions};
use inflight_runner::ModelSource;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::adapters::random_adapter;
use crate::batching::requests_that_share;
use crate::draft_models::{chunked, paused, serves_as_without, with_tiles};
use crate::support::{Request, Setup, fixture};

const RANDOM: [&str; 2] = ["draft-heads/random/model", "draft-heads/random/head"];
/// Another head for the same model, in the layout of speculators.
const SPECULATORS: &str = "draft-heads/random/speculators";
const RIGHT: [&str; 2] = ["draft-heads/right/model", "draft-heads/right/head"];

pub fn drafted(max_draft_tokens: u32) -> Option<Speculation> {
    Some(Speculation {
        max_draft_tokens,
        prompt_lookup: None,
        has_draft_model: true,
        recomputes_drafts: true,
    })
}

fn roomy(head: &'static str) -> Setup {
    Setup {
        speculation: drafted(5),
        draft_head: Some(head),
        ..Setup::default()
    }
}

pub fn greedy_requests(vocab_size: TokenId) -> Vec<Request> {
    let requests = requests_that_share().into_iter().map(|request| {
        let prompt: Vec<_> = request.prompt.iter().map(|it| it % vocab_size).collect();
        Request {
            arrival: request.arrival,
            ..Request::greedy(&prompt, request.max_new_tokens)
        }
    });
    requests.collect()
}

#[derive(Deserialize)]
struct Expected {
    prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
    /// Behind each of these: as far as no near tie decides.
    drafts: Vec<Vec<TokenId>>,
}

#[test]
fn drafts_are_those_of_an_implementation_without_a_cache() {
    let [name, head] = RANDOM;
    makes_the_drafts_of("draft-heads/random/expected.json", name, head);
}

#[test]
fn a_head_of_speculators_makes_the_drafts_of_an_implementation_without_a_cache() {
    let expected = "draft-heads/random/expected-speculators.json";
    makes_the_drafts_of(expected, RANDOM[0], SPECULATORS);
}

/// tests/fixtures/make_draft_head_fixtures.py has the implementation.
fn makes_the_drafts_of(expected: &str, name: &str, head: &'static str) {
    has_drafts_of(expected, name, &[roomy(head), chunked(roomy(head))]);
}

/// A head makes the drafts of a file, and no others where that has some.
pub fn has_drafts_of(expected: &str, name: &str, setups: &[Setup]) {
    let text = fs::read_to_string(fixture(expected)).expect("it is there");
    let cases: Vec<Expected> = serde_json::from_str(&text).expect("JSON");
    for setup in setups {
        let setup = Setup {
            speculation: drafted(4),
            ..setup.clone()
        };
        let mut runner = setup.load(name);
        let mut engine = Engine::new(setup.engine_config());
        for (case, id) in cases.iter().zip(0..) {
            let num_new = Tokens(case.greedy.len() as u32 + 5);
            let request = NewRequest::new(SequenceId(id), case.prompt.clone(), num_new);
            engine.add(request).expect("a valid request");
        }
        let (mut output, mut events) = (StepOutput::default(), Vec::new());
        let mut num_compared = 0;
        while !engine.is_idle() {
            let mut step = engine.schedule();
            runner.make_drafts(&mut step).expect("drafts are made");
            output.clear();
            for plan in step.plans() {
                for planned in plan.sequences.iter().filter(|it| it.num_drafts > 0) {
                    let case = &cases[planned.id.index()];
                    let num_tokens = (planned.kv_len - planned.num_drafts) as usize;
                    let Some(expected) = case.drafts.get(num_tokens - case.prompt.len() - 1) else {
                        continue;
                    };
                    let end = planned.tokens.end as usize;
                    let drafts = &plan.token_ids[end - planned.num_drafts as usize..end];
                    let num = expected.len().min(drafts.len());
                    assert_eq!(drafts[..num], expected[..num], "{num_tokens} tokens");
                    num_compared += num;
                }
                runner.run(plan, &mut output).expect("the step runs");
            }
            engine.apply(step, &mut output, &mut events);
        }
        assert!(num_compared > 60, "{num_compared}");
    }
}

#[test]
fn a_request_is_the_same_with_a_head() {
    let [name, head] = RANDOM;
    let mut requests = greedy_requests(131);
    for request in requests.iter_mut().skip(1).step_by(3) {
        request.sampling.temperature = 0.2;
        request.sampling.end_ids = (0..8).collect();
    }
    for setup in [
        roomy(head),
        chunked(roomy(head)),
        paused(roomy(head)),
        with_tiles(roomy(head)),
    ] {
        let happened = serves_as_without(name, &setup, &requests);
        assert!(happened.drafts.num_drafted > 100, "{happened:?}");
    }
}

#[test]
fn requests_that_are_cancelled_leave_those_beside_them_the_same() {
    let [name, head] = RANDOM;
    let mut requests = greedy_requests(131);
    for (index, request) in requests.iter_mut().enumerate().step_by(2) {
        request.cancelled_at = Some(1 + index / 2);
    }
    for setup in [roomy(head), paused(roomy(head)), paused(roomy(SPECULATORS))] {
        let happened = serves_as_without(name, &setup, &requests);
        assert!(happened.drafts.num_drafted > 60, "{happened:?}");
    }
}

#[test]
fn requests_with_adapters_are_the_same_with_a_head() {
    let [name, head] = RANDOM;
    let adapters = [1, 2].map(|seed| random_adapter(&fixture(name), 4, seed));
    let mut requests = greedy_requests(131);
    for (index, request) in requests.iter_mut().enumerate() {
        request.adapter = adapters.get(index % 3).cloned();
    }
    for setup in [roomy(head), paused(roomy(head))] {
        let happened = serves_as_without(name, &setup, &requests);
        assert!(happened.drafts.num_drafted > 100, "{happened:?}");
    }
}

/// Each is made from the state of the right token, also where blocks are shared, moved to host memory, or computed
/// again.
#[test]
fn all_drafts_of_a_head_that_knows_the_model_are_right() {
    let [name, head] = RIGHT;
    let requests = greedy_requests(64);
    for setup in [roomy(head), chunked(roomy(head)), paused(roomy(head))] {
        let DraftTotals {
            num_drafted,
            num_accepted,
        } = serves_as_without(name, &setup, &requests).drafts;
        assert!(num_drafted > 80, "{num_drafted}");
        assert_eq!(num_accepted, num_drafted, "{setup:?}");
    }
}

#[test]
fn a_head_is_for_one_model() {
    let open = |name| ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    let error_of = |name, head| {
        let source = open(name).with_draft_head(&fixture(head));
        source.err().expect("it is refused").to_string()
    };
    for (name, head, part) in [
        (
            "llama3",
            RANDOM[1],
            "vocab_size: 131 is not 160, the tokens of the model",
        ),
        (RANDOM[0], "llama3", "[\"LlamaForCausalLMEagle3\"]"),
        (RIGHT[0], RANDOM[1], "vocab_size: 131 is not 64"),
    ] {
        let error = error_of(name, head);
        assert!(error.contains(part), "{error}");
    }
}

/// A copy of a head with another config.json.
fn with_config(head: &str, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let folder = format!("inflight-draft-head-{name}-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    fs::create_dir_all(&folder).expect("a folder");
    let weights = "model.safetensors";
    fs::copy(fixture(head).join(weights), folder.join(weights)).expect("it is copied");
    let text = fs::read_to_string(fixture(head).join("config.json")).expect("it is there");
    let mut config = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).expect("it is written");
    folder
}

fn error_of_head(folder: &Path) -> String {
    let source = ModelSource::open(&fixture(RANDOM[0])).expect("the checkpoint opens");
    let source = source.with_draft_head(folder);
    source.err().expect("it is refused").to_string()
}

#[test]
fn heads_that_are_not_computed_are_refused() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change, &str); 9] = [
        (
            "hidden-size",
            RANDOM[1],
            |it| it["target_hidden_size"] = json!(4096),
            "target_hidden_size: 4096 is not 40, the hidden_size of the model",
        ),
        (
            "layers",
            RANDOM[1],
            |it| it["num_hidden_layers"] = json!(2),
            "num_hidden_layers: 2 is not 1",
        ),
        (
            "last-layer",
            RANDOM[1],
            |it| it["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 3]),
            "three ascending layers of the 4 of the model",
        ),
        (
            "bias",
            RANDOM[1],
            |it| it["attention_bias"] = json!(true),
            "attention_bias: true is not false",
        ),
        (
            "method",
            SPECULATORS,
            |it| it["speculators_model_type"] = json!("dflash"),
            "speculators_model_type: \"dflash\" is not \"eagle3\"",
        ),
        (
            "layer",
            SPECULATORS,
            |it| it["transformer_layer_config"] = Value::Null,
            "transformer_layer_config is missing",
        ),
        (
            "family",
            SPECULATORS,
            |it| it["transformer_layer_config"]["model_type"] = json!("qwen3"),
            "transformer_layer_config.model_type: qwen3 is not llama",
        ),
        (
            "tokens",
            SPECULATORS,
            |it| it["transformer_layer_config"]["vocab_size"] = json!(130),
            "transformer_layer_config.vocab_size: 130 is not 131, the tokens of the model",
        ),
        (
            "norm",
            SPECULATORS,
            |it| it["norm_before_fc"] = json!(true),
            "norm_before_fc: true is not false: other heads are not supported",
        ),
    ];
    for (name, head, change, part) in cases {
        let folder = with_config(head, name, change);
        let error = error_of_head(&folder);
        fs::remove_dir_all(&folder).expect("it is there");
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_head_without_safetensors_is_refused_with_the_way_out() {
    let folder = with_config(RANDOM[1], "pickle", |_| {});
    fs::rename(
        folder.join("model.safetensors"),
        folder.join("pytorch_model.bin"),
    )
    .expect("it is there");
    let error = error_of_head(&folder);
    fs::remove_dir_all(&folder).expect("it is there");
    for part in [
        "pytorch_model.bin is in a format that runs code when it is read",
        "safetensors.torch.save_file(torch.load(",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_head_counts_towards_the_size_of_the_model() {
    let open = || ModelSource::open(&fixture(RANDOM[0])).expect("the checkpoint opens");
    let with_head = open()
        .with_draft_head(&fixture(RANDOM[1]))
        .expect("its head");
    let num_bytes = |source: &ModelSource| source.num_weight_bytes(None).expect("all are there");
    assert!(num_bytes(&with_head) > num_bytes(&open()) + 70_000);
    let bytes_per_block = |source: &ModelSource| {
        let model = ConfiguredModel {
            settings: &Settings::default(),
            source: Some(source),
            gpu: None,
        };
        let groups = model.layer_groups(Tokens(128), true);
        model.kv_bytes_per_block(BlockSize::new(16).expect("not zero"), &groups)
    };
    // A state of 48 bf16 for each position, and at least two heads of 10 for keys and for values.
    assert!(bytes_per_block(&with_head) >= bytes_per_block(&open()) + 16 * 2 * (48 + 2 * 20));
}

#[test]
fn a_batch_manager_loads_a_head() {
    let [model, head] = RIGHT.map(fixture);
    let load = |options: serde_json::Value| {
        let options = ManagerOptions::parse(&options.to_string()).expect("good options");
        options.load().map(|_| ())
    };
    let options = |speculation: &str| {
        json!({
            "gpt_model_path": model, "speculation": speculation, "draft_model_path": head, "max_seq_len": 64,
            "max_draft_tokens": 2
        })
    };
    load(options("eagle3")).expect("it loads");
    let error = load(options("prompt_lookup")).expect_err("no head is used");
    assert!(
        error
            .to_string()
            .contains("speculation is not draft_model or eagle3")
    );
    let mut without = options("eagle3");
    without
        .as_object_mut()
        .expect("an object")
        .remove("draft_model_path");
    let error = load(without).expect_err("there is no head").to_string();
    assert!(
        error.contains("speculation is eagle3, and draft_model_path is not set"),
        "{error}"
    );
    let mut parallel = options("eagle3");
    parallel["tensor_parallel_size"] = json!(2);
    let error = load(parallel)
        .expect_err("one process has the head")
        .to_string();
    assert!(
        error.contains("speculation is eagle3, and a draft model is computed by one process"),
        "{error}"
    );
}
