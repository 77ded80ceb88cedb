//! The kernel in plain Rust.

use super::super::kv_cache::GROUP;
use super::super::math::from_bf16_bits;
use super::softmax::softmax;
use super::{AttentionTile, TILE};
use crate::kv_cache::GroupedLayout;

/// See [`super::AttentionKernel`].
///
/// # Safety
///
/// The pointers and sizes of the tile are valid.
pub(super) unsafe fn tile(tile: &AttentionTile) {
    let (head_dim, padded_dim) = (tile.layout.head_dim, tile.layout.padded_dim());
    for row in 0..tile.rows {
        // SAFETY: the tile has this row of everything, and scratch for one.
        let (q, scores, probabilities, state, seen, scales, acc) = unsafe {
            (
                std::slice::from_raw_parts(tile.q.add(row * head_dim), head_dim),
                &mut *tile.scores.cast::<[f32; TILE]>(),
                &mut *tile.probabilities.cast::<[u16; TILE]>(),
                &mut *tile.state.add(row),
                *tile.seen.add(row),
                &*tile.scales,
                std::slice::from_raw_parts_mut(tile.acc.add(row * padded_dim), padded_dim),
            )
        };
        for group in 0..tile.num_groups {
            // SAFETY: the tile has that many groups, each as long as the layout says.
            let keys = unsafe {
                std::slice::from_raw_parts(tile.keys[group], tile.layout.key_group_len())
            };
            score(q, keys, &mut scores[group * GROUP..][..GROUP]);
        }
        // SAFETY: the tile has this row.
        let bias = unsafe { tile.bias(row) };
        let scale = (tile.scale, tile.soft_cap, bias);
        let rescale = softmax(scores, seen, scale, scales, state, probabilities);
        for acc in &mut *acc {
            *acc *= rescale;
        }
        for group in 0..tile.num_groups {
            // SAFETY: as above.
            let values = unsafe {
                std::slice::from_raw_parts(tile.values[group], tile.layout.value_group_len())
            };
            accumulate(&probabilities[group * GROUP..][..GROUP], values, acc);
        }
    }
}

fn score(q: &[u16], keys: &[u16], scores: &mut [f32]) {
    let mut sums = [0.0_f32; GROUP];
    for (q, keys) in q
        .as_chunks::<2>()
        .0
        .iter()
        .zip(keys.as_chunks::<{ 2 * GROUP }>().0)
    {
        let [q0, q1] = q.map(from_bf16_bits);
        for (sum, [k0, k1]) in sums.iter_mut().zip(keys.as_chunks::<2>().0) {
            *sum += q0 * from_bf16_bits(*k0);
            *sum += q1 * from_bf16_bits(*k1);
        }
    }
    scores.copy_from_slice(&sums);
}

fn accumulate(probabilities: &[u16], values: &[u16], acc: &mut [f32]) {
    let pairs = probabilities.as_chunks::<2>().0.iter();
    for (p, values) in pairs.zip(values.chunks_exact(2 * acc.len())) {
        let [p0, p1] = p.map(from_bf16_bits);
        for (acc, [v0, v1]) in acc.iter_mut().zip(values.as_chunks::<2>().0) {
            *acc += p0 * from_bf16_bits(*v0);
            *acc += p1 * from_bf16_bits(*v1);
        }
    }
}
