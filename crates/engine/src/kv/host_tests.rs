//! Blocks that go to host memory and come back.

use super::tests::{ALL, anybody, computed, config, leave_behind, num_found, only_with, tokens};
use super::*;
use crate::{BlockCopy, BlockMove};
use inflight_base::{BlockId, Blocks, HostBlockId, Tokens};

fn cache(num_blocks: u32, num_host_blocks: u32, block_size: u32) -> KvCacheManager {
    KvCacheManager::new(KvCacheConfig {
        num_host_blocks: Blocks(num_host_blocks),
        ..config(num_blocks, block_size)
    })
}

fn offload(source: u32, target: u32) -> BlockMove {
    BlockMove::Offload {
        source: BlockId(source),
        target: HostBlockId(target),
    }
}

fn onboard(source: u32, target: u32) -> BlockMove {
    BlockMove::Onboard {
        source: HostBlockId(source),
        target: BlockId(target),
    }
}

#[test]
fn what_is_evicted_goes_to_the_host_and_comes_back() {
    let mut cache = cache(4, 4, 2);
    leave_behind(&mut cache, &tokens(0..8), &anybody());
    // Another takes three of the four blocks: the ends of the first go.
    let mut other = computed(&mut cache, &tokens(10..16), &anybody());
    assert_eq!(
        cache.moves(),
        [offload(3, 0), offload(2, 1), offload(1, 2)],
        "the end first"
    );
    cache.clear_moves();
    assert_eq!(num_found(&cache, &tokens(0..9)), 8, "all is still there");
    assert_eq!(cache.usage().num_host_used, Blocks(3));
    cache.check_integrity([&other].into_iter());
    cache.release(&mut other);

    let found = cache.find(&tokens(0..7), &anybody(), ALL);
    assert_eq!(found.num_tokens, Tokens(6));
    assert_eq!(found.num_spared, Blocks(0));
    assert_eq!(found.lacking, Blocks(4));
    let again = computed(&mut cache, &tokens(0..7), &anybody());
    // What it finds first is brought first. Each block that it takes makes room on the host by what it evicts.
    assert_eq!(
        cache.moves(),
        [
            offload(1, 3),
            onboard(2, 1),
            offload(2, 2),
            onboard(1, 2),
            offload(3, 1),
        ]
    );
    assert_eq!(again.blocks(), [0, 1, 2, 3].map(BlockId));
    let totals = cache.totals();
    assert_eq!(
        (totals.num_offloaded_blocks, totals.num_onboarded_blocks),
        (6, 2)
    );
    assert_eq!(
        num_found(&cache, &tokens(10..17)),
        6,
        "the other went there"
    );
    cache.check_integrity([&again].into_iter());
}

#[test]
fn blocks_of_every_group_leave_the_host_when_they_are_computed_again() {
    let window = AttentionWindow {
        size: Tokens(64),
        num_sinks: Tokens(0),
    };
    for (groups, num_of_each) in [
        (KvGroups::one(None), 4),
        (KvGroups::new(&[None, Some(window)]), 8),
    ] {
        let mut cache = KvCacheManager::new(KvCacheConfig {
            groups,
            num_host_blocks: Blocks(16),
            ..config(num_of_each, 2)
        });
        leave_behind(&mut cache, &tokens(0..8), &anybody());
        leave_behind(&mut cache, &tokens(10..18), &anybody());
        assert_eq!(cache.usage().num_host_used, Blocks(num_of_each));
        let mut table = BlockTable::default();
        cache.reserve(&mut table, &tokens(0..8), &anybody(), Tokens(0));
        assert_eq!(cache.usage().num_host_used, Blocks(2 * num_of_each));
        cache.commit(&mut table, &tokens(0..8), Tokens(8));
        assert_eq!(cache.usage().num_host_used, Blocks(num_of_each));
        assert_eq!(num_found(&cache, &tokens(0..9)), 8);
        cache.check_integrity([&table].into_iter());
    }
}

#[test]
fn a_context_waits_for_what_follows_blocks_from_the_host() {
    let mut cache = cache(4, 4, 2);
    leave_behind(&mut cache, &tokens(0..4), &anybody());
    leave_behind(&mut cache, &tokens(10..18), &anybody());
    assert_eq!(cache.usage().num_host_used, Blocks(2));
    let prompt = tokens(0..7);
    let mut table = BlockTable::default();
    assert_eq!(
        cache.reserve(&mut table, &prompt, &anybody(), ALL),
        Tokens(4)
    );
    let next = cache.next_block(&table, &prompt);
    assert!(next.is_some());
    assert_eq!(cache.find(&prompt, &anybody(), ALL).next, next);
}

#[test]
fn a_full_host_forgets_what_went_there_first() {
    let mut cache = cache(2, 2, 2);
    for first in [0, 10, 20] {
        leave_behind(&mut cache, &tokens(first..first + 4), &anybody());
    }
    let found = [0, 10, 20].map(|first| num_found(&cache, &tokens(first..first + 5)));
    assert_eq!(found, [0, 4, 4]);
    let mut other = computed(&mut cache, &tokens(30..32), &anybody());
    let found = [10, 20].map(|first| num_found(&cache, &tokens(first..first + 5)));
    assert_eq!(found, [2, 4], "the end of the older one");
    cache.release(&mut other);
    cache.check_integrity(std::iter::empty());
}

#[test]
fn the_beginning_of_a_host_block_is_found_too() {
    let mut cache = cache(2, 2, 4);
    leave_behind(&mut cache, &tokens(0..4), &anybody());
    leave_behind(&mut cache, &tokens(10..18), &anybody());
    let table = computed(&mut cache, &[0, 1, 2, 9, 9], &anybody());
    assert_eq!(cache.totals().num_reused_tokens, 3);
    assert!(cache.moves().contains(&onboard(0, table.blocks()[0].0)));
    assert_eq!(
        num_found(&cache, &tokens(0..5)),
        4,
        "it is still on the host"
    );
    assert_eq!(
        num_found(&cache, &[0, 1, 2, 9, 8]),
        4,
        "and ours is beside it"
    );
    cache.check_integrity([&table].into_iter());
}

#[test]
fn a_source_that_is_overwritten_goes_to_the_host() {
    let mut cache = cache(2, 1, 4);
    leave_behind(&mut cache, &tokens(0..4), &anybody());
    let table = computed(&mut cache, &[0, 1, 2, 9, 9], &anybody());
    assert_eq!(cache.moves(), [offload(0, 0)], "nothing is copied");
    assert_eq!(table.blocks()[0], BlockId(0), "which has the tokens");
    assert_eq!(num_found(&cache, &tokens(0..5)), 4);
    cache.check_integrity([&table].into_iter());
}

#[test]
fn what_is_computed_again_leaves_the_host() {
    let mut cache = cache(2, 2, 2);
    leave_behind(&mut cache, &tokens(0..4), &anybody());
    leave_behind(&mut cache, &tokens(10..14), &anybody());
    assert_eq!(cache.usage().num_host_used, Blocks(2));
    // A request may ask for its prompt to be computed whatever is there.
    let mut table = BlockTable::default();
    cache.reserve(&mut table, &tokens(0..4), &anybody(), Tokens(0));
    cache.commit(&mut table, &tokens(0..4), Tokens(4));
    assert_eq!(cache.usage().num_host_used, Blocks(2), "the other, instead");
    assert_eq!(num_found(&cache, &tokens(0..5)), 4);
    cache.check_integrity([&table].into_iter());
}

#[test]
fn salts_are_apart_on_the_host_too() {
    let mut cache = cache(2, 4, 2);
    leave_behind(&mut cache, &tokens(0..4), &only_with("a"));
    leave_behind(&mut cache, &tokens(10..14), &anybody());
    let find = |reuse: &ReuseOptions| cache.find(&tokens(0..5), reuse, ALL).num_tokens;
    assert_eq!(find(&only_with("a")), Tokens(4));
    assert_eq!(find(&only_with("b")), Tokens(0));
    assert_eq!(find(&anybody()), Tokens(0));
}

#[test]
fn copies_within_the_device_keep_their_place_between_moves() {
    let mut cache = cache(3, 3, 4);
    leave_behind(&mut cache, &tokens(0..8), &anybody());
    // Part of the second block is copied, and the next context of this step takes its beginning.
    let mut first = BlockTable::default();
    cache.reserve(&mut first, &[0, 1, 2, 9], &anybody(), ALL);
    let copy = BlockCopy {
        source: BlockId(0),
        target: BlockId(2),
        num_positions: 3,
    };
    assert_eq!(cache.moves(), [BlockMove::Copy(copy)]);
    let mut second = BlockTable::default();
    cache.reserve(&mut second, &tokens(20..28), &anybody(), ALL);
    let copied_first = cache.moves().first() == Some(&BlockMove::Copy(copy));
    assert!(
        copied_first && cache.moves().len() == 3,
        "{:?}",
        cache.moves()
    );
    assert_eq!(num_found(&cache, &tokens(0..9)), 8);
    cache.check_integrity([&first, &second].into_iter());
}

#[test]
fn what_is_kept_is_found_by_the_next_cache() {
    let mut first = cache(4, 8, 2);
    leave_behind(&mut first, &tokens(0..8), &only_with("a"));
    leave_behind(&mut first, &tokens(20..26), &anybody());
    let kept = first.keep();
    assert_eq!(kept.len(), 7, "of the device, and what was on the host");
    first.check_integrity(std::iter::empty());

    for (num_host_blocks, expected) in [(8, [8, 6]), (7, [8, 6]), (1, [2, 0])] {
        let mut next = cache(4, num_host_blocks, 2);
        let places = next.restore(&kept);
        next.check_integrity(std::iter::empty());
        assert_eq!(places.len(), kept.len().min(num_host_blocks as usize));
        let find = |tokens: &[_], reuse: &_| next.find(tokens, reuse, ALL).num_tokens.0;
        let found = [
            find(&tokens(0..9), &only_with("a")),
            find(&tokens(20..27), &anybody()),
        ];
        assert_eq!(found, expected);
        assert_eq!(find(&tokens(0..9), &anybody()), 0, "another salt");
    }
}

#[test]
fn what_lacks_its_beginning_is_not_restored() {
    let mut first = cache(4, 8, 2);
    leave_behind(&mut first, &tokens(0..8), &anybody());
    let mut kept = first.keep();
    kept.remove(1);
    let mut next = cache(4, 8, 2);
    assert_eq!(next.restore(&kept).len(), 1);
    assert_eq!(num_found(&next, &tokens(0..9)), 2);
    // The same content twice, as in no file of ours.
    let twice = [kept[0].clone(), kept[0].clone()];
    let mut next = cache(4, 8, 2);
    assert_eq!(next.restore(&twice).len(), 1);
    next.check_integrity(std::iter::empty());
}
