//! Relocates KV blocks between engine and runner: in every step, some blocks are copied elsewhere, and blocks
//! that no query attends to are taken away. A runner that follows its plan does not notice.

use inflight_base::BlockId;
use inflight_engine::{BlockCopy, BlockMove, KvGroups, PlannedSequence, StepPlan};

/// The real location of each of the engine's blocks.
pub struct Moves {
    places: Vec<Option<BlockId>>,
    free: Vec<BlockId>,
    groups: KvGroups,
    moves: Vec<BlockMove>,
    block_tables: Vec<BlockId>,
    random: u32,
    /// Number of moved blocks.
    pub num_moves: usize,
    /// Number of blocks taken away although the engine still has them in a table.
    pub num_taken: usize,
}

impl Moves {
    /// For an engine and a runner with these numbers of blocks, and a model with these groups of layers.
    pub fn new(num_blocks: u32, num_runner_blocks: u32, groups: KvGroups) -> Self {
        Self {
            places: vec![None; num_blocks as usize],
            free: (0..num_runner_blocks).map(BlockId).collect(),
            groups,
            moves: Vec::new(),
            block_tables: Vec::new(),
            random: 1,
            num_moves: 0,
            num_taken: 0,
        }
    }

    /// The plan with a third of its blocks moved.
    pub fn apply<'a>(&'a mut self, mut plan: StepPlan<'a>) -> StepPlan<'a> {
        let block_size = plan.block_size.tokens().0;
        self.moves.clear();
        self.block_tables.clear();
        self.block_tables
            .resize(plan.block_tables.len(), BlockId::NONE);
        for sequence in plan.sequences {
            let num_computed = sequence.kv_len - plan.chunk(sequence).len() as u32;
            for (index, &block) in plan.block_table(sequence).iter().enumerate() {
                let start = (index / plan.num_groups) as u32 * block_size;
                if block == BlockId::NONE {
                    continue;
                }
                if !self.is_seen(index % plan.num_groups, num_computed, start, block_size) {
                    let place = self.places[block.index()].take();
                    self.num_taken += usize::from(place.is_some());
                    self.free.extend(place);
                } else if start < num_computed && self.draws_one_of(3) {
                    self.move_block(block, block_size.min(num_computed - start));
                }
            }
        }
        for one in plan.moves {
            let moved = match *one {
                BlockMove::Copy(copy) => BlockMove::Copy(BlockCopy {
                    source: self.place(copy.source),
                    target: self.place(copy.target),
                    ..copy
                }),
                BlockMove::Offload { source, target } => BlockMove::Offload {
                    source: self.place(source),
                    target,
                },
                BlockMove::Onboard { source, target } => BlockMove::Onboard {
                    source,
                    target: self.place(target),
                },
            };
            self.moves.push(moved);
        }
        for sequence in plan.sequences {
            self.write_table(&plan, sequence);
        }
        plan.moves = &self.moves;
        plan.block_tables = &self.block_tables;
        plan
    }

    fn write_table(&mut self, plan: &StepPlan<'_>, sequence: &PlannedSequence) {
        let block_size = plan.block_size.tokens().0;
        let num_computed = sequence.kv_len - plan.chunk(sequence).len() as u32;
        for (index, &block) in plan.block_table(sequence).iter().enumerate() {
            let (place, group) = (index / plan.num_groups, index % plan.num_groups);
            let is_seen = self.is_seen(group, num_computed, place as u32 * block_size, block_size);
            if block != BlockId::NONE && is_seen {
                let place = self.place(block);
                self.block_tables[sequence.block_table.start as usize + index] = place;
            }
        }
    }

    /// Whether the query at `query`, or a later one, attends to any of the block's positions.
    fn is_seen(&self, group: usize, query: u32, start: u32, block_size: u32) -> bool {
        self.groups.windows()[group].is_none_or(|window| {
            let first_seen = (query + 1).saturating_sub(window.size.0);
            start < window.num_sinks.0 || start + block_size > first_seen
        })
    }

    fn place(&mut self, block: BlockId) -> BlockId {
        let place = &mut self.places[block.index()];
        *place.get_or_insert_with(|| self.free.pop().expect("a free block"))
    }

    fn move_block(&mut self, block: BlockId, num_positions: u32) {
        let source = self.places[block.index()].expect("it was computed");
        let index = self.random as usize % self.free.len().max(1);
        let Some(free) = self.free.get_mut(index) else {
            return;
        };
        let target = std::mem::replace(free, source);
        self.places[block.index()] = Some(target);
        self.moves.push(BlockMove::Copy(BlockCopy {
            source,
            target,
            num_positions,
        }));
        self.num_moves += 1;
    }

    /// True for one in `n` calls on average; reproducible (a linear congruential generator).
    fn draws_one_of(&mut self, n: u32) -> bool {
        self.random = self
            .random
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        (self.random >> 16).is_multiple_of(n)
    }
}
