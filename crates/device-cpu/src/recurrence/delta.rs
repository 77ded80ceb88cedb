//! The gated delta rule on CPU: see [`DeltaShape`].
//!
//! ```text
//! task      a key head of a sequence, and the value heads that share it
//! token     for each value head a pass over the state that decays it and gives what it has for the key, and one that
//!           writes the difference and gives what it has for the query; only the latter if the token is repeated
//! ```

use std::iter::repeat;
use std::ops::Range;

use super::super::elementwise::sum;
use super::super::math::{self, exp, silu, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::super::{Cpu, Simd};
use super::columns::{EachColumn, for_each_column};
use super::{Tasks, sigmoid, softplus};
use inflight_device::{DeltaForm, DeltaShape, LateInputs, RuleWeights};

/// Added to the squared length of a query or key, as transformers and flash-linear-attention do.
const LENGTH_EPS: f32 = 1e-6;

/// The operands of a key head.
struct Head<'a> {
    simd: Simd,
    shape: &'a DeltaShape,
    index: usize,
    /// The value heads that share it.
    values: Range<usize>,
    is_repeated: bool,
    weights: &'a RuleWeights<Cpu>,
}

/// Inputs of the rule of one token, for all heads.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    queries: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    gates: &'a [f32],
    strengths: &'a [f32],
    decays: &'a [f32],
}

impl<'a> Inputs<'a> {
    /// The parts of a token's products `x`, with late gates and decays if there are some.
    fn new(shape: &DeltaShape, x: &'a [f32], late: Option<[&'a [f32]; 2]>) -> Self {
        let (key_len, value_len) = (shape.key_len(), shape.value_len());
        let (queries, rest) = x.split_at(key_len);
        let (keys, rest) = rest.split_at(key_len);
        let (values, rest) = rest.split_at(value_len);
        let (gates, strengths, decays) = match late {
            Some([gates, decays]) => (gates, rest, decays),
            None => {
                let (gates, rest) = rest.split_at(value_len);
                let (strengths, decays) = rest.split_at(shape.num_value_heads);
                (gates, strengths, decays)
            }
        };
        Self {
            queries,
            keys,
            values,
            gates,
            strengths,
            decays,
        }
    }
}

impl Cpu {
    /// The rule for all tokens, whose channels have been convolved.
    pub(super) fn mix_delta(
        &mut self,
        tasks: &Tasks<'_>,
        shape: &DeltaShape,
        weights: &RuleWeights<Cpu>,
        late: Option<LateInputs<'_, Cpu>>,
    ) {
        let num_heads = shape.num_value_heads;
        assert!(
            [weights.rates.len(), weights.time_biases.len()] == [num_heads, shape.num_decays()]
                && weights.norm.as_ref().map(Vec::len) == Some(shape.value_dim),
            "the rule's weights"
        );
        let late = match late {
            Some(LateInputs::LowRank { gates, decays }) => {
                let widths = [shape.value_len(), shape.num_decays()];
                assert_eq!([gates.width(), decays.width()], widths, "late inputs");
                let num_tokens = tasks.step.batch.num_tokens();
                Some([gates, decays].map(|rows| (rows.first(num_tokens), rows.width())))
            }
            Some(LateInputs::Selected { .. }) | None => None,
        };
        assert_eq!(
            late.is_some(),
            shape.form == DeltaForm::Channels,
            "late inputs"
        );
        let simd = tasks.simd;
        let group = num_heads / shape.num_key_heads;
        let num_tasks = tasks.num_spans() * shape.num_key_heads;
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tasks, |worker, task| {
            let index = task % shape.num_key_heads;
            let span = tasks.span(task / shape.num_key_heads);
            let head = &Head {
                simd,
                shape,
                index,
                values: index * group..(index + 1) * group,
                is_repeated: span.is_repeated,
                weights,
            };
            // SAFETY: the heads of a sequence are of one task.
            let state = unsafe { tasks.heads(&span, head.values.clone(), shape.matrix_len()) };
            let scratch = &mut worker.recurrence.values;
            scratch.resize(3 * shape.key_dim + shape.value_dim, 0.0);
            let scratch = &mut scratch[..];
            for token in span.tokens {
                let input_len = tasks.shape.input_len();
                // SAFETY: nothing writes them.
                let x = unsafe { tasks.x.read(token * input_len, input_len) };
                let of_token = |(rows, width)| -> &[f32] {
                    let rows: &[f32] = rows;
                    &rows[token * width..][..width]
                };
                let inputs = Inputs::new(shape, x, late.map(|late| late.map(of_token)));
                let first = token * shape.value_len() + head.values.start * shape.value_dim;
                // SAFETY: each token is of one sequence, whose heads are of one task.
                let out = unsafe { tasks.out.slice(first, group * shape.value_dim) };
                for_each_simd!(simd, mix_token, (
                    head: &Head<'_>,
                    inputs: Inputs<'_>,
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
fn mix_token(
    head: &Head<'_>,
    inputs: Inputs<'_>,
    state: &mut [f32],
    scratch: &mut [f32],
    out: &mut [u16],
) {
    let DeltaShape {
        form,
        key_dim,
        value_dim,
        strength_scale,
        norm_eps,
        ..
    } = *head.shape;
    let (q, rest) = scratch.split_at_mut(key_dim);
    let (k, rest) = rest.split_at_mut(key_dim);
    let (row_decays, sums) = rest.split_at_mut(key_dim);
    let own = head.index * key_dim..(head.index + 1) * key_dim;
    normalise(
        &inputs.queries[own.clone()],
        1.0 / (key_dim as f32).sqrt(),
        q,
    );
    normalise(&inputs.keys[own], 1.0, k);
    let (q, k) = (&*q, &*k);
    let matrices = state.chunks_exact_mut(key_dim * value_dim);
    let outs = out.chunks_exact_mut(value_dim);
    for (index, (state, out)) in head.values.clone().zip(matrices.zip(outs)) {
        let weights = head.weights;
        let own = index * value_dim..(index + 1) * value_dim;
        let operands = [q, k, &inputs.values[own.clone()]];
        let strength = || strength_scale * sigmoid(inputs.strengths[index]);
        match (head.is_repeated, form) {
            (true, _) => read(state, q, sums),
            (false, DeltaForm::Heads) => {
                let time = softplus(inputs.decays[index] + weights.time_biases[index]);
                let decay = exp(-weights.rates[index] * time);
                update(head.simd, state, operands, repeat(decay), strength(), sums);
            }
            (false, DeltaForm::Channels) => {
                let own = index * key_dim..(index + 1) * key_dim;
                let operands_of_decays = [&inputs.decays[own.clone()], &weights.time_biases[own]];
                decay_rows(weights.rates[index], operands_of_decays, row_decays);
                let decays = row_decays.iter().copied();
                update(head.simd, state, operands, decays, strength(), sums);
            }
        }
        let scale = 1.0 / (sum(sums, |x| x * x) / value_dim as f32 + norm_eps).sqrt();
        let norm = weights.norm.as_deref().unwrap_or_default();
        let gates = &inputs.gates[own];
        match form {
            DeltaForm::Heads => gate(sums, scale, [norm, gates], silu, out),
            DeltaForm::Channels => gate(sums, scale, [norm, gates], sigmoid, out),
        }
    }
}

/// The decay of each row of a state.
#[inline(always)]
fn decay_rows(rate: f32, [decays, time_biases]: [&[f32]; 2], out: &mut [f32]) {
    for ((out, decay), bias) in out.iter_mut().zip(decays).zip(time_biases) {
        *out = exp(-rate * math::softplus(decay + bias));
    }
}

/// `out = scale * sums * weights * function(gates)`.
#[inline(always)]
fn gate(
    sums: &[f32],
    scale: f32,
    [weights, gates]: [&[f32]; 2],
    function: impl Fn(f32) -> f32,
    out: &mut [u16],
) {
    let weighted = sums.iter().zip(weights).zip(gates).zip(out);
    for (((sum, weight), gate), out) in weighted {
        *out = to_bf16_bits(sum * scale * weight * function(*gate));
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

/// Decays the rows of a state, writes a value to it at a key, and reads it at a query.
#[inline(always)]
fn update(
    simd: Simd,
    state: &mut [f32],
    operands: [&[f32]; 3],
    decays: impl Iterator<Item = f32> + Clone,
    strength: f32,
    out: &mut [f32],
) {
    let mut update = Update {
        state,
        operands,
        decays,
        strength,
        out,
    };
    for_each_column(simd, operands[2].len(), &mut update);
}

/// The operands of [`update`].
struct Update<'a, D> {
    state: &'a mut [f32],
    /// Query, key and value.
    operands: [&'a [f32]; 3],
    decays: D,
    strength: f32,
    out: &'a mut [f32],
}

impl<D: Iterator<Item = f32> + Clone> EachColumn for Update<'_, D> {
    #[inline(always)]
    fn compute<const N: usize>(&mut self, first: usize) {
        let [q, k, v] = self.operands;
        let value_dim = v.len();
        let mut known = [0.0; N];
        let rows = self.state.chunks_exact_mut(value_dim);
        for ((row, k), decay) in rows.zip(k).zip(self.decays.clone()) {
            for (known, state) in known.iter_mut().zip(&mut row[first..first + N]) {
                *state *= decay;
                *known += *state * k;
            }
        }
        let mut written = [0.0; N];
        for ((written, v), known) in written.iter_mut().zip(&v[first..]).zip(known) {
            *written = (v - known) * self.strength;
        }
        let mut sums = [0.0; N];
        let rows = self.state.chunks_exact_mut(value_dim);
        for ((row, k), q) in rows.zip(k).zip(q) {
            let columns = row[first..first + N].iter_mut();
            for ((sum, state), written) in sums.iter_mut().zip(columns).zip(written) {
                *state += written * k;
                *sum += *state * q;
            }
        }
        self.out[first..first + N].copy_from_slice(&sums);
    }
}

#[cfg(test)]
mod tests {
    use std::iter::{Copied, Repeat};
    use std::slice::Iter;

    use super::super::tests::values;
    use super::*;

    /// The rule by its definition, with a decay for each row; adds to the state, too.
    fn updated(
        state: &mut [f64],
        [q, k, v]: [&[f32]; 3],
        decays: &[f32],
        strength: f32,
    ) -> Vec<f64> {
        let strength = f64::from(strength);
        for (row, decay) in state.chunks_mut(v.len()).zip(decays) {
            row.iter_mut()
                .for_each(|element| *element *= f64::from(*decay));
        }
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

    const KEY_DIM: usize = 24;

    /// Compares an update, given its set, state, operands, strength and results, with the definition.
    fn check_updates(
        simd: Simd,
        decay: impl Fn(usize) -> f32,
        update: impl Fn(Simd, &mut [f32], [&[f32]; 3], f32, &mut [f32]),
    ) {
        let decays: Vec<_> = (0..KEY_DIM).map(decay).collect();
        for value_dim in [1, 31, 32, 40, 64, 71, 128, 225] {
            let mut state = values(KEY_DIM * value_dim, 1);
            let mut expected: Vec<_> = state.iter().copied().map(f64::from).collect();
            for token in 2..6 {
                let [q, k] = [(token, 0.25), (token + 10, 1.0)].map(|(seed, len)| {
                    let mut vector = vec![0.0; KEY_DIM];
                    normalise(&values(KEY_DIM, seed), len, &mut vector);
                    vector
                });
                let v = values(value_dim, token + 20);
                let operands = [&q[..], &k, &v];
                let (out, strength) = (&mut vec![0.0; value_dim][..], 0.7);
                update(simd, &mut state, operands, strength, out);
                let all = updated(&mut expected, operands, &decays, strength);
                for (out, expected) in out.iter().zip(all) {
                    let error = (f64::from(*out) - expected).abs();
                    assert!(error < 1e-5, "{simd}, {value_dim}: {out}, {expected}");
                }
            }
        }
    }

    #[test]
    fn a_state_is_updated_by_the_definition_whatever_its_width() {
        for simd in Simd::tested() {
            check_updates(
                simd,
                |_| 0.9,
                |simd, state, operands, strength, out| {
                    let decays = repeat(0.9_f32);
                    for_each_simd!(simd, update, (
                        simd: Simd,
                        state: &mut [f32],
                        operands: [&[f32]; 3],
                        decays: Repeat<f32>,
                        strength: f32,
                        out: &mut [f32],
                    ));
                },
            );
        }
    }

    #[test]
    fn rows_decay_each_by_its_own_factor() {
        let decay = |row: usize| 1.0 - row as f32 / 40.0;
        let decays: Vec<_> = (0..KEY_DIM).map(decay).collect();
        for simd in Simd::tested() {
            check_updates(simd, decay, |simd, state, operands, strength, out| {
                let decays = decays.iter().copied();
                for_each_simd!(simd, update, (
                    simd: Simd,
                    state: &mut [f32],
                    operands: [&[f32]; 3],
                    decays: Copied<Iter<'_, f32>>,
                    strength: f32,
                    out: &mut [f32],
                ));
            });
        }
    }

    #[test]
    fn decays_of_rows_are_near_their_definition() {
        let (rate, decays, biases) = (1.7, values(71, 1), values(71, 2));
        let decays: Vec<_> = decays.iter().map(|decay| 9.0 * decay).collect();
        for simd in Simd::tested() {
            let mut own = vec![0.0; 71];
            let (operands, out) = ([&decays[..], &biases], &mut own[..]);
            for_each_simd!(simd, decay_rows, (
                rate: f32,
                operands: [&[f32]; 2],
                out: &mut [f32],
            ));
            for ((own, decay), bias) in own.iter().zip(&decays).zip(&biases) {
                let time = (f64::from(*decay) + f64::from(*bias)).exp().ln_1p();
                let expected = (-f64::from(rate) * time).exp();
                let error = (f64::from(*own) - expected).abs();
                assert!(error < 2e-6 * expected + 1e-30, "{simd}: {own}, {expected}");
            }
        }
    }

    #[test]
    fn columns_that_are_computed_together_or_read_again_have_the_same_bits() {
        let (key_dim, value_dim) = (24, 225);
        let [q, k] = [1, 2].map(|seed| values(key_dim, seed));
        let v = values(value_dim, 3);
        let state = values(key_dim * value_dim, 4);
        let results = [true, false].map(|together| {
            let (mut state, mut out) = (state.clone(), vec![0.0; value_dim]);
            let mut update = Update {
                state: &mut state,
                operands: [&q[..], &k, &v],
                decays: repeat(0.9),
                strength: 0.7,
                out: &mut out,
            };
            match together {
                true => for_each_column(Simd::Avx512Bf16, value_dim, &mut update),
                false => (0..value_dim).for_each(|column| update.compute::<1>(column)),
            }
            let mut again = vec![0.0; value_dim];
            read(&state, &q, &mut again);
            assert!(out == again);
            (state, out)
        });
        assert!(results[0] == results[1]);
    }
}
