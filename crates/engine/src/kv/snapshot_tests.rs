//! Where snapshots of recurrent states are taken, and who begins with them.

use super::tests::{ALL, anybody, config, tokens};
use super::*;
use crate::{StateMove, StateRestore, StateSnapshot};
use inflight_base::{HostSnapshotId, SnapshotId, StateRow, TokenId, Tokens};

/// A cache of blocks of four tokens, and of snapshots.
fn cache(num_snapshots: u32, snapshot_interval: u32) -> KvCacheManager {
    KvCacheManager::new(KvCacheConfig {
        max_chunk: Tokens(64),
        enable_partial_reuse: false,
        num_snapshots,
        snapshot_interval: Tokens(snapshot_interval),
        ..config(64, 4)
    })
}

/// Begins a sequence of `tokens`. Returns how many are found.
fn begin(cache: &mut KvCacheManager, table: &mut BlockTable, tokens: &[TokenId]) -> u32 {
    cache.reserve(table, tokens, &anybody(), ALL).0
}

/// Computes a chunk of a context, or of an answer. Returns the numbers of tokens that the snapshots sum up.
fn compute(
    cache: &mut KvCacheManager,
    table: &mut BlockTable,
    tokens: &[TokenId],
    chunk: (u32, u32),
    is_answer: bool,
) -> Vec<u32> {
    let context = (!is_answer).then_some(Tokens(tokens.len() as u32));
    let (start, end) = (Tokens(chunk.0), Tokens(chunk.1));
    let taken = cache.take_snapshots(table, start..end, context);
    let taken = taken
        .map(|(num_tokens, _)| (start + num_tokens).0)
        .collect();
    cache.grow(table, end);
    cache.commit(table, tokens, end);
    taken
}

fn restore(snapshot: StateSnapshot, row: u32, num_tokens: u32) -> StateMove {
    StateMove::Restore(StateRestore {
        snapshot,
        row: StateRow(row),
        num_tokens: Tokens(num_tokens),
    })
}

#[test]
fn a_context_leaves_snapshots_where_it_forks_at_an_interval_and_at_its_end() {
    let mut cache = cache(16, 8);
    let with = |range, len| [tokens(0..4), tokens(range)].concat()[..len].to_vec();
    for (prompt, num_found, chunks, expected) in [
        (with(4..99, 18), 0, &[7, 13, 18][..], &[8, 16][..]),
        (with(100..199, 13), 0, &[5, 6, 13], &[4, 8, 12]),
        (with(200..299, 10), 4, &[10], &[8]),
        (with(4..99, 17), 16, &[17], &[]),
        (tokens(300..316), 0, &[16], &[8, 12, 16]),
        (tokens(400..404), 0, &[4], &[]),
    ] {
        let mut table = BlockTable::default();
        assert_eq!(begin(&mut cache, &mut table, &prompt), num_found);
        let mut taken = Vec::new();
        let mut start = num_found;
        for &end in chunks {
            taken.extend(compute(
                &mut cache,
                &mut table,
                &prompt,
                (start, end),
                false,
            ));
            start = end;
        }
        assert_eq!(taken, expected);
        cache.release(&mut table);
        cache.check_integrity(std::iter::empty());
    }
    assert_eq!(cache.totals().num_saved_states, 9);
    let usage = cache.usage();
    assert_eq!((usage.num_snapshots, usage.num_snapshots_used), (16, 9));
}

#[test]
fn without_an_interval_or_others_only_the_end_of_a_context_has_a_snapshot() {
    let mut cache = cache(16, 0);
    let mut table = BlockTable::default();
    let prompt = tokens(0..18);
    begin(&mut cache, &mut table, &prompt);
    let taken = compute(&mut cache, &mut table, &prompt, (0, 18), false);
    assert_eq!(taken, [16]);
}

#[test]
fn a_sequence_begins_with_the_states_behind_what_it_found() {
    let mut cache = cache(4, 0);
    let prompt = tokens(0..18);
    let mut table = BlockTable::default();
    begin(&mut cache, &mut table, &prompt);
    cache.restore_states(&mut table, Tokens(0), StateRow(1));
    assert!(cache.state_moves().is_empty(), "nothing was found");
    let snapshots = cache.take_snapshots(&mut table, Tokens(0)..Tokens(18), Some(Tokens(18)));
    let snapshot = snapshots.map(|(_, id)| id).next().expect("one at the end");
    cache.commit(&mut table, &prompt, Tokens(18));
    let mut other = BlockTable::default();
    assert_eq!(begin(&mut cache, &mut other, &prompt), 16);
    // Once for each time that it begins.
    for _ in 0..2 {
        cache.restore_states(&mut other, Tokens(16), StateRow(2));
    }
    let snapshot = StateSnapshot::Device(snapshot);
    assert_eq!(cache.state_moves(), [restore(snapshot, 2, 16)]);
    assert_eq!(cache.totals().num_restored_states, 1);
}

#[test]
fn an_answer_that_goes_on_has_one_snapshot_behind_its_last_full_block() {
    let mut cache = cache(4, 0);
    let all = tokens(0..30);
    let mut table = BlockTable::default();
    begin(&mut cache, &mut table, &all[..6]);
    assert_eq!(
        compute(&mut cache, &mut table, &all[..6], (0, 6), false),
        [4]
    );
    for end in 7..=17 {
        let taken = compute(&mut cache, &mut table, &all, (end - 1, end), true);
        let expected = if end % 4 == 0 { vec![end] } else { vec![] };
        assert_eq!(taken, expected);
    }
    assert_eq!(cache.usage().num_snapshots_used, 2);
    cache.release(&mut table);
    assert_eq!(begin(&mut cache, &mut table, &all), 16);
    cache.release(&mut table);
    // The states behind its beginning are gone, but for the end of the context.
    assert_eq!(begin(&mut cache, &mut table, &all[..15]), 4);
}

#[test]
fn a_snapshot_that_no_step_has_filled_is_not_taken_again() {
    let mut cache = cache(4, 0);
    let prompt = tokens(0..18);
    let mut table = BlockTable::default();
    begin(&mut cache, &mut table, &prompt);
    let mut take = |table: &mut BlockTable| {
        let taken = cache.take_snapshots(table, Tokens(0)..Tokens(18), Some(Tokens(18)));
        taken.count()
    };
    assert_eq!((take(&mut table), take(&mut table)), (1, 0));
    cache.check_integrity([&table].into_iter());
    for _ in 0..2 {
        cache.release(&mut table);
        cache.check_integrity(std::iter::empty());
    }
}

#[test]
fn what_is_not_registered_has_no_snapshots() {
    let mut cache = cache(4, 4);
    let prompt = tokens(0..18);
    let off = ReuseOptions {
        enabled: false,
        salt: None,
    };
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &prompt, &off, ALL);
    let taken = compute(&mut cache, &mut table, &prompt, (0, 18), false);
    assert!(taken.is_empty());
    cache.release(&mut table);
    begin(&mut cache, &mut table, &prompt);
    cache.stop_registering(&mut table);
    let taken = compute(&mut cache, &mut table, &prompt, (0, 18), false);
    assert!(taken.is_empty());
}

/// Computes a prompt of 18 tokens from `first`, in a cache of so many snapshots on the device and in host memory, and
/// releases it. Returns how many tokens were found.
fn serve(cache: &mut KvCacheManager, first: u32) -> u32 {
    let prompt = tokens(first..first + 18);
    let mut table = BlockTable::default();
    let found = begin(cache, &mut table, &prompt);
    cache.restore_states(&mut table, Tokens(found), StateRow(5));
    compute(cache, &mut table, &prompt, (found, 18), false);
    cache.release(&mut table);
    cache.check_integrity(std::iter::empty());
    found
}

#[test]
fn a_snapshot_goes_to_host_memory_and_comes_back_with_its_prefix() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        max_chunk: Tokens(64),
        enable_partial_reuse: false,
        num_snapshots: 1,
        num_host_snapshots: 2,
        ..config(64, 4)
    });
    let offload = |target| StateMove::Offload {
        source: SnapshotId(0),
        target: HostSnapshotId(target),
    };
    let onboard = |source| StateMove::Onboard {
        source: HostSnapshotId(source),
        target: SnapshotId(0),
    };
    let restored = restore(StateSnapshot::Device(SnapshotId(0)), 5, 16);
    for (first, found, moves) in [
        (0, 0, &[][..]),
        (100, 0, &[offload(0)]),
        (0, 16, &[offload(1), onboard(0), restored]),
        (100, 16, &[offload(0), onboard(1), restored]),
        (200, 0, &[offload(1)]),
        (300, 0, &[offload(0)]),
        // The least recently used one was forgotten.
        (0, 0, &[offload(1)]),
    ] {
        assert_eq!(serve(&mut cache, first), found, "{first}");
        assert_eq!(cache.state_moves(), moves, "{first}");
        cache.clear_moves();
    }
    let usage = cache.usage();
    assert_eq!(
        (usage.num_host_snapshots, usage.num_host_snapshots_used),
        (2, 2)
    );
    let totals = cache.totals();
    assert_eq!(
        (totals.num_offloaded_states, totals.num_onboarded_states),
        (6, 2)
    );
}

#[test]
fn a_snapshot_in_host_memory_is_restored_from_there_while_others_take_those_of_the_device() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        max_chunk: Tokens(64),
        enable_partial_reuse: false,
        num_snapshots: 1,
        num_host_snapshots: 1,
        ..config(64, 4)
    });
    serve(&mut cache, 0);
    let mut other = BlockTable::default();
    let prompt = tokens(100..118);
    begin(&mut cache, &mut other, &prompt);
    let taken = cache.take_snapshots(&mut other, Tokens(0)..Tokens(18), Some(Tokens(18)));
    assert_eq!(taken.count(), 1);
    cache.clear_moves();
    let mut table = BlockTable::default();
    assert_eq!(begin(&mut cache, &mut table, &tokens(0..18)), 16);
    cache.restore_states(&mut table, Tokens(16), StateRow(2));
    let source = StateSnapshot::Host(HostSnapshotId(0));
    assert_eq!(cache.state_moves(), [restore(source, 2, 16)]);
    cache.check_integrity([&other, &table].into_iter());
}
