//! Draft models: the same bits as without, in fewer steps.

use std::fs;
use std::path::Path;

use inflight_base::{BlockSize, Tokens};
use inflight_config::Settings;
use inflight_engine::{BlockReuse, CapacityPolicy, OutputOptions, Speculation};
use inflight_manager::ManagerOptions;
use inflight_manager::sizing::{ConfiguredModel, ModelDimensions};
use inflight_runner::ModelSource;
use inflight_sampling::SamplingParams;
use inflight_tests::checkout;
use serde_json::{Value, json};

use crate::batching::{assert_same_bits, requests, requests_that_share};
use crate::support::{Happened, Request, Setup, fixture, serve, serve_alone};

const DRAFTED: Option<Speculation> = Some(Speculation {
    max_draft_tokens: 5,
    prompt_lookup: None,
    has_draft_model: true,
    recomputes_drafts: false,
});

fn roomy(draft_model: &'static str) -> Setup {
    Setup {
        speculation: DRAFTED,
        draft_model: Some(draft_model),
        ..Setup::default()
    }
}

/// In chunks, with shared beginnings, and with fewer tokens a step than the draft model or head has to catch up on for
/// all.
pub fn chunked(roomy: Setup) -> Setup {
    Setup {
        max_num_tokens: 72,
        block_size: 4,
        num_blocks: 200,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..roomy
    }
}

/// The same with so few blocks that requests are paused.
pub fn paused(roomy: Setup) -> Setup {
    Setup {
        num_blocks: 26,
        num_host_blocks: 20,
        policy: CapacityPolicy::MaxUtilization,
        separate_calls: true,
        ..chunked(roomy)
    }
}

/// With the tiles of several ranks.
pub fn with_tiles(roomy: Setup) -> Setup {
    Setup {
        deterministic: true,
        ..roomy
    }
}

/// Serves requests with a draft model or head, and compares each with its run alone without one, as far as it comes.
pub fn serves_as_without(name: &str, setup: &Setup, requests: &[Request]) -> Happened {
    let alone_setup = Setup {
        deterministic: setup.deterministic,
        ..Setup::default()
    };
    let mut alone = alone_setup.load(name);
    let (served, happened) = serve(&mut setup.load(name), setup, requests);
    for (index, (served, request)) in served.iter().zip(requests).enumerate() {
        let mut expected = serve_alone(&mut alone, &alone_setup, request);
        let what = format!("{name}, request {index}, {setup:?}");
        if request.cancelled_at.is_some() {
            let num_tokens = served.tokens.len();
            assert!(num_tokens < expected.tokens.len(), "{what}: it ends");
            expected.tokens.truncate(num_tokens);
            expected.logits.truncate(num_tokens);
        }
        assert_same_bits(served, &expected, &what);
    }
    happened
}

#[test]
fn a_request_is_the_same_with_a_draft_model() {
    let mut requests = requests_that_share();
    for request in requests.iter_mut().skip(1).step_by(3) {
        request.sampling.temperature = 0.2;
        request.sampling.end_ids = (0..8).collect();
    }
    for (setup, name) in [
        (roomy("llama3"), "llama3"),
        (chunked(roomy("qwen3")), "qwen2"),
        (chunked(roomy("qwen3")), "qwen3"),
        (paused(roomy("qwen3")), "qwen3"),
        (paused(roomy("llama3")), "qwen2"),
        (with_tiles(roomy("llama3")), "llama3"),
    ] {
        let happened = serves_as_without(name, &setup, &requests);
        let drafts = happened.drafts;
        assert!(drafts.num_drafted > 100, "{happened:?}");
        let is_same = setup.draft_model == Some(name);
        assert!(!is_same || drafts.num_accepted > 50, "{happened:?}");
        let pauses = setup.policy == CapacityPolicy::MaxUtilization;
        assert_eq!(happened.num_pauses > 0, pauses, "{happened:?}");
    }
}

#[test]
fn all_drafts_of_the_model_itself_are_right() {
    let requests = requests().into_iter().map(|request| Request {
        sampling: SamplingParams::default(),
        outputs: OutputOptions::default(),
        ..request
    });
    let requests: Vec<_> = requests.collect();
    for setup in [roomy("qwen3"), chunked(roomy("qwen3"))] {
        let happened = serves_as_without("qwen3", &setup, &requests);
        let drafts = happened.drafts;
        assert!(drafts.num_drafted > 80, "{happened:?}");
        assert_eq!(drafts.num_accepted, drafts.num_drafted, "{setup:?}");
    }
}

#[test]
fn a_draft_model_has_the_tokens_of_the_model() {
    let demo = checkout().join("model_repository/stories/1");
    let open = |dir: &Path| ModelSource::open(dir).expect("the checkpoint opens");
    let source = open(&fixture("llama3")).with_draft_model(open(&demo));
    let error = source.err().expect("other tokens").to_string();
    for part in [
        "stories/1 has 1536 tokens, and the model in ",
        "llama3 has 160; name a draft model with the same tokenizer",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_draft_model_counts_towards_the_size_of_the_model() {
    let open = || ModelSource::open(&fixture("llama3")).expect("the checkpoint opens");
    let drafted = open().with_draft_model(open()).expect("the same tokens");
    let num_bytes = |source: &ModelSource| source.num_weight_bytes(None).expect("all are there");
    assert_eq!(num_bytes(&drafted), 2 * num_bytes(&open()));
    assert_eq!(drafted.max_positions(), 128);
    let bytes_per_block = |source: &ModelSource| {
        let model = ConfiguredModel {
            settings: &Settings::default(),
            source: Some(source),
            gpu: None,
        };
        let groups = model.layer_groups(Tokens(128), true);
        model.kv_bytes_per_block(BlockSize::new(16).expect("not zero"), &groups)
    };
    assert_eq!(bytes_per_block(&drafted), 2 * bytes_per_block(&open()));
}

#[test]
fn a_draft_model_with_another_tokenizer_is_refused() {
    let demo = checkout().join("model_repository/stories/1");
    let folder = format!("inflight-draft-model-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    fs::create_dir_all(&folder).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(demo.join(file), folder.join(file)).expect("it is copied");
    }
    let load = || {
        let options = json!({
            "gpt_model_path": demo, "speculation": "draft_model", "draft_model_path": folder,
            "max_seq_len": 64, "max_draft_tokens": 2
        });
        let options = ManagerOptions::parse(&options.to_string()).expect("good options");
        options.load().map(|_| ())
    };
    load().expect("without a tokenizer of its own");
    let text = fs::read_to_string(demo.join("tokenizer.json")).expect("it is there");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    fs::write(folder.join("tokenizer.json"), &text).expect("it is written");
    load().expect("with the same one");
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut();
    let vocabulary = vocabulary.expect("tokens");
    let last = |token: &Value| token.as_u64() >= Some(1534);
    for (_, token) in vocabulary.iter_mut().filter(|(_, token)| last(token)) {
        *token = json!(1534 + 1535 - token.as_u64().expect("an id"));
    }
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("it is written");
    let error = load().expect_err("other tokens").to_string();
    fs::remove_dir_all(&folder).expect("it is there");
    assert!(error.contains("token 1534 is '"), "{error}");
    for part in [demo.display(), folder.display()] {
        assert!(error.contains(&part.to_string()), "{error}");
    }
}
