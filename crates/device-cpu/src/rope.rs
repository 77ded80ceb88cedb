//! Between the QKV projection and attention: norms of the heads, rotation, and storing keys and values.

use crate::kv_cache::GroupedLayout;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::elementwise::{inverse_rms, mean_and_scale, round_to_bf16};
use super::kv_cache::{Encoded, KvLayerMut};
use super::simd::for_each_simd;
use super::{Cpu, KvCache};
use inflight_base::BlockId;
use inflight_device::{
    AttentionParams, AxisPositions, HeadShape, KvBatch, QkNorm, QkNormKind, RopeTable,
};
use inflight_threads::DisjointSlice;

/// Scratch memory of one thread.
#[derive(Default)]
pub(super) struct RopeScratch {
    head: Vec<f32>,
    value: Vec<f32>,
    encoded: Encoded,
}

/// Elements that are rotated at a time.
const LANES: usize = 16;

/// Tokens of one task.
pub(super) const TASK_TOKENS: usize = 4;

impl Cpu {
    /// Normalises the queries and keys if there is a `norm`, rotates them by their positions, writes the
    /// queries to `q`, and stores keys and values in `layer` of the cache. `qkv` is `[m, qkv_len]`, `q` is
    /// `[m, q_len]`; `batch` has the positions and blocks of the tokens, and beside `rope` are their
    /// [positions on its axes](RopeTable::row_of), or nothing. `sink_q`, `[m, q_len]`, takes the queries at
    /// their [shifted](AttentionParams::shifted) positions.
    ///
    /// # Panics
    ///
    /// If lengths or shapes do not agree, or a position is beyond the table.
    #[allow(
        clippy::too_many_arguments,
        reason = "one fused operation with this many operands"
    )]
    pub fn rope_and_store(
        &mut self,
        qkv: &[f32],
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
        (rope, positions): (&RopeTable, &[AxisPositions]),
        batch: &KvBatch<'_>,
        cache: &mut KvCache,
        layer: usize,
        q: &mut [bf16],
        sink_q: Option<(&AttentionParams, &mut [bf16])>,
    ) {
        let layout = *cache.layout(layer);
        let d = shape.head_dim;
        assert_eq!(
            qkv.len(),
            batch.num_tokens() * shape.qkv_len(),
            "qkv is [m, qkv_len]"
        );
        assert_eq!(
            q.len(),
            batch.num_tokens() * shape.q_len(),
            "q is [m, q_len]"
        );
        assert!(
            sink_q
                .as_ref()
                .is_none_or(|(_, sink_q)| sink_q.len() == q.len()),
            "sink_q is [m, q_len]"
        );
        assert!(
            shape.num_kv_heads == 0
                || [layout.head_dim, layout.value_dim(), layout.num_kv_heads]
                    == [d, shape.value_dim, shape.num_kv_heads],
            "cache's shape"
        );
        assert_eq!(rope.half_dim() * 2, d, "one angle per pair of elements");
        assert!(
            norm.is_none_or(|norm| {
                let num_heads = [shape.num_q_heads, shape.num_kv_heads];
                let [num_q, num_k] = norm.kind.num_weighted_heads(num_heads);
                norm.q.len() == num_q * d && norm.k.len() == num_k * d
            }),
            "norm is [head_dim], or of all heads"
        );
        assert!(cache.fits(batch), "batch of this cache");

        let simd = self.simd;
        let num_tasks = batch.num_tokens().div_ceil(TASK_TOKENS);
        let cache = &cache.layer_mut(layer);
        let q = DisjointSlice::new(q.reinterpret_cast_mut());
        let sink_q = sink_q
            .map(|(params, sink_q)| (params, DisjointSlice::new(sink_q.reinterpret_cast_mut())));
        let call = &RopeCall {
            shape,
            norm,
            rotates: rope.rotates(),
            block_size: layout.positions_per_block(),
            cache,
        };
        self.pool
            .for_each(&mut self.workers, num_tasks, |worker, task| {
                let first = task * TASK_TOKENS;
                let end = batch.num_tokens().min(first + TASK_TOKENS);
                let scratch = &mut worker.rope;
                for token in first..end {
                    let qkv = &qkv[token * shape.qkv_len()..][..shape.qkv_len()];
                    let row = (token * shape.q_len(), shape.q_len());
                    // SAFETY: each row belongs to one task.
                    let q = unsafe { q.slice(row.0, row.1) };
                    let for_sinks = sink_q.as_ref().map(|(params, sink_q)| {
                        let (_, position) = batch.place(token);
                        let position = params.shifted(position as u32) as usize;
                        // SAFETY: as above.
                        (rope.row(position), unsafe { sink_q.slice(row.0, row.1) })
                    });
                    let (_, position) = batch.place(token);
                    let place = TokenPlace {
                        angles: &rope.row_of(token, position, positions),
                        ..place(batch, cache.layer_group(), token, rope, call.block_size)
                    };
                    for_each_simd!(simd, rope_and_store_token, (
                        call: &RopeCall<'_>,
                        qkv: &[f32],
                        place: TokenPlace<'_>,
                        scratch: &mut RopeScratch,
                        q: &mut [u16],
                        for_sinks: Option<(&[f32], &mut [u16])>,
                    ));
                }
            });
    }
}

/// The operands that all tokens of a call share.
struct RopeCall<'a> {
    shape: HeadShape,
    norm: Option<QkNorm<'a>>,
    /// Whether any head is another one after its rotation.
    rotates: bool,
    block_size: usize,
    cache: &'a KvLayerMut<'a>,
}

/// Where the key and value of a token are stored, and its angles.
pub(super) struct TokenPlace<'a> {
    pub block: BlockId,
    pub offset: usize,
    pub angles: &'a [f32],
    /// The factor of the rotated query, if queries have factors.
    pub query_factor: Option<f32>,
}

pub(super) fn place<'a>(
    batch: &KvBatch<'_>,
    group: usize,
    token: usize,
    rope: &'a RopeTable,
    block_size: usize,
) -> TokenPlace<'a> {
    let (span, position) = batch.place(token);
    TokenPlace {
        block: batch.block_table(span, group).at(position / block_size),
        offset: position % block_size,
        angles: rope.row(position),
        query_factor: rope.query_factor(position),
    }
}

#[inline(always)]
fn rope_and_store_token(
    call: &RopeCall<'_>,
    qkv: &[f32],
    place: TokenPlace<'_>,
    scratch: &mut RopeScratch,
    q: &mut [u16],
    for_sinks: Option<(&[f32], &mut [u16])>,
) {
    let HeadShape {
        num_kv_heads,
        head_dim: d,
        value_dim,
        ..
    } = call.shape;
    let (q_in, kv) = qkv.split_at(q.len());
    let (k_in, v_in) = kv.split_at(num_kv_heads * d);
    let RopeScratch {
        head,
        value,
        encoded,
    } = scratch;
    head.resize(d, 0.0);
    value.resize(d.max(value_dim), 0.0);
    let [q_norm, k_norm] = match call.norm {
        None => [HeadNorm::None; 2],
        Some(QkNorm {
            q, k, kind, eps, ..
        }) => match kind {
            QkNormKind::Head => [HeadNorm::Each(q, eps), HeadNorm::Each(k, eps)],
            QkNormKind::Row => [
                HeadNorm::Scaled(q, inverse_rms(q_in, eps)),
                HeadNorm::Scaled(k, inverse_rms(k_in, eps)),
            ],
            QkNormKind::LayerOfHead => [HeadNorm::Layer(q, eps), HeadNorm::Layer(k, eps)],
            QkNormKind::BiasedLayer => [HeadNorm::Biased(q, eps), HeadNorm::Biased(k, eps)],
            QkNormKind::RotatedHead => [HeadNorm::Rotated(q, eps), HeadNorm::Rotated(k, eps)],
        },
    };
    let v_norm = match call.norm {
        Some(QkNorm {
            has_values: true,
            eps,
            ..
        }) => HeadNorm::Plain(eps),
        _ => HeadNorm::None,
    };
    for (angles, q) in [(place.angles, q)].into_iter().chain(for_sinks) {
        let angles = call.rotates.then_some(angles);
        let heads = q_in.chunks_exact(d).zip(q.chunks_exact_mut(d));
        for (index, (x, out)) in heads.enumerate() {
            let x = prepared(x, (q_norm, index), angles, head);
            match place.query_factor {
                None => round_to_bf16(x, out),
                Some(factor) => {
                    let value = &mut value[..d];
                    for (scaled, x) in value.iter_mut().zip(x) {
                        *scaled = x * factor;
                    }
                    round_to_bf16(value, out);
                }
            }
        }
    }
    let angles = call.rotates.then_some(place.angles);
    let heads = k_in.chunks_exact(d).zip(v_in.chunks_exact(value_dim));
    let value = &mut value[..value_dim];
    for (index, (k, v)) in heads.enumerate() {
        let k = prepared(k, (k_norm, index), angles, head);
        let v = prepared(v, (v_norm, index), None, value);
        let at = (place.block, place.offset);
        call.cache.store(at, index, [k, v], encoded);
    }
}

/// A head as attention takes it: normalised and rotated, if it is, in `room`.
#[inline(always)]
fn prepared<'a>(
    x: &'a [f32],
    (norm, index): (HeadNorm<'_>, usize),
    angles: Option<&[f32]>,
    room: &'a mut [f32],
) -> &'a [f32] {
    if let (HeadNorm::None, None) = (norm, angles) {
        return x;
    }
    normalise(x, norm, index, room);
    if let Some(angles) = angles {
        rotate(room, angles);
    }
    if let HeadNorm::Rotated(weight, eps) = norm {
        let scale = inverse_rms(room, eps);
        for (x, weight) in room.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
    room
}

/// How the heads of a token are normalised.
#[derive(Clone, Copy)]
enum HeadNorm<'a> {
    None,
    /// Each by itself, without weights, and with this epsilon.
    Plain(f32),
    /// Each by itself, with these weights and this epsilon.
    Each(&'a [f32], f32),
    /// With the weights of all heads, and the scale of the token.
    Scaled(&'a [f32], f32),
    /// Each by itself and around its mean, with the weights of all heads, and this epsilon.
    Layer(&'a [f32], f32),
    /// Each by itself and around its mean, with these weights, the biases behind them, and this epsilon.
    Biased(&'a [f32], f32),
    /// Each by itself behind its rotation, with these weights and this epsilon.
    Rotated(&'a [f32], f32),
}

#[inline(always)]
fn normalise(head: &[f32], norm: HeadNorm<'_>, index: usize, out: &mut [f32]) {
    let first = index * head.len();
    let (weight, scale) = match norm {
        HeadNorm::None | HeadNorm::Rotated(..) => return copy(head, out),
        HeadNorm::Plain(eps) => {
            let scale = inverse_rms(head, eps);
            for (x, out) in head.iter().zip(out) {
                *out = x * scale;
            }
            return;
        }
        HeadNorm::Each(weight, eps) => (weight, inverse_rms(head, eps)),
        HeadNorm::Scaled(weights, scale) => (&weights[first..], scale),
        HeadNorm::Biased(weights, eps) => {
            let (mean, scale) = mean_and_scale(head, eps);
            let (weights, biases) = weights.split_at(head.len());
            let terms = head.iter().zip(weights).zip(biases);
            for (((x, weight), bias), out) in terms.zip(out) {
                *out = (x - mean) * scale * weight + bias;
            }
            return;
        }
        HeadNorm::Layer(weights, eps) => {
            let (mean, scale) = mean_and_scale(head, eps);
            for ((x, weight), out) in head.iter().zip(&weights[first..]).zip(out) {
                *out = (x - mean) * scale * weight;
            }
            return;
        }
    };
    for ((x, weight), out) in head.iter().zip(weight).zip(out) {
        *out = x * scale * weight;
    }
}

/// Copies a head, without the call that a copy of unknown length is.
#[inline(always)]
fn copy(head: &[f32], out: &mut [f32]) {
    let ((head, head_rest), (out, out_rest)) = (head.as_chunks::<LANES>(), out.as_chunks_mut());
    for (x, out) in head.iter().zip(out) {
        *out = *x;
    }
    for (x, out) in head_rest.iter().zip(out_rest) {
        *out = *x;
    }
}

/// Rotates element `i` of a head with element `i + head_dim / 2`.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], angles: &[f32]) {
    let half_dim = head.len() / 2;
    let (low, high) = head.split_at_mut(half_dim);
    let (cos, sin) = angles.split_at(half_dim);
    let ((low, low_rest), (high, high_rest)) = (low.as_chunks_mut(), high.as_chunks_mut());
    let ((cos, cos_rest), (sin, sin_rest)) = (cos.as_chunks(), sin.as_chunks());
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        rotate_lanes::<LANES>(low, high, cos, sin);
    }
    let rest = low_rest.iter_mut().zip(high_rest);
    for (((low, high), cos), sin) in rest.zip(cos_rest).zip(sin_rest) {
        let lane = std::array::from_mut::<f32>;
        rotate_lanes(lane(low), lane(high), &[*cos], &[*sin]);
    }
}

/// The same for some elements of the first half and those of the second half that they belong to.
#[inline(always)]
fn rotate_lanes<const N: usize>(
    low: &mut [f32; N],
    high: &mut [f32; N],
    cos: &[f32; N],
    sin: &[f32; N],
) {
    for i in 0..N {
        let (x, y) = (low[i], high[i]);
        low[i] = x * cos[i] - y * sin[i];
        high[i] = y * cos[i] + x * sin[i];
    }
}
