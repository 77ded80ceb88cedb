//! The gated delta rule on CPU: see [`DeltaShape`].
//!
//! ```text
//! task      a key head of a sequence, and the value heads that share it
//! token     q, k, v by the convolution, then for each value head a pass over the state that decays it and gives what
//!           it has for the key, and one that writes the difference and gives what it has for the query
//! ```

use super::super::elementwise::sum;
use super::super::math::{exp, silu, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::super::{Cpu, Worker};
use super::convolution::Channels;
use super::{SpanState, Tasks, sigmoid};
use inflight_device::{DeltaShape, DeltaWeights};

/// Columns of a state that are computed together: their sums stay in registers.
const COLUMNS: usize = 32;
/// Added to the squared length of a query or key, as transformers and flash-linear-attention do.
const LENGTH_EPS: f32 = 1e-6;

/// The operands of a key head.
#[derive(Clone, Copy)]
struct Head<'a> {
    shape: &'a DeltaShape,
    /// Which of the key heads it is.
    index: usize,
    /// The channels of its queries, its keys and its values.
    channels: [Channels<'a>; 3],
    rates: &'a [f32],
    time_biases: &'a [f32],
    norm: &'a [f32],
}

/// Scratch memory for a token of a head.
struct HeadScratch<'a> {
    /// `[kernel_len, _]` of queries, keys and values.
    windows: [&'a mut [f32]; 3],
    /// A query, a key and the values.
    convolved: [&'a mut [f32]; 3],
    /// `[value_dim]`.
    sums: &'a mut [f32],
}

impl Head<'_> {
    /// Value heads that share a key head.
    #[inline(always)]
    fn group_size(&self) -> usize {
        self.shape.num_value_heads / self.shape.num_key_heads
    }
}

/// The rule for all tokens.
pub(super) fn mix(
    cpu: &mut Cpu,
    tasks: &Tasks<'_>,
    shape: &DeltaShape,
    weights: &DeltaWeights<Cpu>,
) {
    let DeltaWeights {
        rates,
        time_biases,
        norm,
    } = weights;
    let num_heads = shape.num_value_heads;
    assert!(
        [rates.len(), time_biases.len()] == [num_heads; 2] && norm.len() == shape.value_dim,
        "the rule's weights"
    );
    let num_tasks = tasks.step.batch.spans().len() * shape.num_key_heads;
    let Cpu { pool, workers, .. } = cpu;
    pool.for_each(workers, num_tasks, |worker, task| {
        let index = task % shape.num_key_heads;
        let (key_dim, group) = (shape.key_dim, num_heads / shape.num_key_heads);
        let values_len = group * shape.value_dim;
        let channels = [
            tasks.channels(index * key_dim, key_dim),
            tasks.channels(shape.key_len() + index * key_dim, key_dim),
            tasks.channels(2 * shape.key_len() + index * values_len, values_len),
        ];
        let head = Head {
            shape,
            index,
            channels,
            rates,
            time_biases,
            norm,
        };
        mix_head(tasks, tasks.span(task / shape.num_key_heads), &head, worker);
    });
}

fn mix_head(tasks: &Tasks<'_>, span: SpanState<'_>, head: &Head<'_>, worker: &mut Worker) {
    let (shape, simd) = (head.shape, tasks.simd);
    let (group, kernel_len) = (head.group_size(), tasks.shape.kernel_len);
    let lens = head.channels.map(|channels| channels.len);
    let num_channels: usize = lens.iter().sum();
    let scratch = &mut worker.recurrence.values;
    scratch.resize((kernel_len + 1) * num_channels + shape.value_dim, 0.0);
    let mut rest = &mut scratch[..];
    let mut part = |len: usize| rest.split_off_mut(..len).expect("it was resized");
    let mut of_head = HeadScratch {
        windows: lens.map(|len| part(kernel_len * len)),
        convolved: lens.map(&mut part),
        sums: part(shape.value_dim),
    };
    for (channels, window) in head.channels.iter().zip(&mut of_head.windows) {
        // SAFETY: the channels of a sequence are of one task, and sequences have slots of their own.
        unsafe { tasks.read_window(span, *channels, window) };
    }
    let state_len = group * shape.matrix_len();
    let start = span.state + tasks.shape.convolution_len() + head.index * state_len;
    // SAFETY: as above, for the heads of a sequence.
    let state = unsafe { tasks.states.slice(start, state_len) };
    if span.begins {
        state.fill(0.0);
    }
    let out_len = group * shape.value_dim;
    let rows = span.x.chunks_exact(tasks.shape.input_len());
    for (token, x) in (span.first_token..).zip(rows) {
        let start = token * shape.value_len() + head.index * out_len;
        // SAFETY: as above, each token is of one sequence.
        let out = unsafe { tasks.out.slice(start, out_len) };
        let scratch = &mut of_head;
        for_each_simd!(simd, mix_token, (
            head: &Head<'_>,
            x: &[f32],
            state: &mut [f32],
            scratch: &mut HeadScratch<'_>,
            out: &mut [u16],
        ));
    }
    for (channels, window) in head.channels.iter().zip(&of_head.windows) {
        // SAFETY: as above.
        unsafe { tasks.write_window(span, *channels, window) };
    }
}

#[inline(always)]
fn mix_token(
    head: &Head<'_>,
    x: &[f32],
    state: &mut [f32],
    scratch: &mut HeadScratch<'_>,
    out: &mut [u16],
) {
    let DeltaShape {
        key_dim,
        value_dim,
        num_value_heads,
        norm_eps,
        ..
    } = *head.shape;
    let HeadScratch {
        windows,
        convolved,
        sums,
    } = scratch;
    for index in 0..3 {
        let (channels, window) = (head.channels[index], &mut *windows[index]);
        let last = window.len() - channels.len;
        window[last..].copy_from_slice(&x[channels.first..channels.first + channels.len]);
        channels.convolve(window, convolved[index]);
        convolved[index].iter_mut().for_each(|x| *x = silu(*x));
    }
    let [q, k, v] = convolved;
    normalise(q, 1.0 / (key_dim as f32).sqrt());
    normalise(k, 1.0);
    let (q, k) = (&**q, &**k);
    let group = head.group_size();
    let gates = 2 * head.shape.key_len() + head.shape.value_len();
    let strengths = gates + head.shape.value_len();
    let decays = strengths + num_value_heads;
    let of_heads = state.chunks_exact_mut(key_dim * value_dim);
    let values = v.chunks_exact(value_dim);
    let outs = out.chunks_exact_mut(value_dim);
    for (own, ((state, v), out)) in of_heads.zip(values).zip(outs).enumerate() {
        let value_head = head.index * group + own;
        let strength = sigmoid(x[strengths + value_head]);
        let time = softplus(x[decays + value_head] + head.time_biases[value_head]);
        let decay = exp(-head.rates[value_head] * time);
        update(state, [q, k, v], decay, strength, sums);
        let scale = 1.0 / (sum(sums, |x| x * x) / value_dim as f32 + norm_eps).sqrt();
        let gates = &x[gates + value_head * value_dim..][..value_dim];
        let weighted = sums.iter().zip(head.norm).zip(gates).zip(out);
        for (((sum, weight), gate), out) in weighted {
            *out = to_bf16_bits(sum * scale * weight * silu(*gate));
        }
    }
}

/// Divides a vector by its length, and multiplies it with `factor`.
#[inline(always)]
fn normalise(x: &mut [f32], factor: f32) {
    let scale = factor / (sum(x, |x| x * x) + LENGTH_EPS).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => x.exp().ln_1p(),
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
    use super::*;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0;
        (0..len).map(value).collect()
    }

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
                    let [mut q, mut k] = [token, token + 10].map(|seed| values(key_dim, seed));
                    normalise(&mut q, 0.25);
                    normalise(&mut k, 1.0);
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
    fn columns_that_are_computed_together_have_the_same_bits() {
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
            (state, out)
        });
        assert!(results[0] == results[1]);
    }

    #[test]
    fn softplus_is_near_its_definition() {
        for x in [-100.0, -10.0, -1.0, 0.0, 0.5, 10.0, 19.9, 20.1, 80.0_f32] {
            let expected = f64::from(x).exp().ln_1p();
            let error = (f64::from(softplus(x)) - expected).abs();
            assert!(error <= 1e-6 * expected.max(1e-30), "{x}: {error}");
        }
        assert!(softplus(f32::NAN).is_nan());
    }
}
