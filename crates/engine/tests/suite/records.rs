//! Records of steps.

use crate::support::{TestRequest, World, wide_config};
use inflight_base::{Blocks, Tokens};
use inflight_engine::{
    AdapterUsage, BatchingScheme, CapacityPolicy, EngineConfig, LockstepTotals, Stage, Totals,
};

#[test]
fn a_step_is_recorded_as_planned() {
    let config = EngineConfig {
        max_num_requests: 2,
        max_num_active: 3,
        ..wide_config()
    };
    let mut world = World::new(config);
    world.add(TestRequest::of_lengths(5, 2)).expect("fits");
    world.step();
    world.add(TestRequest::of_lengths(9, 1)).expect("fits");
    world.add(TestRequest::of_lengths(1, 1)).expect("fits");
    world.step();
    let stats = world.engine.stats().expect("active").clone();
    assert_eq!((stats.iteration_counter, stats.max_num_active), (2, 3));
    assert_eq!(
        (stats.num_active, stats.num_scheduled, stats.num_waiting),
        (3, 2, 1)
    );
    assert_eq!(
        (stats.num_context, stats.num_generation, stats.num_paused),
        (1, 1, 0)
    );
    assert_eq!(stats.num_context_tokens, Tokens(9));
    // Two blocks of R1 and three of R2, although both have ended in this step.
    assert_eq!(
        (stats.kv.num_used, stats.kv.num_blocks),
        (Blocks(5), Blocks(128))
    );
    assert_eq!(world.engine.kv_usage().num_used, Blocks(0));
    world.step();
    assert_eq!(world.engine.stats().expect("active").iteration_counter, 3);
    world.step();
    assert_eq!(world.engine.stats(), None);
}

#[test]
fn a_paused_request_is_recorded_as_paused() {
    let mut world = World::new(EngineConfig {
        max_seq_len: Tokens(16),
        num_blocks: Blocks(6),
        policy: CapacityPolicy::MaxUtilization,
        ..wide_config()
    });
    for _ in 0..2 {
        world.add(TestRequest::of_lengths(6, 10)).expect("fits");
    }
    while world.num_pauses == 0 {
        world.step();
    }
    let stats = world.engine.stats().expect("active");
    assert_eq!(
        (stats.num_active, stats.num_scheduled, stats.num_context),
        (2, 1, 0)
    );
    assert_eq!((stats.num_paused, stats.num_waiting), (1, 1));
    let stages = world.engine.request_stages().iter();
    let stages: Vec<_> = stages.map(|it| (it.stage, it.tokens)).collect();
    assert_eq!(stages, [(Stage::Generation, 1), (Stage::Paused, 0)]);
}

#[test]
fn requests_that_have_ended_are_counted_unless_they_were_cancelled() {
    let mut world = World::new(EngineConfig {
        max_beam_width: 2,
        ..wide_config()
    });
    world.add(TestRequest::of_lengths(5, 2)).expect("fits");
    let searching = TestRequest::of_lengths(4, 3).with_beams(2);
    world.add(searching).expect("fits");
    let cancelled = world.add(TestRequest::of_lengths(3, 9)).expect("fits");
    world.add(TestRequest::of_lengths(2, 9)).expect("fits");
    world.step();
    world.cancel(cancelled);
    for _ in 0..3 {
        world.step();
    }
    // The search returns two hypotheses of three tokens.
    let ended = Totals {
        num_requests: 2,
        num_input_tokens: 9,
        num_output_tokens: 8,
    };
    assert_eq!(world.engine.stats().expect("active").ended, ended);
}

#[test]
fn the_pages_of_adapters_are_recorded() {
    let mut world = World::new(EngineConfig {
        num_adapter_pages: Some(5),
        ..wide_config()
    });
    // Adapter 1 has two pages, adapter 2 has three, and adapter 3 waits for its four.
    for adapter in [1, 1, 2, 3] {
        let request = TestRequest::of_lengths(5, 4).with_adapter(adapter);
        world.add(request).expect("fits");
    }
    world.step();
    let usage = AdapterUsage {
        num_pages: 5,
        num_used: 5,
        num_adapters: 2,
        num_waiting: 1,
    };
    assert_eq!(world.engine.stats().expect("active").adapters, Some(usage));
}

#[test]
fn a_batch_in_lockstep_is_recorded_when_it_has_ended() {
    let mut world = World::new(EngineConfig {
        scheme: BatchingScheme::V1,
        max_num_tokens: Tokens(14),
        ..wide_config()
    });
    for (num_prompt_tokens, max_new_tokens) in [(4, 2), (7, 4), (4, 2)] {
        let request = TestRequest::of_lengths(num_prompt_tokens, max_new_tokens);
        world.add(request).expect("fits");
    }
    let so_far = |num_context_tokens, num_generated_tokens| LockstepTotals {
        num_requests: 3,
        num_context_tokens,
        num_generated_tokens,
        num_empty_slots: 0,
    };
    // The contexts take two steps of one iteration. The fourth request comes too late for the batch.
    for (num_context_tokens, num_generated_tokens, num_waiting) in [(11, 0, 0), (15, 2, 1)] {
        world.step();
        let stats = world.engine.stats().expect("active");
        assert_eq!(stats.iteration_counter, 1);
        let so_far = so_far(num_context_tokens, num_generated_tokens);
        assert_eq!(stats.lockstep, Some(so_far));
        assert_eq!(stats.num_waiting, num_waiting);
        if num_waiting == 0 {
            // Its context takes two steps.
            world.add(TestRequest::of_lengths(20, 1)).expect("fits");
        }
    }
    world.run_to_end();
    assert!(world.config.is_lockstep() && !wide_config().is_lockstep());
    let ended = world.engine.take_ended_iterations();
    let totals: Vec<_> = ended
        .iter()
        .map(|it| (it.iteration_counter, it.lockstep))
        .collect();
    let first = LockstepTotals {
        num_requests: 3,
        num_context_tokens: 15,
        num_generated_tokens: 8,
        // Two requests wait for the other in its last two steps.
        num_empty_slots: 4,
    };
    let second = LockstepTotals {
        num_requests: 1,
        num_context_tokens: 20,
        num_generated_tokens: 1,
        num_empty_slots: 0,
    };
    assert_eq!(totals, [(1, Some(first)), (2, Some(second))]);
    assert_eq!(world.engine.take_ended_iterations(), []);
}

#[test]
fn only_calls_of_generation_have_slots_of_requests_that_have_ended() {
    let mut world = World::new(EngineConfig {
        scheme: BatchingScheme::V1,
        max_num_tokens: Tokens(8),
        ..wide_config()
    });
    // The first ends with its context, while the context of the second takes another step.
    for (num_prompt_tokens, max_new_tokens) in [(4, 1), (8, 3)] {
        let request = TestRequest::of_lengths(num_prompt_tokens, max_new_tokens);
        world.add(request).expect("fits");
    }
    let mut num_empty_slots = Vec::new();
    for _ in 0..4 {
        world.step();
        let stats = world.engine.stats().expect("active");
        num_empty_slots.push(stats.lockstep.expect("lockstep").num_empty_slots);
    }
    assert_eq!(num_empty_slots, [0, 0, 1, 2]);
    world.run_to_end();
}
