//! The gated delta rule on CPU: see [`DeltaShape`].
//!
//! ```text
//! task      a key head of a sequence, and the value heads that share it
//! token     for each value head a pass over the state that decays it and gives what it has for the key, and one that
//!           writes the difference and gives what it has for the query; only the latter if the token is repeated
//! ```

use std::ops::Range;

use super::super::Cpu;
use super::super::elementwise::sum;
use super::super::math::{exp, silu, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::{COLUMNS, Tasks, sigmoid, softplus};
use inflight_device::{DeltaShape, RuleWeights};

/// Added to the squared length of a query or key, as transformers and flash-linear-attention do.
const LENGTH_EPS: f32 = 1e-6;

/// The operands of a key head.
struct Head<'a> {
    shape: &'a DeltaShape,
    index: usize,
    /// The value heads that share it.
    values: Range<usize>,
    is_repeated: bool,
    weights: &'a RuleWeights<Cpu>,
}

impl Cpu {
    /// The rule for all tokens, whose channels have been convolved.
    pub(super) fn mix_delta(
        &mut self,
        tasks: &Tasks<'_>,
        shape: &DeltaShape,
        weights: &RuleWeights<Cpu>,
    ) {
        let num_heads = shape.num_value_heads;
        assert!(
            [weights.rates.len(), weights.time_biases.len()] == [num_heads; 2]
                && weights.norm.as_ref().map(Vec::len) == Some(shape.value_dim),
            "the rule's weights"
        );
        let simd = tasks.simd;
        let group = num_heads / shape.num_key_heads;
        let num_tasks = tasks.num_spans() * shape.num_key_heads;
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tasks, |worker, task| {
            let index = task % shape.num_key_heads;
            let span = tasks.span(task / shape.num_key_heads);
            let head = &Head {
                shape,
                index,
                values: index * group..(index + 1) * group,
                is_repeated: span.is_repeated,
                weights,
            };
            // SAFETY: the heads of a sequence are of one task.
            let state = unsafe { tasks.heads(&span, head.values.clone(), shape.matrix_len()) };
            let scratch = &mut worker.recurrence.values;
            scratch.resize(2 * shape.key_dim + shape.value_dim, 0.0);
            let scratch = &mut scratch[..];
            for token in span.tokens {
                let input_len = tasks.shape.input_len();
                // SAFETY: nothing writes them.
                let x = unsafe { tasks.x.read(token * input_len, input_len) };
                let first = token * shape.value_len() + head.values.start * shape.value_dim;
                // SAFETY: each token is of one sequence, whose heads are of one task.
                let out = unsafe { tasks.out.slice(first, group * shape.value_dim) };
                for_each_simd!(simd, mix_token, (
                    head: &Head<'_>,
                    x: &[f32],
                    state: &mut [f32],
                    scratch: &mut [f32],
                    out: &mut [u16],
                ));
                let heads = head.values.clone();
                // SAFETY: the heads of a sequence are of one task.
                unsafe { tasks.save_heads(token, heads, shape.matrix_len(), state) };
            }
        });
    }
}

#[inline(always)]
fn mix_token(head: &Head<'_>, x: &[f32], state: &mut [f32], scratch: &mut [f32], out: &mut [u16]) {
    let DeltaShape {
        key_dim,
        value_dim,
        num_value_heads,
        strength_scale,
        norm_eps,
        ..
    } = *head.shape;
    let (key_len, value_len) = (head.shape.key_len(), head.shape.value_len());
    let (queries, rest) = x.split_at(key_len);
    let (keys, rest) = rest.split_at(key_len);
    let (values, rest) = rest.split_at(value_len);
    let (gates, rest) = rest.split_at(value_len);
    let (strengths, decays) = rest.split_at(num_value_heads);
    let (q, rest) = scratch.split_at_mut(key_dim);
    let (k, sums) = rest.split_at_mut(key_dim);
    let own = head.index * key_dim..(head.index + 1) * key_dim;
    normalise(&queries[own.clone()], 1.0 / (key_dim as f32).sqrt(), q);
    normalise(&keys[own], 1.0, k);
    let (q, k) = (&*q, &*k);
    let matrices = state.chunks_exact_mut(key_dim * value_dim);
    let outs = out.chunks_exact_mut(value_dim);
    for (index, (state, out)) in head.values.clone().zip(matrices.zip(outs)) {
        let weights = head.weights;
        let time = softplus(decays[index] + weights.time_biases[index]);
        let decay = exp(-weights.rates[index] * time);
        let own = index * value_dim..(index + 1) * value_dim;
        match head.is_repeated {
            true => read(state, q, sums),
            false => {
                let operands = [q, k, &values[own.clone()]];
                let strength = strength_scale * sigmoid(strengths[index]);
                update(state, operands, decay, strength, sums);
            }
        }
        let scale = 1.0 / (sum(sums, |x| x * x) / value_dim as f32 + norm_eps).sqrt();
        let norm = weights.norm.as_deref().unwrap_or_default();
        let weighted = sums.iter().zip(norm).zip(&gates[own]).zip(out);
        for (((sum, weight), gate), out) in weighted {
            *out = to_bf16_bits(sum * scale * weight * silu(*gate));
        }
    }
}

/// A vector of length `factor` in the direction of `x`.
#[inline(always)]
fn normalise(x: &[f32], factor: f32, out: &mut [f32]) {
    let scale = factor / (sum(x, |x| x * x) + LENGTH_EPS).sqrt();
    for (x, out) in x.iter().zip(out) {
        *out = x * scale;
    }
}

/// Reads a state at a query, with the bits of [`update`] that has left it.
#[inline(always)]
fn read(state: &[f32], q: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (row, q) in state.chunks_exact(out.len()).zip(q) {
        for (out, state) in out.iter_mut().zip(row) {
            *out += state * q;
        }
    }
}

/// Decays a state, writes a value to it at a key, and reads it at a query.
#[inline(always)]
fn update(state: &mut [f32], [q, k, v]: [&[f32]; 3], decay: f32, strength: f32, out: &mut [f32]) {
    let value_dim = v.len();
    let whole = value_dim / COLUMNS * COLUMNS;
    for first in (0..whole).step_by(COLUMNS) {
        update_columns::<COLUMNS>(state, [q, k, v], first, decay, strength, out);
    }
    for first in whole..value_dim {
        update_columns::<1>(state, [q, k, v], first, decay, strength, out);
    }
}

#[inline(always)]
fn update_columns<const N: usize>(
    state: &mut [f32],
    [q, k, v]: [&[f32]; 3],
    first: usize,
    decay: f32,
    strength: f32,
    out: &mut [f32],
) {
    let value_dim = v.len();
    let mut known = [0.0; N];
    for (row, k) in state.chunks_exact_mut(value_dim).zip(k) {
        for (known, state) in known.iter_mut().zip(&mut row[first..first + N]) {
            *state *= decay;
            *known += *state * k;
        }
    }
    let mut written = [0.0; N];
    for ((written, v), known) in written.iter_mut().zip(&v[first..]).zip(known) {
        *written = (v - known) * strength;
    }
    let mut sums = [0.0; N];
    for ((row, k), q) in state.chunks_exact_mut(value_dim).zip(k).zip(q) {
        let columns = row[first..first + N].iter_mut();
        for ((sum, state), written) in sums.iter_mut().zip(columns).zip(written) {
            *state += written * k;
            *sum += *state * q;
        }
    }
    out[first..first + N].copy_from_slice(&sums);
}

#[cfg(test)]
mod tests {
    use super::super::super::Simd;
    use super::super::tests::values;
    use super::*;

    /// The rule by its definition; adds to the state, too.
    fn updated(state: &mut [f64], [q, k, v]: [&[f32]; 3], decay: f32, strength: f32) -> Vec<f64> {
        let (decay, strength) = (f64::from(decay), f64::from(strength));
        state.iter_mut().for_each(|element| *element *= decay);
        let read = |state: &[f64], at: &[f32], column: usize| -> f64 {
            let rows = state.chunks(v.len()).zip(at);
            rows.map(|(row, at)| row[column] * f64::from(*at)).sum()
        };
        let known: Vec<_> = (0..v.len()).map(|column| read(state, k, column)).collect();
        for (row, k) in state.chunks_mut(v.len()).zip(k) {
            for ((element, v), known) in row.iter_mut().zip(v).zip(&known) {
                *element += strength * (f64::from(*v) - known) * f64::from(*k);
            }
        }
        (0..v.len()).map(|column| read(state, q, column)).collect()
    }

    #[test]
    fn a_state_is_updated_by_the_definition_whatever_its_width() {
        for simd in Simd::tested() {
            for value_dim in [1, 31, 32, 40, 64, 71] {
                let key_dim = 24;
                let mut state = values(key_dim * value_dim, 1);
                let mut expected: Vec<_> = state.iter().copied().map(f64::from).collect();
                for token in 2..6 {
                    let [q, k] = [(token, 0.25), (token + 10, 1.0)].map(|(seed, len)| {
                        let mut vector = vec![0.0; key_dim];
                        normalise(&values(key_dim, seed), len, &mut vector);
                        vector
                    });
                    let v = values(value_dim, token + 20);
                    let operands = [&q[..], &k, &v];
                    let (state, out) = (&mut state[..], &mut vec![0.0; value_dim][..]);
                    let (decay, strength) = (0.9, 0.7);
                    for_each_simd!(simd, update, (
                        state: &mut [f32],
                        operands: [&[f32]; 3],
                        decay: f32,
                        strength: f32,
                        out: &mut [f32],
                    ));
                    let all = updated(&mut expected, operands, decay, strength);
                    for (out, expected) in out.iter().zip(all) {
                        let error = (f64::from(*out) - expected).abs();
                        assert!(error < 1e-5, "{simd}, {value_dim}: {out}, {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn columns_that_are_computed_together_or_read_again_have_the_same_bits() {
        let (key_dim, value_dim) = (24, 32);
        let [q, k] = [1, 2].map(|seed| values(key_dim, seed));
        let v = values(value_dim, 3);
        let results = [true, false].map(|together| {
            let mut state = values(key_dim * value_dim, 4);
            let mut out = vec![0.0; value_dim];
            let operands = [&q[..], &k, &v];
            match together {
                true => update(&mut state, operands, 0.9, 0.7, &mut out),
                false => {
                    for column in 0..value_dim {
                        update_columns::<1>(&mut state, operands, column, 0.9, 0.7, &mut out);
                    }
                }
            }
            let mut again = vec![0.0; value_dim];
            read(&state, &q, &mut again);
            assert!(out == again);
            (state, out)
        });
        assert!(results[0] == results[1]);
    }
}
