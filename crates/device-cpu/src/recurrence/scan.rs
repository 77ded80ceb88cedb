//! The selective scan of Mamba on CPU: see [`ScanShape`].
//!
//! ```text
//! task      some channels of a sequence: a pass over their states, [state_dim, channels], for each token
//! ```

use super::super::Cpu;
use super::super::elementwise::{MIN_TASK_LEN, inverse_rms};
use super::super::math::{exp, silu, softplus, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::Tasks;
use inflight_device::{LateInputs, RuleWeights, ScanShape};

/// Channels of a task.
const TASK_CHANNELS: usize = 128;

/// The weights of some channels.
#[derive(Clone, Copy)]
struct Channels<'a> {
    shape: &'a ScanShape,
    /// `[state_dim, num_channels]`, from the first channel on.
    rates: &'a [f32],
    time_biases: &'a [f32],
    skips: &'a [f32],
    /// `[2 * state_dim]`, or empty.
    norm: &'a [f32],
}

/// Inputs of one token.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    values: &'a [f32],
    gates: &'a [f32],
    times: &'a [f32],
    /// Key and query, of all channels.
    keys: &'a [f32],
    /// Whether the token is computed again, and changes no state.
    is_repeated: bool,
}

impl Cpu {
    /// `out = x` of the first channels of all tokens.
    pub(super) fn round_channels(&mut self, tasks: &Tasks<'_>) {
        let (width, input_len) = (tasks.shape.num_channels(), tasks.shape.input_len());
        let num_tokens = tasks.step.batch.num_tokens();
        let max_rows = MIN_TASK_LEN.div_ceil(width);
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tokens.div_ceil(max_rows), |_, task| {
            let first = task * max_rows;
            for token in first..num_tokens.min(first + max_rows) {
                // SAFETY: each row is of one task, and nothing writes x.
                let (x, out) = unsafe {
                    (
                        tasks.x.read(token * input_len, width),
                        tasks.out.slice(token * width, width),
                    )
                };
                for (x, out) in x.iter().zip(out) {
                    *out = to_bf16_bits(*x);
                }
            }
        });
    }

    /// The scan for all tokens, whose values have been convolved.
    pub(super) fn mix_scan(
        &mut self,
        tasks: &Tasks<'_>,
        shape: &ScanShape,
        weights: &RuleWeights<Cpu>,
        late: Option<LateInputs<'_, Cpu>>,
    ) {
        let ScanShape {
            num_channels,
            state_dim,
            norm_eps,
        } = *shape;
        let skips = weights.skips.as_deref().unwrap_or_default();
        let norm = weights.norm.as_deref().unwrap_or_default();
        let num_norms = if norm_eps.is_some() { 2 } else { 0 };
        assert!(
            weights.rates.len() == state_dim * num_channels
                && [weights.time_biases.len(), skips.len()] == [num_channels; 2]
                && norm.len() == num_norms * state_dim,
            "the rule's weights"
        );
        let Some(LateInputs::Selected { times, keys }) = late else {
            panic!("late inputs");
        };
        let widths = [num_channels, 2 * state_dim];
        assert_eq!([times.width(), keys.width()], widths, "late inputs");
        let num_tokens = tasks.step.batch.num_tokens();
        let (times, keys) = (times.first(num_tokens), keys.first(num_tokens));
        let simd = tasks.simd;
        let (input_len, convolution_len) = (tasks.shape.input_len(), tasks.shape.convolution_len());
        let per_span = num_channels.div_ceil(TASK_CHANNELS);
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, tasks.num_spans() * per_span, |worker, task| {
            let span = tasks.span(task / per_span);
            let first = task % per_span * TASK_CHANNELS;
            let len = TASK_CHANNELS.min(num_channels - first);
            let scratch = &mut worker.recurrence.values;
            scratch.resize((state_dim + 3) * len + 2 * state_dim, 0.0);
            let (state, scratch) = scratch.split_at_mut(state_dim * len);
            let rows_of = |slot: usize| {
                let start = slot + convolution_len + first;
                // SAFETY: the channels of a sequence are of one task, and sequences and saved states have slots of
                // their own.
                (0..state_dim)
                    .map(move |row| unsafe { tasks.states.slice(start + row * num_channels, len) })
            };
            let write = |state: &[f32], slot: usize| {
                for (stored, own) in rows_of(slot).zip(state.chunks_exact(len)) {
                    stored.copy_from_slice(own);
                }
            };
            for (stored, own) in rows_of(span.state).zip(state.chunks_exact_mut(len)) {
                match span.begins {
                    true => own.fill(0.0),
                    false => own.copy_from_slice(stored),
                }
            }
            let channels = Channels {
                shape,
                rates: &weights.rates[first..],
                time_biases: &weights.time_biases[first..][..len],
                skips: &skips[first..][..len],
                norm,
            };
            for token in span.tokens.clone() {
                let part = |column: usize| {
                    // SAFETY: nothing writes them.
                    unsafe { tasks.x.read(token * input_len + column + first, len) }
                };
                let inputs = Inputs {
                    values: part(0),
                    gates: part(num_channels),
                    times: &times[token * num_channels + first..][..len],
                    keys: &keys[2 * token * state_dim..][..2 * state_dim],
                    is_repeated: span.is_repeated,
                };
                // SAFETY: the channels of a sequence are of one task, and each token is of one sequence.
                let out = unsafe { tasks.out.slice(token * num_channels + first, len) };
                {
                    let (state, scratch) = (&mut *state, &mut *scratch);
                    for_each_simd!(simd, scan_token, (
                        channels: Channels<'_>,
                        inputs: Inputs<'_>,
                        state: &mut [f32],
                        scratch: &mut [f32],
                        out: &mut [u16],
                    ));
                }
                for slot in tasks.saved_to(token) {
                    write(state, slot);
                }
            }
            write(state, span.state);
        });
    }
}

/// Decays the states of channels, adds their values to them at the key, and reads them at the query.
#[inline(always)]
fn scan_token(
    channels: Channels<'_>,
    inputs: Inputs<'_>,
    state: &mut [f32],
    scratch: &mut [f32],
    out: &mut [u16],
) {
    let ScanShape {
        num_channels,
        state_dim,
        norm_eps,
    } = *channels.shape;
    let len = inputs.values.len();
    let (keys, scratch) = scratch.split_at_mut(2 * state_dim);
    keys.copy_from_slice(inputs.keys);
    if let Some(eps) = norm_eps {
        let weights = channels.norm.chunks_exact(state_dim);
        for (part, weights) in keys.chunks_exact_mut(state_dim).zip(weights) {
            let scale = inverse_rms(part, eps);
            for (x, weight) in part.iter_mut().zip(weights) {
                *x = *x * scale * weight;
            }
        }
    }
    let (key, query) = keys.split_at(state_dim);
    let (times, rest) = scratch.split_at_mut(len);
    let (added, sums) = rest.split_at_mut(len);
    if !inputs.is_repeated {
        let biased = inputs.times.iter().zip(channels.time_biases);
        for ((own, added), ((time, bias), value)) in times
            .iter_mut()
            .zip(added.iter_mut())
            .zip(biased.zip(inputs.values))
        {
            *own = softplus(time + bias);
            *added = *own * value;
        }
    }
    sums.fill(0.0);
    let rates = channels.rates.chunks(num_channels);
    let rows = state.chunks_exact_mut(len).zip(rates);
    for ((row, rates), (key, query)) in rows.zip(key.iter().zip(query)) {
        if !inputs.is_repeated {
            let changes = rates.iter().zip(&*times).zip(&*added);
            for (state, ((rate, time), added)) in row.iter_mut().zip(changes) {
                *state = *state * exp(-rate * time) + added * key;
            }
        }
        for (sum, state) in sums.iter_mut().zip(row) {
            *sum += *state * query;
        }
    }
    let operands = inputs.values.iter().zip(channels.skips).zip(inputs.gates);
    for ((out, sum), ((value, skip), gate)) in out.iter_mut().zip(&*sums).zip(operands) {
        *out = to_bf16_bits((sum + skip * value) * silu(*gate));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::math::from_bf16_bits;
    use super::super::tests::values;
    use super::*;
    use crate::Simd;

    const STATE_DIM: usize = 9;
    const EPS: f32 = 0.01;

    /// The scan of a token by its definition; changes the states, too.
    fn scanned(channels: Channels<'_>, inputs: Inputs<'_>, state: &mut [f64]) -> Vec<f64> {
        let len = inputs.values.len();
        let parts = inputs.keys.chunks(STATE_DIM).enumerate();
        let normed = parts.map(|(index, part)| {
            let squares: f64 = part.iter().map(|x| f64::from(*x).powi(2)).sum();
            let rms = (squares / STATE_DIM as f64 + f64::from(EPS)).sqrt();
            let elements = part.iter().enumerate();
            let normed = elements.map(|(i, x)| match channels.shape.norm_eps {
                Some(_) => f64::from(*x) / rms * f64::from(channels.norm[index * STATE_DIM + i]),
                None => f64::from(*x),
            });
            normed.collect::<Vec<_>>()
        });
        let normed: Vec<_> = normed.collect();
        let of_channel = |channel: usize| {
            let value = f64::from(inputs.values[channel]);
            let time = f64::from(inputs.times[channel]) + f64::from(channels.time_biases[channel]);
            let time = time.exp().ln_1p();
            let mut sum = f64::from(channels.skips[channel]) * value;
            for row in 0..STATE_DIM {
                let own = &mut state[row * len + channel];
                let rate = channels.rates[row * channels.shape.num_channels + channel];
                *own = *own * (-f64::from(rate) * time).exp() + time * value * normed[0][row];
                sum += *own * normed[1][row];
            }
            let gate = f64::from(inputs.gates[channel]);
            sum * gate / (1.0 + (-gate).exp())
        };
        (0..len).map(of_channel).collect()
    }

    #[test]
    fn states_are_scanned_by_the_definition_whatever_their_number() {
        for simd in Simd::tested() {
            for (len, norm_eps) in [
                (1, None),
                (31, Some(EPS)),
                (32, None),
                (40, Some(EPS)),
                (128, None),
            ] {
                let shape = &ScanShape {
                    num_channels: len + 3,
                    state_dim: STATE_DIM,
                    norm_eps,
                };
                let rates: Vec<_> = values(STATE_DIM * (len + 3), 1);
                let rates: Vec<_> = rates.iter().map(|rate| rate.abs()).collect();
                let [biases, skips] = [2, 3].map(|seed| values(len, seed));
                let norm = values(2 * STATE_DIM, 4);
                let channels = Channels {
                    shape,
                    rates: &rates,
                    time_biases: &biases,
                    skips: &skips,
                    norm: &norm,
                };
                let mut state = values(STATE_DIM * len, 5);
                let mut expected: Vec<_> = state.iter().copied().map(f64::from).collect();
                let mut scratch = vec![0.0; 3 * len + 2 * STATE_DIM];
                for token in 6..10 {
                    let [x, gates, times] = [0, 10, 20].map(|seed| values(len, seed + token));
                    let keys = values(2 * STATE_DIM, token + 30);
                    let inputs = |is_repeated| Inputs {
                        values: &x,
                        gates: &gates,
                        times: &times,
                        keys: &keys,
                        is_repeated,
                    };
                    let all = scanned(channels, inputs(false), &mut expected);
                    let outs = [false, true].map(|is_repeated| {
                        let mut own = vec![0; len];
                        let (inputs, out) = (inputs(is_repeated), &mut own[..]);
                        let (state, scratch) = (&mut state[..], &mut scratch[..]);
                        for_each_simd!(simd, scan_token, (
                            channels: Channels<'_>,
                            inputs: Inputs<'_>,
                            state: &mut [f32],
                            scratch: &mut [f32],
                            out: &mut [u16],
                        ));
                        own
                    });
                    assert_eq!(outs[0], outs[1], "{simd}, {len}: read again");
                    for (out, expected) in outs[0].iter().zip(all) {
                        let error = (f64::from(from_bf16_bits(*out)) - expected).abs();
                        let bound = expected.abs() / 200.0 + 1e-5;
                        assert!(error < bound, "{simd}, {len}: {error}, {expected}");
                    }
                }
                for (own, expected) in state.iter().zip(&expected) {
                    let error = (f64::from(*own) - expected).abs();
                    assert!(error < 1e-5, "{simd}, {len}: {own}, {expected}");
                }
            }
        }
    }
}
