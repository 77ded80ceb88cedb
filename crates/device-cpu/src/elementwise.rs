//! Operations on one row at a time: RMS norm and embedding. Other norms are in [`norms`](super::norms).

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::math::{from_bf16_bits, tanh, to_bf16_bits};
use super::simd::for_each_simd;
use super::{Cpu, PackedMatrix};
use inflight_base::TokenId;
use inflight_device::LogitsTransform;
use inflight_numbers::RawMatrix;
use inflight_threads::DisjointSlice;

/// Lanes of a reduction: one 512-bit register, on machines with smaller registers too.
const LANES: usize = 16;

/// Elements of a task: with fewer, distributing tasks costs more than it saves.
pub(super) const MIN_TASK_LEN: usize = 8192;

impl Cpu {
    /// The RMS norm of each row: `out = x / sqrt(mean(x^2) + eps) * weight`. `x` and `out` are `[m, d]`,
    /// `weight` is `[d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [bf16]) {
        let d = weight.len();
        assert!(
            d > 0 && x.len().is_multiple_of(d),
            "rows of the weight's length"
        );
        assert_eq!(x.len(), out.len(), "as many outputs as inputs");
        let simd = self.simd;
        self.for_each_row_block(x.len() / d, d, out.reinterpret_cast_mut(), |rows, out| {
            let x = &x[rows * d..][..out.len()];
            for_each_simd!(simd, rms_norm, (x: &[f32], weight: &[f32], eps: f32, out: &mut [u16]));
        });
    }

    /// `hidden += x`, then `out = rms_norm(hidden)`.
    /// `x`, `hidden` and `out` are `[m, d]`, `weight` is `[d]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not agree.
    pub fn add_rms_norm(
        &mut self,
        x: &[f32],
        hidden: &mut [f32],
        weight: &[f32],
        eps: f32,
        out: &mut [bf16],
    ) {
        let d = weight.len();
        assert!(
            d > 0 && x.len().is_multiple_of(d),
            "rows of the weight's length"
        );
        assert_eq!(x.len(), hidden.len(), "one row of `x` per row");
        assert_eq!(x.len(), out.len(), "as many outputs as inputs");
        let simd = self.simd;
        let hidden = DisjointSlice::new(hidden);
        self.for_each_row_block(x.len() / d, d, out.reinterpret_cast_mut(), |rows, out| {
            let x = &x[rows * d..][..out.len()];
            // SAFETY: each block of rows belongs to one task.
            let hidden = unsafe { hidden.slice(rows * d, out.len()) };
            for_each_simd!(simd, add_rms_norm, (
                x: &[f32],
                hidden: &mut [f32],
                weight: &[f32],
                eps: f32,
                out: &mut [u16],
            ));
        });
    }

    /// Looks up `token_ids` in `table`, and multiplies with `scale`. `out` is `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the table has no row for an id, or `out` has the wrong length.
    pub fn embed(
        &mut self,
        table: &RawMatrix<'_>,
        token_ids: &[TokenId],
        scale: f32,
        out: &mut [f32],
    ) {
        self.embed_rows(token_ids, table.columns(), scale, out, |id, row| {
            table.row_to_f32(id as usize, row);
        });
    }

    /// As [`Cpu::embed`], in an output projection that is tied to the embedding.
    ///
    /// # Panics
    ///
    /// As [`Cpu::embed`], or if the table [has no rows](PackedMatrix::has_rows).
    pub fn embed_packed(
        &mut self,
        table: &PackedMatrix,
        token_ids: &[TokenId],
        scale: f32,
        out: &mut [f32],
    ) {
        self.embed_rows(token_ids, table.k(), scale, out, |id, row| {
            table.row_to_f32(id as usize, row);
        });
    }

    /// `out += table[positions]`, where `position` tells that of a row. `out` is `[m, d]`.
    ///
    /// # Panics
    ///
    /// If the table has no row for a position, or `out` has the wrong length.
    pub fn add_positions(
        &mut self,
        table: &[bf16],
        d: usize,
        position: impl Fn(usize) -> usize + Sync,
        out: &mut [f32],
    ) {
        let num_rows = out.len() / d;
        assert_eq!(out.len(), num_rows * d, "whole rows");
        let table: &[u16] = table.reinterpret_cast();
        self.for_each_row_block(num_rows, d, out, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(d)) {
                let embedding = &table[position(row) * d..][..d];
                for (out, bits) in out.iter_mut().zip(embedding) {
                    *out += from_bf16_bits(*bits);
                }
            }
        });
    }

    /// `logits = transform(logits)`.
    pub fn transform_logits(&mut self, transform: LogitsTransform, logits: &mut [f32]) {
        if transform == LogitsTransform::IDENTITY {
            return;
        }
        let LogitsTransform { scale, soft_cap } = transform;
        let simd = self.simd;
        self.for_each_row_block(logits.len(), 1, logits, |_, logits| {
            for_each_simd!(simd, transform_logits, (scale: f32, soft_cap: Option<f32>, logits: &mut [f32]));
        });
    }

    /// Calls `read(id, row)` for each token and its row of `out`, on all threads.
    pub(super) fn embed_rows(
        &mut self,
        token_ids: &[TokenId],
        d: usize,
        scale: f32,
        out: &mut [f32],
        read: impl Fn(TokenId, &mut [f32]) + Sync,
    ) {
        assert_eq!(out.len(), token_ids.len() * d, "one row per token");
        let max_rows = MIN_TASK_LEN.div_ceil(d);
        let num_tasks = token_ids.len().div_ceil(max_rows);
        let out = DisjointSlice::new(out);
        self.pool.for_each(&mut self.workers, num_tasks, |_, task| {
            let first = task * max_rows;
            for (i, &id) in token_ids[first..].iter().take(max_rows).enumerate() {
                // SAFETY: each row belongs to one task.
                let row = unsafe { out.slice((first + i) * d, d) };
                read(id, row);
                if scale != 1.0 {
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
    }

    /// Calls `body(first_row, rows_of_out)` for blocks of whole rows, on all threads.
    pub(super) fn for_each_row_block<T: Send>(
        &mut self,
        num_rows: usize,
        row_len: usize,
        out: &mut [T],
        body: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let max_rows = MIN_TASK_LEN.div_ceil(row_len);
        let out = DisjointSlice::new(out);
        self.pool
            .for_each(&mut self.workers, num_rows.div_ceil(max_rows), |_, task| {
                let first = task * max_rows;
                let len = max_rows.min(num_rows - first) * row_len;
                // SAFETY: each block of rows belongs to one task.
                body(first, unsafe { out.slice(first * row_len, len) });
            });
    }
}

#[inline(always)]
fn transform_logits(scale: f32, soft_cap: Option<f32>, logits: &mut [f32]) {
    match soft_cap {
        None => logits.iter_mut().for_each(|logit| *logit *= scale),
        Some(cap) => {
            let scale = scale / cap;
            logits
                .iter_mut()
                .for_each(|logit| *logit = cap * tanh(*logit * scale));
        }
    }
}

#[inline(always)]
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [u16]) {
    let d = weight.len();
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        let scale = inverse_rms(x, eps);
        for ((x, weight), out) in x.iter().zip(weight).zip(out) {
            *out = to_bf16_bits(x * scale * weight);
        }
    }
}

#[inline(always)]
fn add_rms_norm(x: &[f32], hidden: &mut [f32], weight: &[f32], eps: f32, out: &mut [u16]) {
    for (hidden, x) in hidden.iter_mut().zip(x) {
        *hidden += x;
    }
    rms_norm(hidden, weight, eps, out);
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum(x, |x| x * x) / x.len() as f32 + eps).sqrt()
}

/// The mean of a row, and the inverse of its standard deviation.
#[inline(always)]
pub(super) fn mean_and_scale(x: &[f32], eps: f32) -> (f32, f32) {
    let mean = sum(x, |x| x) / x.len() as f32;
    let variance = sum(x, |x| (x - mean) * (x - mean)) / x.len() as f32;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// `out` becomes the nearest bf16 of each element, ties to even. In chunks, which need no scalar rest where heads are
/// multiples of them.
#[inline(always)]
pub(super) fn round_to_bf16(x: &[f32], out: &mut [u16]) {
    let ((x_chunks, x_rest), (chunks, rest)) = (x.as_chunks::<LANES>(), out.as_chunks_mut());
    for (x, out) in x_chunks.iter().zip(chunks) {
        *out = x.map(to_bf16_bits);
    }
    for (x, out) in x_rest.iter().zip(rest) {
        *out = to_bf16_bits(*x);
    }
}

/// The sum of a function of all elements, in a fixed order: in 16 lanes, then as a tree over the lanes.
#[inline(always)]
pub(super) fn sum<T: Copy>(x: &[T], term: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += term(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += term(*x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
