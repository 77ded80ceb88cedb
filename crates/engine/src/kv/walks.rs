//! Random walks through all operations with tiny pools, compared with a model that records the content of every
//! position of every block: a hash of the sequence's tokens up to it and of its sharing options. So a block that is
//! freed too early, shared with the wrong sequence, copied in the wrong order or found under a wrong key shows as a
//! wrong hash.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use super::*;
use crate::{BlockMove, StateMove, StateSnapshot};
use inflight_base::{BlockId, BlockSize, Blocks, SnapshotId, StateRow, TokenId, Tokens};

/// Few, so that prompts begin alike.
const NUM_LETTERS: u32 = 2;

/// What a position holds that was never computed.
const NOTHING: u64 = u64::MAX;

#[derive(Clone, Debug)]
enum Move {
    Add {
        prompt: Vec<TokenId>,
        sharing: u8,
        max_reused: u32,
    },
    Step {
        choice: u64,
    },
    Pause {
        nth: usize,
    },
    /// A second sequence goes another way from the last token on.
    Fork {
        nth: usize,
    },
    End {
        nth: usize,
    },
    /// A prefix of a sequence is retained; the one that has been longest is retained no longer.
    Retain {
        nth: usize,
        len: usize,
    },
}

struct WalkSequence {
    tokens: Vec<TokenId>,
    reuse: ReuseOptions,
    max_reused: Tokens,
    /// What is before the first position: equal only where sharing is allowed.
    origin: u64,
    table: BlockTable,
    computed: usize,
    /// Of what its recurrent states sum up.
    state: u64,
    is_running: bool,
}

impl WalkSequence {
    /// What each position has to hold.
    fn chain(&self) -> Vec<u64> {
        let step = |hash: &mut u64, &token: &TokenId| {
            *hash = (*hash ^ u64::from(token + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            *hash ^= *hash >> 29;
            Some(*hash)
        };
        self.tokens.iter().scan(self.origin, step).collect()
    }

    fn len(&self) -> Tokens {
        Tokens(self.tokens.len() as u32)
    }
}

struct World {
    cache: KvCacheManager,
    config: KvCacheConfig,
    max_len: usize,
    block_size: usize,
    /// What each position holds, `[num_blocks][block_size]`.
    memory: Vec<Vec<u64>>,
    /// The same in host memory.
    host_memory: Vec<Vec<u64>>,
    /// The state in each snapshot, as a hash of the tokens before it.
    snapshots: Vec<u64>,
    /// In host memory as well.
    host_snapshots: Vec<u64>,
    sequences: Vec<WalkSequence>,
    retained: VecDeque<RetainedPrefix>,
    num_added: u64,
    num_reused_tokens: u64,
}

impl World {
    fn new(config: KvCacheConfig, max_len: usize) -> Self {
        let block_size = config.block_size.tokens().index();
        Self {
            cache: KvCacheManager::new(config),
            config,
            max_len,
            block_size,
            memory: vec![vec![NOTHING; block_size]; config.num_blocks.index()],
            host_memory: vec![vec![NOTHING; block_size]; config.num_host_blocks.index()],
            snapshots: vec![NOTHING; config.num_snapshots as usize],
            host_snapshots: vec![NOTHING; config.num_host_snapshots as usize],
            sequences: Vec::new(),
            retained: VecDeque::new(),
            num_added: 0,
            num_reused_tokens: 0,
        }
    }

    fn make(&mut self, one: &Move) {
        match one {
            Move::Add {
                prompt,
                sharing,
                max_reused,
            } => self.add(prompt, *sharing, *max_reused),
            Move::Step { choice } => self.step(*choice),
            Move::Pause { nth } if !self.sequences.is_empty() => {
                self.pause(nth % self.sequences.len());
            }
            Move::End { nth } if !self.sequences.is_empty() => {
                let nth = nth % self.sequences.len();
                self.pause(nth);
                self.sequences.remove(nth);
            }
            Move::Fork { nth } if !self.sequences.is_empty() => {
                self.fork(nth % self.sequences.len());
            }
            Move::Retain { nth, len } if !self.sequences.is_empty() => {
                self.retain(nth % self.sequences.len(), *len);
            }
            Move::Pause { .. } | Move::End { .. } | Move::Fork { .. } | Move::Retain { .. } => {}
        }
        let tables = self.sequences.iter().map(|sequence| &sequence.table);
        self.cache.check_integrity(tables);
        assert_eq!(
            self.cache.totals().num_reused_tokens,
            self.num_reused_tokens
        );
    }

    fn add(&mut self, prompt: &[TokenId], sharing: u8, max_reused: u32) {
        self.num_added += 1;
        let salt = |salt: &str| Some(Arc::from(salt));
        let (enabled, salt, origin) = match sharing {
            0 => (true, None, 1),
            1 => (true, salt(""), 2),
            2 => (true, salt("b"), 3),
            _ => (false, None, 1000 + self.num_added),
        };
        self.sequences.push(WalkSequence {
            tokens: prompt[..prompt.len().min(self.max_len)].to_vec(),
            reuse: ReuseOptions { enabled, salt },
            max_reused: Tokens(max_reused),
            origin,
            table: BlockTable::default(),
            computed: 0,
            state: NOTHING,
            is_running: false,
        });
    }

    fn pause(&mut self, nth: usize) {
        let sequence = &mut self.sequences[nth];
        self.cache.release(&mut sequence.table);
        sequence.computed = 0;
        sequence.is_running = false;
    }

    fn retain(&mut self, nth: usize, len: usize) {
        let it = &self.sequences[nth];
        let tokens = it.tokens[..len.min(it.tokens.len())].into();
        let retained = self.cache.retain(tokens, it.reuse.salt.clone());
        self.retained.push_back(retained);
        if self.retained.len() > 3
            && let Some(first) = self.retained.pop_front()
        {
            self.cache.release_retained(&first);
        }
    }

    /// Releases all that is retained: then nothing is.
    fn release_all(&mut self) {
        for retained in self.retained.drain(..) {
            self.cache.release_retained(&retained);
        }
        assert_eq!(self.cache.num_retained(), 0);
    }

    fn fork(&mut self, nth: usize) {
        let it = &self.sequences[nth];
        let num_needed = it.computed.div_ceil(self.block_size) * self.config.groups.num_groups();
        let has_no_blank_block = it.table.total_len().index() == num_needed;
        // States are not shared.
        let has_states = self.config.num_snapshots > 0;
        let can_part = it.is_running && it.computed + 1 == it.tokens.len() && has_no_blank_block;
        if has_states || !can_part {
            return;
        }
        let mut table = BlockTable::default();
        self.cache.fork(&it.table, &mut table);
        let mut tokens = it.tokens.clone();
        tokens[it.computed] = NUM_LETTERS - 1 - tokens[it.computed];
        let fork = WalkSequence {
            tokens,
            reuse: it.reuse.clone(),
            table,
            ..*it
        };
        self.sequences.push(fork);
        if nth.is_multiple_of(2) {
            let table = &mut self.sequences[nth].table;
            self.cache.stop_registering(table);
        }
    }

    fn step(&mut self, mut choice: u64) {
        self.cache.clear_moves();
        self.grow_running();
        self.start_waiting();
        for one in self.cache.moves() {
            match *one {
                BlockMove::Copy(copy) => {
                    let num_positions = copy.num_positions as usize;
                    assert!((1..self.block_size).contains(&num_positions), "{copy:?}");
                    let copied = self.memory[copy.source.index()][..num_positions].to_vec();
                    self.memory[copy.target.index()][..num_positions].copy_from_slice(&copied);
                }
                BlockMove::Offload { source, target } => {
                    self.host_memory[target.index()] = self.memory[source.index()].clone();
                }
                BlockMove::Onboard { source, target } => {
                    self.memory[target.index()] = self.host_memory[source.index()].clone();
                }
            }
        }
        self.blank_what_is_not_computed();
        let mut planned = Vec::new();
        for nth in 0..self.sequences.len() {
            if self.sequences[nth].is_running {
                choice = choice.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                planned.push((nth, self.plan(nth, choice as usize >> 8)));
            }
        }
        // A snapshot that is taken may move another one.
        self.move_states();
        for (nth, (end, taken)) in planned {
            self.compute(nth, end, &taken);
        }
        // As the engine does it: what is computed is known when the whole step is.
        for nth in 0..self.sequences.len() {
            self.commit(nth);
        }
        self.sequences
            .retain(|it| !it.is_running || it.computed < it.tokens.len());
    }

    /// Makes room for those that run, by pausing the last one.
    fn grow_running(&mut self) {
        let mut nth = 0;
        while nth < self.sequences.len() {
            let sequence = &mut self.sequences[nth];
            let computed = Tokens(sequence.computed as u32);
            let num_shared = match sequence.is_running {
                true => self.cache.shared_next(&sequence.table, computed).count(),
                false => 0,
            };
            let lacking =
                self.cache.probe(&sequence.table, sequence.len()) + Blocks(num_shared as u32);
            let num_free = self.cache.usage().num_free();
            if !sequence.is_running {
                nth += 1;
            } else if lacking <= num_free {
                let known = sequence.len();
                self.cache.own_next(&mut sequence.table, computed);
                self.cache.grow(&mut sequence.table, known);
                assert_eq!(self.cache.usage().num_free(), num_free - lacking);
                nth += 1;
            } else {
                let running = self.sequences.iter().rposition(|it| it.is_running);
                let last = running.expect("this one runs");
                self.pause(last);
            }
        }
    }

    /// Starts those that wait, in order, while there is room.
    fn start_waiting(&mut self) {
        let waiting = (0..).map(StateRow).zip(&mut self.sequences);
        for (row, sequence) in waiting.filter(|(_, it)| !it.is_running) {
            let num_free = self.cache.usage().num_free();
            let max_reused = sequence.max_reused;
            let found = self
                .cache
                .find(&sequence.tokens, &sequence.reuse, max_reused);
            if found.lacking > num_free {
                return;
            }
            let reused = self.cache.reserve(
                &mut sequence.table,
                &sequence.tokens,
                &sequence.reuse,
                max_reused,
            );
            assert_eq!(reused, found.num_tokens);
            self.cache.restore_states(&mut sequence.table, reused, row);
            sequence.state = match reused {
                Tokens::ZERO => sequence.origin,
                _ => NOTHING,
            };
            assert!(reused < sequence.len(), "the last token is computed");
            assert!(reused <= max_reused, "no more than it may take over");
            assert_eq!(self.cache.usage().num_free(), num_free - found.lacking);
            sequence.computed = reused.index();
            sequence.is_running = true;
            self.num_reused_tokens += u64::from(reused.0);
        }
    }

    /// Wipes the positions that running sequences have not computed yet, which no other sequence may hold.
    fn blank_what_is_not_computed(&mut self) {
        for sequence in self.sequences.iter().filter(|it| it.is_running) {
            let num_groups = self.config.groups.num_groups();
            let blocks = sequence.table.blocks().iter().enumerate();
            let written = blocks.skip(sequence.computed / self.block_size * num_groups);
            for (index, block) in written.filter(|(_, block)| **block != BlockId::NONE) {
                let place = index / num_groups;
                let holders = self.sequences.iter();
                let holders = holders.filter(|it| it.table.blocks().contains(block));
                assert_eq!(holders.count(), 1, "{block:?} is written and shared");
                let computed = sequence.computed.saturating_sub(place * self.block_size);
                self.memory[block.index()][computed..].fill(NOTHING);
            }
        }
    }

    fn move_states(&mut self) {
        for one in self.cache.state_moves() {
            match *one {
                StateMove::Restore(restore) => {
                    let sequence = &mut self.sequences[restore.row.index()];
                    assert_eq!(restore.num_tokens.index(), sequence.computed);
                    sequence.state = match restore.snapshot {
                        StateSnapshot::Device(id) => self.snapshots[id.index()],
                        StateSnapshot::Host(id) => self.host_snapshots[id.index()],
                    };
                }
                StateMove::Offload { source, target } => {
                    self.host_snapshots[target.index()] = self.snapshots[source.index()];
                }
                StateMove::Onboard { source, target } => {
                    self.snapshots[target.index()] = self.host_snapshots[source.index()];
                }
            }
        }
    }

    /// Where the next chunk of a sequence ends, and the snapshots to be taken of its states, each with the tokens of
    /// the chunk that it sums up.
    fn plan(&mut self, nth: usize, choice: usize) -> (usize, Vec<(Tokens, SnapshotId)>) {
        let sequence = &mut self.sequences[nth];
        let known = sequence.tokens.len();
        let max_chunk = (known - sequence.computed).min(self.config.max_chunk.index());
        let end = sequence.computed + 1 + choice % max_chunk;
        let chunk = Tokens(sequence.computed as u32)..Tokens(end as u32);
        let context = (sequence.computed + 1 < known).then_some(sequence.len());
        let taken = self
            .cache
            .take_snapshots(&mut sequence.table, chunk, context);
        let taken = taken.collect();
        assert!(
            (sequence.computed + max_chunk).div_ceil(self.block_size)
                <= sequence.table.len().index(),
            "a chunk of {max_chunk} after {} has room",
            sequence.computed
        );
        (end, taken)
    }

    fn compute(&mut self, nth: usize, end: usize, taken: &[(Tokens, SnapshotId)]) {
        let sequence = &mut self.sequences[nth];
        let table = &sequence.table;
        let num_held = table.held_from_the_end().count();
        assert!(num_held <= self.cache.max_blocks(sequence.len()).index());
        let chain = sequence.chain();
        if self.config.num_snapshots > 0 {
            let before = sequence.computed.checked_sub(1);
            let expected = before.map_or(sequence.origin, |last| chain[last]);
            assert_eq!(sequence.state, expected, "the states of sequence {nth}");
            for &(num_tokens, id) in taken {
                let last = sequence.computed + num_tokens.index() - 1;
                assert!(last < end, "{id:?} is of this step");
                self.snapshots[id.index()] = chain[last];
            }
            sequence.state = chain[end - 1];
        }
        let windows = self.config.groups.windows();
        for (query, (group, window)) in (sequence.computed..end)
            .flat_map(|query| windows.iter().enumerate().map(move |it| (query, it)))
        {
            // What a group holds is of no use to another.
            let content = |position: usize| chain[position] ^ group as u64;
            let block = table.at(query / self.block_size, group);
            self.memory[block.index()][query % self.block_size] = content(query);
            let is_seen = |position: &usize| {
                window.is_none_or(|window| {
                    *position < window.num_sinks.index() || position + window.size.index() > query
                })
            };
            for position in (0..=query).filter(is_seen) {
                let block = table.at(position / self.block_size, group);
                assert_eq!(
                    self.memory[block.index()][position % self.block_size],
                    content(position),
                    "what {query} of sequence {nth} sees at {position}, group {group}"
                );
            }
        }
        sequence.computed = end;
    }

    /// Commits what the step has computed, and appends a token where all are.
    fn commit(&mut self, nth: usize) {
        let sequence = &mut self.sequences[nth];
        if !sequence.is_running {
            return;
        }
        let computed = Tokens(sequence.computed as u32);
        let before = sequence.table.chain().map(|it| it.num_committed());
        self.cache
            .commit(&mut sequence.table, &sequence.tokens, computed);
        let num_full = sequence.computed / self.block_size;
        // With several groups, another sequence may have had the block beside a node, which is evicted by itself.
        let groups = &self.config.groups;
        let finds_all =
            !groups.any_windows() && groups.num_groups() == 1 && self.config.num_snapshots == 0;
        if before.is_some_and(|before| before < num_full) && finds_all {
            let mut longer = sequence.tokens[..sequence.computed].to_vec();
            longer.push(0);
            let found = self.cache.find(&longer, &sequence.reuse, Tokens(u32::MAX));
            assert!(found.num_tokens.index() >= num_full * self.block_size);
        }
        if sequence.computed == sequence.tokens.len() {
            if sequence.computed < self.max_len {
                let hash = sequence.chain()[sequence.computed - 1];
                sequence.tokens.push((hash >> 40) as u32 % NUM_LETTERS);
            } else {
                self.cache.release(&mut sequence.table);
            }
        }
    }
}

fn configs() -> impl Strategy<Value = (KvCacheConfig, usize)> {
    let window = (1u32..10, 0u32..6).prop_map(|(size, num_sinks)| AttentionWindow {
        size: Tokens(size),
        num_sinks: Tokens(num_sinks),
    });
    let windows = vec(proptest::option::of(window), 1..4);
    let groups = windows.prop_map(|mut windows| {
        windows.sort_by_key(|it| std::cmp::Reverse(it.map_or(Tokens(u32::MAX), |it| it.size)));
        KvGroups::new(&windows)
    });
    let flags = (proptest::bool::weighted(0.9), any::<bool>());
    let num_host_blocks = prop_oneof![1 => Just(0), 2 => 1u32..12];
    let blocks = (0u32..20, num_host_blocks);
    let host_snapshots = prop_oneof![1 => Just(0), 1 => 1u32..6];
    let snapshots = (
        prop_oneof![2 => Just(0), 1 => 1u32..6],
        host_snapshots,
        0u32..8,
    );
    (
        1u32..=4,
        1usize..24,
        blocks,
        1u32..9,
        groups,
        flags,
        snapshots,
    )
        .prop_map(
            |(block_size, max_len, blocks, max_chunk, groups, flags, snapshots)| {
                let (more_blocks, num_host_blocks) = blocks;
                let (enable_reuse, enable_partial_reuse) = flags;
                let num_host_blocks = if enable_reuse { num_host_blocks } else { 0 };
                let (num_snapshots, num_host_snapshots, snapshot_interval) = snapshots;
                let num_snapshots = if enable_reuse { num_snapshots } else { 0 };
                let mut config = KvCacheConfig {
                    num_blocks: Blocks(1),
                    num_host_blocks: Blocks(num_host_blocks),
                    block_size: BlockSize::new(block_size).expect("not zero"),
                    groups,
                    max_chunk: Tokens(max_chunk),
                    enable_reuse,
                    enable_partial_reuse: enable_partial_reuse && num_snapshots == 0,
                    num_snapshots,
                    num_host_snapshots: num_host_snapshots.min(num_snapshots * 9),
                    snapshot_interval: Tokens(snapshot_interval),
                };
                let one = KvCacheManager::new(config).max_blocks(Tokens(max_len as u32));
                config.num_blocks = one + Blocks(more_blocks);
                (config, max_len)
            },
        )
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let prompt = vec(0..NUM_LETTERS, 1..20);
    let sharing = prop_oneof![4 => Just(0u8), 1 => 1u8..4];
    let max_reused = prop_oneof![4 => Just(u32::MAX), 1 => 0u32..20];
    let one = prop_oneof![
        4 => (prompt, sharing, max_reused).prop_map(|(prompt, sharing, max_reused)| Move::Add {
            prompt,
            sharing,
            max_reused,
        }),
        8 => any::<u64>().prop_map(|choice| Move::Step { choice }),
        1 => any::<usize>().prop_map(|nth| Move::Pause { nth }),
        1 => any::<usize>().prop_map(|nth| Move::End { nth }),
        1 => any::<usize>().prop_map(|nth| Move::Fork { nth }),
        1 => (any::<usize>(), 0usize..24).prop_map(|(nth, len)| Move::Retain { nth, len }),
    ];
    vec(one, 1..80)
}

/// Makes `moves`, and returns the tables after each of them.
fn walk(config: KvCacheConfig, max_len: usize, moves: &[Move]) -> Vec<Vec<BlockId>> {
    let mut world = World::new(config, max_len);
    let tables = |one| {
        world.make(one);
        let tables = world.sequences.iter().map(|it| it.table.blocks());
        tables.flatten().copied().collect()
    };
    let tables = moves.iter().map(tables).collect();
    world.release_all();
    tables
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "src/kv/walks.proptest-regressions",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_a_position_sees_is_its_own_prefix((config, max_len) in configs(), moves in moves()) {
        walk(config, max_len, &moves);
    }

    #[test]
    fn the_same_calls_give_the_same_tables((config, max_len) in configs(), moves in moves()) {
        let tables = walk(config, max_len, &moves);
        prop_assert_eq!(tables, walk(config, max_len, &moves));
    }
}
