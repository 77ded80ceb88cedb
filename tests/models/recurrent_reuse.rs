//! Prefix reuse in models with recurrent states: a prompt begins behind the last snapshot of its prefix. And
//! speculation: states roll back behind the drafts that are accepted.

use inflight_engine::{BlockReuse, CapacityPolicy, PromptLookup, Speculation};

use crate::batching::{each_as_alone, prompt, requests_that_share, requests_with_beams};
use crate::families::{Family, RECURRENT, on_shares};
use crate::family_reuse::{self, first_with_answer, later};
use crate::family_rounding::{INT4, INT8};
use crate::schedules::{pausing, pausing_with_host_memory, states_in_host_memory, twice};
use crate::support::{Happened, Request, Setup, serve_alone};

/// The setup of other families, with snapshots.
fn reusing(num_state_snapshots: u32) -> Setup {
    Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots,
        ..family_reuse::reusing()
    }
}

/// Serves prompts whose beginnings were computed before, and compares each with its run alone, which reuses nothing.
///
/// ```text
/// first         |---- 45 ----|-- 14 --|          snapshots behind 44, the end, and 56, the last block of the answer
/// parts         |-- 30 --|- 9 -|- 6 -|           28 are in the cache, but not the state behind them: computed again
/// parts, too    |-- 30 --|- 8 -|- 6 -|           28: that state is there now
/// conversation  |---- 45 ----|-- 14 --|- 3 -|    56
/// again         |---- 45 ----|- 6 -|             44: the last token is computed again
/// ```
fn reuses_as_alone(name: &str, setup: &Setup) -> Happened {
    let (first, answer) = first_with_answer(name, setup);
    let requests = [
        later(4, &first.prompt[..30], &prompt(8, 9)),
        later(20, &first.prompt[..30], &prompt(9, 8)),
        later(40, &first.prompt, &[&answer, &prompt(9, 3)[..]].concat()),
        later(45, &first.prompt, &[]),
        first,
    ];
    each_as_alone(name, setup, &requests)
}

on_shares! { prompts_behind_snapshots: 4 of RECURRENT, a_prompt_begins_behind_the_last_snapshot_of_its_prefix }
on_shares! { rounded_weights: 4 of RECURRENT, weights_of_8_and_4_bits_change_nothing_of_it }
on_shares! { pauses: 4 of RECURRENT, sequences_pause_and_resume_behind_their_snapshots }
on_shares! { host_memory: 4 of RECURRENT, states_come_back_from_host_memory_with_their_prefix }
on_shares! { beams: 4 of RECURRENT, beams_with_states_are_as_alone_in_a_batch }
on_shares! { rejected_drafts: 4 of RECURRENT, states_roll_back_where_drafts_are_rejected }

fn a_prompt_begins_behind_the_last_snapshot_of_its_prefix(families: &[Family]) {
    for &(name, _) in families {
        let happened = reuses_as_alone(name, &reusing(16));
        assert_eq!(happened.num_reused, 28 + 56 + 44, "{name}: {happened:?}");
        assert!(happened.num_chunks > 0, "{name}: {happened:?}");
    }
}

fn weights_of_8_and_4_bits_change_nothing_of_it(families: &[Family]) {
    for &(name, _) in families {
        for weights in [INT8, INT4] {
            let setup = Setup {
                weights: Some(weights),
                ..reusing(16)
            };
            let happened = reuses_as_alone(name, &setup);
            assert_eq!(happened.num_reused, 28 + 56 + 44, "{name}: {happened:?}");
        }
    }
}

/// The state behind the common 30 tokens is kept by the first prompt, if they end where one of its snapshots is.
#[test]
fn with_an_interval_the_first_prompt_leaves_more_snapshots() {
    for (state_snapshot_interval, num_reused) in [(14, 16 + 28), (27, 28 + 28)] {
        let setup = Setup {
            state_snapshot_interval,
            ..reusing(16)
        };
        let happened = reuses_as_alone("qwen3-5", &setup);
        assert_eq!(happened.num_reused, num_reused + 56 + 44, "{happened:?}");
    }
}

#[test]
fn with_few_snapshots_less_is_reused_and_no_bit_changes() {
    let num_reused = |num_state_snapshots| {
        let setup = reusing(num_state_snapshots);
        let happened = each_as_alone("qwen3-5", &setup, &twice(requests_that_share()));
        happened.num_reused
    };
    let reused = [1, 2, 4, 64].map(num_reused);
    assert!(reused.is_sorted() && reused[0] < reused[3], "{reused:?}");
}

/// Prompts that arrive together: the others wait for the states of the first.
#[test]
fn equal_prompts_are_computed_once() {
    let request = Request::greedy(&prompt(7, 45), 6);
    let happened = each_as_alone("qwen3-5", &reusing(16), &[(); 4].map(|()| request.clone()));
    assert_eq!(happened.num_reused, 3 * 44, "{happened:?}");
    let without = Setup {
        reuse: BlockReuse::Off,
        ..reusing(0)
    };
    let happened = each_as_alone("qwen3-5", &without, &[(); 4].map(|()| request.clone()));
    assert_eq!(happened.num_reused, 0, "{happened:?}");
}

/// Sequences that pause go on behind their last snapshot.
fn sequences_pause_and_resume_behind_their_snapshots(families: &[Family]) {
    for &(name, _) in families {
        for (setup, num_host_blocks) in [(pausing(), 0), (pausing_with_host_memory(), 64)] {
            let setup = Setup {
                reuse: BlockReuse::WholeBlocks,
                num_state_snapshots: 12,
                num_host_blocks,
                ..setup
            };
            let happened = each_as_alone(name, &setup, &twice(requests_that_share()));
            assert!(happened.num_pauses > 0, "{name}: {happened:?}");
            assert!(happened.num_reused > 0, "{name}: {happened:?}");
            let is_moved = happened.num_onboarded > 0;
            assert_eq!(is_moved, num_host_blocks > 0, "{name}: {happened:?}");
        }
    }
}

/// Blocks of models without attention are empty, and move as well.
fn states_come_back_from_host_memory_with_their_prefix(families: &[Family]) {
    for &(name, _) in families {
        let setup = states_in_host_memory();
        let happened = each_as_alone(name, &setup, &twice(requests_that_share()));
        assert!(happened.num_reused > 0, "{name}: {happened:?}");
        let num_moved = (happened.num_offloaded_states, happened.num_onboarded_states);
        assert!(num_moved.0 > 10 && num_moved.1 > 3, "{name}: {happened:?}");
    }
}

/// Beams copy the states of those that they continue, alone again after a pause.
fn beams_with_states_are_as_alone_in_a_batch(families: &[Family]) {
    let reusing = Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 16,
        ..Setup::for_beams()
    };
    let paused = Setup {
        policy: CapacityPolicy::MaxUtilization,
        block_size: 8,
        num_blocks: 36,
        ..reusing.clone()
    };
    let mut num_pauses = [0; 2];
    for &(name, _) in families {
        for (setup, num_pauses) in [&reusing, &paused].into_iter().zip(&mut num_pauses) {
            let happened = each_as_alone(name, setup, &twice(requests_with_beams()));
            assert!(happened.num_reused > 0, "{name}: {happened:?}");
            *num_pauses += happened.num_pauses;
        }
    }
    assert!(num_pauses[0] == 0 && num_pauses[1] > 0, "{num_pauses:?}");
}

/// Adds drafts to the requests, the first of them correct.
pub fn with_drafts(name: &str, setup: &Setup, mut requests: Vec<Request>) -> Vec<Request> {
    for (index, request) in requests.iter_mut().enumerate() {
        let alone = serve_alone(&mut setup.load(name), setup, request).tokens;
        let guess = |(at, token)| match at == 3 + index {
            true => (token + 1) % 150,
            false => token,
        };
        request.drafts.expected = alone.into_iter().enumerate().map(guess).collect();
    }
    requests
}

/// Drafts of which some are accepted, of sequences that also pause, resume and reuse prefixes.
fn states_roll_back_where_drafts_are_rejected(families: &[Family]) {
    let [lookup, expected] = [Some(PromptLookup { min: 1, max: 3 }), None];
    for &(name, _) in families {
        let (mut num_accepted, mut num_rejected) = (0, 0);
        for (prompt_lookup, setup) in [(lookup, reusing(16)), (expected, pausing())] {
            let setup = Setup {
                reuse: BlockReuse::WholeBlocks,
                num_state_snapshots: 12,
                speculation: Some(Speculation {
                    max_draft_tokens: 3,
                    prompt_lookup,
                    has_draft_model: false,
                    recomputes_drafts: false,
                }),
                ..setup
            };
            let requests = with_drafts(name, &setup, requests_that_share());
            let happened = each_as_alone(name, &setup, &requests);
            num_accepted += happened.drafts.num_accepted;
            num_rejected += happened.drafts.num_drafted - happened.drafts.num_accepted;
        }
        let has_both = num_accepted > 20 && num_rejected > 20;
        assert!(
            has_both,
            "{name}: {num_accepted} accepted, {num_rejected} not"
        );
    }
}
