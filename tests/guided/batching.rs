//! A guided request gets, bit for bit, what it gets alone.

use inflight_base::{Blocks, Tokens};
use inflight_engine::{BatchingScheme, CapacityPolicy, EngineConfig, PromptLookup, Speculation};
use inflight_guidance::GuideSpec;
use inflight_sampling::SamplingParams;
use serde_json::json;

use crate::support::{Answer, MODEL, Request, roomy, serve};

/// Guided requests of all kinds, alternating with others.
fn mixed() -> Vec<Request> {
    let specs = [
        GuideSpec::JsonSchema(
            json!({"type": "object", "required": ["who", "n"], "properties": {
            "who": {"type": "string", "maxLength": 30}, "n": {"type": "integer"}}}),
        ),
        GuideSpec::Regex(r"([a-z]{2,9} ){3,9}[a-z]+\.".to_owned()),
        GuideSpec::Grammar(
            "root ::= item (\", \" item){2,9}\nitem ::= [a-z]+ | \"(\" root \")\"".to_owned(),
        ),
        GuideSpec::Choice(vec!["the fox".to_owned(), "the foxes ran away".to_owned()]),
    ];
    let mut requests = Vec::new();
    for seed in 0..24 {
        let spec = specs[seed as usize % 4].clone();
        let guide = MODEL.guide(spec).expect("a good guide");
        let mut request = Request::guided("Once upon a time, there was a little fox", guide, seed);
        request.max_new_tokens = 60;
        request.sampling.temperature = [0.0, 0.8, 1.5][seed as usize % 3];
        request.sampling.repetition_penalty = 1.0 + (seed % 2) as f32 * 0.2;
        requests.push(request.clone());
        if seed % 2 == 0 {
            request.sampling = SamplingParams {
                guide: None,
                ..request.sampling
            };
            requests.push(request);
        }
    }
    requests
}

fn alone(request: &Request) -> Answer {
    serve(
        &mut MODEL.manager(roomy(), 1),
        std::slice::from_ref(request),
    )
    .0
    .remove(0)
}

#[test]
fn guided_requests_in_a_mixed_batch_get_what_they_get_alone() {
    let requests = mixed();
    let expected: Vec<Answer> = requests.iter().map(alone).collect();
    let tight = EngineConfig {
        max_num_requests: 12,
        max_seq_len: Tokens(96),
        max_num_tokens: Tokens(24),
        num_blocks: Blocks(24),
        policy: CapacityPolicy::MaxUtilization,
        ..roomy()
    };
    let speculation = Some(Speculation {
        max_draft_tokens: 5,
        prompt_lookup: Some(PromptLookup { min: 1, max: 4 }),
        has_draft_model: false,
        recomputes_drafts: false,
    });
    let configs = [
        ("roomy", roomy(), 2),
        ("tight", tight.clone(), 2),
        (
            "drafts",
            EngineConfig {
                speculation,
                ..roomy()
            },
            2,
        ),
        (
            "tight drafts",
            EngineConfig {
                speculation,
                ..tight.clone()
            },
            2,
        ),
        (
            "two micro-batches",
            EngineConfig {
                num_micro_batches: 2,
                ..tight
            },
            1,
        ),
        (
            "two calls",
            EngineConfig {
                scheme: BatchingScheme::Inflight,
                ..roomy()
            },
            1,
        ),
        (
            "lockstep",
            EngineConfig {
                scheme: BatchingScheme::V1,
                ..roomy()
            },
            1,
        ),
    ];
    for (name, config, num_threads) in configs {
        let requests = mixed();
        let guesses = config.speculation.is_some();
        let mut manager = MODEL.manager(config, num_threads);
        let (answers, num_pauses) = serve(&mut manager, &requests);
        for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(answer, expected, "{name}: request {index}");
        }
        let is_tight = name.contains("tight") || name == "two micro-batches";
        assert_eq!(num_pauses > 0, is_tight, "{name}");
        let drafts = manager.draft_totals();
        assert_eq!(drafts.num_accepted > 50, guesses, "{name}: {drafts:?}");
    }
}

#[test]
fn sequences_of_one_grammar_get_what_they_get_alone_with_separate_and_with_shared_guides() {
    let guide = MODEL.guide(GuideSpec::Regex(r"([a-z]{2,9} ){9}[a-z]+\.".to_owned()));
    let guide = guide.expect("a good guide");
    let own = |seed| Request::guided("Once", guide.0.fresh(), seed);
    let shared = |seed| Request::guided("Once", guide.clone(), seed);
    let requests: Vec<Request> = (0..16).map(own).chain((16..20).map(shared)).collect();
    let config = EngineConfig {
        max_num_requests: 20,
        ..roomy()
    };
    let (answers, _) = serve(&mut MODEL.manager(config, 2), &requests);
    for (seed, answer) in answers.iter().enumerate() {
        let own = MODEL.guide(GuideSpec::Regex(r"([a-z]{2,9} ){9}[a-z]+\.".to_owned()));
        let expected = alone(&Request::guided("Once", own.expect("good"), seed as u64));
        assert_eq!(*answer, expected);
    }
}
