//! The synthetic runner with the real engine: every stream matches its hash.

use std::time::{Duration, Instant};

use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_engine::{
    CapacityPolicy, Engine, Event, NewRequest, PromptLookup, Speculation, StepOutput,
};
use inflight_runner::{SyntheticOptions, SyntheticRunner, synthetic};

use crate::support::Setup;

const VOCAB_SIZE: u32 = 1000;

/// Serves 40 requests of many lengths; returns the tokens of each, the number of pauses, and the number of
/// accepted drafts.
fn serve(setup: &Setup) -> (Vec<Vec<TokenId>>, usize, u64) {
    let options = SyntheticOptions {
        vocab_size: VOCAB_SIZE,
        step_base_us: 0.0,
        step_per_token_us: 0.0,
    };
    let runner = SyntheticRunner::new(options, &setup.runner_limits()).expect("memory");
    let mut runner = Box::new(runner);
    assert_eq!(runner.vocab_size(), VOCAB_SIZE);
    let mut engine = Engine::new(setup.engine_config());
    for index in 0..40 {
        let max_new_tokens = Tokens(1 + (index as u32 * 7) % 40);
        let mut request = NewRequest::new(SequenceId(index), prompt(index), max_new_tokens);
        // Drafts: some have none, some a part of the answer, and some all of it.
        let foreseen = expected(index);
        let num_foreseen = foreseen.len() * (index as usize % 4) / 3;
        let expected = foreseen[..num_foreseen].iter().copied();
        request.drafts.expected = expected.chain([3]).collect();
        engine.add(request).expect("a valid request");
    }
    let mut generated = vec![Vec::new(); 40];
    let mut num_pauses = 0;
    let mut moves = setup.moves();
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    while !engine.is_idle() {
        let step = engine.schedule();
        output.sampled.clear();
        for plan in step.plans() {
            let plan = match &mut moves {
                Some(moves) => moves.apply(plan),
                None => plan,
            };
            runner.run(plan, &mut output).expect("the step runs");
        }
        engine.apply(step, &mut output, &mut events);
        for event in events.drain(..) {
            match event {
                Event::Token(id, token) => generated[id.index()].push(token),
                Event::Paused(_) => num_pauses += 1,
                Event::Admitted(..)
                | Event::ExtraOutputs(..)
                | Event::Hypotheses(..)
                | Event::Finished(..) => {}
            }
        }
    }
    (generated, num_pauses, engine.draft_totals().num_accepted)
}

fn prompt(index: u64) -> Vec<TokenId> {
    (0..1 + (index * 13) % 50)
        .map(|i| ((index * 31 + i * 17) % u64::from(VOCAB_SIZE)) as TokenId)
        .collect()
}

/// The tokens that `next_token` defines for the prompt.
fn expected(index: u64) -> Vec<TokenId> {
    let mut tokens = prompt(index);
    let num_prompt_tokens = tokens.len();
    for _ in 0..1 + (index * 7) % 40 {
        tokens.push(synthetic::next_token(&tokens, VOCAB_SIZE));
    }
    tokens.split_off(num_prompt_tokens)
}

#[test]
fn streams_match_the_hash_under_every_kind_of_scheduling() {
    let roomy = Setup::default();
    let chunked = Setup {
        max_num_tokens: 16,
        block_size: 4,
        enable_chunked_context: true,
        num_blocks: 1000,
        ..Setup::default()
    };
    let scarce = Setup {
        block_size: 4,
        num_blocks: 25,
        policy: CapacityPolicy::MaxUtilization,
        ..Setup::default()
    };
    let moving = Setup {
        moves_blocks: true,
        num_runner_blocks: Some(30),
        ..scarce.clone()
    };
    let windowed = Setup {
        windows: &[9],
        num_sinks: 6,
        ..moving.clone()
    };
    let setups = [
        (roomy, false),
        (chunked, false),
        (scarce, true),
        (moving, true),
        (windowed, true),
    ];
    let speculation = Some(Speculation {
        max_draft_tokens: 4,
        prompt_lookup: Some(PromptLookup { min: 1, max: 2 }),
        has_draft_model: false,
        recomputes_drafts: false,
    });
    for ((setup, pauses), speculation) in setups
        .iter()
        .flat_map(|setup| [None, speculation].map(|speculation| (setup, speculation)))
    {
        let setup = Setup {
            speculation,
            ..setup.clone()
        };
        let (generated, num_pauses, num_accepted) = serve(&setup);
        for (index, tokens) in generated.iter().enumerate() {
            assert_eq!(
                tokens,
                &expected(index as u64),
                "request {index}, {setup:?}"
            );
        }
        assert_eq!(num_pauses > 0, *pauses, "{num_pauses} pauses, {setup:?}");
        let is_drafted = num_accepted > 100;
        assert_eq!(
            is_drafted,
            speculation.is_some(),
            "{num_accepted}, {setup:?}"
        );
    }
}

#[test]
fn a_step_takes_the_time_configured_for_its_tokens() {
    let setup = Setup::default();
    let options = SyntheticOptions {
        vocab_size: VOCAB_SIZE,
        step_base_us: 1000.0,
        step_per_token_us: 100.0,
    };
    let mut runner = SyntheticRunner::new(options, &setup.runner_limits()).expect("memory");
    let mut engine = Engine::new(setup.engine_config());
    let request = NewRequest::new(SequenceId(0), vec![1; 30], Tokens(2));
    engine.add(request).expect("a valid request");
    for duration_us in [1000 + 30 * 100, 1000 + 100] {
        let (mut output, mut events) = (StepOutput::default(), Vec::new());
        let started = Instant::now();
        let step = engine.schedule();
        for plan in step.plans() {
            runner.run(plan, &mut output).expect("the step runs");
        }
        // There is no upper bound: the machine may be busy.
        assert!(started.elapsed() >= Duration::from_micros(duration_us));
        engine.apply(step, &mut output, &mut events);
    }
}

#[test]
fn a_cache_larger_than_memory_is_rejected() {
    let options = SyntheticOptions {
        vocab_size: VOCAB_SIZE,
        step_base_us: 0.0,
        step_per_token_us: 0.0,
    };
    let setup = Setup {
        num_blocks: u32::MAX,
        block_size: u32::MAX,
        ..Setup::default()
    };
    assert!(SyntheticRunner::new(options, &setup.runner_limits()).is_err());
}
