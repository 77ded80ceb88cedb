//! A task of attention: a key/value head of one sequence, and a tile of its queries.

use super::super::Simd;
use super::super::kv_cache::{GROUP, KvBatch, KvDtype, KvLayout, KvSpan, Layer};
use super::super::math::to_bf16_bits;
use super::super::memory::Shared;
use super::super::simd::for_each_simd;
use super::copies::Copies;
use super::groups::{Groups, Lanes, group, groups_in_place, whole_group};
use super::int8::{stored_group, widen_group};
use super::queries::Queries;
use super::softmax::RowState;
use super::{AttentionParams, Kernel, MAX_ROWS, Operands, Scales, TILE, TILE_GROUPS, Tile, kernel};
use crate::base::BlockId;

/// Rows that a task aims at: queries of one token more or less.
const TASK_ROWS: usize = 96;

/// Scratch memory of one thread.
#[derive(Default)]
pub(in super::super) struct Scratch {
    queries: Queries,
    seen: Vec<u64>,
    scores: Vec<f32>,
    probabilities: Vec<u16>,
    state: Vec<RowState>,
    acc: Vec<f32>,
    copies: Copies,
}

/// A call's operands, and how it is cut into tasks.
pub(super) struct Operation<'a> {
    simd: Simd,
    kernel: Kernel,
    operands: Operands,
    params: &'a AttentionParams,
    batch: &'a KvBatch<'a>,
    cache: &'a Layer<'a>,
    q: &'a [u16],
    /// How many tiles of queries come before each span.
    tile_starts: &'a [usize],
    num_tiles: usize,
    /// Tokens of a tile of queries.
    tile_tokens: usize,
}

/// One sequence, one head, some of its tokens.
pub(super) struct Task<'a> {
    /// Positions in the cache.
    pub kv_len: usize,
    pub block_table: &'a [BlockId],
    /// The key/value head.
    pub head: usize,
    /// In the packed arrays.
    first_token: usize,
    /// In the sequence.
    first_position: usize,
    num_tokens: usize,
}

impl<'a> Operation<'a> {
    /// Cuts the batch into tasks; `tile_starts` is memory to write in.
    pub fn new(
        simd: Simd,
        params: &'a AttentionParams,
        batch: &'a KvBatch<'a>,
        cache: &'a Layer<'a>,
        q: &'a [u16],
        tile_starts: &'a mut Vec<usize>,
    ) -> Self {
        let shape = params.shape;
        let tile_tokens = (TASK_ROWS / (shape.num_q_heads / shape.num_kv_heads)).max(1);
        tile_starts.clear();
        let mut num_tiles = 0;
        for span in batch.spans() {
            tile_starts.push(num_tiles);
            num_tiles += span.tokens.len().div_ceil(tile_tokens);
        }
        let (kernel, operands) = kernel(simd, cache.layout().dtype);
        Self {
            simd,
            kernel,
            operands,
            params,
            batch,
            cache,
            q,
            tile_starts,
            num_tiles,
            tile_tokens,
        }
    }

    pub fn num_tasks(&self) -> usize {
        self.num_tiles * self.params.shape.num_kv_heads
    }

    /// All tiles of a head follow one another, while its keys and values are in the cache, and the
    /// last comes first, because it sees most.
    fn task(&self, index: usize) -> Option<Task<'a>> {
        if index >= self.num_tasks() {
            return None;
        }
        let num_kv_heads = self.params.shape.num_kv_heads;
        let tile_starts = self.tile_starts;
        let span_index = tile_starts.partition_point(|&start| start * num_kv_heads <= index) - 1;
        let span: &KvSpan = &self.batch.spans()[span_index];
        let num_tiles = span.tokens.len().div_ceil(self.tile_tokens);
        let index = index - tile_starts[span_index] * num_kv_heads;
        let (head, tile) = (index / num_tiles, num_tiles - 1 - index % num_tiles);
        let before = tile * self.tile_tokens;
        Some(Task {
            kv_len: span.kv_len as usize,
            block_table: self.batch.block_table(span),
            head,
            first_token: span.tokens.start as usize + before,
            first_position: span.kv_len as usize - span.tokens.len() + before,
            num_tokens: self.tile_tokens.min(span.tokens.len() - before),
        })
    }

    /// The first position that the query at `position` sees but for the sinks.
    fn first_seen(&self, position: usize) -> usize {
        let window = self
            .params
            .window
            .map_or(usize::MAX, |window| window.get() as usize);
        (position + 1).saturating_sub(window)
    }

    /// The positions of the tile at `start` that the query at `position` sees, a bit for each.
    fn seen(&self, position: usize, start: usize) -> u64 {
        let below = |end: usize| match end.saturating_sub(start) {
            len @ 0..TILE => (1_u64 << len) - 1,
            _ => u64::MAX,
        };
        let sinks = below(self.params.num_sinks as usize);
        below(position + 1) & (sinks | !below(self.first_seen(position)))
    }

    /// Where the tiles begin that any query of the task sees, in order: those of the sinks, then those
    /// of the window.
    fn tiles(&self, task: &Task<'_>) -> impl Iterator<Item = usize> {
        let first = self.first_seen(task.first_position) / TILE * TILE;
        let sinks = 0..first.min(self.params.num_sinks as usize);
        let window = first..task.first_position + task.num_tokens;
        sinks.step_by(TILE).chain(window.step_by(TILE))
    }

    /// Computes one task and writes its rows of `out`.
    pub fn attend(&self, index: usize, scratch: &mut Scratch, out: &Shared<u16>) {
        let Some(task) = self.task(index) else { return };
        // As a rule this thread's next one: its memory is asked for during the last tile of this.
        let next_task = self.task(index + 1);
        let shape = self.params.shape;
        let heads = shape.num_q_heads / shape.num_kv_heads;
        let row_len = heads * shape.head_dim;
        let place = |token: usize| (task.first_token + token) * shape.q_len() + task.head * row_len;
        scratch.queries.clear();
        for token in 0..task.num_tokens {
            let rows = &self.q[place(token)..][..row_len];
            let queries = &mut scratch.queries;
            queries.add(self.simd, self.operands, rows, shape.head_dim);
        }
        scratch.prepare(task.num_tokens * heads, self.cache.layout());

        let mut tiles = self.tiles(&task);
        let mut next = tiles.next();
        let mut groups = next.map(|start| groups_in_place(self.cache, &task, start));
        while let (Some(start), Some(here)) = (next, groups) {
            next = tiles.next();
            groups = next.map(|start| groups_in_place(self.cache, &task, start));
            let ahead = groups.or_else(|| {
                let next = next_task.as_ref()?;
                let start = self.tiles(next).next()?;
                Some(groups_in_place(self.cache, next, start))
            });
            self.attend_tile(&task, start, here, ahead.unwrap_or_default(), scratch);
        }

        let padded_dim = self.cache.layout().padded_dim();
        for token in 0..task.num_tokens {
            // SAFETY: the tokens of a task are its own, and within a token the heads.
            let out = unsafe { out.slice(place(token), row_len) };
            for (head, out) in out.chunks_exact_mut(shape.head_dim).enumerate() {
                let row = token * heads + head;
                let acc = &scratch.acc[row * padded_dim..][..shape.head_dim];
                let sum = scratch.state[row].sum();
                for_each_simd!(self.simd, finish, (acc: &[f32], sum: f32, out: &mut [u16]));
            }
        }
    }

    /// Takes the 64 positions from `start` on into the sums of the rows that see any of them. `here` are their
    /// groups, and `ahead` those of the tile after this.
    fn attend_tile(
        &self,
        task: &Task<'_>,
        start: usize,
        here: Groups<'_>,
        ahead: Groups<'_>,
        scratch: &mut Scratch,
    ) {
        let layout = *self.cache.layout();
        let shape = self.params.shape;
        let heads = shape.num_q_heads / shape.num_kv_heads;
        // These rows lie side by side, since positions ascend.
        let mut rows = 0..0;
        let mut seen_by_any = 0;
        for token in 0..task.num_tokens {
            let seen = self.seen(task.first_position + token, start);
            if seen != 0 {
                let first_row = if rows.is_empty() {
                    token * heads
                } else {
                    rows.start
                };
                rows = first_row..(token + 1) * heads;
                scratch.seen[token * heads..][..heads].fill(seen);
                seen_by_any |= seen;
            }
        }
        if rows.is_empty() {
            return;
        }
        let end = task.first_position + task.num_tokens;
        let queries = &scratch.queries;
        let q_start = rows.start * shape.head_dim;
        let mut tile = Tile {
            // Those that the kernel does not take are not there.
            q: queries.words.as_ptr().wrapping_add(q_start),
            wide_q: queries.wide.as_ptr().wrapping_add(q_start),
            q_scales: queries.scales.as_ptr().wrapping_add(rows.start),
            rows: rows.len(),
            layout,
            keys: [std::ptr::null(); TILE_GROUPS],
            values: [std::ptr::null(); TILE_GROUPS],
            keys_ahead: [std::ptr::null(); TILE_GROUPS],
            values_ahead: [std::ptr::null(); TILE_GROUPS],
            stored_scales: [std::ptr::null(); TILE_GROUPS],
            num_groups: (end - start).min(TILE).div_ceil(GROUP),
            scale: self.params.scale,
            scales: &Scales::ONE,
            seen: scratch.seen[rows.start..].as_ptr(),
            scores: scratch.scores.as_mut_ptr(),
            probabilities: scratch.probabilities.as_mut_ptr(),
            state: scratch.state[rows.start..].as_mut_ptr(),
            acc: scratch.acc[rows.start * layout.padded_dim()..].as_mut_ptr(),
        };
        let scratch = &mut scratch.copies;
        self.find_groups(
            (task, start),
            seen_by_any,
            (here, ahead),
            scratch,
            &mut tile,
        );
        // SAFETY: the scratch has that many rows, the groups were found, and the kernel was chosen for
        // this machine.
        unsafe { (self.kernel)(&tile) };
    }

    /// Points a tile at its groups, in place or copied, and at those of the next one.
    fn find_groups(
        &self,
        (task, start): (&Task<'_>, usize),
        seen: u64,
        (here, ahead): (Groups<'_>, Groups<'_>),
        copies: &mut Copies,
        tile: &mut Tile,
    ) {
        let (rooms, gathered) = copies.rooms(&tile.layout);
        for (i, room) in rooms.take(tile.num_groups).enumerate() {
            let lanes = Lanes {
                start: start + i * GROUP,
                seen: (seen >> (i * GROUP)) as u16,
                in_place: here[i],
            };
            let group = match (self.operands, tile.layout.dtype) {
                (Operands::Integers, _) => stored_group(self.cache, task, lanes, room),
                (_, KvDtype::Int8) => {
                    widen_group(self.simd, self.cache, task, lanes, ahead[i], gathered, room)
                }
                (Operands::Bf16, KvDtype::Bf16) => whole_group(self.cache, task, lanes, room),
                (Operands::WideQueries, KvDtype::Bf16) => group(self.cache, task, lanes, room),
            };
            tile.keys[i] = group.keys.as_ptr();
            tile.values[i] = group.values.as_ptr();
            tile.stored_scales[i] = group.scales.as_ptr();
        }
        // What was widened has asked for the next tile itself.
        let is_widened = self.operands == Operands::Bf16 && tile.layout.dtype == KvDtype::Int8;
        if is_widened {
            tile.scales = copies.scales();
        }
        for (i, ahead) in ahead.into_iter().enumerate() {
            (tile.keys_ahead[i], tile.values_ahead[i]) = match ahead.filter(|_| !is_widened) {
                Some(ahead) => (ahead.keys.as_ptr(), ahead.values.as_ptr()),
                None => (tile.keys[0], tile.values[0]),
            };
        }
    }
}

impl Scratch {
    /// Makes room for a task and empties the sums. The queries are there already.
    fn prepare(&mut self, rows: usize, layout: &KvLayout) {
        self.scores.resize(MAX_ROWS * TILE, 0.0);
        self.probabilities.resize(MAX_ROWS * TILE, 0);
        self.seen.resize(rows, 0);
        self.state.clear();
        self.state.resize(rows, RowState::EMPTY);
        self.acc.clear();
        self.acc.resize(rows * layout.padded_dim(), 0.0);
        self.copies.prepare(layout);
    }
}

/// Divides by the sum. A result too small for bf16's normal range becomes a positive zero: whether such
/// remnants survive, and the sign of a zero, may depend on how many zero products were added.
#[inline(always)]
fn finish(acc: &[f32], sum: f32, out: &mut [u16]) {
    for (acc, out) in acc.iter().zip(out) {
        let value = acc / sum;
        *out = to_bf16_bits(if value.abs() < f32::MIN_POSITIVE {
            0.0
        } else {
            value
        });
    }
}
