//! Configurations that the engine refuses, and what follows from those that it accepts.

use crate::support::wide_config;
use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_engine::{
    AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, EngineConfig, KvGroups,
    PromptLookup, Speculation,
};

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
            num_host_state_snapshots: 1,
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
                num_host_state_snapshots: 1,
                reuse: BlockReuse::WholeBlocks,
                ..wide()
            },
            "snapshots of recurrent states in host memory, and none of the device",
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
