//! The effect of each scheduling rule, as a time table.
//!
//! Each row is a step, each column a request:
//!
//! ```text
//! c5      5 context tokens            w   waiting to be admitted
//! c4+     4, with more to come        p   paused
//! g       one generation token        .   not added yet, or ended
//! g3/2    and 3 drafts, 2 accepted    -   running, but without tokens in this step
//! ```

use std::collections::BTreeMap;

use crate::support::{TestRequest, VOCAB_SIZE, World, wide_config};
use inflight_base::{Blocks, SequenceId, TokenId, Tokens};
use inflight_engine::{
    AttentionWindow, BatchingScheme, BlockReuse, CapacityPolicy, ContextChunkPolicy, EngineConfig,
    KvGroups, Speculation, StepCost,
};

/// Arrival time, lengths and priority of a request.
struct Arrival {
    before_step: u64,
    num_prompt_tokens: u32,
    max_new_tokens: u32,
    priority: i32,
    /// Number of correct draft tokens; wrong ones follow. 0 for no drafts.
    num_foreseen: usize,
    adapter: Option<u32>,
}

const fn at(before_step: u64, num_prompt_tokens: u32, max_new_tokens: u32) -> Arrival {
    Arrival {
        before_step,
        num_prompt_tokens,
        max_new_tokens,
        priority: 0,
        num_foreseen: 0,
        adapter: None,
    }
}

/// An arrival whose request has a priority.
const fn of_priority(priority: i32, arrival: Arrival) -> Arrival {
    Arrival {
        priority,
        ..arrival
    }
}

/// An arrival whose request has draft tokens: the first `num_foreseen` are correct, the rest wrong.
const fn foreseen(num_foreseen: usize, arrival: Arrival) -> Arrival {
    Arrival {
        num_foreseen,
        ..arrival
    }
}

/// An arrival whose request has an adapter, see [`num_pages`](crate::support::num_pages).
const fn with_adapter(adapter: u32, arrival: Arrival) -> Arrival {
    Arrival {
        adapter: Some(adapter),
        ..arrival
    }
}

/// The first `num_right` tokens of the answer to `request`, followed by wrong ones.
fn expected(request: &TestRequest, num_right: usize) -> Vec<TokenId> {
    let (mut tokens, _) = request.answer_alone(Tokens(u32::MAX));
    for wrong in tokens.iter_mut().skip(num_right) {
        *wrong = (*wrong + 1) % VOCAB_SIZE;
    }
    tokens
}

/// Runs `arrivals` to their end. For each `(n, s)` in `cancelled`, R`n` is cancelled before step `s`.
fn time_table(config: EngineConfig, arrivals: &[Arrival], cancelled: &[(u64, u64)]) -> String {
    let mut world = World::new(config);
    let mut table = String::from("step tokens blocks");
    for n in 1..=arrivals.len() {
        table += &format!("{:>5}", format!("R{n}"));
    }
    table += "\n";
    for step in 1.. {
        for arrival in arrivals
            .iter()
            .filter(|arrival| arrival.before_step == step)
        {
            let mut request = TestRequest {
                priority: arrival.priority,
                adapter: arrival.adapter,
                ..TestRequest::of_lengths(arrival.num_prompt_tokens, arrival.max_new_tokens)
            };
            if arrival.num_foreseen > 0 {
                request.drafts.expected = expected(&request, arrival.num_foreseen).into();
            }
            world.add(request).expect("fits the limits");
        }
        for &(n, _) in cancelled
            .iter()
            .filter(|&&(_, before_step)| before_step == step)
        {
            world.cancel(SequenceId(n));
        }
        if world.engine.is_idle() {
            break;
        }
        let present: Vec<_> = world.active().map(|(id, _)| id).collect();
        let num_tokens_before = |world: &World, id| world.streams[&id].tokens.len();
        let before: BTreeMap<_, _> = present
            .iter()
            .map(|&id| (id, num_tokens_before(&world, id)))
            .collect();
        let planned = world.step();
        let num_tokens: usize = planned.iter().map(|planned| planned.tokens.len()).sum();
        let num_blocks = world.engine.stats().expect("active").kv.num_used;
        table += &format!("{step:>4} {num_tokens:>6} {num_blocks:>6}");
        for id in (1..=arrivals.len() as u64).map(SequenceId) {
            let cell = match planned.iter().find(|planned| planned.id == id) {
                Some(planned) if planned.num_drafts > 0 => {
                    let num_tokens = world.streams[&id].tokens.len() - before[&id];
                    format!("g{}/{}", planned.num_drafts, num_tokens - 1)
                }
                Some(planned) if world.streams[&planned.id].generates => "g".into(),
                Some(planned) => {
                    let more = if planned.samples { "" } else { "+" };
                    format!("c{}{more}", planned.tokens.len())
                }
                None if !present.contains(&id) => ".".into(),
                None if world.streams[&id].paused => "p".into(),
                None if world.streams[&id].admitted => "-".into(),
                None => "w".into(),
            };
            table += &format!("{cell:>5}");
        }
        table += "\n";
    }
    table
}

fn assert_table(actual: String, expected: &str) {
    let lines = |table: &str| -> Vec<String> {
        let lines = table.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.map(str::to_owned).collect()
    };
    assert_eq!(lines(&actual), lines(expected), "what happened:\n{actual}");
}

/// Two requests that need 4 blocks each in total, and a third; the pool has 6.
const THREE: [Arrival; 3] = [at(1, 6, 10), at(1, 6, 10), at(1, 2, 3)];

fn small_pool(policy: CapacityPolicy) -> EngineConfig {
    EngineConfig {
        max_seq_len: Tokens(16),
        num_blocks: Blocks(6),
        policy,
        ..wide_config()
    }
}

#[test]
fn guaranteed_no_evict_admits_only_requests_that_can_run_to_their_end() {
    // R3 would always fit next to R1, but no request overtakes R2.
    assert_table(
        time_table(small_pool(CapacityPolicy::GuaranteedNoEvict), &THREE, &[]),
        "
        step tokens blocks   R1   R2   R3
           1      6      2   c6    w    w
           2      1      2    g    w    w
           3      1      2    g    w    w
           4      1      3    g    w    w
           5      1      3    g    w    w
           6      1      3    g    w    w
           7      1      3    g    w    w
           8      1      4    g    w    w
           9      1      4    g    w    w
          10      1      4    g    w    w
          11      8      3    .   c6   c2
          12      2      3    .    g    g
          13      2      3    .    g    g
          14      1      3    .    g    .
          15      1      3    .    g    .
          16      1      3    .    g    .
          17      1      3    .    g    .
          18      1      4    .    g    .
          19      1      4    .    g    .
          20      1      4    .    g    .
        ",
    );
}

#[test]
fn max_utilization_admits_requests_that_fit_now_and_pauses_the_last_admitted() {
    // In step 8, R1 needs a fourth block. R2 frees all of its blocks and, when R1 has ended, computes its 13 tokens
    // again.
    assert_table(
        time_table(small_pool(CapacityPolicy::MaxUtilization), &THREE, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     14      5   c6   c6   c2
           2      3      5    g    g    g
           3      3      5    g    g    g
           4      2      6    g    g    .
           5      2      6    g    g    .
           6      2      6    g    g    .
           7      2      6    g    g    .
           8      1      4    g    p    .
           9      1      4    g    p    .
          10      1      4    g    p    .
          11     13      4    .  c13    .
          12      1      4    .    g    .
          13      1      4    .    g    .
        ",
    );
}

#[test]
fn max_utilization_resumes_paused_requests_before_admitting_new_ones() {
    let config = EngineConfig {
        max_seq_len: Tokens(24),
        ..small_pool(CapacityPolicy::MaxUtilization)
    };
    let arrivals = [at(1, 7, 8), at(1, 7, 8), at(1, 7, 8), at(6, 1, 2)];
    // From step 7 on a block is free for R4, but paused requests come first. R2 was admitted before R3 and is
    // resumed before it.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3   R4
           1     21      6   c7   c7   c7    .
           2      3      6    g    g    g    .
           3      2      6    g    g    p    .
           4      2      6    g    g    p    .
           5      2      6    g    g    p    .
           6      2      6    g    g    p    w
           7      1      4    g    p    p    w
           8      1      4    g    p    p    w
           9     13      4    .  c13    p    w
          10      1      4    .    g    p    w
          11     10      4    .    .   c9   c1
          12      2      4    .    .    g    g
          13      1      3    .    .    g    .
          14      1      3    .    .    g    .
          15      1      4    .    .    g    .
          16      1      4    .    .    g    .
        ",
    );
}

#[test]
fn a_long_context_is_chunked_beside_generating_requests() {
    let config = EngineConfig {
        max_num_requests: 4,
        max_num_tokens: Tokens(10),
        ..wide_config()
    };
    let arrivals = [at(1, 3, 8), at(2, 21, 3), at(2, 1, 2)];
    // Of the 9 tokens beside R1, R2 gets two blocks. The remaining one would suffice for R3, but it does not
    // overtake.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1      3      1   c3    .    .
           2      9      7    g  c8+    w
           3      9      8    g  c8+    w
           4      7      9    g   c5   c1
           5      3      9    g    g    g
           6      2      8    g    g    .
           7      1      3    g    .    .
           8      1      3    g    .    .
        ",
    );
}

#[test]
fn without_chunking_no_request_overtakes_a_context_that_does_not_fit() {
    let config = EngineConfig {
        max_num_tokens: Tokens(10),
        enable_chunked_context: false,
        ..wide_config()
    };
    let arrivals = [at(1, 3, 4), at(2, 10, 2), at(2, 2, 2)];
    // R2 needs a step to itself, and R3 waits with it.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1      3      1   c3    .    .
           2      1      1    g    w    w
           3      1      2    g    w    w
           4      1      2    g    w    w
           5     10      3    .  c10    w
           6      3      4    .    g   c2
           7      1      1    .    .    g
        ",
    );
}

#[test]
fn a_cancelled_request_makes_room_in_the_next_step() {
    let config = EngineConfig {
        max_num_requests: 1,
        ..wide_config()
    };
    let arrivals = [at(1, 4, 9), at(1, 4, 9), at(1, 4, 2)];
    assert_table(
        time_table(config, &arrivals, &[(1, 3), (2, 3)]),
        "
        step tokens blocks   R1   R2   R3
           1      4      1   c4    w    w
           2      1      2    g    w    w
           3      4      1    .    .   c4
           4      1      2    .    .    g
        ",
    );
}

#[test]
fn no_request_joins_a_static_batch_until_all_of_its_requests_have_ended() {
    let config = EngineConfig {
        max_num_requests: 2,
        policy: CapacityPolicy::StaticBatch,
        ..wide_config()
    };
    let arrivals = [at(1, 4, 2), at(1, 4, 4), at(1, 4, 2), at(2, 4, 1)];
    // R1 ends after step 2, and its place stays empty until R2 has ended too.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3   R4
           1      8      2   c4   c4    w    .
           2      2      4    g    g    w    w
           3      1      2    .    g    w    w
           4      1      2    .    g    w    w
           5      8      2    .    .   c4   c4
           6      1      2    .    .    g    .
        ",
    );
}

#[test]
fn lockstep_answers_a_batch_when_its_longest_has_ended() {
    let config = EngineConfig {
        scheme: BatchingScheme::V1,
        max_num_tokens: Tokens(14),
        ..wide_config()
    };
    let arrivals = [at(1, 4, 2), at(1, 7, 4), at(1, 4, 2)];
    // All three are one batch. R3's context does not fit into the first step, and the others wait for it; R1 and R3
    // are done after step 3, and wait for R2.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     11      4   c4   c7    -
           2      4      5    -    -   c4
           3      3      6    g    g    g
           4      1      7    -    g    -
           5      1      7    -    g    -
        ",
    );
}

#[test]
fn equal_progress_gives_each_context_a_block_in_turn() {
    let config = EngineConfig {
        max_num_tokens: Tokens(12),
        chunk_policy: ContextChunkPolicy::EqualProgress,
        ..wide_config()
    };
    let arrivals = [at(1, 17, 2), at(1, 9, 2), at(2, 6, 1)];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     12      8  c8+  c4+    .
           2     12     10  c4+  c4+  c4+
           3      8     10   c5   c1   c2
           4      2      8    g    g    .
        ",
    );
}

#[test]
fn the_smaller_priority_number_starts_first_and_is_paused_last() {
    let arrivals = [
        of_priority(1, at(1, 6, 10)),
        at(2, 6, 10),
        of_priority(1, at(2, 2, 2)),
        at(3, 1, 2),
    ];
    // R2 and R4 arrive after R1 but take precedence: when blocks run out, R1 is paused.
    assert_table(
        time_table(small_pool(CapacityPolicy::MaxUtilization), &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3   R4
           1      6      2   c6    .    .    .
           2      9      5    g   c6   c2    .
           3      4      6    g    g    g   c1
           4      3      6    g    g    .    g
           5      2      6    g    g    .    .
           6      2      6    g    g    .    .
           7      2      6    g    g    .    .
           8      1      3    p    g    .    .
           9      1      4    p    g    .    .
          10      1      4    p    g    .    .
          11      1      4    p    g    .    .
          12     13      4  c13    .    .    .
          13      1      4    g    .    .    .
          14      1      4    g    .    .    .
        ",
    );
}

#[test]
fn a_context_waits_for_blocks_that_another_is_about_to_write() {
    let config = EngineConfig {
        max_num_tokens: Tokens(20),
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    };
    // All begin with the same tokens. R3, which has no whole block, does not have to wait.
    let arrivals = [at(1, 14, 2), at(1, 14, 2), at(1, 3, 2)];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     17      5  c14    w   c3
           2      4      6    g   c2    g
           3      1      4    .    g    .
        ",
    );
}

#[test]
fn blocks_that_are_shared_with_a_running_request_are_kept_once() {
    // Each could need four blocks, of which three are common: five are enough for both.
    let config = EngineConfig {
        max_seq_len: Tokens(16),
        num_blocks: Blocks(5),
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    };
    let arrivals = [at(1, 13, 3), at(2, 13, 3)];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2
           1     13      4  c13    .
           2      2      5    g   c1
           3      2      5    g    g
           4      1      4    .    g
        ",
    );
}

#[test]
fn a_batch_without_newcomers_starts_with_all_requests_that_share_a_prefix() {
    for (scheme, policy) in [
        (BatchingScheme::InflightFused, CapacityPolicy::StaticBatch),
        (BatchingScheme::V1, CapacityPolicy::GuaranteedNoEvict),
    ] {
        let config = EngineConfig {
            scheme,
            policy,
            reuse: BlockReuse::WholeBlocks,
            ..wide_config()
        };
        let arrivals = [at(1, 14, 3), at(1, 14, 3), at(2, 14, 2)];
        // R3 reuses the whole blocks of the requests before it.
        assert_table(
            time_table(config, &arrivals, &[]),
            "
            step tokens blocks   R1   R2   R3
               1     28      8  c14  c14    .
               2      2      8    g    g    w
               3      2      8    g    g    w
               4      2      4    .    .   c2
               5      1      4    .    .    g
            ",
        );
    }
}

#[test]
fn two_micro_batches_take_turns() {
    let config = EngineConfig {
        num_micro_batches: 2,
        ..wide_config()
    };
    let arrivals = [at(1, 4, 3), at(1, 5, 3), at(1, 6, 3)];
    // The tokens of a step are known when the second step after it is planned.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1      9      3   c4   c5    w
           2      6      5    -    -   c6
           3      2      6    g    g    -
           4      1      6    -    -    g
           5      2      6    g    g    -
           6      1      6    -    -    g
           7      0      2    .    .    -
        ",
    );
}

const DRAFTS: Option<Speculation> = Some(Speculation {
    max_draft_tokens: 4,
    prompt_lookup: None,
    has_draft_model: false,
    recomputes_drafts: false,
});

#[test]
fn drafts_use_the_rest_of_the_token_budget() {
    let config = EngineConfig {
        max_num_tokens: Tokens(12),
        speculation: DRAFTS,
        ..wide_config()
    };
    // The drafts of R1 are correct to its end, R2's up to its fifth token. The context of R3 comes before them.
    let arrivals = [
        foreseen(20, at(1, 3, 14)),
        foreseen(5, at(1, 3, 12)),
        at(2, 20, 2),
    ];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1      6      2   c3   c3    .
           2     12      8 g2/2    g  c8+
           3     12     10 g2/2    g  c8+
           4     12     11 g4/4 g2/2   c4
           5      4     13 g1/1    g    g
           6      1      3    .    g    .
           7      1      3    .    g    .
           8      1      3    .    g    .
           9      1      4    .    g    .
          10      1      4    .    g    .
        ",
    );
}

#[test]
fn drafts_are_as_many_as_are_worth_what_they_cost() {
    let config = |fixed_ns, per_token_ns| EngineConfig {
        max_num_tokens: Tokens(12),
        speculation: DRAFTS,
        step_cost: Some(StepCost {
            fixed_ns,
            per_token_ns,
        }),
        ..wide_config()
    };
    // A draft costs half of what a token does. As one right draft after the other is known, the second one, the third
    // and the fourth are right in more than half of the cases.
    let arrivals = [foreseen(24, at(1, 3, 24))];
    assert_table(
        time_table(config(1, 1), &arrivals, &[]),
        "
        step tokens blocks   R1
           1      3      1   c3
           2      2      2 g1/1
           3      2      2 g1/1
           4      3      3 g2/2
           5      5      4 g4/4
           6      5      5 g4/4
           7      5      7 g4/4
           8      1      7    g
        ",
    );
    // It costs as much as a token: one is made as long as it is right. The drafts of R2 are wrong from its fifth token
    // on.
    let arrivals = [foreseen(9, at(1, 3, 8)), foreseen(5, at(1, 3, 9))];
    assert_table(
        time_table(config(0, 1), &arrivals, &[]),
        "
        step tokens blocks   R1   R2
           1      6      2   c3   c3
           2      4      4 g1/1 g1/1
           3      4      4 g1/1 g1/1
           4      4      6 g1/1 g1/0
           5      2      6    g    g
           6      1      3    .    g
           7      1      3    .    g
        ",
    );
}

#[test]
fn drafts_take_no_block_that_another_may_need() {
    let config = EngineConfig {
        num_blocks: Blocks(7),
        speculation: DRAFTS,
        ..small_pool(CapacityPolicy::MaxUtilization)
    };
    let arrivals = [
        foreseen(20, at(1, 6, 10)),
        foreseen(20, at(1, 6, 8)),
        at(3, 9, 2),
    ];
    // In step 2 three blocks are free, and R1 and R2 may need one each: R1 takes the third. In step 3 one is
    // left, and R3 waits for more: R1 gets no room for drafts, while R2 has some.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     12      4   c6   c6    .
           2      7      5 g4/4 g1/1    .
           3      5      6    g g3/3    w
           4      3      4 g2/2    p    w
           5     22      7    .  c13   c9
           6      1      3    .    .    g
        ",
    );
}

#[test]
fn drafts_leave_a_block_of_each_group() {
    let window = AttentionWindow {
        size: Tokens(64),
        num_sinks: Tokens(0),
    };
    // Two places have four blocks. A draft at position 7 takes no block.
    for (num_blocks, num_drafts) in [(6, 1), (8, 4)] {
        let mut world = World::new(EngineConfig {
            policy: CapacityPolicy::MaxUtilization,
            max_seq_len: Tokens(12),
            num_blocks: Blocks(num_blocks),
            groups: KvGroups::new(&[None, Some(window)]),
            speculation: DRAFTS,
            ..wide_config()
        });
        let mut request = TestRequest::of_lengths(6, 6);
        request.drafts.expected = expected(&request, 20).into();
        world.add(request).expect("fits");
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
fn drafts_take_the_blocks_that_were_set_aside() {
    let config = EngineConfig {
        speculation: DRAFTS,
        ..small_pool(CapacityPolicy::GuaranteedNoEvict)
    };
    let arrivals = [foreseen(20, at(1, 6, 10)), at(1, 6, 3)];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2
           1     12      4   c6   c6
           2      6      5 g4/4    g
           3      5      6 g3/3    g
        ",
    );
}

#[test]
fn a_request_waits_for_the_pages_of_its_adapter_and_holds_up_only_others_with_adapters() {
    let config = EngineConfig {
        num_adapter_pages: Some(3),
        ..wide_config()
    };
    // Adapters 1 and 5 have 2 pages each. R4's is held by R1, but would keep R2 waiting.
    let arrivals = [
        with_adapter(1, at(1, 2, 3)),
        with_adapter(5, at(1, 2, 2)),
        at(1, 2, 3),
        with_adapter(1, at(2, 2, 2)),
        at(3, 2, 1),
    ];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3   R4   R5
           1      4      2   c2    w   c2    .    .
           2      2      2    g    w    g    w    .
           3      4      3    g    w    g    w   c2
           4      2      1    .   c2    .    w    .
           5      1      1    .    g    .    w    .
           6      2      1    .    .    .   c2    .
           7      1      1    .    .    .    g    .
        ",
    );
}

#[test]
fn sequences_with_one_adapter_share_its_pages() {
    let config = EngineConfig {
        num_adapter_pages: Some(2),
        ..wide_config()
    };
    let arrivals = [with_adapter(1, at(1, 2, 3)), with_adapter(1, at(2, 2, 3))];
    // The pages are free when the second has ended, too, or was cancelled.
    let third = [with_adapter(5, at(2, 2, 1))];
    let arrivals: Vec<_> = arrivals.into_iter().chain(third).collect();
    let table = "
        step tokens blocks   R1   R2   R3
           1      2      1   c2    .    .
           2      3      2    g   c2    w
           3      2      2    g    g    w
    ";
    let to_end = "
           4      1      1    .    g    w
           5      2      1    .    .   c2
    ";
    let expected = format!("{table}{to_end}");
    assert_table(time_table(config.clone(), &arrivals, &[]), &expected);
    let cancelled = format!("{table}\n           4      2      1    .    .   c2\n");
    assert_table(time_table(config, &arrivals, &[(2, 4)]), &cancelled);
}

#[test]
fn a_paused_sequence_keeps_the_pages_of_its_adapter() {
    let config = EngineConfig {
        num_adapter_pages: Some(3),
        ..small_pool(CapacityPolicy::MaxUtilization)
    };
    let [first, second, third] = THREE;
    let arrivals = [first, with_adapter(1, second), with_adapter(5, third)];
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     12      4   c6   c6    w
           2      2      4    g    g    w
           3      2      4    g    g    w
           4      2      6    g    g    w
           5      2      6    g    g    w
           6      2      6    g    g    w
           7      2      6    g    g    w
           8      1      4    g    p    w
           9      1      4    g    p    w
          10      1      4    g    p    w
          11     13      4    .  c13    w
          12      1      4    .    g    w
          13      1      4    .    g    w
          14      2      1    .    .   c2
          15      1      1    .    .    g
          16      1      1    .    .    g
        ",
    );
}

#[test]
fn a_prompt_waits_for_the_states_of_one_that_begins_like_it() {
    let config = EngineConfig {
        num_state_snapshots: 4,
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    };
    let arrivals = [at(1, 13, 3), at(1, 13, 3), at(1, 3, 2)];
    // R1 leaves its states behind 12 tokens, with which R2 begins. R3 is too short for them, and overtakes R2.
    assert_table(
        time_table(config, &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     16      5  c13    w   c3
           2      3      6    g   c1    g
           3      2      5    g    g    .
           4      1      4    .    g    .
        ",
    );
}

#[test]
fn a_prompt_begins_behind_states_in_host_memory() {
    let config = |num_host_state_snapshots| EngineConfig {
        num_state_snapshots: 1,
        num_host_state_snapshots,
        reuse: BlockReuse::WholeBlocks,
        ..wide_config()
    };
    // R2 leaves its states behind 8 tokens, in place of those that R1 has left behind 12.
    let arrivals = [at(1, 13, 1), at(2, 9, 1), at(3, 13, 1)];
    assert_table(
        time_table(config(1), &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     13      4  c13    .    .
           2      9      3    .   c9    .
           3      1      4    .    .   c1
        ",
    );
    assert_table(
        time_table(config(0), &arrivals, &[]),
        "
        step tokens blocks   R1   R2   R3
           1     13      4  c13    .    .
           2      9      3    .   c9    .
           3      5      4    .    .   c5
        ",
    );
}
