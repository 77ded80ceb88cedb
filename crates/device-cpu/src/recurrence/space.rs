//! The selective state space of Mamba-2 on CPU: see [`StateSpaceShape`].
//!
//! ```text
//! task      a head of a sequence: a pass over its state for each token, whose result takes the place of the value
//! then      gates and norms of whole rows
//! ```

use super::super::elementwise::{MIN_TASK_LEN, inverse_rms};
use super::super::math::{exp, silu, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::super::{Cpu, Simd};
use super::columns::{EachColumn, for_each_column};
use super::{Tasks, softplus};
use inflight_device::{RuleWeights, SpaceNorm, StateSpaceShape};

impl Cpu {
    /// The rule for all tokens, whose channels have been convolved.
    pub(super) fn mix_space(
        &mut self,
        tasks: &Tasks<'_>,
        shape: &StateSpaceShape,
        weights: &RuleWeights<Cpu>,
    ) {
        let num_heads = shape.num_heads;
        let skips = weights.skips.as_ref().expect("the rule's weights");
        let norm = weights.norm.as_deref().unwrap_or_default();
        assert!(
            [weights.rates.len(), weights.time_biases.len(), skips.len()] == [num_heads; 3]
                && norm.len()
                    == match shape.norm {
                        SpaceNorm::Absent => 0,
                        SpaceNorm::Gated | SpaceNorm::Ungated => shape.value_len(),
                    },
            "the rule's weights"
        );
        let simd = tasks.simd;
        let input_len = tasks.shape.input_len();
        let (key_len, value_len) = (shape.key_len(), shape.value_len());
        let head_dim = shape.head_dim;
        let num_tasks = tasks.num_spans() * num_heads;
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tasks, |_, task| {
            let head = task % num_heads;
            let span = tasks.span(task / num_heads);
            // SAFETY: the heads of a sequence are of one task.
            let state = unsafe { tasks.heads(&span, head..head + 1, shape.matrix_len()) };
            let group = head / (num_heads / shape.num_groups) * shape.state_dim;
            for token in span.tokens {
                let part = |column: usize, len: usize| {
                    // SAFETY: nothing writes what is not a value.
                    unsafe { tasks.x.read(token * input_len + column, len) }
                };
                let query = part(value_len + key_len + group, shape.state_dim);
                let start = token * input_len + head * head_dim;
                // SAFETY: each token is of one sequence, whose heads are of one task.
                let value = unsafe { tasks.x.slice(start, head_dim) };
                if span.is_repeated {
                    let (state, skip) = (&*state, skips[head]);
                    for_each_simd!(simd, read, (
                        state: &[f32],
                        query: &[f32],
                        skip: f32,
                        value: &mut [f32],
                    ));
                    // SAFETY: the heads of a sequence are of one task.
                    unsafe { tasks.save_heads(token, head..head + 1, shape.matrix_len(), state) };
                    continue;
                }
                let key = part(value_len + group, shape.state_dim);
                let time = part(2 * (value_len + key_len) + head, 1)[0];
                let [least, most] = shape.times;
                // Written as comparisons, because `f32::clamp` panics if a bound is NaN.
                let time = softplus(time + weights.time_biases[head]);
                let time = if time < least { least } else { time };
                let time = if time > most { most } else { time };
                let decay = exp(-weights.rates[head] * time);
                let factors = [decay, time, skips[head]];
                for_each_simd!(simd, update, (
                    simd: Simd,
                    state: &mut [f32],
                    key: &[f32],
                    query: &[f32],
                    factors: [f32; 3],
                    value: &mut [f32],
                ));
                // SAFETY: the heads of a sequence are of one task.
                unsafe { tasks.save_heads(token, head..head + 1, shape.matrix_len(), state) };
            }
        });
        self.gate_and_normalise(tasks, shape, norm);
    }

    /// Multiplies what the input projection gives with its factors.
    pub(super) fn scale_inputs(&mut self, tasks: &Tasks<'_>, shape: &StateSpaceShape) {
        if shape.input_scales == [1.0; 5] {
            return;
        }
        let input_len = tasks.shape.input_len();
        let num_tokens = tasks.step.batch.num_tokens();
        let max_rows = MIN_TASK_LEN.div_ceil(input_len);
        let (value_len, key_len) = (shape.value_len(), shape.key_len());
        let lens = [value_len, key_len, key_len, value_len, shape.num_heads];
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tokens.div_ceil(max_rows), |_, task| {
            let first = task * max_rows;
            for token in first..num_tokens.min(first + max_rows) {
                // SAFETY: each row is of one task.
                let mut row = unsafe { tasks.x.slice(token * input_len, input_len) };
                for (len, scale) in lens.into_iter().zip(shape.input_scales) {
                    let (part, rest) = row.split_at_mut(len);
                    part.iter_mut().for_each(|x| *x *= scale);
                    row = rest;
                }
            }
        });
    }

    /// `out = norm(results * silu(gates))`, or another [norm](SpaceNorm).
    fn gate_and_normalise(&mut self, tasks: &Tasks<'_>, shape: &StateSpaceShape, norm: &[f32]) {
        let simd = tasks.simd;
        let input_len = tasks.shape.input_len();
        let value_len = shape.value_len();
        let gates = value_len + 2 * shape.key_len();
        let num_tokens = tasks.step.batch.num_tokens();
        let max_rows = MIN_TASK_LEN.div_ceil(value_len);
        let (len, eps) = (value_len / shape.num_norm_groups, shape.norm_eps);
        let kind = shape.norm;
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tokens.div_ceil(max_rows), |_, task| {
            let first = task * max_rows;
            for token in first..num_tokens.min(first + max_rows) {
                // SAFETY: each row is of one task.
                let (row, out) = unsafe {
                    (
                        tasks.x.slice(token * input_len, input_len),
                        tasks.out.slice(token * value_len, value_len),
                    )
                };
                let (results, rest) = row.split_at_mut(value_len);
                let gates = &rest[gates - value_len..][..value_len];
                for_each_simd!(simd, normalise, (
                    results: &mut [f32],
                    gates: &[f32],
                    norm: &[f32],
                    kind: SpaceNorm,
                    len: usize,
                    eps: f32,
                    out: &mut [u16],
                ));
            }
        });
    }
}

#[inline(always)]
fn normalise(
    results: &mut [f32],
    gates: &[f32],
    norm: &[f32],
    kind: SpaceNorm,
    len: usize,
    eps: f32,
    out: &mut [u16],
) {
    let gate_all = |results: &mut [f32]| {
        for (result, gate) in results.iter_mut().zip(gates) {
            *result *= silu(*gate);
        }
    };
    if kind != SpaceNorm::Ungated {
        gate_all(results);
    }
    let groups = results.chunks_exact_mut(len).zip(norm.chunks_exact(len));
    for (results, norm) in groups {
        let scale = inverse_rms(results, eps);
        for (result, weight) in results.iter_mut().zip(norm) {
            *result = *result * scale * weight;
        }
    }
    if kind == SpaceNorm::Ungated {
        gate_all(results);
    }
    for (result, out) in results.iter().zip(out) {
        *out = to_bf16_bits(*result);
    }
}

/// Puts in place of the value what the state has for a query, with the bits of [`update`] that has left it.
#[inline(always)]
fn read(state: &[f32], query: &[f32], skip: f32, value: &mut [f32]) {
    let head_dim = value.len();
    for (column, value) in value.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (row, query) in state.chunks_exact(head_dim).zip(query) {
            sum += row[column] * query;
        }
        *value = sum + skip * *value;
    }
}

/// Decays a state, adds a value to it at a key, and puts in place of the value what the state has for a query.
#[inline(always)]
fn update(
    simd: Simd,
    state: &mut [f32],
    key: &[f32],
    query: &[f32],
    factors: [f32; 3],
    value: &mut [f32],
) {
    let head_dim = value.len();
    let mut update = Update {
        state,
        key,
        query,
        factors,
        value,
    };
    for_each_column(simd, head_dim, &mut update);
}

/// The operands of [`update`].
struct Update<'a> {
    state: &'a mut [f32],
    key: &'a [f32],
    query: &'a [f32],
    /// Decay, time and skip.
    factors: [f32; 3],
    value: &'a mut [f32],
}

impl EachColumn for Update<'_> {
    #[inline(always)]
    fn compute<const N: usize>(&mut self, first: usize) {
        let [decay, time, skip] = self.factors;
        let rows = self.state.chunks_exact_mut(self.value.len());
        let value = &mut self.value[first..first + N];
        let mut added = [0.0; N];
        for (added, value) in added.iter_mut().zip(&*value) {
            *added = time * value;
        }
        let mut sums = [0.0; N];
        for ((row, key), query) in rows.zip(self.key).zip(self.query) {
            let columns = row[first..first + N].iter_mut();
            for ((sum, state), added) in sums.iter_mut().zip(columns).zip(added) {
                *state = *state * decay + added * key;
                *sum += *state * query;
            }
        }
        for (value, sum) in value.iter_mut().zip(sums) {
            *value = sum + skip * *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::math::from_bf16_bits;
    use super::super::tests::values;
    use super::*;

    #[test]
    fn a_state_is_updated_by_the_definition_whatever_its_width() {
        for simd in Simd::tested() {
            for head_dim in [1, 31, 32, 40, 64, 71, 128, 225] {
                let state_dim = 24;
                let mut state = values(state_dim * head_dim, 1);
                let mut expected: Vec<_> = state.iter().copied().map(f64::from).collect();
                for token in 2..6 {
                    let [key, query] = [token, token + 10].map(|seed| values(state_dim, seed));
                    let mut value = values(head_dim, token + 20);
                    let factors = [0.9, 0.3, 0.7];
                    let [decay, time, skip] = factors.map(f64::from);
                    let all: Vec<_> = (0..head_dim)
                        .map(|column| {
                            let x = f64::from(value[column]);
                            let rows = expected.chunks_mut(head_dim).zip(&key).zip(&query);
                            let sum: f64 = rows
                                .map(|((row, key), query)| {
                                    row[column] = row[column] * decay + time * x * f64::from(*key);
                                    row[column] * f64::from(*query)
                                })
                                .sum();
                            sum + skip * x
                        })
                        .collect();
                    let (key, query) = (&key[..], &query[..]);
                    let (state, value) = (&mut state[..], &mut value[..]);
                    for_each_simd!(simd, update, (
                        simd: Simd,
                        state: &mut [f32],
                        key: &[f32],
                        query: &[f32],
                        factors: [f32; 3],
                        value: &mut [f32],
                    ));
                    for (value, expected) in value.iter().zip(all) {
                        let error = (f64::from(*value) - expected).abs();
                        assert!(error < 1e-5, "{simd}, {head_dim}: {value}, {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn results_are_gated_and_normalised_in_either_order() {
        const LEN: usize = 35;
        let (results, gates, norm) = (values(2 * LEN, 1), values(2 * LEN, 2), values(2 * LEN, 3));
        let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
        for simd in Simd::tested() {
            for kind in [SpaceNorm::Gated, SpaceNorm::Ungated, SpaceNorm::Absent] {
                let mut own = results.clone();
                let mut out = [0; 2 * LEN];
                let weights: &[f32] = match kind {
                    SpaceNorm::Absent => &[],
                    SpaceNorm::Gated | SpaceNorm::Ungated => &norm,
                };
                let (len, eps) = (LEN, 0.1);
                {
                    let (results, gates, norm, out) =
                        (&mut own[..], &gates[..], weights, &mut out[..]);
                    for_each_simd!(simd, normalise, (
                        results: &mut [f32],
                        gates: &[f32],
                        norm: &[f32],
                        kind: SpaceNorm,
                        len: usize,
                        eps: f32,
                        out: &mut [u16],
                    ));
                }
                for (group, first) in [0, LEN].into_iter().enumerate() {
                    let all = first..first + LEN;
                    let factor = |i: usize| match kind {
                        SpaceNorm::Gated => silu(gates[i]),
                        SpaceNorm::Ungated | SpaceNorm::Absent => 1.0,
                    };
                    let squares = all
                        .clone()
                        .map(|i| (f64::from(results[i]) * factor(i)).powi(2));
                    let rms = (squares.sum::<f64>() / LEN as f64 + f64::from(eps)).sqrt();
                    for i in all {
                        let gated = f64::from(results[i]) * silu(gates[i]);
                        let expected = match kind {
                            SpaceNorm::Absent => gated,
                            SpaceNorm::Gated | SpaceNorm::Ungated => {
                                gated / rms * f64::from(norm[i])
                            }
                        };
                        let error = (f64::from(from_bf16_bits(out[i])) - expected).abs();
                        let bound = expected.abs() / 200.0 + 1e-6;
                        assert!(error < bound, "{simd}, {kind:?}, {group}, {i}: {error}");
                    }
                }
            }
        }
    }
}
