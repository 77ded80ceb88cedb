//! Multi-head latent attention on CPU: see [`LatentShape`].
//!
//! ```text
//! queries       [tokens][heads][content | rotated]
//! by heads      [heads][tokens][content]            segments with a matrix each, as those of experts
//! latents       [heads][tokens][latent]             products with the heads' key matrices
//! keyed         [tokens][heads][latent | rotated]   what attends to the cache
//! attended      [tokens][heads][latent], by heads, products with the value matrices, [tokens][heads][value]
//! ```
//!
//! Long contexts are computed in chunks of tokens, so that scratch memory is bounded. All rows are computed this way,
//! in a context and in generation, so that a token's bits depend on nothing else in the step.

use crate::kv_cache::GroupedLayout;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::attention::Selected;
use super::elementwise::{inverse_rms, round_to_bf16};
use super::gemm::Segment;
use super::math::to_bf16_bits;
use super::rope::{TASK_TOKENS, place, rotate};
use super::rows::first_mut;
use super::simd::for_each_simd;
use super::{Cpu, CpuSelection, KvCache};
use inflight_device::{HeadBiases, KvBatch, KvSpan, LatentParams, LatentShape};

/// What the activations of a chunk of tokens may take.
const MAX_CHUNK_BYTES: usize = 128 << 20;

/// Scratch memory, which grows with the first steps.
#[derive(Default)]
pub(super) struct LatentScratch {
    spans: Vec<KvSpan>,
    segments: Vec<Segment>,
    /// `[heads][tokens]` of contents, later of what attention gives.
    by_heads: Vec<bf16>,
    /// `[heads][tokens]` of latents, later of values.
    sums: Vec<f32>,
    /// `[tokens][heads][latent_dim + rotary_dim]`.
    keyed: Vec<bf16>,
    /// `[tokens][heads][latent_dim]`.
    attended: Vec<bf16>,
}

/// Scratch memory of one thread.
#[derive(Default)]
pub(super) struct KeyScratch {
    rotated: Vec<f32>,
    key: Vec<u16>,
}

impl Cpu {
    /// Stores the normalised latents and the rotated keys of tokens in a layer of the cache. `kv` is `[m, latent_dim +
    /// rotary_dim]`.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree, or a position is beyond the table.
    pub fn store_latents(
        &mut self,
        kv: &[f32],
        of: &LatentParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        let (shape, width) = (of.shape, of.shape.key_dim());
        check(of, batch, cache, layer);
        assert_eq!(kv.len(), batch.num_tokens() * width, "kv is [m, key_dim]");
        let simd = self.simd;
        let block_size = cache.layout(layer).positions_per_block();
        let cache = &cache.layer_mut(layer);
        let num_tasks = batch.num_tokens().div_ceil(TASK_TOKENS);
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let first = task * TASK_TOKENS;
                for token in first..batch.num_tokens().min(first + TASK_TOKENS) {
                    let place = place(batch, cache.layer_group(), token, of.angles, block_size);
                    let scratch = &mut worker.key;
                    let kv = &kv[token * width..][..width];
                    let norm = (&of.norm[..], of.norm_eps);
                    let (latent_dim, angles) = (shape.latent_dim, place.angles);
                    for_each_simd!(simd, make_key, (
                        kv: &[f32],
                        latent_dim: usize,
                        norm: (&[f32], f32),
                        angles: &[f32],
                        scratch: &mut KeyScratch,
                    ));
                    cache.store_key((place.block, place.offset), &worker.key.key);
                }
            });
    }

    /// Latent attention of the queries of each token over the positions of its sequence, up to its own. `q` has the
    /// queries, `[m, num_heads * (content_dim + rotary_dim)]`, not rotated yet; what the cache holds of the batch is
    /// already there; `out` is `[m, num_heads * value_dim]`.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree, or a position is beyond the table.
    pub fn latent_attention(
        &mut self,
        q: &[f32],
        of: &LatentParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
    ) {
        self.latent_attention_in_chunks((q, None), of, batch, cache, layer, out, MAX_CHUNK_BYTES);
    }

    /// As [`Cpu::latent_attention`], over the positions that tokens [select](Cpu::select_positions).
    ///
    /// # Panics
    ///
    /// As [`Cpu::latent_attention`], or if there are windows.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub fn sparse_latent_attention(
        &mut self,
        q: &[f32],
        of: &LatentParams<'_, Self>,
        selection: &CpuSelection,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
    ) {
        let selected = Selected {
            positions: selection.positions(batch.num_tokens()),
            num_selected: selection.max_selected(),
        };
        let q = (q, Some(selected));
        self.latent_attention_in_chunks(q, of, batch, cache, layer, out, MAX_CHUNK_BYTES);
    }

    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn latent_attention_in_chunks(
        &mut self,
        (q, selected): (&[f32], Option<Selected<'_>>),
        of: &LatentParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        out: &mut [bf16],
        max_chunk_bytes: usize,
    ) {
        let (shape, num_tokens) = (of.shape, batch.num_tokens());
        check(of, batch, cache, layer);
        assert_eq!(q.len(), num_tokens * shape.q_len(), "q is [m, q_len]");
        assert_eq!(
            out.len(),
            num_tokens * shape.out_len(),
            "out is [m, out_len]"
        );
        let widest = shape.latent_dim.max(shape.content_dim);
        let of_head = 2 * widest
            + 4 * shape.latent_dim.max(shape.value_dim)
            + 2 * (shape.key_dim() + shape.latent_dim);
        let max_tokens = (max_chunk_bytes / (shape.num_heads * of_head)).max(1);
        let mut scratch = std::mem::take(&mut self.latent);
        for start in (0..num_tokens).step_by(max_tokens) {
            let end = num_tokens.min(start + max_tokens);
            let mut spans = std::mem::take(&mut scratch.spans);
            cut(batch, start, end, &mut spans);
            let chunk = batch.with_spans(&spans);
            let q = &q[start * shape.q_len()..end * shape.q_len()];
            let q = (q, selected.map(|selected| selected.of(start..end)));
            let out = &mut out[start * shape.out_len()..end * shape.out_len()];
            self.attend_chunk(q, of, &chunk, cache, layer, &mut scratch, out);
            scratch.spans = spans;
        }
        self.latent = scratch;
    }

    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn attend_chunk(
        &mut self,
        (q, selected): (&[f32], Option<Selected<'_>>),
        of: &LatentParams<'_, Self>,
        batch: &KvBatch<'_>,
        cache: &KvCache,
        layer: usize,
        scratch: &mut LatentScratch,
        out: &mut [bf16],
    ) {
        let (shape, num_tokens) = (of.shape, batch.num_tokens());
        let LatentShape {
            num_heads,
            content_dim,
            latent_dim,
            value_dim,
            ..
        } = shape;
        let num_rows = num_heads * num_tokens;
        let LatentScratch {
            segments,
            by_heads,
            sums,
            keyed,
            attended,
            ..
        } = scratch;
        segments.clear();
        segments.extend((0..num_heads).map(|head| Segment {
            matrix: head,
            rows: head * num_tokens..(head + 1) * num_tokens,
        }));
        let contents = first_mut(by_heads, num_rows * content_dim);
        let simd = self.simd;
        self.for_each_head_of(
            num_tokens,
            num_heads,
            content_dim,
            contents,
            |token, head, out| {
                let q = &q[token * shape.q_len() + head * shape.query_dim()..][..content_dim];
                let out: &mut [u16] = out.reinterpret_cast_mut();
                for_each_simd!(simd, round_to_bf16, (q: &[f32], out: &mut [u16]));
            },
        );
        let latents = first_mut(sums, num_rows * latent_dim);
        self.gemm_segments(contents, segments, |head| &of.heads.keys[head], latents);

        let keyed = first_mut(keyed, num_rows * shape.key_dim());
        let (latents, block_size) = (&*latents, cache.layout(layer).positions_per_block());
        let width = num_heads * shape.key_dim();
        self.for_each_row_block(num_tokens, width, keyed.reinterpret_cast_mut(), |first, rows| {
            for (token, row) in (first..).zip(rows.chunks_exact_mut(width)) {
                let angles = place(batch, 0, token, of.angles, block_size).angles;
                for (head, out) in row.chunks_exact_mut(shape.key_dim()).enumerate() {
                    let latent = &latents[(head * num_tokens + token) * latent_dim..][..latent_dim];
                    let q = &q[token * shape.q_len() + head * shape.query_dim()..];
                    let rotary = &q[content_dim..shape.query_dim()];
                    for_each_simd!(simd, key_query, (latent: &[f32], rotary: &[f32], angles: &[f32], out: &mut [u16]));
                }
            }
        });

        let attended = first_mut(attended, num_rows * latent_dim);
        self.attention_over(
            (keyed, None, selected),
            (&of.attention, HeadBiases::NONE),
            batch,
            cache,
            layer,
            attended,
        );
        let attended = &*attended;
        let by_heads = first_mut(by_heads, num_rows * latent_dim);
        self.for_each_head_of(
            num_tokens,
            num_heads,
            latent_dim,
            by_heads,
            |token, head, out| {
                out.copy_from_slice(
                    &attended[(token * num_heads + head) * latent_dim..][..latent_dim],
                );
            },
        );
        let values = first_mut(sums, num_rows * value_dim);
        self.gemm_segments(by_heads, segments, |head| &of.heads.values[head], values);
        let (values, width) = (&*values, shape.out_len());
        self.for_each_row_block(
            num_tokens,
            width,
            out.reinterpret_cast_mut(),
            |first, rows| {
                for (token, row) in (first..).zip(rows.chunks_exact_mut(width)) {
                    for (head, out) in row.chunks_exact_mut(value_dim).enumerate() {
                        let values =
                            &values[(head * num_tokens + token) * value_dim..][..value_dim];
                        for_each_simd!(simd, round_to_bf16, (values: &[f32], out: &mut [u16]));
                    }
                }
            },
        );
    }

    /// Calls `write(token, head, row)` for each row of `[heads][tokens][width]`.
    fn for_each_head_of(
        &mut self,
        num_tokens: usize,
        num_heads: usize,
        width: usize,
        out: &mut [bf16],
        write: impl Fn(usize, usize, &mut [bf16]) + Sync,
    ) {
        self.for_each_row_block(num_heads * num_tokens, width, out, |first, rows| {
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                write(row % num_tokens, row / num_tokens, out);
            }
        });
    }
}

fn check(of: &LatentParams<'_, Cpu>, batch: &KvBatch<'_>, cache: &KvCache, layer: usize) {
    let (shape, layout) = (of.shape, cache.layout(layer));
    assert!(
        layout.num_kv_heads == 1
            && layout.head_dim == shape.key_dim()
            && layout.values == shape.kv_values()
            && of.attention.shape == shape.head_shape(),
        "cache's shape"
    );
    assert_eq!(of.norm.len(), shape.latent_dim, "norm is [latent_dim]");
    assert_eq!(
        2 * of.angles.half_dim(),
        shape.rotary_dim,
        "one angle per pair"
    );
    assert!(cache.fits(batch), "batch of this cache");
}

/// The spans of tokens `start..end` of a batch, as a batch of their own: each as if its later tokens came in a later
/// step.
fn cut(batch: &KvBatch<'_>, start: usize, end: usize, spans: &mut Vec<KvSpan>) {
    spans.clear();
    let (start, end) = (start as u32, end as u32);
    for span in batch.spans() {
        let (first, last) = (span.tokens.start.max(start), span.tokens.end.min(end));
        if first < last {
            spans.push(KvSpan {
                tokens: first - start..last - start,
                kv_len: span.kv_len - (span.tokens.end - last),
                block_table: span.block_table.clone(),
            });
        }
    }
}

/// The key of a token: its normalised latent, and the rotated part.
#[inline(always)]
fn make_key(
    kv: &[f32],
    latent_dim: usize,
    (weight, eps): (&[f32], f32),
    angles: &[f32],
    scratch: &mut KeyScratch,
) {
    let (latent, rotary) = kv.split_at(latent_dim);
    let KeyScratch { rotated, key } = scratch;
    key.resize(kv.len(), 0);
    let (normed, tail) = key.split_at_mut(latent_dim);
    let scale = inverse_rms(latent, eps);
    for ((x, weight), out) in latent.iter().zip(weight).zip(normed) {
        *out = to_bf16_bits(x * scale * weight);
    }
    rotated.clear();
    rotated.extend_from_slice(rotary);
    rotate(rotated, angles);
    round_to_bf16(rotated, tail);
}

/// The query of a head to keys of latents: in their space, and the rotated part.
#[inline(always)]
fn key_query(latent: &[f32], rotary: &[f32], angles: &[f32], out: &mut [u16]) {
    let (start, tail) = out.split_at_mut(latent.len());
    round_to_bf16(latent, start);
    let half_dim = rotary.len() / 2;
    let (low, high) = rotary.split_at(half_dim);
    let (cos, sin) = angles.split_at(half_dim);
    let (low_out, high_out) = tail.split_at_mut(half_dim);
    for i in 0..half_dim {
        low_out[i] = to_bf16_bits(low[i] * cos[i] - high[i] * sin[i]);
        high_out[i] = to_bf16_bits(high[i] * cos[i] + low[i] * sin[i]);
    }
}
