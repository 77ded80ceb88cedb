//! Random walks through add, cancel and step, with tiny pools and budgets, where conflicts are common.
//!
//! `support` checks each step; this file generates the walks. A failure prints the shortest walk that
//! reproduces it, and its seed is added to a file next to this one, which is to be committed.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::num::NonZeroU32;

use crate::support::{
    TestRequest, VOCAB_SIZE, World, num_image_tokens, num_pages, num_rows_of_first_span,
    wide_config,
};
use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{
    AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, ContextChunkPolicy, DraftOptions,
    EngineConfig, Event, ImageLimits, KvGroups, OutputOptions, PlannedSequence, PromptLookup,
    ReuseOptions, Speculation, StepCost,
};
use inflight_sampling::{BeamSearch, EarlyStopping};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

#[derive(Clone, Debug)]
enum Move {
    Add(TestRequest),
    Step,
    /// Cancels the request with index `n` modulo the number of requests so far, even one that has ended.
    Cancel(usize),
    /// The same, between a plan and its results.
    StepAndCancel(usize),
}

/// Configurations with little room: pools have a few blocks more than the longest sequence needs.
fn configs() -> impl Strategy<Value = EngineConfig> {
    let host_blocks = prop_oneof![1 => Just(0), 2 => 1u32..=16];
    let blocks = (0u32..=12, host_blocks);
    let sizes = (1u32..=8, 2u32..=48, blocks, 1u32..=8, 0u32..=24);
    let scheme = prop_oneof![
        1 => Just(BatchingScheme::V1),
        2 => Just(BatchingScheme::Inflight),
        4 => Just(BatchingScheme::InflightFused),
    ];
    let policy = prop_oneof![
        1 => Just(CapacityPolicy::StaticBatch),
        3 => Just(CapacityPolicy::GuaranteedNoEvict),
        4 => Just(CapacityPolicy::MaxUtilization),
    ];
    let chunks = prop_oneof![
        Just(None),
        Just(Some(ContextChunkPolicy::FirstComeFirstServed)),
        Just(Some(ContextChunkPolicy::EqualProgress)),
    ];
    let reuse = prop_oneof![
        Just(BlockReuse::Off),
        Just(BlockReuse::WholeBlocks),
        Just(BlockReuse::PartialBlocks),
    ];
    let windows = vec(proptest::option::of(1u32..=20), 1..4);
    let groups = (windows, 0u32..=6).prop_map(|(mut windows, num_sinks)| {
        windows.sort_by_key(|window| Reverse(window.unwrap_or(u32::MAX)));
        let windows = windows.into_iter().map(|window| {
            window.map(|size| AttentionWindow {
                size: Tokens(size),
                num_sinks: Tokens(num_sinks),
            })
        });
        KvGroups::new(&windows.collect::<Vec<_>>())
    });
    let lookup = (1u32..=3, 0u32..=3).prop_map(|(min, more)| PromptLookup {
        min,
        max: min + more,
    });
    let speculation = (1u32..=6, proptest::option::of(lookup), any::<[bool; 2]>());
    let speculation = speculation.prop_map(
        |(max_draft_tokens, prompt_lookup, [has_draft_model, recomputes_drafts])| Speculation {
            max_draft_tokens,
            prompt_lookup,
            has_draft_model,
            recomputes_drafts,
        },
    );
    let step_cost = (0u64..=20, 0u64..=2).prop_map(|(fixed_ns, per_token_ns)| StepCost {
        fixed_ns,
        per_token_ns,
    });
    let speculation = proptest::option::of((speculation, proptest::option::of(step_cost)));
    let options = (
        scheme,
        policy,
        chunks,
        reuse,
        groups,
        prop_oneof![2 => Just((1usize, false)), 3 => Just((1, true)), 2 => Just((2, false))],
        speculation,
    );
    let beams = prop_oneof![1 => Just(1u32), 2 => 2u32..5];
    let adapters = proptest::option::of(1u32..=8);
    let host_snapshots = prop_oneof![1 => Just(0), 1 => 1u32..=8];
    let snapshots = (
        prop_oneof![3 => Just(0), 1 => 1u32..=8],
        host_snapshots,
        0u32..=24,
    );
    let images = (1u32..=12, 7u32..=20, any::<bool>());
    let images =
        images.prop_map(
            |(max_num_tokens, max_cached_tokens, has_whole_images)| ImageLimits {
                max_num_tokens: Tokens(max_num_tokens),
                max_cached_tokens: Tokens(max_cached_tokens),
                has_whole_images,
            },
        );
    let images = proptest::option::of(images);
    (sizes, options, beams, (adapters, images), snapshots).prop_map(
        |(sizes, options, max_beam_width, (num_adapter_pages, images), snapshots)| {
            let (block_size, max_seq_len, blocks, max_num_requests, more_tokens) = sizes;
            let (more_blocks, num_host_blocks) = blocks;
            let (scheme, policy, chunks, reuse, groups, out, speculation) = options;
            let (num_micro_batches, plan_ahead) = out;
            let lockstep = scheme == BatchingScheme::V1;
            let policy = match policy {
                CapacityPolicy::MaxUtilization if lockstep => CapacityPolicy::GuaranteedNoEvict,
                policy => policy,
            };
            let pauses = policy == CapacityPolicy::MaxUtilization;
            let least_tokens = match (chunks, pauses) {
                (Some(_), _) => block_size,
                (None, _) if lockstep => block_size,
                (None, true) => max_seq_len,
                (None, false) => 1,
            };
            let block_size = BlockSize::new(block_size).expect("not zero");
            let mut config = EngineConfig {
                scheme,
                max_num_requests,
                max_seq_len: Tokens(max_seq_len),
                max_beam_width,
                max_num_tokens: Tokens(
                    least_tokens.max(max_num_requests).max(max_beam_width) + more_tokens,
                ),
                block_size,
                chunk_unit: block_size,
                num_blocks: Blocks(u32::MAX / 8),
                policy,
                enable_chunked_context: chunks.is_some(),
                chunk_policy: chunks.unwrap_or(ContextChunkPolicy::FirstComeFirstServed),
                num_micro_batches: if lockstep { 1 } else { num_micro_batches },
                num_adapter_pages,
                images,
                plan_ahead: plan_ahead && scheme == BatchingScheme::InflightFused,
                reuse,
                groups,
                speculation: speculation.map(|it| it.0).filter(|_| !lockstep),
                step_cost: speculation.and_then(|it| it.1),
                draft_cost: speculation.and_then(|it| it.1),
                record_requests: true,
                ..EngineConfig::default()
            };
            if let Some(speculation) = &mut config.speculation {
                let groups = &config.groups;
                let keeps_all = groups.windows().len() == 1 && groups.windows()[0].is_none();
                speculation.has_draft_model &= keeps_all;
            }
            if snapshots.0 > 0 {
                config.reuse = BlockReuse::WholeBlocks;
                (config.num_state_snapshots, config.num_host_state_snapshots) =
                    (snapshots.0, snapshots.1);
                config.state_snapshot_interval = Tokens(snapshots.2);
                config.plan_ahead = false;
            }
            config.num_blocks = config.min_num_blocks() + Blocks(more_blocks);
            if config.reuse != BlockReuse::Off {
                config.num_host_blocks = Blocks(num_host_blocks);
            }
            config
        },
    )
}

/// Requests, some of them too long for most configurations.
fn test_requests() -> impl Strategy<Value = TestRequest> {
    let fails_after = proptest::option::weighted(0.05, 0usize..4);
    // Many have a common prefix.
    let prompt = prop_oneof![
        vec(0..VOCAB_SIZE, 0..40),
        vec(0..2u32, 0..40),
        (0..40u32, 0..3u32).prop_map(|(len, last)| {
            let mut prompt = vec![1; len as usize];
            prompt.extend(vec![last; len as usize % 3]);
            prompt
        }),
    ];
    let salt = prop_oneof![4 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("b"))];
    let reuse = (prop::bool::weighted(0.9), salt).prop_map(|(enabled, salt)| ReuseOptions {
        enabled,
        salt: salt.map(Into::into),
    });
    let outputs = prop_oneof![2 => Just([false; 5]), 1 => any::<[bool; 5]>()];
    let outputs = (outputs, 0u32..4).prop_map(
        |(
            [
                context_logits,
                of_prompt,
                generation_logits,
                kv_blocks,
                drafts,
            ],
            beams,
        )| OutputOptions {
            context_logits,
            prompt_log_probs: of_prompt.then_some(0),
            generation_logits,
            kv_blocks,
            drafts,
            beams: NonZeroU32::new(beams),
            ..OutputOptions::default()
        },
    );
    (
        (prompt, 0u32..40, any::<bool>(), fails_after),
        prop_oneof![6 => Just(0), 1 => -2..3],
        reuse,
        outputs,
        guesses(),
        (
            beams(),
            any::<bool>(),
            proptest::option::of(0u32..10),
            prop::bool::weighted(0.2),
            vec((0u32..6, 0u128..7), 0..4),
        ),
    )
        .prop_map(|(tokens, priority, reuse, outputs, guesses, search)| {
            let (prompt, max_new_tokens, has_end_id, fails_after) = tokens;
            let mut request = TestRequest {
                prompt,
                max_new_tokens,
                has_end_id,
                // A request with beams has no guide.
                is_guided: search.3 && search.0.is_none(),
                fails_after,
                priority,
                reuse,
                outputs,
                drafts: DraftOptions::default(),
                beam_search: search.0,
                has_stop_text: search.1,
                adapter: search.2,
                images: Vec::new(),
            };
            request.place_images(&search.4);
            request.drafts = guesses.of(&request);
            request
        })
}

/// Expected outputs: a number of correct tokens, followed by some that are mostly wrong.
#[derive(Clone, Debug)]
struct Guesses {
    max_draft_tokens: Option<u32>,
    num_right: usize,
    others: Vec<u32>,
}

fn guesses() -> impl Strategy<Value = Guesses> {
    let max_draft_tokens = proptest::option::weighted(0.3, 0u32..8);
    let num_right = prop_oneof![1 => Just(0), 1 => 0usize..50];
    (max_draft_tokens, num_right, vec(0..VOCAB_SIZE, 0..6)).prop_map(
        |(max_draft_tokens, num_right, others)| Guesses {
            max_draft_tokens,
            num_right,
            others,
        },
    )
}

impl Guesses {
    fn of(self, request: &TestRequest) -> DraftOptions {
        let mut expected = match request.prompt.len() {
            // The request is refused.
            0 => Vec::new(),
            len => {
                let long = Tokens(len as u32 + 50);
                request.answer_alone(long).0
            }
        };
        expected.truncate(self.num_right);
        expected.extend(self.others);
        DraftOptions {
            max_draft_tokens: self.max_draft_tokens,
            expected: expected.into(),
        }
    }
}

fn beams() -> impl Strategy<Value = Option<BeamSearch>> {
    let early_stopping = prop_oneof![
        Just(EarlyStopping::Always),
        Just(EarlyStopping::Likely),
        Just(EarlyStopping::Never),
    ];
    let search = (2u32..5, 1u32..5, -1i8..3, early_stopping, 0u8..3).prop_map(
        |(width, num_returned, length_penalty, early_stopping, diversity_rate)| BeamSearch {
            width,
            num_returned: num_returned.min(width),
            length_penalty: f32::from(length_penalty),
            early_stopping,
            diversity_rate: f32::from(diversity_rate) / 4.0,
        },
    );
    proptest::option::weighted(0.3, search)
}

fn walks() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        12 => test_requests().prop_map(Move::Add),
        24 => Just(Move::Step),
        1 => any::<usize>().prop_map(Move::Cancel),
        1 => any::<usize>().prop_map(Move::StepAndCancel),
    ];
    vec(one, 1..400)
}

/// Walks, and then runs the remaining requests to their end. Returns all plans and all events.
fn walk(config: EngineConfig, moves: &[Move]) -> (Vec<Vec<PlannedSequence>>, Vec<Event>, World) {
    let (mut plans, mut events) = (Vec::new(), Vec::new());
    let mut world = World::new(config);
    for next in moves {
        let pick = |n: usize, world: &World| {
            let num_added = world.streams.len();
            (num_added > 0).then(|| SequenceId((n % num_added) as u64 + 1))
        };
        match next {
            Move::Add(request) => {
                let fits = world.add(request.clone()).is_ok();
                assert_eq!(fits, fits_alone(&world.config, request), "{request:?}");
            }
            Move::Cancel(n) => {
                if let Some(id) = pick(*n, &world) {
                    world.cancel(id);
                    world.engine.check_integrity();
                }
            }
            Move::Step => {
                plans.push(world.step());
                events.extend_from_slice(&world.events);
            }
            Move::StepAndCancel(n) => {
                plans.push(world.step_and_cancel(pick(*n, &world)));
                events.extend_from_slice(&world.events);
            }
        }
    }
    world.run_to_end();
    // Two worlds have different ones.
    for planned in plans.iter_mut().flatten() {
        let planned: &mut PlannedSequence = planned;
        planned.adapter = None;
    }
    (plans, events, world)
}

fn fits_alone(config: &EngineConfig, request: &TestRequest) -> bool {
    let in_one_step = config.max_num_tokens.index();
    !request.prompt.is_empty()
        && request.max_new_tokens > 0
        && request.prompt.len() < config.max_seq_len.index()
        && (config.enable_chunked_context
            || config.scheme == BatchingScheme::V1
            || request.prompt.len() <= in_one_step)
        && (request.beam_search.is_none() || beams_fit_alone(config, request))
        && adapter_fits_alone(config, request)
        && images_fit_alone(config, request)
}

/// Whether there is room for each image, or for all of them if the context is not cut.
fn images_fit_alone(config: &EngineConfig, request: &TestRequest) -> bool {
    if request.images.is_empty() {
        return true;
    }
    let hashes: BTreeSet<_> = request.images.iter().map(|(_, hash)| *hash).collect();
    let sizes = hashes.into_iter().map(num_image_tokens);
    let needed = match config.enable_chunked_context || config.scheme == BatchingScheme::V1 {
        true => sizes.max().unwrap_or(0),
        false => sizes.sum(),
    };
    let mut hashes = request.images.iter().map(|(_, hash)| *hash);
    let fits_whole = hashes.all(|hash| {
        num_rows_of_first_span(hash).is_none() && num_image_tokens(hash) <= config.max_num_tokens.0
    });
    config.images.is_some_and(|limits| {
        needed <= limits.max_cached_tokens.0 && (!limits.has_whole_images || fits_whole)
    })
}

fn adapter_fits_alone(config: &EngineConfig, request: &TestRequest) -> bool {
    let needed = request.adapter.map_or(0, num_pages);
    config.num_adapter_pages.is_none_or(|max| needed <= max)
}

/// Whether the pool can hold all beams if they share only the full blocks of their prompt; in groups with a window,
/// each as if it were alone.
fn beams_fit_alone(config: &EngineConfig, request: &TestRequest) -> bool {
    let (block, width) = (config.block_size.tokens().0, request.width());
    let prompt = request.prompt.len() as u32;
    let longest = config.max_seq_len.0.min(prompt + request.max_new_tokens) - 1;
    let one = longest.div_ceil(block);
    let num_whole = config.groups.num_whole() as u32;
    // The most blocks that a sequence of this length holds at once.
    let alone = EngineConfig {
        max_seq_len: Tokens(longest),
        ..config.clone()
    };
    let windowed = alone.min_num_blocks().0 - num_whole * one;
    let whole = prompt / block + width * (one - prompt / block);
    let num_blocks = num_whole * whole + width * windowed;
    width <= config.max_beam_width && num_blocks <= config.num_blocks.0
}

fn cases(cases: u32) -> ProptestConfig {
    let regressions = "tests/suite/random_walks.proptest-regressions";
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(6000))]

    #[test]
    fn every_stream_is_what_its_request_gives_alone(config in configs(), moves in walks()) {
        walk(config, &moves);
    }
}

proptest! {
    #![proptest_config(cases(50))]

    #[test]
    fn the_same_calls_give_the_same_plans_and_events(config in configs(), moves in walks()) {
        let (plans, events, _) = walk(config.clone(), &moves);
        let (plans_again, events_again, _) = walk(config, &moves);
        prop_assert_eq!(plans, plans_again);
        prop_assert_eq!(events, events_again);
    }
}

#[test]
fn a_pool_that_is_far_too_small_pauses_often_and_still_serves_everybody() {
    let config = EngineConfig {
        policy: CapacityPolicy::MaxUtilization,
        num_blocks: Blocks(16),
        max_num_tokens: Tokens(16),
        ..wide_config()
    };
    let mut world = World::new(config);
    for n in 0..64 {
        world
            .add(TestRequest::of_lengths(1 + n % 20, 30))
            .expect("fits");
    }
    world.run_to_end();
    assert!(world.num_pauses > 64, "only {} pauses", world.num_pauses);
}

#[test]
fn more_adapters_than_pages_take_turns_and_everybody_is_served() {
    for policy in [
        CapacityPolicy::MaxUtilization,
        CapacityPolicy::GuaranteedNoEvict,
        CapacityPolicy::StaticBatch,
    ] {
        let config = EngineConfig {
            policy,
            num_blocks: Blocks(24),
            num_adapter_pages: Some(5),
            ..wide_config()
        };
        let mut world = World::new(config);
        for n in 0..64 {
            let request = TestRequest::of_lengths(1 + n % 9, 12);
            let request = match n % 3 {
                0 => request,
                _ => request.with_adapter(n % 10),
            };
            world.add(request).expect("fits");
        }
        let mut num_waiting = 0;
        while !world.engine.is_idle() {
            world.step();
            let stats = world.engine.stats().expect("a request is active");
            num_waiting += stats.adapters.expect("pages").num_waiting;
        }
        world.run_to_end();
        assert!(num_waiting > 64, "{policy:?}: {num_waiting} waits");
    }
}

#[test]
fn steps_are_planned_before_tokens_are_known() {
    let config = EngineConfig {
        plan_ahead: true,
        ..wide_config()
    };
    let mut world = World::new(config.clone());
    let num_tokens = 30;
    for n in 0..8 {
        let mut request = TestRequest::of_lengths(1 + n, num_tokens);
        request.has_end_id = n % 2 == 0;
        world.add(request).expect("fits");
    }
    world.run_to_end();
    let num_ahead = world.num_ahead;
    assert!(num_ahead > 2 * u64::from(num_tokens), "only {num_ahead}");
    // Some tokens only the host can choose.
    assert!(world.num_missed > 0);

    // A request that needs the host between two steps holds up the others, and is served.
    let mut world = World::new(config);
    let mut request = TestRequest::of_lengths(5, num_tokens);
    request.outputs.generation_logits = true;
    world.add(request).expect("fits");
    world
        .add(TestRequest::of_lengths(6, num_tokens))
        .expect("fits");
    world.run_to_end();
    assert_eq!(world.num_ahead, 0);
}

#[test]
fn a_sequence_whose_guide_is_not_ready_sits_the_step_out() {
    for policy in [
        CapacityPolicy::MaxUtilization,
        CapacityPolicy::GuaranteedNoEvict,
    ] {
        let mut world = World::new(EngineConfig {
            policy,
            ..wide_config()
        });
        let num_tokens = 40;
        for n in 0..8 {
            let mut request = TestRequest::of_lengths(1 + n, num_tokens);
            request.has_end_id = false;
            request.is_guided = true;
            world.add(request).expect("fits");
        }
        world.run_to_end();
        assert!(world.num_missed > 8, "{policy:?}: {}", world.num_missed);
    }
}

/// Serves prompts of 40 tokens of eight users, twice. Returns how many tokens are reused.
fn conversations_that_return(config: EngineConfig) -> u64 {
    let mut world = World::new(EngineConfig {
        reuse: BlockReuse::WholeBlocks,
        ..config
    });
    let mut num_reused_tokens = 0;
    for _ in 0..2 {
        for user in 0..8 {
            let mut request = TestRequest::of_lengths(40, 4);
            request.prompt[0] = user;
            world.add(request).expect("fits");
            while !world.engine.is_idle() {
                world.step();
                let stats = world.engine.stats().expect("a request is active");
                num_reused_tokens = stats.reuse.num_reused_tokens;
            }
        }
    }
    num_reused_tokens
}

#[test]
fn a_conversation_that_returns_is_found_in_host_memory() {
    let num_reused_tokens = |num_host_blocks| {
        conversations_that_return(EngineConfig {
            num_blocks: Blocks(16),
            num_host_blocks: Blocks(num_host_blocks),
            ..wide_config()
        })
    };
    // Each of the second round finds the nine full blocks before the last token of its prompt.
    assert_eq!(num_reused_tokens(0), 0);
    assert_eq!(num_reused_tokens(128), 8 * 36);
}

#[test]
fn a_conversation_that_returns_finds_its_states_in_host_memory() {
    let num_reused_tokens = |num_host_blocks, num_host_state_snapshots| {
        conversations_that_return(EngineConfig {
            num_blocks: Blocks(16),
            num_host_blocks: Blocks(num_host_blocks),
            num_state_snapshots: 2,
            num_host_state_snapshots,
            ..wide_config()
        })
    };
    assert_eq!(num_reused_tokens(128, 0), 0);
    assert_eq!(num_reused_tokens(0, 32), 0, "without the blocks");
    // A prompt leaves one snapshot at its end, and its answer another one.
    assert_eq!(num_reused_tokens(128, 32), 8 * 36);
}
