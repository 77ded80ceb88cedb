//! Sparse attention by an indexer on CPU: see [`IndexerShape`].
//!
//! ```text
//! keys        of the tokens, stored beside the latents
//! scores      [rows][positions]               a task has a part of the positions of a row
//! positions   [tokens][max_selected]          a task has a row
//! ```
//!
//! Rows are the tokens that see more than `max_selected` positions, some at a time, so that scratch memory is bounded.
//! A score depends on nothing but its query and its key, and is summed in the order of elements and heads.

use half::bf16;

use super::attention::num_dense;
use super::elementwise::{mean_and_scale, round_to_bf16};
use super::kv_cache::{GROUP, GroupedLayout, KvLayer};
use super::math::{from_bf16_bits, mul_add, to_bf16_bits};
use super::rope::{TASK_TOKENS, place, rotate};
use super::rows::{Rows, first_mut};
use super::simd::for_each_simd;
use super::step::CpuStep;
use super::{Cpu, KvCache};
use inflight_base::LoadError;
use inflight_device::{
    GroupBlocks, IndexerOps, IndexerParams, IndexerShape, KvBatch, LatentParams,
};
use inflight_threads::DisjointSlice;

/// Scores of some rows, of one at least.
const MAX_SCORES: usize = 8 << 20;

/// Positions of a task, roughly: it has whole blocks.
const PART: usize = 1024;

/// Heads whose sums are in registers.
const HEADS: usize = 4;

/// Bits of a digit of a rank.
const DIGIT_BITS: u32 = 8;
/// Digits of a rank.
const DIGITS: u32 = u32::BITS / DIGIT_BITS;

/// Sparse attention by an indexer, on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuIndexer;

/// The positions that queries see.
pub struct CpuSelection {
    /// `[max_rows, max_selected]`, each row in order. Of a token that sees all positions up to its own, the row is
    /// unspecified.
    positions: Rows<u32>,
}

/// Scratch memory.
#[derive(Default)]
pub(super) struct IndexerScratch {
    rows: Vec<ScoredRow>,
    /// `[rows][positions]`.
    scores: Vec<f32>,
}

/// Scratch memory of one thread.
#[derive(Default)]
pub(super) struct ScoreScratch {
    head: Vec<f32>,
    rounded: Vec<u16>,
    queries: Vec<f32>,
}

/// A token that sees some of the positions up to its own.
struct ScoredRow {
    token: usize,
    position: usize,
}

impl IndexerScratch {
    /// Takes all scores, so that a step allocates nothing when a sequence grows.
    fn reserve(&mut self) {
        if self.scores.is_empty() {
            // Zeros would take no memory until they are written.
            self.scores = vec![f32::NAN; MAX_SCORES];
        }
    }
}

impl IndexerOps<Cpu> for CpuIndexer {
    type Selection = CpuSelection;

    fn num_scratch_bytes(self) -> usize {
        MAX_SCORES * size_of::<f32>()
    }

    fn alloc_selection(
        self,
        cpu: &mut Cpu,
        max_rows: usize,
        max_selected: usize,
    ) -> Result<CpuSelection, LoadError> {
        cpu.indexer.reserve();
        CpuSelection::new(max_rows, max_selected)
    }

    fn store_keys(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        params: IndexerParams<'_, Cpu>,
        keys: &Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        let keys = keys.first(step.batch.num_tokens());
        cpu.store_indexer_keys(keys, params, &step.batch, cache, layer);
    }

    fn select(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        params: IndexerParams<'_, Cpu>,
        q: &Rows<f32>,
        head_weights: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
        selection: &mut CpuSelection,
    ) {
        let num_rows = step.batch.num_tokens();
        let queries = (q.first(num_rows), head_weights.first(num_rows));
        cpu.select_positions(queries, params, &step.batch, cache, layer, selection);
    }

    fn attend(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        params: &LatentParams<'_, Cpu>,
        q: &Rows<f32>,
        selection: &CpuSelection,
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let num_rows = step.batch.num_tokens();
        let (q, out) = (q.first(num_rows), out.first_mut(num_rows));
        cpu.sparse_latent_attention(q, params, selection, &step.batch, cache, layer, out);
    }
}

impl CpuSelection {
    /// Reserves memory for `max_rows` queries, each of which sees up to `max_selected` positions.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn new(max_rows: usize, max_selected: usize) -> Result<Self, LoadError> {
        Ok(Self {
            positions: Rows::new(max_rows, max_selected)?,
        })
    }

    /// The most positions that a query sees.
    pub fn max_selected(&self) -> usize {
        self.positions.width()
    }

    /// The rows of the first `num_tokens` tokens.
    pub fn positions(&self, num_tokens: usize) -> &[u32] {
        self.positions.first(num_tokens)
    }
}

impl Cpu {
    /// Normalises and rotates keys of an indexer, and stores them in a layer of the cache. `keys` is `[m, head_dim]`.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree, or a position is beyond the table.
    pub fn store_indexer_keys(
        &mut self,
        keys: &[f32],
        of: IndexerParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        let (shape, simd) = (of.shape, self.simd);
        let width = shape.head_dim;
        check(of, batch, cache, layer);
        assert_eq!(keys.len(), batch.num_tokens() * width, "keys of all tokens");
        let block_size = cache.layout(layer).positions_per_block();
        let cache = &cache.layer_mut(layer);
        let num_tasks = batch.num_tokens().div_ceil(TASK_TOKENS);
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let first = task * TASK_TOKENS;
                for token in first..batch.num_tokens().min(first + TASK_TOKENS) {
                    let place = place(batch, cache.layer_group(), token, of.angles, block_size);
                    let (key, angles) = (&keys[token * width..][..width], place.angles);
                    let norm = (of.key_norm.map(|vector| &vector[..]), of.norm_eps);
                    let scratch = &mut worker.indexer;
                    for_each_simd!(simd, make_key, (
                        key: &[f32],
                        shape: IndexerShape,
                        norm: ([&[f32]; 2], f32),
                        angles: &[f32],
                        scratch: &mut ScoreScratch,
                    ));
                    cache.store_indexer_key((place.block, place.offset), &worker.indexer.rounded);
                }
            });
    }

    /// Selects the positions that tokens see, whose keys are in the cache. `q` has the queries, `[m, num_heads *
    /// head_dim]`, not rotated yet, and `head_weights` their weights, `[m, num_heads]`.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree, or a position is beyond the table.
    pub fn select_positions(
        &mut self,
        (q, head_weights): (&[f32], &[f32]),
        of: IndexerParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        selection: &mut CpuSelection,
    ) {
        let (shape, num_tokens) = (of.shape, batch.num_tokens());
        check(of, batch, cache, layer);
        assert_eq!(q.len(), num_tokens * shape.q_len(), "q is [m, q_len]");
        assert_eq!(
            head_weights.len(),
            num_tokens * shape.num_heads,
            "a weight for each head"
        );
        assert_eq!(
            selection.max_selected(),
            shape.max_selected,
            "its positions"
        );
        let mut scratch = std::mem::take(&mut self.indexer);
        scratch.reserve();
        let IndexerScratch { rows, scores } = &mut scratch;
        scored_rows(batch, shape.max_selected, rows);
        let stride = rows.iter().map(|row| row.position + 1).max().unwrap_or(0);
        let max_rows = MAX_SCORES.checked_div(stride);
        for rows in rows.chunks(max_rows.unwrap_or(0).max(1)) {
            let scores = first_mut(scores, rows.len() * stride);
            self.score_rows((q, head_weights), of, batch, cache, layer, rows, scores);
            let positions = DisjointSlice::new(selection.positions.all_mut());
            let (scores, num_selected) = (&*scores, shape.max_selected);
            self.pool
                .for_each(&mut self.workers, rows.len(), |_, index| {
                    let ScoredRow { token, position } = rows[index];
                    let scores = &scores[index * stride..][..position + 1];
                    // SAFETY: each token belongs to one task.
                    let out = unsafe { positions.slice(token * num_selected, num_selected) };
                    choose_largest(scores, out);
                });
        }
        self.indexer = scratch;
    }

    /// Scores all positions that each row may see: `scores` is `[rows, positions]`.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn score_rows(
        &mut self,
        (q, head_weights): (&[f32], &[f32]),
        of: IndexerParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        rows: &[ScoredRow],
        scores: &mut [f32],
    ) {
        let (shape, simd) = (of.shape, self.simd);
        let stride = scores.len() / rows.len();
        let block_size = cache.layout(layer).positions_per_block();
        let part_len = PART.div_ceil(block_size) * block_size;
        let num_parts = stride.div_ceil(part_len);
        let cache = &cache.layer(layer);
        let call = &ScoreCall {
            cache,
            block_size,
            fuses: simd.fuses(),
        };
        let scores = DisjointSlice::new(scores);
        self.pool
            .for_each(&mut self.workers, rows.len() * num_parts, |worker, task| {
                let (index, start) = (task / num_parts, task % num_parts * part_len);
                let ScoredRow { token, position } = rows[index];
                let Some(len @ 1..) = (position + 1).checked_sub(start) else {
                    return;
                };
                // SAFETY: each task has its own part of a row.
                let out = unsafe { scores.slice(index * stride + start, len.min(part_len)) };
                let (span, _) = batch.place(token);
                let table = batch.block_table(span, cache.layer_group());
                let q = &q[token * shape.q_len()..][..shape.q_len()];
                let weights = &head_weights[token * shape.num_heads..][..shape.num_heads];
                let (angles, scratch) = (of.angles.row(position), &mut worker.indexer);
                for_each_simd!(simd, order_queries, (
                    q: &[f32],
                    shape: IndexerShape,
                    angles: &[f32],
                    scratch: &mut ScoreScratch,
                ));
                let queries = &scratch.queries[..];
                for_each_simd!(simd, score_part, (
                    call: &ScoreCall<'_>,
                    table: GroupBlocks<'_>,
                    start: usize,
                    queries: &[f32],
                    weights: &[f32],
                    out: &mut [f32],
                ));
            });
    }
}

fn check(of: IndexerParams<'_, Cpu>, batch: &KvBatch<'_>, cache: &KvCache, layer: usize) {
    let shape = of.shape;
    assert_eq!(
        cache.layout(layer).indexer_dim,
        shape.head_dim,
        "cache's shape"
    );
    let lens = of.key_norm.map(Vec::len);
    assert_eq!(lens, [shape.head_dim; 2], "norm is [head_dim]");
    assert_eq!(
        2 * of.angles.half_dim(),
        shape.rotary_dim,
        "one angle per pair"
    );
    assert!(
        shape.rotary_dim <= shape.head_dim,
        "rotated elements of a head"
    );
    assert!(cache.fits(batch), "batch of this cache");
}

/// The tokens that see more than `max_selected` positions.
fn scored_rows(batch: &KvBatch<'_>, max_selected: usize, rows: &mut Vec<ScoredRow>) {
    rows.clear();
    for span in batch.spans() {
        let first = num_dense(span, max_selected);
        let before = span.kv_len as usize - span.tokens.len();
        rows.extend((first..span.tokens.len()).map(|place| ScoredRow {
            token: span.tokens.start as usize + place,
            position: before + place,
        }));
    }
}

/// The operands that all parts of a call share.
struct ScoreCall<'a> {
    cache: &'a KvLayer<'a>,
    block_size: usize,
    /// Whether the instruction set multiplies and adds in one instruction.
    fuses: bool,
}

/// The key of a token: normalised, its first elements rotated.
#[inline(always)]
fn make_key(
    key: &[f32],
    shape: IndexerShape,
    ([weight, bias], eps): ([&[f32]; 2], f32),
    angles: &[f32],
    scratch: &mut ScoreScratch,
) {
    let ScoreScratch { head, rounded, .. } = scratch;
    let (mean, scale) = mean_and_scale(key, eps);
    head.clear();
    let elements = key.iter().zip(weight).zip(bias);
    head.extend(elements.map(|((x, weight), bias)| (x - mean) * scale * weight + bias));
    rotate_start(head, shape, angles);
    rounded.resize(head.len(), 0);
    round_to_bf16(head, rounded);
}

/// Rotates and rounds the queries of a token, and orders them for [`score_group`]: `[tiles of heads][pairs of
/// elements][HEADS][2]`. Heads that the last tile lacks are 0.
#[inline(always)]
fn order_queries(q: &[f32], shape: IndexerShape, angles: &[f32], scratch: &mut ScoreScratch) {
    let ScoreScratch { head, queries, .. } = scratch;
    let tile_len = HEADS * shape.head_dim;
    queries.clear();
    queries.resize(shape.num_heads.div_ceil(HEADS) * tile_len, 0.0);
    for (index, q) in q.chunks_exact(shape.head_dim).enumerate() {
        head.clear();
        head.extend_from_slice(q);
        rotate_start(head, shape, angles);
        let tile = &mut queries[index / HEADS * tile_len..][..tile_len];
        let pairs = tile.chunks_exact_mut(2 * HEADS);
        for (pair, out) in head.as_chunks::<2>().0.iter().zip(pairs) {
            let pair = pair.map(|x| from_bf16_bits(to_bf16_bits(x)));
            out[index % HEADS * 2..][..2].copy_from_slice(&pair);
        }
    }
}

/// Rotates the first elements of a head.
#[inline(always)]
fn rotate_start(head: &mut [f32], shape: IndexerShape, angles: &[f32]) {
    let rotated = &mut head[..shape.rotary_dim];
    if !shape.is_interleaved {
        return rotate(rotated, angles);
    }
    let (cos, sin) = angles.split_at(shape.rotary_dim / 2);
    let pairs = rotated.as_chunks_mut::<2>().0.iter_mut();
    for (([x, y], cos), sin) in pairs.zip(cos).zip(sin) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

/// The scores of a query at consecutive positions, from the beginning of a block on.
#[inline(always)]
fn score_part(
    call: &ScoreCall<'_>,
    table: GroupBlocks<'_>,
    start: usize,
    queries: &[f32],
    weights: &[f32],
    out: &mut [f32],
) {
    let (mut done, block_size) = (0, call.block_size);
    while done < out.len() {
        let (place, offset) = ((start + done) / block_size, (start + done) % block_size);
        let keys = call.cache.indexer_keys(table.at(place), offset / GROUP);
        let scores = match call.fuses {
            true => score_group::<true>(queries, weights, keys),
            false => score_group::<false>(queries, weights, keys),
        };
        let len = GROUP.min(block_size - offset).min(out.len() - done);
        out[done..done + len].copy_from_slice(&scores[..len]);
        done += len;
    }
}

/// The scores of a query at the positions of a group of keys.
#[inline(always)]
fn score_group<const FUSED: bool>(queries: &[f32], weights: &[f32], keys: &[u16]) -> [f32; GROUP] {
    let mut scores = [0.0; GROUP];
    let tile_len = keys.len() / GROUP * HEADS;
    for (tile, weights) in queries.chunks_exact(tile_len).zip(weights.chunks(HEADS)) {
        let mut sums = [[0.0; GROUP]; HEADS];
        let pairs = tile.as_chunks::<{ 2 * HEADS }>().0;
        for (queries, keys) in pairs.iter().zip(keys.as_chunks::<{ 2 * GROUP }>().0) {
            let keys = keys.as_chunks::<2>().0;
            for (sums, q) in sums.iter_mut().zip(queries.as_chunks::<2>().0) {
                for (sum, key) in sums.iter_mut().zip(keys) {
                    let [k0, k1] = key.map(from_bf16_bits);
                    *sum = mul_add::<FUSED>(q[0], k0, *sum);
                    *sum = mul_add::<FUSED>(q[1], k1, *sum);
                }
            }
        }
        for (sums, weight) in sums.iter().zip(weights) {
            for (score, sum) in scores.iter_mut().zip(sums) {
                // NaN stays NaN.
                *score += weight * if *sum < 0.0 { 0.0 } else { *sum };
            }
        }
    }
    scores
}

/// Writes the positions of the largest scores, in order; of equal scores, the first ones.
fn choose_largest(scores: &[f32], out: &mut [u32]) {
    let (least, mut num_equal) = least_chosen(scores, out.len());
    let chosen = (0..).zip(scores).filter(|(_, score)| {
        let rank = rank(**score);
        let is_among_equal = rank == least && num_equal > 0;
        num_equal -= usize::from(is_among_equal);
        rank > least || is_among_equal
    });
    for (out, (position, _)) in out.iter_mut().zip(chosen) {
        *out = position;
    }
}

/// The least of the `num` largest ranks, and how many of these are equal to it: found digit by digit, the first one
/// first.
fn least_chosen(scores: &[f32], num: usize) -> (u32, usize) {
    let (mut found, mut num_left) = (0, num);
    for num_behind in (0..DIGITS).rev() {
        let mut counts = [0; 1 << DIGIT_BITS];
        for score in scores {
            let digits = rank(*score) >> (num_behind * DIGIT_BITS);
            if digits.checked_shr(DIGIT_BITS) == Some(found) {
                counts[digits as usize % counts.len()] += 1;
            }
        }
        let mut digit = counts.len() - 1;
        while counts[digit] < num_left {
            num_left -= counts[digit];
            digit -= 1;
        }
        found = found << DIGIT_BITS | digit as u32;
    }
    (found, num_left)
}

/// An integer in the order of scores. NaN is above or below all numbers, by its sign.
fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    match bits >> 31 {
        0 => bits | 1 << 31,
        _ => !bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_scores_are_chosen_and_of_equal_ones_the_first() {
        let scores = [0.0, 3.0, -1.0, 0.0, f32::INFINITY, 0.0, -2.0, 3.0];
        for (num, expected) in [
            (1, &[4][..]),
            (2, &[1, 4]),
            (3, &[1, 4, 7]),
            (4, &[0, 1, 4, 7]),
            (5, &[0, 1, 3, 4, 7]),
            (7, &[0, 1, 2, 3, 4, 5, 7]),
            (8, &[0, 1, 2, 3, 4, 5, 6, 7]),
        ] {
            let mut out = vec![u32::MAX; num];
            choose_largest(&scores, &mut out);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn scratch_memory_is_taken_with_the_first_selection() {
        let mut cpu = Cpu::new(&crate::CpuOptions::default()).expect("a CPU");
        assert!(cpu.indexer.scores.is_empty());
        for _ in 0..2 {
            let selection = CpuIndexer.alloc_selection(&mut cpu, 4, 8);
            assert_eq!(selection.expect("memory").max_selected(), 8);
            let num_bytes = size_of_val(&cpu.indexer.scores[..]);
            assert_eq!(num_bytes, CpuIndexer.num_scratch_bytes());
        }
    }

    #[test]
    fn ranks_have_the_order_of_scores() {
        let scores = [
            f32::NEG_INFINITY,
            -3e38,
            -1.0,
            -1e-40,
            0.0,
            1e-40,
            1.0,
            3e38,
            f32::INFINITY,
            f32::NAN,
        ];
        assert!(scores.is_sorted_by(|a, b| rank(*a) < rank(*b)));
    }
}
