//! Draft models: the same bits as without, in fewer steps.

use std::path::Path;

use triton_inflight::engine::{BlockReuse, CapacityPolicy, OutputOptions, Speculation};
use triton_inflight::sampling::SamplingParams;

use crate::batching::{assert_same_bits, requests, requests_that_share};
use crate::support::{Happened, Request, Setup, serve, serve_alone};

const DRAFTED: Option<Speculation> = Some(Speculation {
    max_draft_tokens: 5,
    prompt_lookup: None,
    has_draft_model: true,
});

fn roomy(draft_model: &'static str) -> Setup {
    Setup {
        speculation: DRAFTED,
        draft_model: Some(draft_model),
        ..Setup::default()
    }
}

/// In chunks, with shared beginnings, and with fewer tokens a step than the draft model has to catch up on.
fn chunked(draft_model: &'static str) -> Setup {
    Setup {
        max_num_tokens: 24,
        block_size: 4,
        num_blocks: 200,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..roomy(draft_model)
    }
}

fn paused(draft_model: &'static str) -> Setup {
    Setup {
        num_blocks: 26,
        num_host_blocks: 20,
        policy: CapacityPolicy::MaxUtilization,
        separate_calls: true,
        ..chunked(draft_model)
    }
}

/// Serves requests with a draft model, and compares each with its run alone without one.
fn serves_as_without(name: &str, setup: &Setup, requests: &[Request]) -> Happened {
    let alone_setup = Setup::default();
    let mut alone = alone_setup.load(name);
    let (served, happened) = serve(&mut setup.load(name), setup, requests);
    for (index, (served, request)) in served.iter().zip(requests).enumerate() {
        let expected = serve_alone(&mut alone, &alone_setup, request);
        let what = format!("{name}, request {index}, {setup:?}");
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
        (chunked("qwen3"), "qwen2"),
        (chunked("qwen3"), "qwen3"),
        (paused("qwen3"), "qwen3"),
        (paused("llama3"), "qwen2"),
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
    for setup in [roomy("qwen3"), chunked("qwen3")] {
        let happened = serves_as_without("qwen3", &setup, &requests);
        let drafts = happened.drafts;
        assert!(drafts.num_drafted > 80, "{happened:?}");
        assert_eq!(drafts.num_accepted, drafts.num_drafted, "{setup:?}");
    }
}

#[test]
fn a_draft_model_has_the_tokens_of_the_model() {
    let setup = Setup::default();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/stories/1");
    let draft_model = setup.load_from(&demo);
    let runner = setup.load("llama3").with_draft_model(draft_model);
    let error = runner.map(|_| ()).expect_err("other tokens").to_string();
    assert!(error.contains("the draft model has 1536 tokens"), "{error}");
    assert!(
        error.contains("has 160; name a draft model with the same tokenizer"),
        "{error}"
    );
}
