//! One call of attention, divided into tasks: a key/value head of one sequence and a tile of its queries, or only
//! a part of its positions, or of its query heads.

use crate::kv_cache::GroupedLayout;
use std::ops::Range;

use super::super::Simd;
use super::super::kv_cache::{GROUP, KvLayer};
use super::super::lines::Lines;
use super::super::math::to_bf16_bits;
use super::super::simd::for_each_simd;
use super::copies::Copies;
use super::groups::{Groups, Lanes, group, groups_in_place, whole_group};
use super::int8::{stored_group, widen_group};
use super::latent::group_of_keys;
use super::parts::{self, PART};
use super::queries::Queries;
use super::selected::{Selected, SpanTiles};
use super::softmax::{RowBias, RowState};
use super::task::Task;
use super::{
    AttentionKernel, AttentionTile, MAX_SCORED_ROWS, Operands, Scales, TILE, TILE_GROUPS, kernel,
};
use inflight_device::{AttentionParams, HeadBiases, KvBatch, KvLayout, KvSpan};
use inflight_threads::DisjointSlice;

/// Query rows per task, roughly: a task has whole tokens.
const TASK_ROWS: usize = 96;

/// The fewest query heads of a group, which all read the same keys.
const MIN_GROUP_HEADS: usize = 4;

/// The positions of a task that is not split.
const ALL: Range<usize> = 0..usize::MAX;

/// The most elements of the totals of all split tasks.
pub(super) const MAX_TOTALS_LEN: usize = 1 << 20;

/// Scratch memory of one thread.
#[derive(Default)]
pub(crate) struct AttentionScratch {
    queries: Queries,
    seen: Vec<u64>,
    /// One for each row, if there are linear biases.
    biases: Vec<RowBias>,
    scores: Lines<f32>,
    probabilities: Lines<u16>,
    state: Vec<RowState>,
    acc: Lines<f32>,
    /// The totals of earlier parts, [`parts::row_len`] per row.
    totals: Vec<f32>,
    /// The totals of one part.
    part_totals: Vec<f32>,
    copies: Copies,
}

/// The positions that queries meet, of those that they see.
#[derive(Clone, Copy)]
enum Met {
    All,
    Sinks,
    Others,
}

/// The operands of a call, and its division into tasks.
pub(super) struct AttentionCall<'a> {
    simd: Simd,
    kernel: AttentionKernel,
    operands: Operands,
    params: &'a AttentionParams,
    biases: HeadBiases<'a>,
    batch: &'a KvBatch<'a>,
    cache: &'a KvLayer<'a>,
    q: &'a [u16],
    /// The queries for the sinks, if they are others.
    sink_q: Option<&'a [u16]>,
    selected: Option<Selected<'a>>,
    /// The number of query tiles before each span.
    tile_starts: &'a [usize],
    num_tiles: usize,
    /// Groups of query heads, each with a key/value head.
    num_groups: usize,
    /// Tokens per query tile.
    tile_tokens: usize,
    /// Parts per task, including empty ones. One if tasks are not split.
    num_parts: usize,
    /// Elements of the totals of a part.
    totals_len: usize,
}

impl<'a> AttentionCall<'a> {
    /// Divides the batch into tasks for some threads. `tile_starts` is scratch memory.
    pub fn new(
        (simd, num_threads): (Simd, usize),
        (params, biases): (&'a AttentionParams, HeadBiases<'a>),
        batch: &'a KvBatch<'a>,
        cache: &'a KvLayer<'a>,
        (q, sink_q, selected): (&'a [u16], Option<&'a [u16]>, Option<Selected<'a>>),
        tile_starts: &'a mut Vec<usize>,
    ) -> Self {
        let shape = params.shape;
        let tile_tokens = (TASK_ROWS / (shape.num_q_heads / shape.num_kv_heads)).max(1);
        tile_starts.clear();
        let mut num_tiles = 0;
        for span in batch.spans() {
            tile_starts.push(num_tiles);
            num_tiles += SpanTiles::new(span, selected, tile_tokens).len();
        }
        let (kernel, operands) = kernel(simd, cache.dtype());
        let mut operation = Self {
            simd,
            kernel,
            operands,
            params,
            biases,
            batch,
            cache,
            q,
            sink_q,
            selected,
            tile_starts,
            num_tiles,
            num_groups: shape.num_kv_heads,
            tile_tokens,
            num_parts: 1,
            totals_len: 0,
        };
        operation.split_heads(num_threads);
        operation.split(num_threads);
        operation
    }

    /// Divides the query heads of the only key head among tasks where threads would have none. Other caches have more
    /// key heads, and reading one twice would cost more.
    fn split_heads(&mut self, num_threads: usize) {
        if self.cache.layout().stores_values() {
            return;
        }
        let num_heads = self.heads();
        let numbers = 1..=num_heads / MIN_GROUP_HEADS;
        let mut numbers = numbers.filter(|num| num_heads.is_multiple_of(*num));
        let enough = numbers
            .clone()
            .find(|num| num * self.num_tiles >= num_threads);
        self.num_groups *= enough.or_else(|| numbers.next_back()).unwrap_or(1);
    }

    /// Splits the tasks if the longest one is more than half of each thread's work.
    fn split(&mut self, num_threads: usize) {
        let (mut total, mut longest, mut max_kv_len, mut max_tokens) = (0, 0, 0, 0);
        for span in self.batch.spans() {
            let (num_tokens, kv_len) = (span.tokens.len(), span.kv_len as usize);
            let kv_len = self
                .selected
                .map_or(kv_len, |it| kv_len.min(it.num_selected));
            let window = self.params.window.map_or(kv_len, |w| w.get() as usize);
            let num_seen = kv_len.min(window + num_tokens + self.params.num_sinks as usize);
            total += self.tiles_of(span).len() * num_seen;
            longest = num_seen.max(longest);
            max_kv_len = kv_len.max(max_kv_len);
            max_tokens = num_tokens.max(max_tokens);
        }
        total *= self.num_groups;
        if num_threads == 1 || longest <= PART || longest * 2 * num_threads <= total {
            return;
        }
        let totals_len = self.totals_len_of(max_tokens.min(self.tile_tokens));
        let num_parts = max_kv_len.div_ceil(PART);
        if self.num_tasks() * num_parts * totals_len <= MAX_TOTALS_LEN {
            (self.num_parts, self.totals_len) = (num_parts, totals_len);
        }
    }

    /// The number of whole tasks.
    pub fn num_tasks(&self) -> usize {
        self.num_tiles * self.num_groups
    }

    /// The number of parts of all tasks, if they are split.
    pub fn num_parts(&self) -> Option<usize> {
        (self.num_parts > 1).then(|| self.num_tasks() * self.num_parts)
    }

    /// The tiles of a head are consecutive, so that its keys and values stay in the cache. The last one comes first,
    /// because it sees most.
    fn task(&self, index: usize) -> Option<Task<'a>> {
        if index >= self.num_tasks() {
            return None;
        }
        let num_groups = self.num_groups;
        let tile_starts = self.tile_starts;
        let span_index = tile_starts.partition_point(|&start| start * num_groups <= index) - 1;
        let span: &KvSpan = &self.batch.spans()[span_index];
        let tiles = self.tiles_of(span);
        let num_tiles = tiles.len();
        let index = index - tile_starts[span_index] * num_groups;
        let (group, tile) = (index / num_tiles, num_tiles - 1 - index % num_tiles);
        let (tokens, is_dense) = tiles.tokens(tile);
        let first_token = span.tokens.start as usize + tokens.start;
        let selected = self.selected.filter(|_| !is_dense);
        let selected = selected.map(|selected| selected.row(first_token));
        let (kv_len, first_position) = match selected {
            Some(positions) => (positions.len(), positions.len() - 1),
            None => {
                let kv_len = span.kv_len as usize;
                (kv_len, kv_len - span.tokens.len() + tokens.start)
            }
        };
        Some(Task {
            kv_len,
            block_table: self.batch.block_table(span, self.cache.layer_group()),
            group,
            head: group / (num_groups / self.params.shape.num_kv_heads),
            first_token,
            first_position,
            num_tokens: tokens.len(),
            selected,
        })
    }

    fn tiles_of(&self, span: &KvSpan) -> SpanTiles {
        SpanTiles::new(span, self.selected, self.tile_tokens)
    }

    /// The positions that a token of the task sees, besides the sinks.
    fn sight(&self, task: &Task<'_>, token: usize) -> Range<usize> {
        let position = task.first_position + token;
        let first = self.params.first_seen(position);
        let end = match (self.params.is_bidirectional, self.params.window) {
            (false, _) => position + 1 + self.batch.num_seen_ahead(task.first_token + token),
            (true, None) => task.kv_len,
            (true, Some(window)) => task.kv_len.min(position + window.get() as usize),
        };
        first..end
    }

    /// The end of the positions that any query of the task sees.
    fn end_of_task(&self, task: &Task<'_>) -> usize {
        self.sight(task, task.num_tokens - 1).end
    }

    /// A mask of the positions of the tile at `start` that a token of the task meets.
    fn seen(&self, met: Met, task: &Task<'_>, token: usize, start: usize) -> u64 {
        let below = |end: usize| match end.saturating_sub(start) {
            len @ 0..TILE => (1_u64 << len) - 1,
            _ => u64::MAX,
        };
        let sinks = below(self.params.num_sinks as usize);
        let sight = self.sight(task, token);
        let window = !below(sight.start);
        let among = match met {
            Met::All => sinks | window,
            Met::Sinks => sinks,
            Met::Others => window & !sinks,
        };
        below(sight.end) & among
    }

    /// The starts of the tiles within `positions` of which any query of the task meets a position: first those of the
    /// sinks, then those of the window. `positions` start at a tile.
    fn tiles(
        &self,
        met: Met,
        task: &Task<'_>,
        positions: &Range<usize>,
    ) -> impl Iterator<Item = usize> {
        let among = |range: Range<usize>| {
            let (start, end) = (
                range.start.max(positions.start),
                range.end.min(positions.end),
            );
            (start..end).step_by(TILE)
        };
        let num_sinks = self.params.num_sinks as usize;
        let end = self.end_of_task(task);
        let first = self.sight(task, 0).start;
        let first = match met {
            Met::All => first,
            Met::Sinks => end,
            Met::Others => first.max(num_sinks),
        };
        let first = first / TILE * TILE;
        let sinks = match met {
            Met::All => 0..first.min(num_sinks),
            Met::Sinks => 0..end.min(num_sinks),
            Met::Others => 0..0,
        };
        let window = match met {
            Met::Sinks => 0..0,
            Met::All | Met::Others => first..end,
        };
        among(sinks).chain(among(window))
    }

    /// Computes one task, and writes its rows of `out`.
    pub fn attend(&self, index: usize, scratch: &mut AttentionScratch, out: &DisjointSlice<u16>) {
        let Some(task) = self.task(index) else { return };
        let next = self.task(index + 1).map(|task| (task, ALL));
        let mut totals = std::mem::take(&mut scratch.totals);
        totals.resize(self.totals_len_of(task.num_tokens), 0.0);
        self.walk((&task, ALL), next, scratch, &mut totals);
        self.write(&task, &totals, out);
        scratch.totals = totals;
    }

    /// Computes one part of a split task, and writes the totals of its rows to its piece of `totals`.
    pub fn attend_part(
        &self,
        index: usize,
        scratch: &mut AttentionScratch,
        totals: &DisjointSlice<f32>,
    ) {
        let Some((task, positions)) = self.part(index) else {
            return;
        };
        // SAFETY: each part has its own piece.
        let totals = unsafe { totals.slice(index * self.totals_len, self.totals_len) };
        let totals = &mut totals[..self.totals_len_of(task.num_tokens)];
        self.walk((&task, positions), self.part(index + 1), scratch, totals);
    }

    /// Combines the parts of a task, and writes its rows of `out`.
    pub fn join(&self, index: usize, totals: &DisjointSlice<f32>, out: &DisjointSlice<u16>) {
        let Some(task) = self.task(index) else { return };
        let len = self.totals_len;
        // SAFETY: each task uses only the pieces of its own parts.
        let totals = unsafe { totals.slice(index * self.num_parts * len, self.num_parts * len) };
        let (first, later) = totals.split_at_mut(len);
        let len_of_rows = self.totals_len_of(task.num_tokens);
        for later in later.chunks_exact(len) {
            self.add_totals(&mut first[..len_of_rows], later);
        }
        self.write(&task, &first[..len_of_rows], out);
    }

    /// A part of a split task: the task, and the positions of the part.
    fn part(&self, index: usize) -> Option<(Task<'a>, Range<usize>)> {
        let part = index % self.num_parts;
        let task = self.task(index / self.num_parts)?;
        Some((task, part * PART..(part + 1) * PART))
    }

    /// Elements of the totals for some tokens of one group of heads.
    fn totals_len_of(&self, num_tokens: usize) -> usize {
        num_tokens * self.heads() * parts::row_len(self.cache.layout())
    }

    /// Query heads per group.
    fn heads(&self) -> usize {
        self.params.shape.num_q_heads / self.num_groups
    }

    /// The start and length of the rows of a token in queries, or in results, by the elements of a row.
    fn place(&self, task: &Task<'_>, token: usize, row_len: usize) -> (usize, usize) {
        let num_heads = self.heads();
        let start = (task.first_token + token) * self.params.shape.num_q_heads;
        let start = start + task.group * num_heads;
        (start * row_len, num_heads * row_len)
    }

    /// Adds the tiles within some positions to the totals of the rows of a task. `next_task` is usually this thread's
    /// next task: its first tile is prefetched during the last one of this task.
    fn walk(
        &self,
        (task, positions): (&Task<'_>, Range<usize>),
        next_task: Option<(Task<'_>, Range<usize>)>,
        scratch: &mut AttentionScratch,
        totals: &mut [f32],
    ) {
        let row_len = parts::row_len(self.cache.layout());
        parts::clear(totals, row_len);
        let Some(sink_q) = self.sink_q else {
            let of_all = (Met::All, self.q);
            return self.meet(of_all, (task, &positions), next_task, scratch, totals);
        };
        // A part that has sinks and others is summed by itself, as where another thread computes it.
        let mut part_totals = std::mem::take(&mut scratch.part_totals);
        part_totals.resize(totals.len(), 0.0);
        let end = positions.end.min(self.end_of_task(task));
        for start in (positions.start..end).step_by(PART) {
            let part = start..start + PART;
            parts::clear(&mut part_totals, row_len);
            for (met, q) in [(Met::Sinks, sink_q), (Met::Others, self.q)] {
                self.meet((met, q), (task, &part), None, scratch, &mut part_totals);
            }
            self.add_totals(totals, &part_totals);
        }
        scratch.part_totals = part_totals;
    }

    /// Adds the totals of later positions to the totals of the rows.
    fn add_totals(&self, totals: &mut [f32], later: &[f32]) {
        let row_len = parts::row_len(self.cache.layout());
        let rows = totals.chunks_exact_mut(row_len);
        for (row, later) in rows.zip(later.chunks_exact(row_len)) {
            for_each_simd!(self.simd, parts::add, (row: &mut [f32], later: &[f32]));
        }
    }

    /// The same for the positions that these queries meet.
    fn meet(
        &self,
        (met, q): (Met, &[u16]),
        (task, positions): (&Task<'_>, &Range<usize>),
        next_task: Option<(Task<'_>, Range<usize>)>,
        scratch: &mut AttentionScratch,
        totals: &mut [f32],
    ) {
        let mut tiles = self.tiles(met, task, positions);
        let Some(first) = tiles.next() else { return };
        scratch.queries.clear();
        for token in 0..task.num_tokens {
            let head_dim = self.params.shape.head_dim;
            let (start, len) = self.place(task, token, head_dim);
            let queries = &mut scratch.queries;
            queries.add(self.simd, self.operands, &q[start..][..len], head_dim);
        }
        let num_rows = task.num_tokens * self.heads();
        scratch.prepare(num_rows, self.cache.layout());
        if self.biases.slopes.is_some() {
            scratch.biases.resize(num_rows, RowBias::NONE);
        }

        let mut next = Some(first);
        let mut groups = next.map(|start| groups_in_place(self.cache, task, start));
        while let (Some(start), Some(here)) = (next, groups) {
            next = tiles.next();
            groups = next.map(|start| groups_in_place(self.cache, task, start));
            let ahead = groups.or_else(|| {
                let (next, positions) = next_task.as_ref()?;
                let start = self.tiles(met, next, positions).next()?;
                Some(groups_in_place(self.cache, next, start))
            });
            let ahead = ahead.unwrap_or_default();
            self.attend_tile((met, task), start, here, ahead, scratch);
            if next.is_none_or(|next| next / PART != start / PART) {
                self.end_part(scratch, totals);
                if next.is_some() {
                    scratch.empty_sums();
                }
            }
        }
    }

    /// Adds the sums of a part to the totals of the rows.
    fn end_part(&self, scratch: &AttentionScratch, totals: &mut [f32]) {
        let layout = self.cache.layout();
        let rows = totals.chunks_exact_mut(parts::row_len(layout));
        let accs = scratch.acc.chunks_exact(layout.padded_dim());
        for (index, ((row, values), state)) in rows.zip(accs).zip(&scratch.state).enumerate() {
            let q_scale = scratch.queries.scales.get(index).copied().unwrap_or(1.0);
            let sum = state.sum();
            let max = match state.max {
                // Nothing was seen; the scale may be NaN.
                f32::NEG_INFINITY => f32::NEG_INFINITY,
                max => max * (self.params.scale * q_scale),
            };
            for_each_simd!(self.simd, parts::fold, (row: &mut [f32], max: f32, sum: f32, values: &[f32]));
        }
    }

    /// Writes the rows of a task.
    fn write(&self, task: &Task<'_>, totals: &[f32], out: &DisjointSlice<u16>) {
        let value_dim = self.cache.layout().value_dim();
        let mut rows = totals.chunks_exact(parts::row_len(self.cache.layout()));
        for token in 0..task.num_tokens {
            let (start, len) = self.place(task, token, value_dim);
            // SAFETY: no other task has these tokens and this head.
            let out = unsafe { out.slice(start, len) };
            let heads = task.group * self.heads()..;
            for ((out, row), head) in out.chunks_exact_mut(value_dim).zip(&mut rows).zip(heads) {
                let sink_logit = self.biases.sink_logits.map(|logits| logits[head]);
                let (scale, sum, values) = parts::result(row, sink_logit);
                for_each_simd!(self.simd, finish, (values: &[f32], scale: f32, sum: f32, out: &mut [u16]));
            }
        }
    }

    /// Adds the 64 positions starting at `start` to the sums of the rows that see any of them. `here` are their groups,
    /// `ahead` those of the next tile.
    fn attend_tile(
        &self,
        (met, task): (Met, &Task<'_>),
        start: usize,
        here: Groups<'_>,
        ahead: Groups<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let layout = *self.cache.layout();
        let shape = self.params.shape;
        let heads = self.heads();
        // These rows are consecutive, because positions ascend.
        let mut rows = 0..0;
        let mut seen_by_any = 0;
        for token in 0..task.num_tokens {
            let seen = self.seen(met, task, token, start);
            if seen != 0 {
                let first_row = if rows.is_empty() {
                    token * heads
                } else {
                    rows.start
                };
                rows = first_row..(token + 1) * heads;
                scratch.seen[token * heads..][..heads].fill(seen);
                seen_by_any |= seen;
                if let Some(slopes) = self.biases.slopes {
                    let distance = start as f32 - (task.first_position + token) as f32;
                    let slopes = &slopes[task.group * heads..][..heads];
                    let biases = &mut scratch.biases[token * heads..][..heads];
                    for (bias, slope) in biases.iter_mut().zip(slopes) {
                        let slope = slope / self.params.scale;
                        *bias = RowBias { slope, distance };
                    }
                }
            }
        }
        if rows.is_empty() {
            return;
        }
        let end = self.end_of_task(task);
        let queries = &scratch.queries;
        let q_start = rows.start * shape.head_dim;
        let mut tile = AttentionTile {
            // The scratch has only the operands that this kernel uses.
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
            soft_cap: self.params.soft_cap,
            scales: &Scales::ONE,
            biases: match scratch.biases.get(rows.start..) {
                Some(biases) if self.biases.slopes.is_some() => biases.as_ptr(),
                _ => std::ptr::null(),
            },
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
        // SAFETY: the scratch has that many rows, the pointers of the groups are valid, and the machine
        // supports the kernel.
        unsafe { (self.kernel)(&tile) };
    }

    /// Sets the pointers of a tile to its groups, in place or copied, and to those of the next tile.
    fn find_groups(
        &self,
        (task, start): (&Task<'_>, usize),
        seen: u64,
        (here, ahead): (Groups<'_>, Groups<'_>),
        copies: &mut Copies,
        tile: &mut AttentionTile,
    ) {
        let (rooms, gathered) = copies.rooms(&tile.layout);
        for (i, room) in rooms.take(tile.num_groups).enumerate() {
            let lanes = Lanes {
                start: start + i * GROUP,
                seen: (seen >> (i * GROUP)) as u16,
                in_place: here[i],
            };
            let group = match self.operands {
                _ if !tile.layout.stores_values() => {
                    group_of_keys(self.simd, self.cache, task, lanes, room)
                }
                Operands::Integers => stored_group(self.cache, task, lanes, room),
                Operands::Widened => {
                    widen_group(self.simd, self.cache, task, lanes, ahead[i], gathered, room)
                }
                Operands::Bf16 => whole_group(self.cache, task, lanes, room),
                Operands::WideQueries => group(self.cache, task, lanes, room),
            };
            tile.keys[i] = group.keys.as_ptr();
            tile.values[i] = group.values.as_ptr();
            tile.stored_scales[i] = group.scales.as_ptr();
        }
        // Widening has prefetched the next tile already.
        let is_widened = self.operands == Operands::Widened;
        if is_widened {
            tile.scales = copies.scales();
        }
        for (i, ahead) in ahead.into_iter().enumerate() {
            (tile.keys_ahead[i], tile.values_ahead[i]) = match ahead.filter(|_| !is_widened) {
                Some(ahead) if ahead.values.is_empty() => (ahead.keys.as_ptr(), tile.values[0]),
                Some(ahead) => (ahead.keys.as_ptr(), ahead.values.as_ptr()),
                None => (tile.keys[0], tile.values[0]),
            };
        }
    }
}

impl AttentionScratch {
    /// Makes room for a task, and resets the sums. The queries have been added before.
    fn prepare(&mut self, rows: usize, layout: &KvLayout) {
        self.scores.resize(MAX_SCORED_ROWS * TILE);
        self.probabilities.resize(MAX_SCORED_ROWS * TILE);
        self.seen.resize(rows, 0);
        self.state.resize(rows, RowState::EMPTY);
        self.acc.resize(rows * layout.padded_dim());
        self.empty_sums();
        self.copies.prepare(layout);
    }

    /// Resets the sums of all rows for the next part.
    fn empty_sums(&mut self) {
        self.state.fill(RowState::EMPTY);
        self.acc.fill(0.0);
    }
}

/// Scales, and divides by the sum. Results below the normal range of bf16 become positive zero, because they and the
/// sign of a zero could depend on how many zero products were added.
#[inline(always)]
fn finish(acc: &[f32], scale: f32, sum: f32, out: &mut [u16]) {
    for (acc, out) in acc.iter().zip(out) {
        let value = acc * scale / sum;
        *out = to_bf16_bits(if value.abs() < f32::MIN_POSITIVE {
            0.0
        } else {
            value
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::KvCache;
    use super::*;
    use inflight_base::{BlockId, BlockSize};
    use inflight_device::{HeadShape, KvDtype, KvLayouts, KvValues, LayerGroups};

    /// Parts of all tasks of sequences with these new tokens and lengths, two key/value heads.
    fn num_parts(num_threads: usize, window: Option<u32>, work: &[(u32, u32)]) -> Option<usize> {
        let shape = HeadShape {
            num_q_heads: 4,
            num_kv_heads: 2,
            head_dim: 8,
            value_dim: 8,
        };
        let layout = KvLayout {
            num_kv_heads: 2,
            head_dim: 8,
            values: KvValues::OfTheirOwn(8),
            indexer_dim: 0,
            block_size: BlockSize::new(4096).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        let mut num_tokens = 0;
        let spans: Vec<_> = (0..)
            .zip(work)
            .map(|(index, &(new, kv_len))| {
                num_tokens += new;
                KvSpan {
                    tokens: num_tokens - new..num_tokens,
                    kv_len,
                    block_table: index..index + 1,
                }
            })
            .collect();
        let tables: Vec<_> = (0..work.len() as u32).map(BlockId).collect();
        let mut cache = KvCache::new(KvLayouts::alike(layout, 1), LayerGroups::one(1), work.len())
            .expect("memory");
        let cache = &mut cache;
        let params = AttentionParams {
            shape,
            scale: 1.0,
            soft_cap: None,
            window: window.and_then(std::num::NonZeroU32::new),
            chunk: None,
            is_bidirectional: false,
            num_sinks: 0,
            shifts_sinks: false,
        };
        let batch = cache.batch(&spans, &tables);
        let layer = cache.layer(0);
        let machine = (Simd::Portable, num_threads);
        AttentionCall::new(
            machine,
            (&params, HeadBiases::NONE),
            &batch,
            &layer,
            (&[], None, None),
            &mut Vec::new(),
        )
        .num_parts()
    }

    #[test]
    fn tasks_are_split_where_a_long_one_would_leave_threads_without_work() {
        assert_eq!(num_parts(4, None, &[(1, 3000)]), Some(2 * 3));
        // As many tasks as threads, but too few to balance them.
        assert_eq!(num_parts(4, None, &[(1, 3000), (1, 3000)]), Some(4 * 3));
        assert_eq!(
            num_parts(4, None, &[(1, 3000), (8, 9), (1, 9)]),
            Some(6 * 3)
        );
        assert_eq!(num_parts(1, None, &[(1, 3000)]), None);
        assert_eq!(num_parts(2, None, &[(1, 3000), (1, 3000)]), None);
        // No sequence is long.
        assert_eq!(num_parts(64, None, &[(1, 1024)]), None);
        assert_eq!(num_parts(64, Some(1000), &[(1, 3000)]), None);
        // A context has enough tasks.
        assert_eq!(num_parts(4, None, &[(2000, 3000)]), None);
    }
}
