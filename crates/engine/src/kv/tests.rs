use std::sync::Arc;

use super::prefix::{MAX_BUCKET, MAX_CHILDREN};
use super::*;
use crate::{BlockCopy, BlockMove};
use inflight_base::{BlockId, BlockSize, Blocks, TokenId, Tokens};

/// A cache that reuses all it can.
fn cache(num_blocks: u32, block_size: u32) -> KvCacheManager {
    KvCacheManager::new(config(num_blocks, block_size))
}

pub(super) fn config(num_blocks: u32, block_size: u32) -> KvCacheConfig {
    KvCacheConfig {
        num_blocks: Blocks(num_blocks),
        num_host_blocks: Blocks(0),
        block_size: BlockSize::new(block_size).expect("not zero"),
        groups: KvGroups::one(None),
        max_chunk: Tokens(16),
        enable_reuse: true,
        enable_partial_reuse: true,
        num_snapshots: 0,
        num_host_snapshots: 0,
        snapshot_interval: Tokens(0),
    }
}

/// As many tokens as there are may be taken over.
pub(super) const ALL: Tokens = Tokens(u32::MAX);

pub(super) fn anybody() -> ReuseOptions {
    ReuseOptions::default()
}

pub(super) fn only_with(salt: &str) -> ReuseOptions {
    ReuseOptions {
        salt: Some(Arc::from(salt)),
        ..anybody()
    }
}

/// A sequence of `tokens`, all of them computed.
pub(super) fn computed(
    cache: &mut KvCacheManager,
    tokens: &[TokenId],
    reuse: &ReuseOptions,
) -> BlockTable {
    let mut table = BlockTable::default();
    cache.reserve(&mut table, tokens, reuse, ALL);
    cache.commit(&mut table, tokens, Tokens(tokens.len() as u32));
    table
}

/// A sequence of `tokens` has come and gone.
pub(super) fn leave_behind(cache: &mut KvCacheManager, tokens: &[TokenId], reuse: &ReuseOptions) {
    let mut table = computed(cache, tokens, reuse);
    cache.release(&mut table);
    cache.clear_moves();
}

pub(super) fn num_found(cache: &KvCacheManager, tokens: &[TokenId]) -> u32 {
    cache.find(tokens, &anybody(), ALL).num_tokens.0
}

pub(super) fn tokens(range: std::ops::Range<u32>) -> Vec<TokenId> {
    range.collect()
}

#[test]
fn a_sequence_takes_a_block_when_a_position_needs_one_and_not_before() {
    let mut cache = cache(4, 4);
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &[7; 5], &anybody(), ALL);
    for (kv_len, blocks) in [(5, 2), (6, 2), (8, 2), (9, 3), (12, 3), (13, 4)] {
        cache.grow(&mut table, Tokens(kv_len));
        assert_eq!(table.len(), Blocks(blocks), "at {kv_len} positions");
        cache.check_integrity([&table].into_iter());
    }
    assert_eq!(cache.usage().num_free(), Blocks(0));
    cache.release(&mut table);
    assert_eq!(cache.usage().num_free(), Blocks(4));
    cache.check_integrity(std::iter::empty());
}

#[test]
fn probing_changes_nothing() {
    let mut cache = cache(4, 4);
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &[7; 4], &anybody(), ALL);
    assert_eq!(cache.probe(&table, Tokens(3)), Blocks(0));
    assert_eq!(cache.probe(&table, Tokens(16)), Blocks(3));
    assert_eq!(cache.usage().num_free(), Blocks(3));
}

#[test]
#[should_panic(expected = "holders of BlockId(0)")]
fn the_integrity_check_finds_a_block_in_two_tables() {
    let mut cache = cache(4, 4);
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &[7; 4], &anybody(), ALL);
    cache.check_integrity([&table, &table].into_iter());
}

#[test]
#[should_panic(expected = "holders of BlockId(0)")]
fn the_integrity_check_finds_a_lost_block() {
    let mut cache = cache(4, 4);
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &[7; 4], &anybody(), ALL);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn the_full_blocks_of_a_prompt_are_found_again_but_never_its_last_token() {
    for len in 1..=13 {
        let prompt = tokens(0..len);
        for enable_partial_reuse in [false, true] {
            let mut cache = KvCacheManager::new(KvCacheConfig {
                enable_partial_reuse,
                ..config(8, 4)
            });
            leave_behind(&mut cache, &prompt, &anybody());
            let full_blocks = len / 4 * 4;
            let expected = match enable_partial_reuse {
                true => full_blocks.min(len - 1),
                false => (len - 1) / 4 * 4,
            };
            assert_eq!(num_found(&cache, &prompt), expected, "of {len} tokens");
            let longer = tokens(0..len + 1);
            assert_eq!(num_found(&cache, &longer), full_blocks, "with one more");
        }
    }
}

#[test]
fn what_is_found_is_shared_and_the_rest_is_new() {
    let mut cache = cache(8, 4);
    let first = computed(&mut cache, &tokens(0..10), &anybody());
    let found = cache.find(&tokens(0..9), &anybody(), ALL);
    assert_eq!(found.num_tokens, Tokens(8));
    assert_eq!(found.num_spared, Blocks(2));
    assert_eq!(found.lacking, Blocks(1));

    let second = computed(&mut cache, &tokens(0..9), &anybody());
    assert_eq!(second.blocks()[..2], first.blocks()[..2]);
    assert_ne!(second.blocks()[2], first.blocks()[2]);
    assert_eq!(cache.usage().num_used, Blocks(4));
    assert_eq!(
        cache.totals(),
        ReuseTotals {
            num_taken_blocks: 4,
            num_reused_blocks: 2,
            num_missed_blocks: 4,
            num_reused_tokens: 8,
            ..ReuseTotals::default()
        }
    );
    cache.check_integrity([&first, &second].into_iter());
}

#[test]
fn blocks_that_nobody_holds_are_counted_as_free_until_they_are_shared() {
    let mut cache = cache(8, 4);
    leave_behind(&mut cache, &tokens(0..10), &anybody());
    assert_eq!(cache.usage().num_used, Blocks(0));
    assert_eq!(cache.num_cached(), 2);
    let found = cache.find(&tokens(0..9), &anybody(), ALL);
    assert_eq!(found.num_spared, Blocks(0), "both are free");
    assert_eq!(found.lacking, Blocks(3));
}

#[test]
fn tokens_are_shared_with_the_same_salt_and_with_nobody_else() {
    let mut cache = cache(32, 2);
    let off = ReuseOptions {
        enabled: false,
        salt: None,
    };
    let prompt = tokens(0..7);
    let options = [
        anybody(),
        only_with("a"),
        only_with("b"),
        only_with(""),
        off,
    ];
    for (nth, reuse) in options.iter().enumerate() {
        assert_eq!(
            cache.find(&prompt, reuse, ALL).num_tokens,
            Tokens(0),
            "{reuse:?}"
        );
        leave_behind(&mut cache, &prompt, reuse);
        let with_itself = if reuse.enabled { 6 } else { 0 };
        for (other, reuse) in options[..=nth].iter().enumerate() {
            let expected = if other < nth { 6 } else { with_itself };
            assert_eq!(cache.find(&prompt, reuse, ALL).num_tokens, Tokens(expected));
        }
    }
    cache.check_integrity(std::iter::empty());
}

#[test]
fn the_longest_common_beginning_is_copied() {
    let mut cache = cache(12, 4);
    for other in [[0, 1, 9, 9], [0, 1, 2, 9], [0, 1, 2, 8], [0, 9, 9, 9]] {
        leave_behind(&mut cache, &other, &anybody());
    }
    let table = computed(&mut cache, &[0, 1, 2, 3, 4], &anybody());
    let [BlockMove::Copy(copy)] = cache.moves() else {
        panic!("one copy: {:?}", cache.moves());
    };
    assert_eq!(copy.num_positions, 3);
    assert_eq!(copy.target, table.blocks()[0]);
    assert_eq!(copy.source, BlockId(2), "of two, the one registered last");
    assert_eq!(num_found(&cache, &[0, 1, 2, 8, 5]), 4, "it is still there");
    assert_eq!(num_found(&cache, &[0, 1, 2, 3, 5]), 4, "and ours too");
}

#[test]
fn of_many_that_could_be_copied_the_ones_registered_last_are_compared() {
    for (num_others, expected) in [(MAX_CHILDREN - 1, 1), (MAX_CHILDREN, 0)] {
        let mut cache = cache(2 * MAX_CHILDREN as u32, 2);
        leave_behind(&mut cache, &[5, 5], &anybody());
        for other in 0..num_others as u32 {
            leave_behind(&mut cache, &[10 + other, 5], &anybody());
        }
        assert_eq!(num_found(&cache, &[5, 9, 9]), expected);
        assert_eq!(num_found(&cache, &[5, 5, 9]), 2, "whole blocks are hashed");
        assert_eq!(num_found(&cache, &[5, 5]), 1, "even if they are copied");
    }
}

#[test]
fn a_block_to_copy_from_is_taken_over_when_no_other_is_left() {
    for num_blocks in [2, 3] {
        let mut cache = cache(num_blocks, 4);
        leave_behind(&mut cache, &[0, 1, 2, 3], &anybody());
        let prompt = [0, 1, 2, 9, 9];
        let found = cache.find(&prompt, &anybody(), ALL);
        assert_eq!(found.num_tokens, Tokens(3));
        assert_eq!(found.lacking, Blocks(2));
        let mut table = BlockTable::default();
        assert_eq!(
            cache.reserve(&mut table, &prompt, &anybody(), ALL),
            Tokens(3)
        );
        if num_blocks == 2 {
            assert_eq!(cache.moves(), []);
            assert_eq!(table.blocks()[0], BlockId(0), "which has the tokens");
            assert_eq!(num_found(&cache, &[0, 1, 2, 3, 4]), 0);
        } else {
            assert_eq!(cache.moves().len(), 1);
            assert!(!table.blocks().contains(&BlockId(0)));
            assert_eq!(num_found(&cache, &[0, 1, 2, 3, 4]), 4);
        }
        assert_eq!(cache.totals().num_taken_blocks, 1 + 2);
        cache.check_integrity([&table].into_iter());
    }
}

#[test]
fn ends_are_evicted_before_beginnings_and_what_was_not_used_for_longest_first() {
    let mut cache = cache(6, 2);
    let (old, new) = (tokens(10..16), tokens(20..26));
    leave_behind(&mut cache, &old, &anybody());
    leave_behind(&mut cache, &new, &anybody());
    // Looking up changes nothing, taking over does.
    assert_eq!(num_found(&cache, &new), 5);
    leave_behind(&mut cache, &old[..5], &anybody());
    let mut taken = BlockTable::default();
    let mut left = Vec::new();
    for kv_len in 1..=6 {
        cache.grow(&mut taken, Tokens(2 * kv_len));
        left.push((num_found(&cache, &old), num_found(&cache, &new)));
    }
    // First the blank one, in which the last token of `old[..5]` was.
    assert_eq!(left, [(4, 5), (4, 4), (4, 2), (4, 0), (2, 0), (0, 0)]);
}

#[test]
fn an_evicted_block_takes_along_what_is_below_it() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        groups: KvGroups::one(Some(AttentionWindow {
            size: Tokens(2),
            num_sinks: Tokens(0),
        })),
        max_chunk: Tokens(6),
        ..config(4, 2)
    });
    let prompt = tokens(0..6);
    let mut table = computed(&mut cache, &prompt, &anybody());
    assert_eq!(
        table.blocks()[..2],
        [BlockId::NONE; 2],
        "outside of the window"
    );
    assert_eq!(cache.num_cached(), 2);
    assert_eq!(num_found(&cache, &tokens(0..7)), 6);
    // The last block but one goes, and with it the last one, which is still held.
    let mut other = BlockTable::default();
    cache.reserve(&mut other, &[9, 9, 9, 9], &anybody(), ALL);
    assert_eq!(num_found(&cache, &tokens(0..7)), 2);
    cache.check_integrity([&table, &other].into_iter());
    assert_eq!(cache.num_cached(), 1);
    cache.release(&mut table);
    assert_eq!(cache.num_cached(), 1, "nobody could find the other");
}

#[test]
fn of_two_that_compute_the_same_the_second_is_found_when_the_first_is_evicted() {
    let mut cache = cache(6, 2);
    let prompt = tokens(0..6);
    let mut tables = [BlockTable::default(), BlockTable::default()];
    for table in &mut tables {
        assert_eq!(
            cache.reserve(table, &prompt[..4], &anybody(), ALL),
            Tokens(0)
        );
    }
    let [first, second] = &mut tables;
    for table in [&mut *first, &mut *second] {
        cache.commit(table, &prompt[..4], Tokens(4));
    }
    cache.release(first);
    assert_eq!(cache.num_cached(), 2);
    // What the second adds goes below what the first has left.
    cache.grow(second, Tokens(6));
    cache.commit(second, &prompt, Tokens(6));
    assert_eq!(num_found(&cache, &tokens(0..7)), 6);
    // Another takes that: what the second holds cannot be found, until it has something to add.
    let mut other = BlockTable::default();
    cache.reserve(&mut other, &[9, 9, 9], &anybody(), ALL);
    assert_eq!(num_found(&cache, &tokens(0..7)), 2);
    cache.release(&mut other);
    cache.grow(second, Tokens(8));
    cache.commit(second, &tokens(0..8), Tokens(8));
    assert_eq!(num_found(&cache, &tokens(0..9)), 8);
    cache.check_integrity([&*second].into_iter());
}

#[test]
fn a_context_can_wait_for_the_block_that_another_is_about_to_write() {
    for salt in [anybody(), only_with("a")] {
        let mut cache = cache(16, 2);
        let (long, fork) = (tokens(0..7), [0, 1, 2, 3, 9, 9, 9]);
        let next = |cache: &KvCacheManager, tokens: &[TokenId]| cache.find(tokens, &salt, ALL).next;
        assert_eq!(next(&cache, &long), None, "nobody writes anything");

        let mut table = BlockTable::default();
        cache.reserve(&mut table, &long, &salt, ALL);
        assert_eq!(
            cache.find(&long, &only_with("b"), ALL).next,
            None,
            "a stranger"
        );
        assert_eq!(next(&cache, &[0]), None, "not a full block");
        for (computed, same) in [(0, true), (2, true), (4, false)] {
            cache.commit(&mut table, &long, Tokens(computed));
            let written = cache.next_block(&table, &long);
            assert!(written.is_some());
            assert_eq!(written, next(&cache, &long), "at {computed}");
            assert_eq!(written == next(&cache, &fork), same, "at {computed}");
        }
        cache.commit(&mut table, &long, Tokens(6));
        assert_eq!(
            cache.next_block(&table, &long),
            None,
            "the last is not full"
        );
        assert_eq!(
            next(&cache, &long[..6]),
            None,
            "the last is computed anyway"
        );
        assert_ne!(next(&cache, &tokens(0..8)), None);
    }
}

#[test]
fn a_context_waits_for_whole_blocks_where_no_others_are_reused() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        enable_partial_reuse: false,
        ..config(16, 2)
    });
    let long = tokens(0..7);
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &long, &anybody(), ALL);
    for computed in [0, 2, 4] {
        cache.commit(&mut table, &long, Tokens(computed));
        let next = cache.find(&long, &anybody(), ALL).next;
        assert!(next.is_some(), "at {computed}");
        assert_eq!(cache.next_block(&table, &long), next, "at {computed}");
        let whole = tokens(0..computed + 2);
        let next = cache.find(&whole, &anybody(), ALL).next;
        assert_eq!(next, None, "its last token is computed anyway");
    }
}

#[test]
fn nobody_waits_for_a_block_of_another_salt() {
    let mut cache = cache(16, 2);
    let prompt = tokens(0..7);
    let salts = [only_with("a"), only_with("b"), anybody()];
    let mut written = Vec::new();
    for salt in &salts {
        let mut table = BlockTable::default();
        cache.reserve(&mut table, &prompt, salt, ALL);
        written.push(cache.next_block(&table, &prompt));
    }
    for (nth, salt) in salts.iter().enumerate() {
        let next = cache.find(&prompt, salt, ALL).next;
        let are_next = written.iter().map(|written| *written == next);
        let expected = (0..salts.len()).map(|other| other == nth);
        assert!(next.is_some() && are_next.eq(expected), "{salt:?}");
    }
}

#[test]
fn no_more_is_taken_over_than_may_be() {
    for (partial, expected) in [
        (true, [0, 1, 2, 3, 4, 6, 6]),
        (false, [0, 0, 2, 2, 4, 6, 6]),
    ] {
        let mut cache = KvCacheManager::new(KvCacheConfig {
            enable_partial_reuse: partial,
            ..config(16, 2)
        });
        leave_behind(&mut cache, &tokens(0..8), &anybody());
        for (max_reused, expected) in [0, 1, 2, 3, 4, 6, u32::MAX].into_iter().zip(expected) {
            let max_reused = Tokens(max_reused);
            let found = cache.find(&tokens(0..7), &anybody(), max_reused);
            assert_eq!(found.num_tokens, Tokens(expected), "{max_reused}");
            assert_eq!(found.next, None, "{max_reused}: nothing to wait for");
            let mut table = BlockTable::default();
            let reused = cache.reserve(&mut table, &tokens(0..7), &anybody(), max_reused);
            assert_eq!(reused, Tokens(expected));
            cache.release(&mut table);
            cache.clear_moves();
        }
    }
}

#[test]
fn a_window_bounds_what_a_sequence_holds() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        groups: KvGroups::one(Some(AttentionWindow {
            size: Tokens(6),
            num_sinks: Tokens(2),
        })),
        max_chunk: Tokens(4),
        ..config(5, 4)
    });
    let prompt = tokens(0..40);
    assert_eq!(cache.max_blocks(Tokens(3)), Blocks(1));
    assert_eq!(cache.max_blocks(Tokens(40)), Blocks(4));
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &prompt, &anybody(), ALL);
    assert_eq!((table.len(), table.num_held_of(0)), (Blocks(4), Blocks(4)));
    for computed in (4..=40).step_by(4) {
        cache.commit(&mut table, &prompt, Tokens(computed));
        cache.grow(&mut table, Tokens(40));
        assert!(table.num_held_of(0) <= Blocks(4));
        assert!(
            table.len()
                >= Tokens(computed + 4)
                    .min(Tokens(40))
                    .blocks_ceil(cache.usage().block_size)
        );
    }
    let held = table.blocks().iter().map(|&block| block != BlockId::NONE);
    let held: Vec<_> = held.collect();
    assert!(held[0], "the sinks");
    assert_eq!(held[1..8], [false; 7]);
    assert_eq!(held[8..], [true; 2], "5 positions before the next one");
    cache.check_integrity([&table].into_iter());
}

#[test]
fn tokens_are_compared_and_not_only_their_hashes() {
    let (a, b) = colliding_pairs();
    let mut cache = cache(8, 2);
    let next = |cache: &KvCacheManager, block: [u32; 2]| {
        cache.find(&[block[0], block[1], 9], &anybody(), ALL).next
    };
    assert_ne!(a, b);
    assert_eq!(next(&cache, a), next(&cache, b), "the same hash");
    let first = computed(&mut cache, &[a[0], a[1], 9], &anybody());
    assert_eq!(num_found(&cache, &[a[0], a[1], 9]), 2);
    assert_eq!(num_found(&cache, &[b[0], b[1], 9]), 0);
    let second = computed(&mut cache, &[b[0], b[1], 9], &anybody());
    assert_eq!(num_found(&cache, &[b[0], b[1], 9]), 2);
    cache.check_integrity([&first, &second].into_iter());
}

/// Two blocks of two tokens with the same 64-bit hash.
///
/// The hash is a bijection of `rotate_left(token * odd, 5) ^ next_token`, so it is enough that the
/// upper halves are equal, for which there are many pairs.
fn colliding_pairs() -> ([TokenId; 2], [TokenId; 2]) {
    let before_last = |token: TokenId| {
        let hash = u64::from(token).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash.rotate_left(5)
    };
    let mut by_upper_half = std::collections::BTreeMap::new();
    // Cubes, because multiples of that number are spread too evenly to meet soon.
    let mut candidates = (0u32..).map(|n| n.wrapping_pow(3));
    candidates
        .find_map(|token| {
            let hash = before_last(token);
            let other = by_upper_half.insert(hash >> 32, token)?;
            let is_new = other != token;
            is_new.then(|| ([other, before_last(other) as u32], [token, hash as u32]))
        })
        .expect("there are more tokens than upper halves")
}

#[test]
fn blocks_that_crowd_one_bucket_are_not_registered() {
    let mut cache = cache(64, 1);
    let mut root = computed(&mut cache, &[0], &anybody());
    // All below one content, and in one of 128 buckets.
    let in_one_bucket = |&token: &u32| {
        let next = cache.find(&[0, token, 9], &anybody(), ALL).next;
        next.is_some_and(|next| next.key() % 128 == 0)
    };
    let crowd: Vec<_> = (1..).filter(in_one_bucket).take(MAX_BUCKET + 1).collect();
    for (nth, &token) in crowd.iter().enumerate() {
        leave_behind(&mut cache, &[0, token], &anybody());
        let is_found = num_found(&cache, &[0, token, 9]) == 2;
        assert_eq!(is_found, nth < MAX_BUCKET, "the {nth}th");
    }
    cache.check_integrity([&root].into_iter());
    cache.release(&mut root);
}

#[test]
fn sequences_that_fork_share_all_but_the_block_they_write() {
    let mut cache = cache(8, 4);
    let mut first = computed(&mut cache, &tokens(0..6), &anybody());
    let (mut second, mut third) = (BlockTable::default(), BlockTable::default());
    cache.fork(&first, &mut second);
    cache.fork(&first, &mut third);
    assert_eq!(cache.usage().num_used, Blocks(2));
    let next = Tokens(6);
    for (table, lacking) in [(&mut first, 1), (&mut second, 1), (&mut third, 0)] {
        let num_used = cache.usage().num_used;
        cache.own_next(table, next);
        cache.grow(table, Tokens(7));
        assert_eq!(cache.usage().num_used, num_used + Blocks(lacking));
    }
    let copy = |target| {
        BlockMove::Copy(BlockCopy {
            source: BlockId(1),
            target: BlockId(target),
            num_positions: 2,
        })
    };
    assert_eq!(cache.moves(), [copy(2), copy(3)]);
    let blocks = [&first, &second, &third].map(|table| table.blocks().to_vec());
    assert_eq!(blocks, [[0, 2], [0, 3], [0, 1]].map(|ids| ids.map(BlockId)));
    let tables = || [&first, &second, &third].into_iter();
    cache.check_integrity(tables());
    assert_eq!(cache.num_own(tables(), Blocks(0)), Blocks(4));
    assert_eq!(cache.num_own(tables(), Blocks(1)), Blocks(3));
    assert_eq!(cache.num_own(tables().take(2), Blocks(0)), Blocks(2));
    for mut table in [first, second, third] {
        cache.release(&mut table);
    }
    assert_eq!(cache.usage().num_used, Blocks(0));
}

#[test]
fn at_a_block_bound_a_fork_has_nothing_to_copy() {
    let mut cache = cache(4, 4);
    let first = computed(&mut cache, &tokens(0..4), &anybody());
    let mut second = BlockTable::default();
    cache.fork(&first, &mut second);
    cache.own_next(&mut second, Tokens(4));
    cache.grow(&mut second, Tokens(5));
    assert_eq!(cache.moves(), []);
    assert_eq!(second.blocks(), [BlockId(0), BlockId(1)]);
}

#[test]
fn what_no_longer_registers_leaves_its_full_blocks_to_others_and_no_more() {
    let mut cache = cache(4, 4);
    let all = tokens(0..9);
    let mut table = computed(&mut cache, &all[..6], &anybody());
    cache.stop_registering(&mut table);
    cache.grow(&mut table, Tokens(9));
    cache.commit(&mut table, &all, Tokens(9));
    assert_eq!(num_found(&cache, &all), 4);
    cache.check_integrity([&table].into_iter());
    cache.release(&mut table);
    cache.check_integrity(std::iter::empty());
    assert_eq!(num_found(&cache, &all), 4);
}

/// Sequences of `range` come and go, one after the other, which fill a pool of eight blocks of four twice.
fn churn(cache: &mut KvCacheManager, range: std::ops::Range<u32>) {
    for first in range {
        let salt = format!("other {first}");
        leave_behind(cache, &tokens(0..8), &only_with(&salt));
    }
}

#[test]
fn a_retained_prefix_is_found_after_others_have_used_the_pool() {
    let mut cache = cache(8, 4);
    leave_behind(&mut cache, &tokens(0..14), &anybody());
    churn(&mut cache, 0..8);
    assert_eq!(num_found(&cache, &tokens(0..16)), 0, "evicted");

    leave_behind(&mut cache, &tokens(0..14), &anybody());
    let retained = cache.retain(tokens(0..14).into(), None);
    // The same prefix may be retained more than once.
    let shorter = cache.retain(tokens(0..6).into(), None);
    churn(&mut cache, 8..16);
    assert_eq!(num_found(&cache, &tokens(0..16)), 12);
    cache.release_retained(&retained);
    churn(&mut cache, 16..24);
    assert_eq!(num_found(&cache, &tokens(0..16)), 4);
    cache.release_retained(&shorter);
    churn(&mut cache, 24..32);
    assert_eq!(num_found(&cache, &tokens(0..16)), 0);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn nobody_waits_for_retained_blocks() {
    let mut cache = cache(8, 4);
    leave_behind(&mut cache, &tokens(0..16), &anybody());
    let first = cache.retain(tokens(0..16).into(), None);
    leave_behind(&mut cache, &tokens(100..116), &anybody());
    let second = cache.retain(tokens(100..116).into(), None);
    assert_eq!(cache.usage().num_free(), Blocks(8), "they are free");

    // The one that was used last keeps its blocks, and the other the beginning of its own.
    leave_behind(&mut cache, &tokens(200..208), &anybody());
    let found = |cache: &_, from| num_found(cache, &tokens(from..from + 17));
    assert_eq!((found(&cache, 0), found(&cache, 100)), (8, 16));
    leave_behind(&mut cache, &tokens(300..332), &anybody());
    assert_eq!((found(&cache, 0), found(&cache, 100)), (0, 0));

    // What has taken their place is not theirs: it is not released with them.
    leave_behind(&mut cache, &tokens(0..16), &anybody());
    let again = cache.retain(tokens(0..16).into(), None);
    cache.release_retained(&first);
    cache.release_retained(&second);
    churn(&mut cache, 0..8);
    assert_eq!(found(&cache, 0), 16);
    cache.release_retained(&again);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn a_retained_prefix_stays_retained_in_host_memory() {
    let host = KvCacheConfig {
        num_host_blocks: Blocks(4),
        ..config(4, 4)
    };
    let mut cache = KvCacheManager::new(host);
    leave_behind(&mut cache, &tokens(0..8), &anybody());
    let retained = cache.retain(tokens(0..8).into(), None);
    // It needs all blocks of the device, and the content moves.
    leave_behind(&mut cache, &tokens(100..116), &anybody());
    assert_eq!(cache.num_retained(), 2);
    churn(&mut cache, 0..8);
    assert_eq!(num_found(&cache, &tokens(0..9)), 8);
    cache.release_retained(&retained);
    assert_eq!(cache.num_retained(), 0);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn without_reuse_nothing_is_retained() {
    let mut cache = KvCacheManager::new(KvCacheConfig {
        enable_reuse: false,
        ..config(4, 4)
    });
    leave_behind(&mut cache, &tokens(0..8), &anybody());
    let retained = cache.retain(tokens(0..8).into(), None);
    assert_eq!(cache.num_retained(), 0);
    cache.release_retained(&retained);
}

/// A cache for layers that see everything and layers with a window of 4, in blocks of 2.
fn cache_of_two_groups(num_blocks: u32) -> KvCacheManager {
    let window = AttentionWindow {
        size: Tokens(4),
        num_sinks: Tokens(0),
    };
    KvCacheManager::new(KvCacheConfig {
        groups: KvGroups::new(&[None, Some(window)]),
        ..config(num_blocks, 2)
    })
}

#[test]
fn a_prefix_is_found_as_far_as_every_group_has_what_it_sees() {
    let mut cache = cache_of_two_groups(30);
    let prompt = tokens(0..13);
    let mut table = computed(&mut cache, &prompt, &anybody());
    // With a window, a sequence that goes on from 12 sees 9 and later.
    assert_eq!(cache.usage().num_used, Blocks(7 + 3));
    assert!((0..4).all(|place| table.at(place, 1) == BlockId::NONE));
    cache.release(&mut table);
    assert_eq!(cache.num_cached(), 12);
    assert_eq!(num_found(&cache, &prompt), 12);
    assert_eq!(num_found(&cache, &tokens(0..9)), 8);

    // The blocks behind the window are the first to be evicted: 18 have no content.
    let mut others = BlockTable::default();
    cache.grow(&mut others, Tokens(2 * 11));
    assert_eq!(cache.num_cached(), 12 - 4);
    assert_eq!(num_found(&cache, &prompt), 12, "it sees none of these");
    assert_eq!(num_found(&cache, &tokens(0..9)), 0, "it sees two of them");
    cache.check_integrity([&others].into_iter());
    cache.release(&mut others);

    // Who computes them again leaves them beside what is still there.
    leave_behind(&mut cache, &tokens(0..9), &anybody());
    assert_eq!(cache.num_cached(), 12);
    assert_eq!(num_found(&cache, &tokens(0..9)), 8);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn blocks_behind_a_window_are_spared_to_nobody() {
    let mut cache = cache_of_two_groups(30);
    let table = computed(&mut cache, &tokens(0..9), &anybody());
    let found = cache.find(&tokens(0..9), &anybody(), ALL);
    assert_eq!(found.num_tokens, Tokens(8));
    // Four blocks of the group that sees everything; it may free the others while it needs new ones.
    assert_eq!(found.num_spared, Blocks(4));
    cache.check_integrity([&table].into_iter());
}

#[test]
fn a_block_that_is_found_in_part_is_copied_for_every_group() {
    let mut cache = cache_of_two_groups(16);
    leave_behind(&mut cache, &tokens(0..9), &anybody());
    let mut table = BlockTable::default();
    let mut other = tokens(0..7);
    other.push(99);
    other.push(100);
    let found = cache.find(&other, &anybody(), ALL);
    assert_eq!(found.num_tokens, Tokens(7));
    assert_eq!(
        cache.reserve(&mut table, &other, &anybody(), ALL),
        Tokens(7)
    );
    let targets: Vec<_> = cache
        .moves()
        .iter()
        .map(|one| match one {
            BlockMove::Copy(copy) if copy.num_positions == 1 => copy.target,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(targets, [table.at(3, 0), table.at(3, 1)]);
    cache.check_integrity([&table].into_iter());
}

#[test]
fn what_is_retained_of_layers_with_a_window_is_what_they_will_see() {
    let mut cache = cache_of_two_groups(30);
    let prompt = tokens(0..12);
    leave_behind(&mut cache, &prompt, &anybody());
    let retained = cache.retain(prompt.into(), None);
    assert_eq!(cache.num_retained(), 6 + 2);
    cache.check_integrity(std::iter::empty());
    cache.release_retained(&retained);
    assert_eq!(cache.num_retained(), 0);
    cache.check_integrity(std::iter::empty());
}
