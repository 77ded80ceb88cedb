//! Requests that the engine refuses, and how requests end.

use std::sync::Arc;

use crate::support::{TestRequest, World, wide_config};
use inflight_base::{Blocks, SequenceId, Tokens};
use inflight_engine::{
    Adapter, AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, DraftTotals, Engine,
    EngineConfig, Event, ExtraOutputs, KvBlocks, KvGroups, OutputOptions, ReuseOptions, Sampled,
    Speculation, StepOutput,
};
use inflight_sampling::{FinishReason, SampleError};

#[test]
fn requests_that_could_never_run_are_rejected_with_the_way_out() {
    let refusal = |config: EngineConfig, num_prompt_tokens, max_new_tokens| {
        let mut world = World::new(config);
        let request = TestRequest::of_lengths(num_prompt_tokens, max_new_tokens);
        let error = world.add(request).expect_err("could never run").to_string();
        assert!(world.engine.is_idle(), "nothing of it is left");
        error
    };
    let wide = wide_config;
    assert_eq!(
        refusal(wide(), 0, 1),
        "the prompt is empty: it must have at least one token"
    );
    assert_eq!(
        refusal(wide(), 1, 0),
        "a request for no new tokens: ask for at least 1"
    );
    assert_eq!(
        refusal(wide(), 64, 1),
        "the prompt has 64 tokens and one of output makes 65, more than max_seq_len = 64: shorten \
         the prompt"
    );
    let not_chunked = EngineConfig {
        max_num_tokens: Tokens(20),
        enable_chunked_context: false,
        ..wide()
    };
    assert_eq!(
        refusal(not_chunked, 21, 1),
        "the prompt has 21 tokens, more than a step can carry (max_num_tokens = 20) and \
         enable_chunked_context is false: shorten the prompt"
    );
}

#[test]
fn prompts_that_cannot_be_pooled_are_rejected() {
    let pooling = EngineConfig {
        pools: true,
        ..wide_config()
    };
    let whole = EngineConfig {
        whole_prompts: true,
        max_num_tokens: Tokens(20),
        ..pooling.clone()
    };
    let add = |config: &EngineConfig, num_prompt_tokens| {
        let mut engine = Engine::new(config.clone());
        let request = TestRequest::of_lengths(num_prompt_tokens, 1);
        engine.add(request.to_request(SequenceId(1)))
    };
    // Nothing is generated, so a prompt may be as long as a sequence.
    add(&pooling, 64).expect("fits");
    let error = add(&pooling, 65).expect_err("too long").to_string();
    assert_eq!(
        error,
        "the prompt has 65 tokens, more than max_seq_len = 64: shorten the prompt"
    );
    add(&whole, 20).expect("fits");
    let error = add(&whole, 21).expect_err("too long").to_string();
    assert!(
        error.contains("a step computes all; max_num_tokens = 20 is less"),
        "{error}"
    );
    let mut engine = Engine::new(pooling);
    let request = TestRequest::of_lengths(5, 1).with_beams(1);
    let error = engine
        .add(request.to_request(SequenceId(1)))
        .expect_err("nothing is searched");
    assert!(error.to_string().contains("leave out beam_width"));
}

#[test]
fn the_longest_prompt_gives_one_token() {
    let mut world = World::new(wide_config());
    let id = world
        .add(TestRequest::of_lengths(63, u32::MAX))
        .expect("fits");
    world.step();
    assert_eq!(
        world.events.last(),
        Some(&Event::Finished(id, FinishReason::Length))
    );
    assert_eq!(world.streams[&id].tokens.len(), 1);
}

#[test]
fn a_sequence_with_nan_logits_fails_alone() {
    let mut world = World::new(wide_config());
    let fails = TestRequest {
        fails_after: Some(1),
        ..TestRequest::of_lengths(3, 4)
    };
    let failing = world.add(fails).expect("fits");
    let other = world.add(TestRequest::of_lengths(3, 2)).expect("fits");
    world.step();
    world.step();
    let finishes: Vec<_> = world
        .events
        .iter()
        .filter(|event| matches!(event, Event::Finished(..)))
        .collect();
    assert_eq!(
        finishes,
        [
            &Event::Finished(failing, FinishReason::Error(SampleError::NotFinite)),
            &Event::Finished(other, FinishReason::Length),
        ]
    );
    assert!(world.engine.is_idle());
}

#[test]
fn a_request_can_be_cancelled_wherever_it_is() {
    // The pool is large enough for R1 and R2 until both need a third block; then R2 is paused, and R3 waits.
    let config = EngineConfig {
        max_num_requests: 2,
        max_seq_len: Tokens(16),
        num_blocks: Blocks(4),
        policy: CapacityPolicy::MaxUtilization,
        ..wide_config()
    };
    let mut world = World::new(config);
    let [running, paused, waiting] =
        [(); 3].map(|()| world.add(TestRequest::of_lengths(7, 9)).expect("fits"));
    world.step();
    world.step();
    world.step();
    assert_eq!(world.events[0], Event::Paused(paused));
    for (id, num_active, num_used) in [(paused, 2, 3), (waiting, 1, 3), (running, 0, 0)] {
        assert!(world.engine.is_active(id));
        world.cancel(id);
        world.engine.check_integrity();
        assert_eq!(world.engine.num_active(), num_active);
        assert_eq!(world.engine.kv_usage().num_used, Blocks(num_used));
        assert!(!world.engine.is_active(id));
    }
    assert!(
        !world.engine.cancel(SequenceId(999)),
        "no request has this id"
    );
    assert!(world.step().is_empty());
}

/// An engine with requests of five tokens, the first of which is `SequenceId(1)`.
fn engine_with(config: EngineConfig, num_requests: u64) -> Engine {
    let mut engine = Engine::new(config);
    for id in 1..=num_requests {
        let request = TestRequest::of_lengths(5, 9).to_request(SequenceId(id));
        engine.add(request).expect("fits");
    }
    engine
}

#[test]
fn a_pooling_model_returns_a_state_and_nothing_of_what_others_generate() {
    let mut engine = Engine::new(EngineConfig {
        pools: true,
        ..wide_config()
    });
    let mut request = TestRequest::of_lengths(5, 9);
    request.outputs = OutputOptions {
        kv_blocks: true,
        generation_logits: true,
        ..OutputOptions::default()
    };
    let mut request = request.to_request(SequenceId(1));
    request.second_text = Some(Tokens(3));
    engine.add(request).expect("fits");
    let step = engine.schedule();
    let plan = step.plans().next().expect("a call");
    let outputs = OutputOptions {
        pooled: true,
        kv_blocks: true,
        ..OutputOptions::default()
    };
    assert_eq!(plan.outputs(0), outputs);
    assert_eq!(plan.second_text(0), Some(Tokens(3)));
}

#[test]
fn a_waiting_request_can_be_finished_except_in_lockstep() {
    for (scheme, ends) in [
        (BatchingScheme::InflightFused, true),
        (BatchingScheme::V1, false),
    ] {
        let config = EngineConfig {
            scheme,
            max_num_requests: 1,
            ..wide_config()
        };
        let mut engine = engine_with(config.clone(), 2);
        assert_eq!(engine.config(), &config);
        let _step = engine.schedule();
        let mut finish = |id| engine.finish(SequenceId(id), Tokens(0), FinishReason::StopWords);
        assert_eq!(finish(2), ends);
        assert!(!finish(3), "nobody has it");
        assert_eq!(engine.is_active(SequenceId(2)), !ends);
    }
}

#[test]
fn a_request_that_waits_for_its_batch_has_ended() {
    let mut world = World::new(EngineConfig {
        scheme: BatchingScheme::V1,
        ..wide_config()
    });
    let first = world.add(TestRequest::of_lengths(4, 1)).expect("fits");
    let second = world.add(TestRequest::of_lengths(4, 3)).expect("fits");
    world.step();
    assert_eq!(world.engine.ended(first), Some(FinishReason::Length));
    assert_eq!(world.engine.ended(second), None);
}

#[test]
fn what_an_engine_keeps_another_one_restores() {
    let config = EngineConfig {
        num_host_blocks: Blocks(8),
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    };
    let mut world = World::new(config.clone());
    world.add(TestRequest::of_lengths(13, 2)).expect("fits");
    world.run_to_end();
    let (moves, kept) = world.engine.keep();
    // The full blocks of 14 positions.
    assert_eq!((moves.len(), kept.len()), (3, 3));
    assert_eq!(Engine::new(config).restore(&kept).len(), 3);
}

#[test]
fn a_step_can_be_planned_ahead_while_one_with_a_sequence_is_out() {
    let ahead = EngineConfig {
        plan_ahead: true,
        ..wide_config()
    };
    assert!(!Engine::new(ahead.clone()).can_plan_ahead());
    let mut engine = engine_with(ahead, 1);
    let _first = engine.schedule();
    assert!(engine.can_plan_ahead());
    let _second = engine.schedule();
    assert!(!engine.can_plan_ahead(), "two steps are out");

    let mut engine = engine_with(wide_config(), 1);
    let step = engine.schedule();
    let mut output = StepOutput::default();
    let slot = step.sequences()[0].slot;
    output.sampled.push((slot, Sampled::Token(1)));
    engine.apply(step, &mut output, &mut Vec::new());
    assert!(!engine.can_plan_ahead(), "it plans none ahead");
}

#[test]
fn a_sequence_is_planned_ahead_again_when_it_has_what_it_missed() {
    let mut engine = engine_with(
        EngineConfig {
            plan_ahead: true,
            ..wide_config()
        },
        1,
    );
    for (result, is_ahead) in [
        (Sampled::Token(1), true),
        (Sampled::Missed, true),
        (Sampled::Token(2), false),
        (Sampled::Token(3), true),
    ] {
        let step = engine.schedule();
        assert_eq!(engine.can_plan_ahead(), is_ahead, "{result:?}");
        let mut output = StepOutput::default();
        output.sampled.push((step.sequences()[0].slot, result));
        engine.apply(step, &mut output, &mut Vec::new());
    }
}

#[test]
fn a_sequence_that_has_missed_a_token_keeps_its_extra_outputs() {
    let mut world = World::new(wide_config());
    let request = TestRequest {
        is_guided: true,
        outputs: OutputOptions {
            generation_logits: true,
            kv_blocks: true,
            ..OutputOptions::default()
        },
        ..TestRequest::of_lengths(5, 40)
    };
    world.add(request).expect("fits");
    world.run_to_end();
    assert!(world.num_missed > 0);
}

#[test]
fn what_is_retained_is_found_until_it_is_released() {
    let mut world = World::new(EngineConfig {
        num_blocks: Blocks(16),
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    });
    let prompt = TestRequest::of_lengths(13, 1).prompt;
    // Others fill the pool twice before it comes again.
    let num_found = |world: &mut World| {
        let of = |prompt: Vec<u32>| TestRequest {
            prompt,
            outputs: OutputOptions {
                kv_blocks: true,
                ..OutputOptions::default()
            },
            ..TestRequest::of_lengths(1, 1)
        };
        for other in [7, 8, 9] {
            world.add(of(vec![other; 41])).expect("fits");
            world.run_to_end();
        }
        let id = world.add(of(prompt.clone())).expect("fits");
        world.run_to_end();
        world.streams[&id].kv_blocks.num_reused
    };
    assert_eq!(num_found(&mut world), Blocks(0));
    assert_eq!(num_found(&mut world), Blocks(0), "evicted");
    let retained = world
        .engine
        .retain(TestRequest::of_lengths(13, 1).prompt.into(), None);
    assert_eq!(num_found(&mut world), Blocks(3));
    world.engine.release_retained(&retained);
    assert_eq!(num_found(&mut world), Blocks(0), "evicted again");
}

#[test]
fn no_more_than_sixteen_requests_that_wait_for_blocks_are_overtaken() {
    for (num_waiting, num_planned) in [(15, 2), (16, 1)] {
        let mut world = World::new(EngineConfig {
            max_num_requests: 20,
            num_blocks: Blocks(256),
            reuse: BlockReuse::WholeBlocks,
            ..wide_config()
        });
        // All but the first wait for what it writes.
        for _ in 0..=num_waiting {
            world.add(TestRequest::of_lengths(14, 2)).expect("fits");
        }
        let prompt = vec![7, 7];
        let other = TestRequest {
            prompt,
            ..TestRequest::of_lengths(2, 2)
        };
        world.add(other).expect("fits");
        assert_eq!(world.step().len(), num_planned, "{num_waiting} wait");
        world.run_to_end();
    }
}

#[test]
fn only_a_prompt_that_begins_like_another_waits_for_its_states() {
    let first: Vec<_> = (0..13).collect();
    let mut other = first.clone();
    other[0] = 9;
    let shares_nothing = ReuseOptions {
        enabled: false,
        ..ReuseOptions::default()
    };
    for (prompt, reuse, starts) in [
        (&first, ReuseOptions::default(), false),
        (&other, ReuseOptions::default(), true),
        (&first, shares_nothing, true),
    ] {
        let mut world = World::new(EngineConfig {
            num_state_snapshots: 4,
            reuse: BlockReuse::WholeBlocks,
            ..wide_config()
        });
        for prompt in [&first, prompt] {
            let request = TestRequest {
                prompt: prompt.clone(),
                reuse: reuse.clone(),
                ..TestRequest::of_lengths(13, 2)
            };
            world.add(request).expect("fits");
        }
        assert_eq!(world.step().len() == 2, starts, "{prompt:?}, {reuse:?}");
        world.run_to_end();
    }
}

#[test]
fn an_adapter_is_let_go_with_the_last_request_that_has_it() {
    let weights = Arc::new(7_u32);
    let mut engine = Engine::new(EngineConfig {
        num_adapter_pages: Some(4),
        ..wide_config()
    });
    let mut request = TestRequest::of_lengths(5, 1).to_request(SequenceId(1));
    request.adapter = Some(Adapter::new(weights.clone(), 1));
    engine.add(request).expect("fits");
    let step = engine.schedule();
    let mut output = StepOutput::default();
    let slot = step.sequences()[0].slot;
    output.sampled.push((slot, Sampled::Token(1)));
    engine.apply(step, &mut output, &mut Vec::new());
    assert_eq!(Arc::strong_count(&weights), 1);
}

#[test]
fn nothing_could_join_a_static_batch_that_runs() {
    let config = EngineConfig {
        policy: CapacityPolicy::StaticBatch,
        ..wide_config()
    };
    let mut engine = engine_with(config, 1);
    let _step = engine.schedule();
    assert_eq!(engine.num_startable(), 0);
}

#[test]
fn each_beam_takes_a_token_of_the_room() {
    let mut world = World::new(EngineConfig {
        max_beam_width: 2,
        ..wide_config()
    });
    let request = TestRequest::of_lengths(5, 9).with_beams(2);
    world.add(request).expect("fits");
    world.step();
    assert_eq!(world.engine.room().tokens, Tokens(510));
}

/// Applies a step of one request, whose token is followed by more than the step asks for.
fn apply_too_much(more: impl FnOnce(&mut StepOutput)) {
    let mut engine = Engine::new(wide_config());
    let request = TestRequest::of_lengths(3, 4).to_request(SequenceId(1));
    engine.add(request).expect("fits");
    let step = engine.schedule();
    let mut output = StepOutput::default();
    output
        .sampled
        .push((step.sequences()[0].slot, Sampled::Token(1)));
    more(&mut output);
    engine.apply(step, &mut output, &mut Vec::new());
}

#[test]
#[should_panic(expected = "no result for a sequence that does not sample")]
fn a_result_that_no_sequence_samples_is_refused() {
    apply_too_much(|output| output.sampled.push(output.sampled[0]));
}

#[test]
#[should_panic(expected = "extra outputs are in the step's order")]
fn extra_outputs_that_no_sequence_wants_are_refused() {
    apply_too_much(|output| {
        let slot = output.sampled[0].0;
        output.extra_outputs.push((slot, ExtraOutputs::default()));
    });
}

#[test]
fn limits_beyond_what_the_pool_can_hold_take_no_memory() {
    let config = EngineConfig {
        max_num_requests: u32::MAX,
        max_num_tokens: Tokens(u32::MAX),
        ..wide_config()
    };
    let mut world = World::new(config);
    let ids = [(); 130].map(|()| world.add(TestRequest::of_lengths(1, 2)).expect("fits"));
    assert_eq!(world.step().len(), 128, "one for each block");
    world.run_to_end();
    assert!(ids.iter().all(|id| world.streams[id].ended));
}

#[test]
fn a_request_can_report_its_number_of_blocks() {
    let of_blocks = TestRequest {
        outputs: OutputOptions {
            kv_blocks: true,
            ..OutputOptions::default()
        },
        ..TestRequest::of_lengths(7, 9)
    };
    let blocks = |num_new, num_reused| KvBlocks {
        num_new: Blocks(num_new),
        num_reused: Blocks(num_reused),
    };
    // As above, R2 is paused when both need a third block, and later allocates all four of its blocks again.
    let tight = EngineConfig {
        max_num_requests: 2,
        max_seq_len: Tokens(16),
        num_blocks: Blocks(4),
        policy: CapacityPolicy::MaxUtilization,
        ..wide_config()
    };
    let mut world = World::new(tight);
    let [first, second] = [(); 2].map(|()| world.add(of_blocks.clone()).expect("fits"));
    world.run_to_end();
    assert_eq!(world.streams[&first].kv_blocks, blocks(4, 0));
    assert_eq!(world.streams[&second].kv_blocks, blocks(2 + 4, 0));
    assert_eq!(world.streams[&second].num_cached, Tokens(0));

    let mut world = World::new(EngineConfig {
        reuse: BlockReuse::PartialBlocks,
        ..wide_config()
    });
    // 6 of the 7 tokens can be reused: a whole block, and the beginning of the next.
    for (expected, num_cached) in [(blocks(4, 0), 0), (blocks(2, 2), 6)] {
        let id = world.add(of_blocks.clone()).expect("fits");
        world.run_to_end();
        assert_eq!(world.streams[&id].kv_blocks, expected);
        assert_eq!(world.streams[&id].num_cached, Tokens(num_cached));
    }
    for (context_logits, prompt_log_probs) in [(true, None), (false, Some(1)), (true, Some(1))] {
        let context = TestRequest {
            outputs: OutputOptions {
                context_logits,
                prompt_log_probs,
                ..of_blocks.outputs
            },
            ..of_blocks.clone()
        };
        let id = world.add(context).expect("fits");
        world.run_to_end();
        assert_eq!(
            world.streams[&id].kv_blocks,
            blocks(4, 0),
            "all is computed anew"
        );
    }
}

/// A request with drafts whose first `num_right` tokens are correct, and none after them.
fn foreseen(num_right: usize, request: TestRequest) -> TestRequest {
    let mut request = TestRequest {
        outputs: OutputOptions {
            drafts: true,
            ..OutputOptions::default()
        },
        ..request
    };
    request.drafts.expected = request
        .answer_alone(Tokens(64))
        .0
        .into_iter()
        .take(num_right)
        .collect();
    request
}

#[test]
fn draft_statistics_are_in_the_events_and_in_the_records() {
    let config = EngineConfig {
        speculation: Some(Speculation {
            max_draft_tokens: 4,
            prompt_lookup: None,
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..wide_config()
    };
    let mut world = World::new(config);
    let mut wrong = foreseen(9, TestRequest::of_lengths(6, 9));
    let mut expected = wrong.drafts.expected.to_vec();
    expected[3] ^= 1;
    wrong.drafts.expected = expected.into();
    let wrong = world.add(wrong).expect("fits");
    let right = world
        .add(foreseen(9, TestRequest::of_lengths(5, 9)))
        .expect("fits");
    let silent = TestRequest {
        outputs: OutputOptions::default(),
        ..foreseen(3, TestRequest::of_lengths(4, 9))
    };
    let silent = world.add(silent).expect("fits");
    world.step();
    world.step();
    assert_eq!(world.active().count(), 3);
    world.step();
    let before = world.engine.stats().expect("active").drafts;
    world.run_to_end();
    let totals = |num_drafted, num_accepted| DraftTotals {
        num_drafted,
        num_accepted,
    };
    // The third of the four drafts of `wrong` is wrong. `right` has four and then two drafts, `silent` two, all
    // correct.
    assert_eq!(world.streams[&wrong].drafts, totals(4, 2));
    assert_eq!(world.streams[&right].drafts, totals(6, 6));
    assert_eq!(world.streams[&silent].drafts, totals(0, 0));
    assert_eq!(before, Some(totals(4 + 4 + 2, 2 + 4 + 2)));
    assert_eq!(world.engine.draft_totals(), totals(4 + 6 + 2, 2 + 6 + 2));
}

#[test]
fn tokens_after_a_stop_word_in_the_same_step_are_not_counted() {
    let config = EngineConfig {
        speculation: Some(Speculation {
            max_draft_tokens: 8,
            prompt_lookup: None,
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..wide_config()
    };
    let mut world = World::new(config);
    let stopped = world
        .add(foreseen(9, TestRequest::of_lengths(5, 30)))
        .expect("fits");
    let other = world.add(TestRequest::of_lengths(7, 2)).expect("fits");
    world.step();
    world.step();
    assert!(world.streams[&other].ended);
    assert_eq!(world.streams[&stopped].tokens.len(), 10);
    // Its fourth token completes a stop word.
    let reason = FinishReason::StopWords;
    assert!(world.engine.finish(stopped, Tokens(4), reason));
    world.streams.get_mut(&stopped).expect("added").ended = true;
    let last = world.add(TestRequest::of_lengths(3, 2)).expect("fits");
    world.run_to_end();
    assert!(world.streams[&last].ended);
    let id = world.add(TestRequest::of_lengths(1, 1)).expect("fits");
    world.step();
    assert!(world.streams[&id].ended);
    let ended = world.engine.stats().expect("active").ended;
    assert_eq!((ended.num_requests, ended.num_input_tokens), (3, 5 + 7 + 3));
    assert_eq!(ended.num_output_tokens, 4 + 2 + 2);
}

#[test]
fn further_requests_could_start_while_none_waits_and_a_place_is_free() {
    for (policy, beside_running) in [
        (CapacityPolicy::MaxUtilization, 1),
        (CapacityPolicy::GuaranteedNoEvict, 1),
        (CapacityPolicy::StaticBatch, 0),
    ] {
        let mut world = World::new(EngineConfig {
            max_num_requests: 3,
            policy,
            ..wide_config()
        });
        assert_eq!(world.engine.num_startable(), 3, "{policy:?}, idle");
        for _ in 0..2 {
            world.add(TestRequest::of_lengths(5, 4)).expect("fits");
        }
        assert_eq!(world.engine.num_startable(), 0, "{policy:?}, two wait");
        world.step();
        assert_eq!(world.engine.num_startable(), beside_running, "{policy:?}");
        world.add(TestRequest::of_lengths(5, 4)).expect("fits");
        world.step();
        assert_eq!(
            world.engine.num_startable(),
            0,
            "{policy:?}, full or closed"
        );
        world.run_to_end();
        assert_eq!(world.engine.num_startable(), 3, "{policy:?}, idle again");
    }
}

#[test]
fn no_request_could_join_a_batch_in_lockstep() {
    let mut world = World::new(EngineConfig {
        scheme: BatchingScheme::V1,
        max_num_requests: 3,
        ..wide_config()
    });
    assert_eq!(world.engine.num_startable(), 3);
    world.add(TestRequest::of_lengths(5, 4)).expect("fits");
    world.step();
    assert_eq!(world.engine.num_startable(), 0);
    world.run_to_end();
    assert_eq!(world.engine.num_startable(), 3);
}

#[test]
fn requests_that_wait_for_pages_leave_room_for_others() {
    let mut world = World::new(EngineConfig {
        num_adapter_pages: Some(3),
        ..wide_config()
    });
    // Adapters 1 and 5 have two pages each.
    for adapter in [1, 5, 5] {
        let request = TestRequest::of_lengths(5, 4).with_adapter(adapter);
        world.add(request).expect("fits");
    }
    assert_eq!(world.engine.num_startable(), 0, "three have not been tried");
    world.step();
    let max_num_requests = world.config.max_num_requests as usize;
    assert_eq!(world.engine.num_startable(), max_num_requests - 3);
    world.add(TestRequest::of_lengths(5, 4)).expect("fits");
    assert_eq!(world.engine.num_startable(), 0, "one has not been tried");
    world.step();
    assert_eq!(world.engine.num_startable(), max_num_requests - 4);
    world.run_to_end();
    let request = TestRequest::of_lengths(5, 4).with_adapter(3);
    let error = world.add(request).expect_err("it has four pages");
    let error = error.to_string();
    assert!(
        error.contains("4 pages") && error.contains("together have 3"),
        "{error}"
    );
}

#[test]
fn no_further_request_could_start_without_blocks_for_it() {
    // Blocks for one request of the largest length, and one block more.
    let config = wide_config();
    let largest = config.max_seq_len.blocks_ceil(config.block_size);
    let mut world = World::new(EngineConfig {
        num_blocks: largest + Blocks(1),
        max_num_requests: 4,
        policy: CapacityPolicy::GuaranteedNoEvict,
        ..config.clone()
    });
    assert_eq!(world.engine.num_startable(), 1);
    let room = config.max_seq_len.0 - 1;
    world.add(TestRequest::of_lengths(1, room)).expect("fits");
    world.step();
    assert_eq!(world.engine.num_startable(), 1, "a short one may fit");
    world.add(TestRequest::of_lengths(5, 10)).expect("fits");
    world.step();
    assert_eq!(world.engine.num_startable(), 0, "it waits for blocks");
}

#[test]
fn a_cancelled_request_holds_its_blocks_until_its_step_has_landed() {
    for window in [None, Some(Tokens(12))] {
        let config = EngineConfig {
            groups: KvGroups::one(window.map(|size| AttentionWindow {
                size,
                num_sinks: Tokens(0),
            })),
            max_num_tokens: Tokens(16),
            max_num_requests: 4,
            policy: CapacityPolicy::GuaranteedNoEvict,
            ..wide_config()
        };
        // The window, a step of 16 tokens, and what blocks have besides.
        let largest = if window.is_some() { 8 } else { 16 };
        let mut engine = engine_with(
            EngineConfig {
                num_blocks: Blocks(2 * largest),
                ..config
            },
            1,
        );
        let step = engine.schedule();
        assert!(engine.cancel(SequenceId(1)));
        assert_eq!(engine.num_startable(), 1, "{window:?}");
        let mut output = StepOutput::default();
        let slot = step.sequences()[0].slot;
        output.sampled.push((slot, Sampled::Token(1)));
        engine.apply(step, &mut output, &mut Vec::new());
        assert_eq!(engine.num_startable(), 2, "{window:?}");
    }
}

#[test]
fn the_room_is_what_running_requests_leave() {
    let unlimited = Tokens(u32::MAX);
    for (policy, tokens, idle_tokens, blocks) in [
        // Five tokens are in two blocks now, and 15 in four at the end.
        (
            CapacityPolicy::MaxUtilization,
            Tokens(511),
            Tokens(512),
            126,
        ),
        (
            CapacityPolicy::GuaranteedNoEvict,
            Tokens(511),
            Tokens(512),
            124,
        ),
        (CapacityPolicy::StaticBatch, unlimited, unlimited, 124),
    ] {
        let mut world = World::new(EngineConfig {
            policy,
            ..wide_config()
        });
        let idle = world.engine.room();
        assert_eq!((idle.tokens, idle.blocks), (idle_tokens, Blocks(128)));
        world.add(TestRequest::of_lengths(5, 10)).expect("fits");
        world.step();
        let room = world.engine.room();
        assert_eq!(
            room.reserves_to_the_end,
            policy != CapacityPolicy::MaxUtilization
        );
        assert_eq!(
            (room.tokens, room.blocks),
            (tokens, Blocks(blocks)),
            "{policy:?}"
        );
        assert_eq!(room.max_seq_len, Tokens(64));
        world.run_to_end();
        assert_eq!(world.engine.room(), idle, "{policy:?}");
    }
}
