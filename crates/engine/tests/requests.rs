//! Configurations and requests that the engine refuses, and how requests end.

mod support;

use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{
    AdapterUsage, AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, DraftTotals, Engine,
    EngineConfig, Event, ExtraOutputs, KvBlocks, KvGroups, LockstepTotals, OutputOptions,
    PromptLookup, Sampled, Speculation, Stage, StepOutput, Totals,
};
use inflight_sampling::{FinishReason, SampleError};
use support::{TestRequest, World, wide_config};

fn refusal(config: EngineConfig) -> String {
    config.check().expect_err("cannot be served").to_string()
}

#[test]
fn limits_that_cannot_be_served_are_rejected_with_the_way_out() {
    let wide = wide_config;
    assert_eq!(
        refusal(EngineConfig {
            max_num_requests: 0,
            ..wide()
        }),
        "config.pbtxt: max_num_requests is 0; set it to at least 1"
    );
    assert_eq!(
        refusal(EngineConfig {
            max_seq_len: Tokens(1),
            ..wide()
        }),
        "config.pbtxt: max_seq_len is 1; set it to at least 2: a token of prompt and one of output"
    );
    assert_eq!(
        refusal(EngineConfig {
            max_num_requests: 1 << 16,
            max_seq_len: Tokens(1 << 18),
            max_num_tokens: Tokens(1 << 18),
            num_blocks: Blocks(1 << 16),
            ..wide()
        }),
        "config.pbtxt: the block tables of max_num_requests = 65536 requests with max_beam_width = 1 \
         and max_seq_len = 262144 have 2^32 places or more; lower one of these, or raise \
         tokens_per_block"
    );
    assert_eq!(
        refusal(EngineConfig {
            max_num_tokens: Tokens(7),
            ..wide()
        }),
        "config.pbtxt: max_num_tokens is 7, too few for one token of each of max_num_requests = 8 \
         requests; raise max_num_tokens to at least 8, or lower max_num_requests"
    );
    assert_eq!(
        refusal(EngineConfig {
            max_num_tokens: Tokens(15),
            chunk_unit: BlockSize::new(16).expect("not zero"),
            ..wide()
        }),
        "config.pbtxt: max_num_tokens is 15, less than a block of tokens_per_block = 16, the \
         smallest chunk of a context; raise max_num_tokens to at least 16, or lower tokens_per_block"
    );
    assert_eq!(
        refusal(EngineConfig {
            max_num_tokens: Tokens(63),
            enable_chunked_context: false,
            policy: CapacityPolicy::MaxUtilization,
            ..wide()
        }),
        "config.pbtxt: max_num_tokens is 63, too few to compute a paused sequence of up to \
         max_seq_len = 64 tokens again in one step; set enable_chunked_context to true, or \
         batch_scheduler_policy to guaranteed_no_evict, or raise max_num_tokens to at least 64"
    );
    assert_eq!(
        refusal(EngineConfig {
            num_blocks: Blocks(15),
            ..wide()
        }),
        "config.pbtxt: the KV cache has 15 blocks of 4 tokens, which do not hold one sequence of \
         max_seq_len = 64; lower max_seq_len to at most 60, or let the KV cache have at least 64 \
         tokens: by max_tokens_in_paged_kv_cache, where it is written, or else by more memory \
         (kv_cache_free_gpu_mem_fraction)"
    );
    let nothing_fits = refusal(EngineConfig {
        num_blocks: Blocks::ZERO,
        ..wide()
    });
    assert!(
        nothing_fits.contains("; lower max_seq_len, or"),
        "{nothing_fits}"
    );
    for num_micro_batches in [0, 3] {
        let config = EngineConfig {
            num_micro_batches,
            ..wide()
        };
        assert!(refusal(config).contains("set it to 1, or to 2"));
    }
}

#[test]
fn the_smallest_limits_that_can_be_served_are_accepted() {
    let wide = wide_config;
    let unchunked = || EngineConfig {
        enable_chunked_context: false,
        policy: CapacityPolicy::MaxUtilization,
        ..wide()
    };
    for config in [
        EngineConfig {
            max_num_requests: 1,
            max_num_active: 1,
            max_seq_len: Tokens(2),
            num_blocks: Blocks(1),
            ..wide()
        },
        EngineConfig {
            max_num_tokens: Tokens(8),
            max_beam_width: 8,
            ..wide()
        },
        EngineConfig {
            max_num_tokens: Tokens(16),
            chunk_unit: BlockSize::new(16).expect("not zero"),
            ..wide()
        },
        EngineConfig {
            max_num_tokens: Tokens(64),
            ..unchunked()
        },
        // Nothing is paused, and a prompt is compared with the budget when it comes.
        EngineConfig {
            max_num_tokens: Tokens(63),
            policy: CapacityPolicy::GuaranteedNoEvict,
            ..unchunked()
        },
        EngineConfig {
            num_blocks: Blocks(16),
            ..wide()
        },
        EngineConfig {
            num_micro_batches: 2,
            ..wide()
        },
        EngineConfig {
            plan_ahead: true,
            reuse: BlockReuse::WholeBlocks,
            ..wide()
        },
        EngineConfig {
            num_host_blocks: Blocks(u32::MAX - 129),
            reuse: BlockReuse::WholeBlocks,
            ..wide()
        },
        EngineConfig {
            num_state_snapshots: 1,
            reuse: BlockReuse::WholeBlocks,
            ..wide()
        },
        EngineConfig {
            pools: true,
            whole_prompts: true,
            ..wide()
        },
        // Block tables of 2^32 - 1 places.
        EngineConfig {
            max_num_requests: 65535,
            max_seq_len: Tokens(65537 * 4),
            max_num_tokens: Tokens(1 << 18),
            num_blocks: Blocks(1 << 17),
            ..wide()
        },
    ] {
        assert!(config.check().is_ok(), "{config:?}");
    }
}

#[test]
fn settings_that_exclude_each_other_are_rejected() {
    let wide = wide_config;
    let pooling = || EngineConfig {
        pools: true,
        ..wide()
    };
    let speculation = Some(Speculation {
        max_draft_tokens: 2,
        prompt_lookup: Some(PromptLookup { min: 1, max: 2 }),
        has_draft_model: false,
        recomputes_drafts: false,
    });
    for (config, expected) in [
        (
            EngineConfig {
                max_num_active: 0,
                ..wide()
            },
            "max_num_active is 0",
        ),
        (
            EngineConfig {
                max_beam_width: 0,
                ..wide()
            },
            "max_beam_width = 0 beams",
        ),
        (
            EngineConfig {
                max_num_tokens: Tokens(8),
                max_beam_width: 9,
                ..wide()
            },
            "max_beam_width = 9 beams",
        ),
        (
            EngineConfig {
                max_num_requests: 1 << 15,
                max_beam_width: 2,
                max_seq_len: Tokens(1 << 18),
                max_num_tokens: Tokens(1 << 18),
                num_blocks: Blocks(1 << 16),
                ..wide()
            },
            "have 2^32 places or more",
        ),
        (
            EngineConfig {
                plan_ahead: true,
                num_micro_batches: 2,
                ..wide()
            },
            "plan_ahead is true",
        ),
        (
            EngineConfig {
                plan_ahead: true,
                scheme: BatchingScheme::V1,
                ..wide()
            },
            "plan_ahead is true",
        ),
        (
            EngineConfig {
                scheme: BatchingScheme::V1,
                num_micro_batches: 2,
                ..wide()
            },
            "gpt_model_type is V1, which computes one batch at a time",
        ),
        (
            EngineConfig {
                num_host_blocks: Blocks(1),
                ..wide()
            },
            "blocks in host memory, and nothing is reused",
        ),
        (
            EngineConfig {
                num_host_blocks: Blocks(u32::MAX - 128),
                reuse: BlockReuse::WholeBlocks,
                ..wide()
            },
            "2^32 or more",
        ),
        (
            EngineConfig {
                num_state_snapshots: 1,
                reuse: BlockReuse::PartialBlocks,
                ..wide()
            },
            "snapshots of recurrent states",
        ),
        (
            EngineConfig {
                num_state_snapshots: 1,
                reuse: BlockReuse::WholeBlocks,
                plan_ahead: true,
                ..wide()
            },
            "snapshots of recurrent states",
        ),
        (
            EngineConfig {
                whole_prompts: true,
                ..wide()
            },
            "each token of the model sees all others",
        ),
        (
            EngineConfig {
                whole_prompts: true,
                reuse: BlockReuse::WholeBlocks,
                ..pooling()
            },
            "each token of the model sees all others",
        ),
        (
            EngineConfig {
                scheme: BatchingScheme::V1,
                ..pooling()
            },
            "a pooling model, and gpt_model_type is V1",
        ),
        (
            EngineConfig {
                speculation,
                ..pooling()
            },
            "a pooling model, and speculation is on",
        ),
        (
            EngineConfig {
                max_beam_width: 2,
                ..pooling()
            },
            "a pooling model, and max_beam_width is above 1",
        ),
    ] {
        let refusal = refusal(config);
        assert!(refusal.contains(expected), "{refusal}");
    }
}

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
fn a_cache_of_several_groups_says_how_many_tokens_it_holds() {
    let refusal = refusal(EngineConfig {
        groups: KvGroups::new(&[None, None]),
        num_blocks: Blocks(15),
        ..wide_config()
    });
    assert!(
        refusal.contains("at most 28, or let the KV cache have at least 64 tokens"),
        "{refusal}"
    );
}

#[test]
fn the_largest_step_follows_from_the_limits() {
    let with = |max_beam_width, max_num_tokens, max_draft_tokens| EngineConfig {
        max_beam_width,
        max_num_tokens: Tokens(max_num_tokens),
        speculation: (max_draft_tokens > 0).then_some(Speculation {
            max_draft_tokens,
            prompt_lookup: Some(PromptLookup { min: 1, max: 2 }),
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..wide_config()
    };
    // Eight requests.
    for (config, max_sequences, max_sampled_rows) in [
        (with(1, 512, 0), 8, 8),
        (with(4, 512, 0), 32, 32),
        (with(4, 20, 0), 20, 20),
        (with(1, 512, 5), 8, 48),
        (with(1, 40, 5), 8, 40),
    ] {
        assert_eq!(config.max_sequences(), max_sequences, "{config:?}");
        assert_eq!(config.max_sampled_rows(), Tokens(max_sampled_rows));
    }
}

#[test]
fn a_step_that_is_planned_ahead_computes_one_more_token_of_a_sequence() {
    let with = |max_num_tokens, plan_ahead| EngineConfig {
        groups: KvGroups::one(Some(AttentionWindow {
            size: Tokens(8),
            num_sinks: Tokens(0),
        })),
        max_num_tokens: Tokens(max_num_tokens),
        plan_ahead,
        ..wide_config()
    };
    let blocks = |max_num_tokens| with(max_num_tokens, false).min_num_blocks();
    let changes = (9..40).filter(|&it| blocks(it - 1) != blocks(it));
    for max_num_tokens in changes {
        let ahead = with(max_num_tokens - 1, true).min_num_blocks();
        assert_eq!(ahead, blocks(max_num_tokens));
    }
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

    let mut world = World::new(EngineConfig {
        reuse: BlockReuse::PartialBlocks,
        ..wide_config()
    });
    // 6 of the 7 tokens can be reused: a whole block, and the beginning of the next.
    for expected in [blocks(4, 0), blocks(2, 2)] {
        let id = world.add(of_blocks.clone()).expect("fits");
        world.run_to_end();
        assert_eq!(world.streams[&id].kv_blocks, expected);
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

#[test]
fn bad_speculation_settings_are_rejected_with_the_way_out() {
    let with = |max_draft_tokens, min, max| EngineConfig {
        speculation: Some(Speculation {
            max_draft_tokens,
            prompt_lookup: Some(PromptLookup { min, max }),
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..wide_config()
    };
    with(64, 1, 32).check().expect("good limits");
    let drafting = |has_draft_model, windows: &[Option<AttentionWindow>]| EngineConfig {
        groups: KvGroups::new(windows),
        speculation: Some(Speculation {
            has_draft_model,
            ..with(4, 1, 2).speculation.expect("it is set")
        }),
        ..wide_config()
    };
    let window = Some(AttentionWindow {
        size: Tokens(8),
        num_sinks: Tokens(0),
    });
    drafting(true, &[None]).check().expect("blocks are kept");
    drafting(false, &[window]).check().expect("no draft model");
    let refused = refusal(drafting(true, &[None, None]));
    assert!(refused.contains("a draft model needs them"), "{refused}");
    for (config, expected) in [
        (
            with(0, 1, 2),
            "max_draft_tokens is 0; set it to 1 to 64, or set speculation to none",
        ),
        (
            with(65, 1, 2),
            "max_draft_tokens is 65; set it to 1 to 64, or set speculation to none",
        ),
        (
            with(4, 0, 2),
            "prompt_lookup_min is 0 and prompt_lookup_max is 2; set prompt_lookup_min to at least 1, \
             and at most prompt_lookup_max",
        ),
        (
            with(4, 3, 2),
            "prompt_lookup_min is 3 and prompt_lookup_max is 2; set prompt_lookup_min to at least 1, \
             and at most prompt_lookup_max",
        ),
        (
            with(4, 1, 33),
            "prompt_lookup_max is 33; set it to at most 32",
        ),
        (
            EngineConfig {
                groups: KvGroups::one(Some(AttentionWindow {
                    size: Tokens(8),
                    num_sinks: Tokens(0),
                })),
                speculation: Some(Speculation {
                    has_draft_model: true,
                    recomputes_drafts: false,
                    ..with(4, 1, 2).speculation.expect("it is set")
                }),
                ..wide_config()
            },
            "the model has attention windows, behind which its KV cache gives blocks back, and a draft model needs \
             them; set speculation to prompt_lookup or none",
        ),
        (
            EngineConfig {
                scheme: BatchingScheme::V1,
                ..with(4, 1, 2)
            },
            "gpt_model_type is V1, which generates one token per request and step, and speculation is \
             on; set speculation to none, or gpt_model_type to inflight_fused_batching",
        ),
    ] {
        assert_eq!(refusal(config), format!("config.pbtxt: {expected}"));
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
