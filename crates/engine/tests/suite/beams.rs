//! Which blocks beams share, allocate and free. `support` checks every step, and at the end of each request that
//! its results are the same as when it runs alone.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::support::{TestRequest, VOCAB_SIZE, World, search_alone, wide_config};
use inflight_base::{Blocks, SequenceId, Tokens};
use inflight_engine::{
    AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, EngineConfig, Event, KvBlocks,
    KvGroups, OutputOptions, PlannedSequence, Speculation,
};
use inflight_sampling::{EarlyStopping, FinishReason, Hypothesis, SampleError};

fn with_beams(max_beam_width: u32) -> EngineConfig {
    EngineConfig {
        max_beam_width,
        ..wide_config()
    }
}

/// Searches with `width` beams that do not stop before their maximum length.
fn search(num_prompt_tokens: u32, max_new_tokens: u32, width: u32) -> TestRequest {
    let mut request = TestRequest::of_lengths(num_prompt_tokens, max_new_tokens).with_beams(width);
    if let Some(search) = &mut request.beam_search {
        search.early_stopping = EarlyStopping::Never;
    }
    request
}

fn num_used(world: &World) -> u32 {
    world.engine.stats().expect("active").kv.num_used.0
}

#[test]
fn beams_compute_their_context_once_and_copy_only_the_block_they_write() {
    let mut world = World::new(with_beams(3));
    let id = world.add(search(5, 4, 3)).expect("fits");
    let context = world.step();
    assert_eq!((context.len(), context[0].tokens.len()), (1, 5));
    assert_eq!((num_used(&world), world.num_copies), (2, 0));
    // All beams share the one full block; the second is copied for all but one.
    let generation = world.step();
    let beams: Vec<_> = generation.iter().map(|planned| planned.beam).collect();
    assert_eq!(beams, [0, 1, 2]);
    assert!(generation.iter().all(|it| world.streams[&it.id].generates));
    assert_eq!((num_used(&world), world.num_copies), (4, 2));
    let stats = world.engine.stats().expect("active");
    assert_eq!((stats.num_scheduled, stats.num_generation), (1, 1));
    world.run_to_end();
    let found = &world.streams[&id].hypotheses;
    assert_eq!(found.len(), 3);
    assert!(found.is_sorted_by(|a, b| a.cum_log_prob >= b.cum_log_prob));
    assert!(found.iter().all(|it| it.tokens.len() == 4));
    assert!(
        found
            .iter()
            .all(|it| it.finish_reason == Some(FinishReason::Length))
    );
}

#[test]
fn a_step_holds_any_mix_of_widths() {
    let mut world = World::new(with_beams(4));
    for width in [1, 4, 2, 1, 3] {
        let request = match width {
            1 => TestRequest::of_lengths(5, 12),
            _ => search(5, 12, width),
        };
        world.add(request).expect("fits");
    }
    world.step();
    assert_eq!(world.step().len(), 1 + 4 + 2 + 1 + 3);
    assert_eq!(world.engine.stats().expect("active").num_scheduled, 5);
    world.run_to_end();
}

#[test]
fn a_request_with_beams_can_be_cancelled_at_any_time() {
    for num_micro_batches in 1..=2 {
        for before_step in 0..9 {
            for while_out in [false, true] {
                let mut world = World::new(EngineConfig {
                    num_micro_batches,
                    max_num_tokens: Tokens(12),
                    reuse: BlockReuse::PartialBlocks,
                    ..with_beams(3)
                });
                let id = world.add(search(18, 9, 3)).expect("fits");
                world.add(TestRequest::of_lengths(18, 9)).expect("fits");
                (0..before_step).for_each(|_| drop(world.step()));
                match while_out {
                    true => drop(world.step_and_cancel(Some(id))),
                    false => world.cancel(id),
                }
                world.engine.check_integrity();
                world.run_to_end();
                assert!(world.streams[&id].hypotheses.is_empty());
            }
        }
    }
}

#[test]
fn where_none_is_paused_the_blocks_that_beams_may_need_are_kept_for_them() {
    // In total three beams need 1 + 3 * 3 blocks, and the others 4 each.
    let mut world = World::new(EngineConfig {
        max_seq_len: Tokens(16),
        num_blocks: Blocks(16),
        ..with_beams(3)
    });
    world.add(TestRequest::of_lengths(5, 11)).expect("fits");
    world.add(search(5, 11, 3)).expect("fits");
    let last = world.add(TestRequest::of_lengths(5, 11)).expect("fits");
    world.step();
    assert_eq!(num_used(&world), 2 + 2);
    assert!(!world.streams[&last].admitted, "the last would take them");
    world.run_to_end();
}

#[test]
fn beams_are_paused_for_those_before_them_and_start_again_where_they_part() {
    let mut world = World::new(EngineConfig {
        policy: CapacityPolicy::MaxUtilization,
        max_seq_len: Tokens(32),
        num_blocks: Blocks(13),
        max_num_tokens: Tokens(64),
        ..with_beams(3)
    });
    // They need 8 blocks each in total, and the beams up to 1 + 3 * 4.
    let long = world.add(TestRequest::of_lengths(5, 27)).expect("fits");
    world.add(TestRequest::of_lengths(5, 27)).expect("fits");
    let beams = world.add(search(5, 14, 3)).expect("fits");
    let of_beams = |planned: Vec<PlannedSequence>| -> Vec<(u32, u32, usize)> {
        let own = planned.into_iter().filter(|planned| planned.id == beams);
        own.map(|it| (it.beam, it.kv_len, it.tokens.len()))
            .collect()
    };
    let mut len = 0;
    while !world.streams[&beams].paused {
        assert!(!world.streams[&beams].ended, "it never pauses");
        let planned = of_beams(world.step());
        len = planned.first().map_or(len, |&(_, kv_len, _)| kv_len + 1);
    }
    assert!(!world.streams[&long].paused, "it came first");
    // The first step computes what all have in common, once; others the rest of each, in equal chunks.
    let mut steps = Vec::new();
    while steps.last().is_none_or(|&(_, kv_len, _)| kv_len < len) {
        assert!(!world.engine.is_idle(), "{steps:?}");
        steps.extend(of_beams(world.step()));
    }
    let (_, num_common, chunk) = steps[0];
    assert_eq!(num_common, chunk as u32, "from the beginning");
    assert!((5..len).contains(&num_common), "{steps:?}, {len}");
    let mut start = num_common;
    for beams in steps[1..].chunks(3) {
        let [(.., chunk), ..] = *beams else {
            panic!("a step without beams")
        };
        let kv_len = start + chunk as u32;
        assert_eq!(beams, [0, 1, 2].map(|beam| (beam, kv_len, chunk)));
        start = kv_len;
    }
    assert_eq!(start, len, "their next tokens come from the last");
    world.run_to_end();
}

#[test]
fn beams_that_are_about_to_part_find_their_blocks() {
    // The context has 5 full blocks and takes two steps. Then each beam needs a block.
    for (num_blocks, starts) in [(8, false), (9, true)] {
        let mut world = World::new(EngineConfig {
            policy: CapacityPolicy::MaxUtilization,
            max_seq_len: Tokens(32),
            max_num_tokens: Tokens(12),
            num_blocks: Blocks(num_blocks),
            ..with_beams(3)
        });
        world.add(search(20, 5, 3)).expect("fits");
        world.step();
        let next = world.add(TestRequest::of_lengths(4, 2)).expect("fits");
        world.step();
        assert_eq!(world.streams[&next].admitted, starts, "{num_blocks} blocks");
        world.run_to_end();
    }
}

#[test]
fn a_context_starts_with_its_blocks_and_a_search_also_with_the_next_one_of_each_beam() {
    // A prompt of eight tokens has two full blocks.
    let plain = || TestRequest::of_lengths(8, 4);
    for (request, num_blocks, num_started) in [
        (plain(), 4, 2),
        (plain(), 5, 2),
        (search(8, 4, 3), 9, 1),
        (search(8, 4, 3), 10, 2),
    ] {
        let mut world = World::new(EngineConfig {
            policy: CapacityPolicy::MaxUtilization,
            max_seq_len: Tokens(16),
            num_blocks: Blocks(num_blocks),
            ..with_beams(3)
        });
        for _ in 0..2 {
            world.add(request.clone()).expect("fits");
        }
        assert_eq!(world.step().len(), num_started, "{num_blocks} blocks");
        world.run_to_end();
    }
}

#[test]
fn those_that_start_leave_running_searches_a_token_for_each_beam() {
    let config = EngineConfig {
        max_num_tokens: Tokens(8),
        num_blocks: Blocks(256),
        ..with_beams(6)
    };
    // Beams take four of eight tokens, so that a block fits into a step, but no token of its request later.
    for widths in [&[4][..], &[2, 2]] {
        let mut world = World::new(config.clone());
        let searches: Vec<_> = widths
            .iter()
            .map(|&width| world.add(search(1, 9, width)).expect("fits"))
            .collect();
        world.step();
        let long = world.add(TestRequest::of_lengths(40, 2)).expect("fits");
        while searches.iter().all(|id| !world.streams[id].ended) {
            assert!(!world.streams[&long].admitted, "{widths:?}");
            world.step();
        }
        world.run_to_end();
    }
    // Where nobody searches, a context may be given less than a block.
    let mut world = World::new(config);
    for _ in 0..5 {
        world.add(TestRequest::of_lengths(1, 9)).expect("fits");
    }
    world.step();
    world.add(TestRequest::of_lengths(2, 9)).expect("fits");
    assert_eq!(world.step().len(), 6);
    world.run_to_end();
}

#[test]
fn drafts_leave_a_block_for_each_beam() {
    // The request has two blocks and the search four: one that all share, and one of each beam. A draft at position 7
    // takes no block, and those behind it one that is free only if others are for all beams.
    for (num_blocks, num_drafts) in [(10, 1), (11, 4)] {
        let mut world = World::new(EngineConfig {
            policy: CapacityPolicy::MaxUtilization,
            max_seq_len: Tokens(16),
            num_blocks: Blocks(num_blocks),
            speculation: Some(Speculation {
                max_draft_tokens: 4,
                prompt_lookup: None,
                has_draft_model: false,
                recomputes_drafts: false,
            }),
            ..with_beams(3)
        });
        let mut request = TestRequest::of_lengths(6, 8);
        request.drafts.expected = request.answer_alone(Tokens(16)).0.into();
        world.add(request).expect("fits");
        world.add(search(5, 5, 3)).expect("fits");
        world.step();
        assert_eq!(
            world.step()[0].num_drafts,
            num_drafts,
            "{num_blocks} blocks"
        );
        world.run_to_end();
    }
}

#[test]
fn in_a_pool_that_is_far_too_small_searches_pause_often_and_all_end() {
    for (reuse, window) in [
        (BlockReuse::Off, None),
        (BlockReuse::PartialBlocks, None),
        (
            BlockReuse::WholeBlocks,
            Some(AttentionWindow {
                size: Tokens(9),
                num_sinks: Tokens(2),
            }),
        ),
    ] {
        let mut world = World::new(EngineConfig {
            policy: CapacityPolicy::MaxUtilization,
            num_blocks: Blocks(44),
            max_num_tokens: Tokens(32),
            reuse,
            groups: KvGroups::one(window),
            ..with_beams(4)
        });
        for n in 0..24 {
            world.add(search(1 + n % 20, 24, 2 + n % 3)).expect("fits");
        }
        world.run_to_end();
        let num_pauses = world.num_pauses_with_beams;
        assert!(num_pauses > 2, "{reuse:?}, {window:?}: {num_pauses} pauses");
    }
}

#[test]
fn beams_leave_a_step_room_for_the_next_chunk_of_those_before_them() {
    let config = EngineConfig {
        max_num_tokens: Tokens(8),
        num_blocks: Blocks(256),
        ..with_beams(6)
    };
    let mut world = World::new(config.clone());
    let long = world.add(TestRequest::of_lengths(40, 2)).expect("fits");
    let beams = world.add(search(1, 20, 6)).expect("fits");
    while !world.streams[&long].ended {
        world.step();
        // 6 of 8 tokens would leave less than one block.
        assert!(!world.streams[&beams].admitted);
    }
    world.run_to_end();
    let mut world = World::new(config);
    world.add(search(1, 20, 6)).expect("alone there is room");
    world.run_to_end();
}

#[test]
fn with_a_window_each_beam_frees_the_blocks_outside_of_it() {
    let config = EngineConfig {
        max_num_tokens: Tokens(8),
        groups: KvGroups::one(Some(AttentionWindow {
            size: Tokens(6),
            num_sinks: Tokens(2),
        })),
        num_blocks: Blocks(24),
        ..with_beams(4)
    };
    for reuse in [BlockReuse::Off, BlockReuse::PartialBlocks] {
        for policy in [
            CapacityPolicy::GuaranteedNoEvict,
            CapacityPolicy::MaxUtilization,
        ] {
            let mut world = World::new(EngineConfig {
                reuse,
                policy,
                ..config.clone()
            });
            for _ in 0..2 {
                world.add(search(20, 44, 4)).expect("fits");
                world.add(TestRequest::of_lengths(20, 44)).expect("fits");
            }
            let mut most = 0;
            while !world.engine.is_idle() {
                world.step();
                most = most.max(world.engine.kv_usage().num_used.0);
            }
            world.run_to_end();
            // Without the window one of the four would need 5 + 4 * 11 blocks.
            assert!(most <= 24, "{most}");
        }
    }
}

#[test]
fn no_beam_holds_more_blocks_than_its_window_has() {
    let config = EngineConfig {
        groups: KvGroups::one(Some(AttentionWindow {
            size: Tokens(6),
            num_sinks: Tokens(2),
        })),
        num_blocks: Blocks(256),
        ..with_beams(4)
    };
    for num_prompt_tokens in 1..20 {
        let mut world = World::new(config.clone());
        world.add(search(num_prompt_tokens, 40, 4)).expect("fits");
        while !world.engine.is_idle() {
            world.step();
            // The sinks are in one block, and six positions in three at most.
            let num_used = world.engine.kv_usage().num_used.0;
            assert!(num_used <= 4 * (1 + 3), "{num_used}");
        }
        world.run_to_end();
    }
}

#[test]
fn in_lockstep_beams_wait_for_the_rest_of_their_batch() {
    let mut world = World::new(EngineConfig {
        scheme: BatchingScheme::V1,
        ..with_beams(2)
    });
    let beams = world.add(search(3, 2, 2)).expect("fits");
    let other = world.add(TestRequest::of_lengths(3, 5)).expect("fits");
    for num_generating in [0, 3, 1, 1, 1] {
        assert!(world.streams[&beams].hypotheses.is_empty());
        let planned = world.step();
        let generating = planned.iter().filter(|it| world.streams[&it.id].generates);
        assert_eq!(generating.count(), num_generating);
    }
    // The two rows of the ended request were computed but not used.
    assert_eq!(world.num_padding_tokens, 2);
    assert_eq!(world.engine.ended(beams), None);
    assert!(world.streams[&beams].ended && world.streams[&other].ended);
    let order: Vec<_> = world.events.iter().map(Event::sequence_id).collect();
    assert_eq!(order, [other, beams, beams, other]);
    world.run_to_end();
}

#[test]
fn in_lockstep_contexts_are_padded_to_the_longest_in_however_many_steps() {
    for (max_num_tokens, num_steps) in [(24, 1), (8, 3)] {
        let mut world = World::new(EngineConfig {
            scheme: BatchingScheme::V1,
            max_num_tokens: Tokens(max_num_tokens),
            ..with_beams(2)
        });
        for num_prompt_tokens in [4, 7, 9] {
            world
                .add(TestRequest::of_lengths(num_prompt_tokens, 2))
                .expect("fits");
        }
        for _ in 0..num_steps {
            let planned = world.step();
            assert!(planned.iter().all(|it| !world.streams[&it.id].generates));
        }
        assert_eq!(world.num_padding_tokens, 3 * 9 - (4 + 7 + 9));
        let planned = world.step();
        assert_eq!(planned.len(), 3);
        assert!(planned.iter().all(|it| world.streams[&it.id].generates));
        world.run_to_end();
    }
}

#[test]
fn only_the_prompt_of_beams_is_reused() {
    let prompt: Vec<_> = (0..10).collect();
    let request = TestRequest {
        prompt: prompt.clone(),
        outputs: OutputOptions {
            kv_blocks: true,
            ..OutputOptions::default()
        },
        ..search(1, 12, 3)
    };
    // The search again, and requests that go on from each of its hypotheses.
    for next in 0..4 {
        let mut world = World::new(EngineConfig {
            reuse: BlockReuse::PartialBlocks,
            ..with_beams(3)
        });
        let first = world.add(request.clone()).expect("fits");
        world.run_to_end();
        // 10 positions, then at least 3 times those after the two full blocks of the prompt.
        let stream = &world.streams[&first];
        let KvBlocks {
            num_new,
            num_reused,
        } = stream.kv_blocks;
        assert!(
            num_new.0 >= 2 + 3 * 4 && num_reused == Blocks(0),
            "{num_new}"
        );
        let request = match stream.hypotheses.get(next) {
            None => request.clone(),
            Some(found) => TestRequest {
                prompt: [&prompt[..], &found.tokens].concat(),
                beam_search: None,
                ..request.clone()
            },
        };
        let id = world.add(request).expect("fits");
        world.run_to_end();
        assert_eq!(world.streams[&id].kv_blocks.num_reused, Blocks(2));
    }
}

#[test]
fn what_beams_generate_is_not_reused() {
    // Each beam fills the third block with its first token.
    let prompt: Vec<_> = (0..11).collect();
    let mut world = World::new(EngineConfig {
        reuse: BlockReuse::WholeBlocks,
        ..with_beams(3)
    });
    let searching = TestRequest {
        prompt: prompt.clone(),
        ..search(1, 12, 3)
    };
    world.add(searching).expect("fits");
    world.run_to_end();
    for token in 0..VOCAB_SIZE {
        let request = TestRequest {
            prompt: [&prompt[..], &[token, 0]].concat(),
            outputs: OutputOptions {
                kv_blocks: true,
                ..OutputOptions::default()
            },
            ..TestRequest::of_lengths(1, 1)
        };
        let id = world.add(request).expect("fits");
        world.run_to_end();
        let num_reused = world.streams[&id].kv_blocks.num_reused;
        assert_eq!(num_reused, Blocks(2), "{token}");
    }
}

#[test]
fn the_new_blocks_of_a_search_are_those_that_it_takes_from_the_pool() {
    let mut world = World::new(with_beams(3));
    let num_taken = |world: &mut World| {
        let mut num_taken = 0;
        while !world.engine.is_idle() {
            world.step();
            let stats = world.engine.stats().expect("active");
            num_taken = stats.reuse.num_taken_blocks;
        }
        world.run_to_end();
        num_taken
    };
    world.add(TestRequest::of_lengths(9, 1)).expect("fits");
    let before = num_taken(&mut world);
    let request = TestRequest {
        outputs: OutputOptions {
            kv_blocks: true,
            ..OutputOptions::default()
        },
        ..search(10, 12, 3)
    };
    let id = world.add(request).expect("fits");
    let after = num_taken(&mut world);
    let num_new = world.streams[&id].kv_blocks.num_new.0;
    assert_eq!((before, u64::from(num_new)), (3, after - before));
}

#[test]
fn the_logits_of_a_beam_follow_its_history_and_are_shared_with_its_siblings() {
    for num_micro_batches in 1..=2 {
        let mut world = World::new(EngineConfig {
            num_micro_batches,
            ..with_beams(4)
        });
        let request = TestRequest {
            outputs: OutputOptions {
                context_logits: true,
                generation_logits: true,
                ..OutputOptions::default()
            },
            has_end_id: true,
            ..search(5, 9, 4)
        };
        let id = world.add(request).expect("fits");
        world.add(search(5, 9, 2)).expect("fits");
        // `support` checks their contents at the end of the request.
        world.run_to_end();
        let found = &world.streams[&id].hypotheses;
        assert_eq!(found.len(), 4);
        for (one, other) in found
            .iter()
            .flat_map(|one| found.iter().map(move |it| (one, it)))
        {
            assert_eq!(one.generation_logits.len(), one.tokens.len());
            let both = std::iter::zip(&one.tokens, &other.tokens);
            let num_common = both.take_while(|(one, other)| one == other).count();
            let rows = std::iter::zip(&one.generation_logits, &other.generation_logits);
            for (one, other) in rows.take(num_common + 1) {
                assert!(Arc::ptr_eq(one, other), "one row, not a copy of it");
            }
        }
    }
}

#[test]
fn the_current_hypotheses_are_available_after_every_step() {
    let request = TestRequest {
        has_end_id: true,
        has_stop_text: true,
        ..search(5, 9, 4)
    };
    for scheme in [BatchingScheme::InflightFused, BatchingScheme::V1] {
        let mut world = World::new(EngineConfig {
            scheme,
            ..with_beams(4)
        });
        let id = world.add(request.clone()).expect("fits");
        let long = world.add(TestRequest::of_lengths(5, 12)).expect("fits");
        let how = request.beam_search.expect("it searches");
        let alone = search_alone(&request, how, world.config.max_seq_len);
        let ended = |texts: &Vec<_>| {
            texts
                .iter()
                .any(|it: &Hypothesis| it.finish_reason.is_some())
        };
        assert!(alone.so_far.iter().any(ended), "some end before others");
        assert_eq!(world.engine.best_so_far(id)[..], []);
        for expected in &alone.so_far {
            world.step();
            assert_eq!(world.engine.best_so_far(id)[..], expected[..]);
        }
        world.step();
        // In lockstep it waits for the other request.
        let waits = scheme == BatchingScheme::V1;
        let found = if waits { &alone.found[..] } else { &[] };
        assert_eq!(world.engine.best_so_far(id)[..], *found);
        assert_eq!(world.engine.best_so_far(long)[..], [], "it has no beams");
        world.run_to_end();
    }
}

#[test]
fn the_engine_knows_which_beams_are_in_a_launched_step() {
    let mut world = World::new(EngineConfig {
        num_micro_batches: 2,
        ..with_beams(2)
    });
    let (beams, other) = (search(5, 9, 2), TestRequest::of_lengths(5, 9));
    let [beams, other] = [beams, other].map(|request| world.add(request).expect("fits"));
    let mut were_out = [false; 2];
    for _ in 0..4 {
        world.step();
        let are_out = world.engine.are_beams_out(beams);
        were_out[usize::from(are_out)] = true;
        assert!(!world.engine.are_beams_out(other));
    }
    assert_eq!(were_out, [true; 2]);
    world.run_to_end();
}

#[test]
fn a_request_receives_its_current_beams_if_it_asks_for_them() {
    let mut world = World::new(with_beams(3));
    let told_every = |beams| TestRequest {
        outputs: OutputOptions {
            beams: NonZeroU32::new(beams),
            ..OutputOptions::default()
        },
        ..search(5, 9, 3)
    };
    let ids = [1, 4, 100].map(|interval| world.add(told_every(interval)).expect("fits"));
    // `support` checks the reported hypotheses at the end of each request.
    world.run_to_end();
    let num_told = ids.map(|id| world.streams[&id].told.len());
    assert_eq!(num_told, [8, 2, 1]);
}

#[test]
fn a_beam_that_ends_with_a_stop_word_is_a_hypothesis() {
    let request = TestRequest {
        has_stop_text: true,
        ..search(5, 12, 4)
    };
    let mut world = World::new(with_beams(4));
    let id = world.add(request).expect("fits");
    world.run_to_end();
    let found = &world.streams[&id].hypotheses;
    let mut num_ended = 0;
    for it in found {
        let (last, before) = it.tokens.split_last().expect("tokens");
        let ends = before
            .last()
            .is_some_and(|before| (before + last).is_multiple_of(7));
        assert_eq!(ends, it.finish_reason == Some(FinishReason::StopWords));
        let is_seven = |pair: &[u32]| (pair[0] + pair[1]).is_multiple_of(7);
        assert!(!before.windows(2).any(is_seven), "it ends at the first");
        num_ended += u32::from(ends);
    }
    assert!(num_ended > 0);
}

#[test]
fn a_search_that_fails_ends_with_its_error_and_without_hypotheses() {
    let mut world = World::new(with_beams(3));
    let id = world
        .add(TestRequest {
            fails_after: Some(2),
            ..search(5, 9, 3)
        })
        .expect("fits");
    while !world.streams[&id].ended {
        world.step();
    }
    let error = FinishReason::Error(SampleError::NotFinite);
    assert_eq!(world.events, [Event::Finished(id, error)]);
    world.run_to_end();
}

#[test]
fn only_the_requested_number_of_hypotheses_is_returned() {
    let all = search(5, 9, 4);
    let mut world = World::new(with_beams(4));
    let best = TestRequest {
        beam_search: all.beam_search.map(|mut search| {
            search.num_returned = 2;
            search
        }),
        ..all.clone()
    };
    let [all, best] = [all, best].map(|request| world.add(request).expect("fits"));
    world.run_to_end();
    let found = |id: SequenceId| &world.streams[&id].hypotheses;
    assert_eq!(found(all).len(), 4);
    assert_eq!(found(best)[..], found(all)[..2]);
}

#[test]
fn beams_that_cannot_run_are_rejected_with_the_way_out() {
    let mut world = World::new(EngineConfig {
        num_blocks: Blocks(20),
        ..with_beams(4)
    });
    let refusal = world.add(search(5, 9, 5)).expect_err("too wide");
    assert_eq!(
        refusal.to_string(),
        "beam_width is 5, and the model's max_beam_width is 4: ask for fewer beams, or load the model with \
         a larger max_beam_width"
    );
    let refusal = world.add(search(5, 40, 4)).expect_err("too long");
    assert_eq!(
        refusal.to_string(),
        "4 beams of the request could need 41 blocks of the KV cache, which has 20: lower beam_width or \
         max_tokens"
    );
    let config = EngineConfig {
        max_beam_width: 513,
        ..wide_config()
    };
    assert_eq!(
        config.check().expect_err("too wide").to_string(),
        "config.pbtxt: max_num_tokens is 512, too few for one token of each of max_beam_width = 513 \
         beams; raise max_num_tokens to at least 513, or lower max_beam_width"
    );
}
