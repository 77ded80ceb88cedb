//! The tiles of queries that a step's attention consists of, and the kernel that computes each.
//!
//! A query's result does not depend on the kernel: all walk the cache in the same order (paged_attention.cuh). So the
//! choice is one of speed and scratch memory only.
//!
//! ```text
//! rows of a step     | chunk of a context, 16 to 64 queries a tile | few rows of a sequence: a warp for each split of 256 positions |
//! kernel             | context                                     | generation, then merge                                         |
//! ```

use std::cmp::Reverse;

use inflight_device::{KvBatch, StepCapacity};

/// Positions of a split: `SPLIT_LEN` of the kernels.
pub(super) const SPLIT_LEN: usize = 256;
/// Queries of a tile of the generation kernel: `WARP_QUERIES` of the kernels.
pub(super) const WARP_QUERIES: usize = 16;
/// Queries of a sequence up to which the generation kernel computes them.
pub(super) const MAX_GENERATION_QUERIES: usize = 2 * WARP_QUERIES;
/// Entries of the generation kernel's list; what does not fit is computed by the context kernel.
const MAX_GENERATION_ENTRIES: usize = 1 << 16;

/// `AttentionTile` of paged_attention.cuh: some queries of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct AttentionTile {
    first_row: u32,
    num_rows: u32,
    first_query: u32,
    position: u32,
    block_table: u32,
    split: u32,
    first_partial: u32,
    table_stride: u32,
}

/// The tiles of a step, for both kernels.
pub(super) struct TileLists {
    /// Query heads that share keys.
    group: usize,
    /// Queries of a tile of the context kernel.
    context_queries: usize,
    /// Queries whose partial results fit the scratch memory.
    max_partials: usize,
    max_context_tiles: usize,
    /// Each list begins with its counts, as a tile of which two words are used.
    generation: Vec<AttentionTile>,
    /// The entries for splits after the first, to be appended.
    later_splits: Vec<AttentionTile>,
    num_first_splits: usize,
    context: Vec<AttentionTile>,
    has_later_positions: bool,
    has_several_splits: bool,
    max_queries: usize,
}

/// The lists of a step on the device.
#[derive(Clone, Copy, Default)]
pub(super) struct WorkLists {
    pub generation: u64,
    pub num_generation: usize,
    pub num_first_splits: usize,
    pub has_several_splits: bool,
    /// Queries of the largest tile.
    pub max_queries: usize,
    pub context: u64,
    pub num_context: usize,
    /// Whether a query of the context kernel is at a position from 256 on.
    pub has_later_positions: bool,
}

impl TileLists {
    /// Empty lists. `context_queries` is the size of a tile of the context kernel, `max_partials` the number of queries
    /// whose partial results fit the scratch memory.
    pub fn new(
        group: usize,
        context_queries: usize,
        max_partials: usize,
        capacity: &StepCapacity,
    ) -> Self {
        Self {
            group,
            context_queries,
            max_partials,
            max_context_tiles: (capacity.max_num_tokens * group).div_ceil(context_queries)
                + capacity.max_num_sequences,
            generation: Vec::new(),
            later_splits: Vec::new(),
            num_first_splits: 0,
            context: Vec::new(),
            has_later_positions: false,
            has_several_splits: false,
            max_queries: 0,
        }
    }

    /// Words of both lists, at most.
    pub fn max_words(&self) -> usize {
        tile_words(&[AttentionTile::default()]).len()
            * (MAX_GENERATION_ENTRIES + self.max_context_tiles + 2)
    }

    /// Makes them the lists of a step.
    ///
    /// ```text
    /// packed queries of a span   | row 0: head 0, 1, ... | row 1: head 0, 1, ... | ...
    /// tiles                      | first_query 0         | first_query 16 (or 32, 64)    | ...
    /// entries, generation        | tile, split 0 | tile, split 0 | ... then the tiles' splits 1, 2, ...
    /// ```
    pub fn set(&mut self, batch: &KvBatch<'_>) {
        self.clear();
        let (mut block_table, mut num_partials) = (0, 0);
        for span in batch.spans() {
            let num_rows = span.tokens.len();
            let position = span.kv_len - num_rows as u32;
            let tile = AttentionTile {
                first_row: span.tokens.start,
                num_rows: num_rows as u32,
                position,
                block_table,
                table_stride: batch.num_groups() as u32,
                ..AttentionTile::default()
            };
            block_table += span.block_table.len() as u32;
            let num_queries = num_rows * self.group;
            let num_splits = span.kv_len as usize / SPLIT_LEN + 1;
            let most = num_queries * num_splits;
            let num_entries = self.generation.len() + self.later_splits.len();
            let fits = num_entries + num_queries.div_ceil(WARP_QUERIES) * num_splits
                <= MAX_GENERATION_ENTRIES
                && (num_splits == 1 || num_partials + most <= self.max_partials);
            if num_queries <= MAX_GENERATION_QUERIES && fits {
                self.push_generation(tile, num_queries, &mut num_partials);
            } else {
                self.has_later_positions |= span.kv_len as usize > SPLIT_LEN;
                self.context
                    .extend(
                        (0..num_queries)
                            .step_by(self.context_queries)
                            .map(|first_query| AttentionTile {
                                first_query: first_query as u32,
                                ..tile
                            }),
                    );
            }
        }
        self.num_first_splits = self.generation.len() - 1;
        self.generation.append(&mut self.later_splits);
        let num_generation = self.generation.len() - 1;
        self.generation[0] = counts(num_generation, self.num_first_splits);
        let num_context = self.context.len() - 1;
        self.context[0] = counts(num_context, num_context);
        // The longest work begins first.
        let group = self.group as u32;
        let last_position = |tile: &AttentionTile| tile.position + tile.first_query / group;
        self.context[1..]
            .sort_unstable_by_key(|tile| Reverse((last_position(tile), tile.first_row)));
    }

    /// Whether the generation kernel computes all queries of the step.
    pub fn is_generation(&self) -> bool {
        self.context.len() == 1
    }

    /// Whether a query has several splits, whose results are merged.
    pub fn has_several_splits(&self) -> bool {
        self.has_several_splits
    }

    /// Entries of a step of `num_rows` sequences with a row each, at most, if they have up to `max_seq_len` positions.
    pub fn max_entries(&self, num_rows: usize, max_seq_len: usize) -> usize {
        num_rows * self.group.div_ceil(WARP_QUERIES) * (max_seq_len / SPLIT_LEN + 1)
    }

    /// The number of words of both lists.
    pub fn num_words(&self) -> usize {
        tile_words(&self.generation).len() + tile_words(&self.context).len()
    }

    /// Refers to block tables that begin at this word instead of word 0.
    pub fn move_block_tables(&mut self, start: u32) {
        for tiles in [&mut self.generation, &mut self.context] {
            // The first one has the counts.
            tiles[1..]
                .iter_mut()
                .for_each(|tile| tile.block_table += start);
        }
    }

    /// The words of both lists.
    pub fn words(&self) -> [impl Iterator<Item = u32> + '_; 2] {
        [&self.generation, &self.context].map(|tiles| tile_words(tiles).iter().copied())
    }

    /// The lists, once they have been uploaded to these addresses.
    pub fn at(&self, generation: u64, context: u64) -> WorkLists {
        WorkLists {
            generation,
            num_generation: self.generation.len() - 1,
            num_first_splits: self.num_first_splits,
            has_several_splits: self.has_several_splits,
            max_queries: self.max_queries,
            context,
            num_context: self.context.len() - 1,
            has_later_positions: self.has_later_positions,
        }
    }

    fn clear(&mut self) {
        for list in [&mut self.generation, &mut self.context] {
            list.clear();
            list.push(AttentionTile::default());
        }
        self.later_splits.clear();
        self.has_later_positions = false;
        self.has_several_splits = false;
        self.max_queries = 0;
    }

    fn push_generation(
        &mut self,
        tile: AttentionTile,
        num_queries: usize,
        num_partials: &mut usize,
    ) {
        for first_query in (0..num_queries).step_by(WARP_QUERIES) {
            let tile_queries = WARP_QUERIES.min(num_queries - first_query);
            let last_row = (first_query + tile_queries - 1) / self.group;
            let num_splits = (tile.position as usize + last_row) / SPLIT_LEN + 1;
            let tile = AttentionTile {
                first_query: first_query as u32,
                first_partial: *num_partials as u32,
                ..tile
            };
            self.generation.push(tile);
            let later = (1..num_splits as u32).map(|split| AttentionTile { split, ..tile });
            self.later_splits.extend(later);
            self.max_queries = self.max_queries.max(tile_queries);
            if num_splits > 1 {
                self.has_several_splits = true;
                *num_partials += num_splits * tile_queries;
            }
        }
    }
}

/// The counts at the head of a list.
fn counts(num_entries: usize, num_first_splits: usize) -> AttentionTile {
    AttentionTile {
        first_row: num_entries as u32,
        num_rows: num_first_splits as u32,
        ..AttentionTile::default()
    }
}

/// The words of tiles as the kernels read them.
fn tile_words(tiles: &[AttentionTile]) -> &[u32] {
    bytemuck::cast_slice(tiles)
}
