//! Which drafts a draft model is asked for, and from where it computes them.

use crate::support::{TestRequest, wide_config};
use inflight_base::{Blocks, SequenceId, TokenId, Tokens};
use inflight_engine::{
    BlockReuse, Engine, EngineConfig, Sampled, Speculation, StepCost, StepOutput,
};

fn with_draft_model() -> EngineConfig {
    EngineConfig {
        speculation: Some(Speculation {
            max_draft_tokens: 4,
            prompt_lookup: None,
            has_draft_model: true,
            recomputes_drafts: false,
        }),
        ..wide_config()
    }
}

/// With a draft model, and with the costs of its steps and of the steps of the model.
fn with_costs(model: u64, draft: u64) -> EngineConfig {
    let cost = |fixed_ns, per_token_ns| {
        Some(StepCost {
            fixed_ns,
            per_token_ns,
        })
    };
    EngineConfig {
        step_cost: cost(model, 1),
        draft_cost: cost(draft, 1),
        ..with_draft_model()
    }
}

/// The drafts that a draft model is asked for.
#[derive(Debug, PartialEq)]
struct Made {
    start: u32,
    num_tokens: usize,
    num_drafts: u32,
}

fn made(start: u32, num_tokens: usize, num_drafts: u32) -> Made {
    Made {
        start,
        num_tokens,
        num_drafts,
    }
}

fn add(engine: &mut Engine, id: u64, num_prompt_tokens: u32, max_new_tokens: u32) {
    let request = TestRequest::of_lengths(num_prompt_tokens, max_new_tokens);
    engine
        .add(request.to_request(SequenceId(id)))
        .expect("fits");
}

/// One step, in which all drafts are right, or none. Returns what the draft model is asked for.
fn step(engine: &mut Engine, are_right: bool) -> Vec<Made> {
    const TOKEN: TokenId = 3;
    let mut step = engine.schedule();
    let asked: Vec<_> = step
        .drafts_to_make()
        .map(|it| made(it.start, it.tokens.len(), it.num_drafts))
        .collect();
    let num_drafts: u32 = asked.iter().map(|it| it.num_drafts).sum();
    let draft = if are_right { TOKEN } else { TOKEN + 1 };
    step.set_drafts(&vec![draft; num_drafts as usize]);
    for plan in step.plans() {
        let drafts = plan.sequences.iter().flat_map(|it| plan.drafts(it));
        assert!(
            drafts.into_iter().all(|it| *it == draft),
            "they are planned"
        );
    }
    let mut output = StepOutput::default();
    for planned in step.sequences().iter().filter(|planned| planned.samples) {
        let num_accepted = if are_right { planned.num_drafts } else { 0 };
        for _ in 0..=num_accepted {
            output.sampled.push((planned.slot, Sampled::Token(TOKEN)));
        }
    }
    engine.apply(step, &mut output, &mut Vec::new());
    asked
}

#[test]
fn a_draft_model_catches_up_on_what_the_model_has_computed() {
    for (are_right, second) in [
        // It lacks the last draft, which the model has computed.
        (true, made(9, 2, 4)),
        // Its keys and values of the drafts are void.
        (false, made(6, 1, 4)),
    ] {
        let mut engine = Engine::new(with_draft_model());
        add(&mut engine, 1, 5, 40);
        assert_eq!(step(&mut engine, are_right), []);
        assert_eq!(step(&mut engine, are_right), [made(0, 6, 4)]);
        assert_eq!(step(&mut engine, are_right), [second]);
    }
}

#[test]
fn blocks_that_were_found_in_the_cache_are_taken_for_computed() {
    let mut engine = Engine::new(EngineConfig {
        reuse: BlockReuse::WholeBlocks,
        ..with_draft_model()
    });
    for (id, start) in [(1, 0), (2, 12)] {
        add(&mut engine, id, 14, 3);
        step(&mut engine, true);
        assert_eq!(
            step(&mut engine, true),
            [made(start, 15 - start as usize, 1)]
        );
        while !engine.is_idle() {
            step(&mut engine, true);
        }
    }
}

#[test]
fn a_step_of_the_draft_model_has_no_more_tokens_than_one_of_the_model() {
    for (num_prompt_tokens, asked) in [
        (7, Some(made(0, 8, 4))),
        // The last token is one of the step's.
        (8, Some(made(0, 9, 4))),
        (9, None),
    ] {
        let mut engine = Engine::new(EngineConfig {
            max_num_tokens: Tokens(8),
            ..with_draft_model()
        });
        add(&mut engine, 1, num_prompt_tokens, 20);
        let mut all = Vec::new();
        while all.is_empty() && !engine.is_idle() {
            all = step(&mut engine, true);
        }
        assert_eq!(all.pop(), asked, "{num_prompt_tokens}");
    }
}

#[test]
fn no_drafts_are_made_that_cost_more_than_they_save() {
    let mut engine = Engine::new(with_costs(100, 1000));
    add(&mut engine, 1, 5, 20);
    while !engine.is_idle() {
        assert_eq!(step(&mut engine, true), []);
    }
}

#[test]
fn a_request_begins_with_what_the_drafts_of_others_were_worth() {
    let first_drafts = |engine: &mut Engine, id, are_right| {
        add(engine, id, 5, 20);
        step(engine, are_right);
        let asked = step(engine, are_right);
        while !engine.is_idle() {
            step(engine, are_right);
        }
        asked.first().map_or(0, |it| it.num_drafts)
    };
    let mut engine = Engine::new(with_costs(1000, 200));
    let unknown = first_drafts(&mut engine, 1, true);
    let after_right = first_drafts(&mut engine, 2, true);
    assert!(
        (1..after_right).contains(&unknown),
        "{unknown}, {after_right}"
    );
    let mut engine = Engine::new(with_costs(1000, 200));
    assert_eq!(first_drafts(&mut engine, 1, false), unknown);
    for id in 2..9 {
        first_drafts(&mut engine, id, false);
    }
    assert_eq!(first_drafts(&mut engine, 9, false), 0);
}

#[test]
fn a_long_prompt_is_not_caught_up_on_for_few_tokens() {
    let asked_for = |num_prompt_tokens, max_new_tokens| {
        let mut engine = Engine::new(EngineConfig {
            max_seq_len: Tokens(512),
            num_blocks: Blocks(512),
            ..with_costs(100, 10)
        });
        add(&mut engine, 1, num_prompt_tokens, max_new_tokens);
        step(&mut engine, true);
        step(&mut engine, true).len()
    };
    assert_eq!(asked_for(400, 3), 0);
    assert_eq!(asked_for(400, 100), 1);
    // Two tokens are left, and one of them is drafted.
    assert_eq!(asked_for(1, 3), 1);
}

#[test]
fn sequences_share_the_cost_of_a_draft_model() {
    let mut engine = Engine::new(with_costs(1000, 400));
    add(&mut engine, 1, 5, 40);
    while !engine.is_idle() {
        step(&mut engine, true);
    }
    // A pass for one of three would cost more than a token of the step.
    for id in 2..5 {
        add(&mut engine, id, 5, 20);
    }
    step(&mut engine, true);
    assert_eq!(step(&mut engine, true).len(), 3);
}
