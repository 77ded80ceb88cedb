//! Layers with recurrent states: convolutions, the gated delta rule, state spaces, gates and norms.

use std::ops::Range;

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, UNWRITTEN, assert_close, bits, cases, to_f64, unwritten,
    unwritten_bf16,
};

const NUM_CASES: usize = 12;
/// Errors of results beside their size, which sums over a key and exponentials of rates have.
const RULE_ROUNDING: f64 = 50.0 * F32_ROUNDING;

const BEGINS: u32 = 1;
const IS_REPEATED: u32 = 2;
/// Tokens of the largest step.
const MAX_TOKENS: usize = 4 * 19;

/// A sequence of a step.
#[derive(Clone)]
struct Span {
    first_token: usize,
    num_tokens: usize,
    slot: usize,
    flags: u32,
    /// Token and slot.
    saved: Vec<[usize; 2]>,
}

/// The sequences of a step, some of which begin, and one that is padding.
struct Step {
    spans: Vec<Span>,
    num_tokens: usize,
    num_slots: usize,
}

impl Step {
    fn new(random: &mut Random) -> Self {
        let num_spans = random.between(1, 4);
        // Each saves up to two states.
        let num_slots = 3 * num_spans + 1;
        let slots = random.different(num_slots, num_slots);
        let mut slots = slots.into_iter().map(|slot| slot as usize);
        let mut num_tokens = 0;
        let spans = (0..num_spans).map(|_| {
            let first_token = num_tokens;
            let len = random.one_of(&[1, 2, 7, 19]);
            num_tokens += len;
            let last = num_tokens - 1;
            let saved = match random.between(0, 2) {
                0 => vec![],
                1 => vec![[last, slots.next().expect("a slot")]],
                _ => {
                    let token = random.between(first_token, last);
                    [token, last]
                        .map(|token| [token, slots.next().expect("a slot")])
                        .to_vec()
                }
            };
            Span {
                first_token,
                num_tokens: len,
                slot: slots.next().expect("a slot"),
                flags: if random.coin() { BEGINS } else { 0 },
                saved,
            }
        });
        let spans = spans.collect();
        Self {
            spans,
            num_tokens,
            num_slots,
        }
    }

    /// The sequences and saved states as the kernels read them, and an empty sequence.
    fn words(&self) -> [Vec<u32>; 2] {
        let mut saved = Vec::new();
        let mut spans = Vec::new();
        for span in &self.spans {
            let first_saved = saved.len() / 2;
            saved.extend(span.saved.iter().flatten().map(|it| *it as u32));
            let [first, len] = [span.first_token, span.num_tokens].map(|it| it as u32);
            let num_saved = span.saved.len() as u32;
            spans.extend([
                first,
                len,
                span.slot as u32,
                span.flags,
                first_saved as u32,
                num_saved,
            ]);
        }
        spans.extend([0; 6]);
        saved.extend([0; 2]);
        [spans, saved]
    }

    fn num_blocks(&self) -> usize {
        self.spans.len() + 1
    }

    /// This step in two: the first tokens of each sequence, then the others.
    fn cut(&self, random: &mut Random) -> [Self; 2] {
        let mut parts = [vec![], vec![]];
        for span in &self.spans {
            let len = random.between(0, span.num_tokens);
            let middle = span.first_token + len;
            let (first, second): (Vec<_>, Vec<_>) = span
                .saved
                .iter()
                .copied()
                .partition(|[token, _]| *token < middle);
            if len > 0 {
                parts[0].push(Span {
                    num_tokens: len,
                    saved: first,
                    ..span.clone()
                });
            }
            if len < span.num_tokens {
                let flags = if len == 0 { span.flags } else { 0 };
                let num_tokens = span.num_tokens - len;
                parts[1].push(Span {
                    first_token: middle,
                    num_tokens,
                    flags,
                    saved: second,
                    ..span.clone()
                });
            }
        }
        parts.map(|spans| Self {
            spans,
            num_tokens: self.num_tokens,
            num_slots: self.num_slots,
        })
    }
}

/// Rows and states behind a step.
#[derive(Clone)]
struct Done {
    x: Vec<f32>,
    states: Vec<f32>,
}

/// Checks a kernel that computes a step in place.
///
/// `run` is the kernel, which has `own_state` of a state, and puts results in `own` elements of
/// a row. `reference` computes a token from its index, its row and the state of its sequence in f64, and changes both.
/// A step in two parts has equal bits, and so has a last token that is computed again, which changes no state.
fn check(
    random: &mut Random,
    (input_len, state_len): (usize, usize),
    own_state: Range<usize>,
    run: &dyn Fn(&mut Random, &Step, &mut Done),
    reference: impl Fn(usize, &mut [f64], &mut [f64]),
    own: &dyn Fn(usize) -> bool,
) {
    let step = Step::new(random);
    let before = Done {
        x: random.floats(step.num_tokens * input_len, 2.0),
        states: random.floats(step.num_slots * state_len, 1.0),
    };
    let mut done = before.clone();
    run(random, &step, &mut done);
    let mut x = to_f64(&before.x);
    let mut states = to_f64(&before.states);
    for span in &step.spans {
        let at = span.slot * state_len;
        let mut state = states[at..at + state_len].to_vec();
        if span.flags & BEGINS != 0 {
            state[own_state.clone()].fill(0.0);
        }
        for token in span.first_token..span.first_token + span.num_tokens {
            let row = &mut x[token * input_len..][..input_len];
            reference(token, row, &mut state);
            for [_, slot] in span.saved.iter().filter(|[saved, _]| *saved == token) {
                states[slot * state_len..][own_state.clone()]
                    .copy_from_slice(&state[own_state.clone()]);
            }
        }
        states[at..at + state_len].copy_from_slice(&state);
    }
    assert_close(&done.states, &states, RULE_ROUNDING, 1.0);
    assert_close(&done.x, &x, RULE_ROUNDING, 4.0);

    let mut in_parts = before.clone();
    for part in step.cut(random) {
        run(random, &part, &mut in_parts);
    }
    assert_eq!(bits(&in_parts.states), bits(&done.states));
    assert_eq!(bits(&in_parts.x), bits(&done.x));

    // The last token of each sequence again, with the inputs that it had.
    let mut again = Done {
        x: before.x.clone(),
        states: done.states.clone(),
    };
    let spans = step.spans.iter().map(|span| Span {
        first_token: span.first_token + span.num_tokens - 1,
        num_tokens: 1,
        flags: IS_REPEATED,
        saved: vec![],
        ..span.clone()
    });
    let last = Step {
        spans: spans.collect(),
        ..step
    };
    run(random, &last, &mut again);
    assert_eq!(bits(&again.states), bits(&done.states));
    for span in &last.spans {
        let at = span.first_token * input_len;
        for i in (0..input_len).filter(|&i| own(i)) {
            assert_eq!(
                again.x[at + i].to_bits(),
                done.x[at + i].to_bits(),
                "element {i}"
            );
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

/// Moves the window of a state on, unless its token is repeated; returns the sums.
fn convolved(state: &mut [f64], inputs: &[f64], weights: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
    let n = inputs.len();
    let len = weights.len();
    state.copy_within(n..len, 0);
    state[len - n..len].copy_from_slice(inputs);
    let sum = |i: usize| {
        let products = (i..len)
            .step_by(n)
            .map(|at| state[at] * f64::from(weights[at]));
        products.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[i]))
    };
    (0..n).map(sum).collect()
}

#[test]
fn channels_are_convolved_behind_the_inputs_that_a_state_has() {
    let random = &mut Random::new();
    for _ in cases(2 * NUM_CASES) {
        let is_rounded = random.coin();
        let (num_channels, kernel_len) = (random.between(1, 150), random.between(1, 8));
        let input_len = num_channels + random.between(0, 40);
        let weights = random.floats(kernel_len * num_channels, 1.0);
        let bias = random.coin().then(|| random.floats(num_channels, 1.0));
        let state_len = kernel_len * num_channels + random.between(0, 9);
        let run = |random: &mut Random, step: &Step, done: &mut Done| {
            let [spans, saved] = step.words();
            let mut out = unwritten_bf16(done.x.len() / input_len * num_channels);
            let mut args = vec![];
            if is_rounded {
                args.push(Arg::from(&mut out[..]));
            }
            args.extend([
                Arg::from(&mut done.x[..]),
                Arg::from(&mut done.states[..]),
                Arg::from(&weights[..]),
                Arg::from(bias.as_deref()),
                Arg::from(&spans[..]),
                Arg::from(&saved[..]),
                (state_len as u64).into(),
                (input_len as i32).into(),
                (num_channels as i32).into(),
                (kernel_len as i32).into(),
            ]);
            let name = match is_rounded {
                true => "convolve_values",
                false => "convolve_channels",
            };
            let dims = Dims::new(num_channels.div_ceil(128), step.num_blocks(), 128);
            // SAFETY: rows, states and sequences are as the kernel's source describes them.
            unsafe { random.launch(name, dims, &mut args) };
            if is_rounded {
                for span in &step.spans {
                    for token in span.first_token..span.first_token + span.num_tokens {
                        let x = &done.x[token * input_len..][..num_channels];
                        let out = &out[token * num_channels..][..num_channels];
                        let rounded = x.iter().map(|x| bf16::from_f32(*x));
                        assert!(rounded.eq(out.iter().copied()));
                    }
                }
            }
        };
        let reference = |_: usize, row: &mut [f64], state: &mut [f64]| {
            let sums = convolved(state, &row[..num_channels], &weights, bias.as_deref());
            for (x, sum) in row.iter_mut().zip(sums) {
                *x = sum * sigmoid(sum);
            }
        };
        check(
            random,
            (input_len, state_len),
            0..kernel_len * num_channels,
            &run,
            reference,
            &|i| i < num_channels,
        );
    }
}

#[test]
fn a_gated_convolution_is_a_layer_by_itself() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_channels, kernel_len) = (random.between(1, 150), random.between(1, 8));
        let weights = random.floats(kernel_len * num_channels, 1.0);
        let bias = random.coin().then(|| random.floats(num_channels, 1.0));
        let state_len = kernel_len * num_channels;
        let step = Step::new(random);
        let x = random.floats(step.num_tokens * 3 * num_channels, 2.0);
        let before = random.floats(step.num_slots * state_len, 1.0);
        let mut states = before.clone();
        let mut out = unwritten_bf16(step.num_tokens * num_channels);
        let [spans, saved] = step.words();
        let args = &mut [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::from(&mut states[..]),
            Arg::from(&weights[..]),
            Arg::from(bias.as_deref()),
            Arg::from(&spans[..]),
            Arg::from(&saved[..]),
            (state_len as u64).into(),
            (num_channels as i32).into(),
            (kernel_len as i32).into(),
        ];
        let dims = Dims::new(num_channels.div_ceil(128), step.num_blocks(), 128);
        // SAFETY: rows, states and sequences are as the kernel's source describes them.
        unsafe { random.launch("gated_convolution", dims, args) };
        let mut expected = vec![];
        for span in &step.spans {
            let mut state = to_f64(&before[span.slot * state_len..][..state_len]);
            if span.flags & BEGINS != 0 {
                state.fill(0.0);
            }
            for token in span.first_token..span.first_token + span.num_tokens {
                let row = to_f64(&x[token * 3 * num_channels..][..3 * num_channels]);
                let (b, rest) = row.split_at(num_channels);
                let (c, x) = rest.split_at(num_channels);
                let inputs: Vec<_> = b.iter().zip(x).map(|(b, x)| b * x).collect();
                let sums = convolved(&mut state, &inputs, &weights, bias.as_deref());
                expected.extend(c.iter().zip(sums).map(|(c, sum)| c * sum));
            }
            let own = &states[span.slot * state_len..][..state_len];
            assert_close(own, &state, RULE_ROUNDING, 1.0);
        }
        assert_close(&out, &expected, BF16_ROUNDING, 1e-3);
    }
}

/// The kernel of a rule for keys of this size.
fn sized(name: &str, size: usize) -> String {
    let largest = [64, 128, 256].into_iter().find(|&largest| size <= largest);
    format!("{name}_{}", largest.expect("such a kernel"))
}

#[test]
fn the_gated_delta_rule_is_its_definition() {
    let random = &mut Random::new();
    for _ in cases(2 * NUM_CASES) {
        let by_channels = random.coin();
        let (num_key_heads, group) = (random.between(1, 2), random.between(1, 3));
        let num_heads = num_key_heads * group;
        // By channels, keys have up to 128 elements.
        let key_dim = random.one_of(&[1, 8, 20, 64, 65, 128, if by_channels { 100 } else { 130 }]);
        let value_dim = random.one_of(&[1, 12, 32, 45]);
        let (key_len, value_len) = (num_key_heads * key_dim, num_heads * value_dim);
        let (input_len, num_decays) = match by_channels {
            true => (2 * key_len + value_len + num_heads, num_heads * key_dim),
            false => (2 * (key_len + value_len + num_heads), num_heads),
        };
        let decays = random.floats(MAX_TOKENS * num_decays, 2.0);
        let convolution_len = random.between(0, 9);
        let state_len = convolution_len + num_heads * key_dim * value_dim;
        let rates: Vec<_> = random
            .floats(num_heads, 1.0)
            .iter()
            .map(|x| x.abs())
            .collect();
        let biases = random.floats(num_decays, 1.0);
        let strength_scale = random.one_of(&[1.0, 2.0]);
        let run = |random: &mut Random, step: &Step, done: &mut Done| {
            let [spans, saved] = step.words();
            let mut args = vec![Arg::from(&mut done.x[..])];
            if by_channels {
                args.push(Arg::from(&decays[..]));
            }
            args.extend([
                Arg::from(&mut done.states[..]),
                Arg::from(&rates[..]),
                Arg::from(&biases[..]),
                Arg::from(&spans[..]),
                Arg::from(&saved[..]),
                (state_len as u64).into(),
                (num_key_heads as i32).into(),
                (num_heads as i32).into(),
                (key_dim as i32).into(),
                (value_dim as i32).into(),
                (convolution_len as i32).into(),
                strength_scale.into(),
            ]);
            let name = match by_channels {
                true => "channel_delta_rule",
                false => "delta_rule",
            };
            let dims = Dims::new(num_heads * value_dim.div_ceil(32), step.num_blocks(), 256);
            // SAFETY: rows, states and sequences are as the kernel's source describes them.
            unsafe { random.launch(&sized(name, key_dim), dims, &mut args) };
        };
        let reference = |token: usize, row: &mut [f64], state: &mut [f64]| {
            let unit = |vector: &[f64]| {
                let length = (vector.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                vector.iter().map(|x| x / length).collect::<Vec<_>>()
            };
            for head in 0..num_heads {
                let key_head = head / group * key_dim;
                let q = unit(&row[key_head..][..key_dim]);
                let k = unit(&row[key_len + key_head..][..key_dim]);
                let strengths = input_len
                    - if by_channels {
                        num_heads
                    } else {
                        2 * num_heads
                    };
                let strength = f64::from(strength_scale) * sigmoid(row[strengths + head]);
                let decay_of = |i: usize| {
                    let (decay, bias) = match by_channels {
                        true => {
                            let own = head * key_dim + i;
                            (f64::from(decays[token * num_decays + own]), biases[own])
                        }
                        false => (row[strengths + num_heads + head], biases[head]),
                    };
                    (-f64::from(rates[head]) * softplus(decay + f64::from(bias))).exp()
                };
                let of_rows: Vec<_> = (0..key_dim).map(decay_of).collect();
                let matrix = convolution_len + head * key_dim * value_dim;
                for column in 0..value_dim {
                    let own = &mut state[matrix + column * key_dim..][..key_dim];
                    own.iter_mut()
                        .zip(&of_rows)
                        .for_each(|(s, decay)| *s *= decay);
                    let known: f64 = own.iter().zip(&k).map(|(s, k)| s * k).sum();
                    let value = &mut row[2 * key_len + head * value_dim + column];
                    let written = strength * (*value - known);
                    own.iter_mut().zip(&k).for_each(|(s, k)| *s += written * k);
                    let read: f64 = own.iter().zip(&q).map(|(s, q)| s * q).sum();
                    *value = read / (key_dim as f64).sqrt();
                }
            }
        };
        let is_value = |i: usize| (2 * key_len..2 * key_len + value_len).contains(&i);
        check(
            random,
            (input_len, state_len),
            convolution_len..state_len,
            &run,
            reference,
            &is_value,
        );
    }
}

#[test]
fn a_state_space_is_its_definition() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_groups, group) = (random.between(1, 2), random.between(1, 3));
        let num_heads = num_groups * group;
        let state_dim = random.one_of(&[1, 16, 20, 64, 65, 128, 130]);
        let head_dim = random.one_of(&[1, 12, 32, 45]);
        let (key_len, value_len) = (num_groups * state_dim, num_heads * head_dim);
        let input_len = 2 * (key_len + value_len) + num_heads;
        let convolution_len = random.between(0, 9);
        let state_len = convolution_len + num_heads * state_dim * head_dim;
        let rates: Vec<_> = random
            .floats(num_heads, 1.0)
            .iter()
            .map(|x| x.abs())
            .collect();
        let (biases, skips) = (random.floats(num_heads, 1.0), random.floats(num_heads, 1.0));
        let [least, most] = random.one_of(&[[0.0, f32::INFINITY], [0.3, 0.9]]);
        let run = |random: &mut Random, step: &Step, done: &mut Done| {
            let [spans, saved] = step.words();
            let args = &mut [
                Arg::from(&mut done.x[..]),
                Arg::from(&mut done.states[..]),
                Arg::from(&rates[..]),
                Arg::from(&biases[..]),
                Arg::from(&skips[..]),
                Arg::from(&spans[..]),
                Arg::from(&saved[..]),
                (state_len as u64).into(),
                (num_groups as i32).into(),
                (num_heads as i32).into(),
                (state_dim as i32).into(),
                (head_dim as i32).into(),
                (convolution_len as i32).into(),
                least.into(),
                most.into(),
            ];
            let dims = Dims::new(num_heads * head_dim.div_ceil(32), step.num_blocks(), 256);
            // SAFETY: rows, states and sequences are as the kernel's source describes them.
            unsafe { random.launch(&sized("state_space", state_dim), dims, args) };
        };
        let reference = |_: usize, row: &mut [f64], state: &mut [f64]| {
            for head in 0..num_heads {
                let own_group = head / group * state_dim;
                let key = row[value_len + own_group..][..state_dim].to_vec();
                let query = row[value_len + key_len + own_group..][..state_dim].to_vec();
                let time =
                    softplus(row[2 * (value_len + key_len) + head] + f64::from(biases[head]));
                let time = time.clamp(least.into(), most.into());
                let decay = (-f64::from(rates[head]) * time).exp();
                let matrix = convolution_len + head * state_dim * head_dim;
                for column in 0..head_dim {
                    let value = &mut row[head * head_dim + column];
                    let own = &mut state[matrix + column * state_dim..][..state_dim];
                    let added = time * *value;
                    own.iter_mut()
                        .zip(&key)
                        .for_each(|(s, k)| *s = *s * decay + added * k);
                    let read: f64 = own.iter().zip(&query).map(|(s, q)| s * q).sum();
                    *value = read + f64::from(skips[head]) * *value;
                }
            }
        };
        check(
            random,
            (input_len, state_len),
            convolution_len..state_len,
            &run,
            reference,
            &|i| i < value_len,
        );
    }
}

#[test]
fn a_selective_scan_is_its_definition() {
    const EPS: f32 = 0.01;
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let num_channels = random.between(1, 150);
        let state_dim = random.one_of(&[1, 9, 16, 17, 64]);
        let has_norm = random.coin();
        let convolution_len = random.between(0, 9);
        let state_len = convolution_len + num_channels * state_dim;
        let rates: Vec<_> = random
            .floats(num_channels * state_dim, 1.0)
            .iter()
            .map(|x| x.abs())
            .collect();
        let [biases, skips] = [0, 1].map(|_| random.floats(num_channels, 1.0));
        let norm = has_norm.then(|| random.floats(2 * state_dim, 1.0));
        let name = match state_dim {
            ..=16 => "selective_scan_16",
            _ => "selective_scan_64",
        };
        let step = Step::new(random);
        let num_tokens = step.num_tokens;
        let x = random.floats(num_tokens * 2 * num_channels, 2.0);
        let times = random.floats(num_tokens * num_channels, 2.0);
        let keys = random.floats(num_tokens * 2 * state_dim, 2.0);
        let before = random.floats(step.num_slots * state_len, 1.0);
        let run = |random: &mut Random, step: &Step, states: &mut [f32], out: &mut [bf16]| {
            let [spans, saved] = step.words();
            let args = &mut [
                Arg::from(out),
                Arg::from(&x[..]),
                Arg::from(&times[..]),
                Arg::from(&keys[..]),
                Arg::from(states),
                Arg::from(&rates[..]),
                Arg::from(&biases[..]),
                Arg::from(&skips[..]),
                Arg::from(norm.as_deref()),
                Arg::from(&spans[..]),
                Arg::from(&saved[..]),
                (state_len as u64).into(),
                (num_channels as i32).into(),
                (state_dim as i32).into(),
                (convolution_len as i32).into(),
                EPS.into(),
            ];
            let dims = Dims::new(num_channels.div_ceil(128), step.num_blocks(), 128);
            // SAFETY: rows, states and sequences are as the kernel's source describes them.
            unsafe { random.launch(name, dims, args) };
        };
        let (mut states, mut out) = (before.clone(), unwritten_bf16(num_tokens * num_channels));
        run(random, &step, &mut states, &mut out);

        let normed = |part: &[f32], weights: Option<&[f32]>| -> Vec<f64> {
            let squares: f64 = part.iter().map(|x| f64::from(*x).powi(2)).sum();
            let rms = (squares / state_dim as f64 + f64::from(EPS)).sqrt();
            let elements = part.iter().enumerate();
            let normed = elements.map(|(i, x)| match weights {
                Some(weights) => f64::from(*x) / rms * f64::from(weights[i]),
                None => f64::from(*x),
            });
            normed.collect()
        };
        let mut expected = to_f64(&before);
        let mut expected_out = vec![0.0; out.len()];
        for span in &step.spans {
            let at = span.slot * state_len;
            let mut state = expected[at..at + state_len].to_vec();
            if span.flags & BEGINS != 0 {
                state[convolution_len..].fill(0.0);
            }
            for token in span.first_token..span.first_token + span.num_tokens {
                let (key, query) =
                    keys[2 * token * state_dim..][..2 * state_dim].split_at(state_dim);
                let weights = norm.as_ref().map(|norm| norm.split_at(state_dim));
                let key = normed(key, weights.map(|it| it.0));
                let query = normed(query, weights.map(|it| it.1));
                for channel in 0..num_channels {
                    let value = f64::from(x[2 * token * num_channels + channel]);
                    let gate = f64::from(x[(2 * token + 1) * num_channels + channel]);
                    let time = times[token * num_channels + channel];
                    let time = softplus(f64::from(time) + f64::from(biases[channel]));
                    let mut sum = f64::from(skips[channel]) * value;
                    for i in 0..state_dim {
                        let place = i * num_channels + channel;
                        let own = &mut state[convolution_len + place];
                        let decay = (-f64::from(rates[place]) * time).exp();
                        *own = *own * decay + key[i] * time * value;
                        sum += *own * query[i];
                    }
                    expected_out[token * num_channels + channel] = sum * gate * sigmoid(gate);
                }
                for [_, slot] in span.saved.iter().filter(|[saved, _]| *saved == token) {
                    expected[slot * state_len..][convolution_len..state_len]
                        .copy_from_slice(&state[convolution_len..]);
                }
            }
            expected[at..at + state_len].copy_from_slice(&state);
        }
        assert_close(&states, &expected, RULE_ROUNDING, 1.0);
        assert_close(&out, &expected_out, BF16_ROUNDING, 1e-3);

        let (mut in_parts, mut out_of_parts) = (before.clone(), out.clone());
        out_of_parts.fill(bf16::NAN);
        for part in step.cut(random) {
            run(random, &part, &mut in_parts, &mut out_of_parts);
        }
        assert_eq!(bits(&in_parts), bits(&states));
        assert_eq!(out_of_parts, out);

        // The last token of each sequence again.
        let spans = step.spans.iter().map(|span| Span {
            first_token: span.first_token + span.num_tokens - 1,
            num_tokens: 1,
            flags: IS_REPEATED,
            saved: vec![],
            ..span.clone()
        });
        let last = Step {
            spans: spans.collect(),
            ..step
        };
        let (mut again, mut out_again) = (states.clone(), out.clone());
        run(random, &last, &mut again, &mut out_again);
        assert_eq!(bits(&again), bits(&states));
        assert_eq!(out_again, out);
    }
}

#[test]
fn results_are_gated_and_normalised_in_either_order() {
    const EPS: f32 = 0.1;
    let random = &mut Random::new();
    for _ in cases(3 * NUM_CASES) {
        let (num_rows, num_groups) = (random.between(1, 3), random.between(1, 3));
        let group_len = random.between(1, 300);
        let width = num_groups * group_len;
        let norm_len = random.one_of(&[group_len, width]);
        let (first_result, first_gate) = (random.between(0, 9), width + random.between(9, 20));
        let input_len = first_gate + width + random.between(0, 5);
        let x = random.floats(num_rows * input_len, 2.0);
        let norm = random.floats(norm_len, 2.0);
        let order = random.between(0, 3);
        let mut out = unwritten_bf16((num_rows + 1) * width);
        let args = &mut [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::from(&x[..]),
            Arg::from(&norm[..]),
            (input_len as i32).into(),
            (input_len as i32).into(),
            (width as i32).into(),
            (first_result as i32).into(),
            (first_gate as i32).into(),
            (group_len as i32).into(),
            (norm_len as i32).into(),
            (order as i32).into(),
            EPS.into(),
        ];
        let dims = Dims::new(num_rows, num_groups, random.block(8));
        // SAFETY: rows are as long as the lengths say.
        unsafe { random.launch("gate_results", dims, args) };
        let expected = x.chunks(input_len).flat_map(|row| {
            let parts = [first_result, first_gate].map(|first| to_f64(&row[first..][..width]));
            let [results, gates] = parts;
            let silu: Vec<_> = gates.iter().map(|gate| gate * sigmoid(*gate)).collect();
            let gated = |i: usize| match order {
                1 | 3 => results[i],
                _ => results[i] * silu[i],
            };
            (0..width)
                .map(|i| {
                    if order == 2 {
                        return gated(i);
                    }
                    let group = i / group_len * group_len..(i / group_len + 1) * group_len;
                    let squares: f64 = group.map(|i| gated(i).powi(2)).sum();
                    let rms = (squares / group_len as f64 + f64::from(EPS)).sqrt();
                    let normed = gated(i) / rms * f64::from(norm[i % norm_len]);
                    match order {
                        1 => normed * silu[i],
                        3 => normed * sigmoid(gates[i]),
                        _ => normed,
                    }
                })
                .collect::<Vec<_>>()
        });
        let expected: Vec<_> = expected.collect();
        assert_close(&out[..expected.len()], &expected, BF16_ROUNDING, 1e-4);
        assert!(out[expected.len()..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn inputs_are_scaled_by_their_parts() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let lens = [1, 2, 2, 1, 0].map(|_| random.between(1, 90));
        let [value_len, key_len, num_heads, ..] = lens;
        let lens = [value_len, key_len, key_len, value_len, num_heads];
        let input_len: usize = lens.iter().sum();
        let num_rows = random.between(1, 3);
        let before = random.floats(num_rows * input_len, 2.0);
        let scales = [0.5, 2.0, 3.0, -1.0, 7.0];
        let mut x = before.clone();
        x.extend(unwritten(5));
        let mut args = vec![
            Arg::from(&mut x[..]),
            (value_len as i32).into(),
            (key_len as i32).into(),
            (num_heads as i32).into(),
        ];
        args.extend(scales.map(|scale: f32| Arg::from(scale)));
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(8));
        // SAFETY: rows are as long as the parts together.
        unsafe { random.launch("scale_inputs", dims, &mut args) };
        let of_row: Vec<_> = lens
            .iter()
            .zip(scales)
            .flat_map(|(len, scale)| vec![scale; *len])
            .collect();
        let expected = before
            .chunks(input_len)
            .flat_map(|row| row.iter().zip(&of_row).map(|(x, scale)| x * scale));
        let mut expected: Vec<f32> = expected.collect();
        expected.extend([UNWRITTEN; 5]);
        assert_eq!(bits(&x), bits(&expected));
    }
}

#[test]
fn attention_is_gated() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, num_gates) = (random.between(1, 4), random.between(1, 60));
        let (run_len, has_softplus) = (random.between(1, 5), random.between(0, 1));
        let width = num_gates * run_len;
        let before = random.bf16s(num_rows * width, 2.0);
        let gates = random.floats(num_rows * num_gates, 6.0);
        let mut attended = before.clone();
        let args = &mut [
            Arg::from(&mut attended[..]),
            Arg::from(&gates[..]),
            (width as i32).into(),
            (run_len as i32).into(),
            (has_softplus as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(8));
        // SAFETY: both have this many rows, of this width and of so many gates.
        unsafe { random.launch("gate_attention", dims, args) };
        let function = |gate: f64| match has_softplus {
            0 => sigmoid(gate),
            _ => gate.exp().ln_1p(),
        };
        let expected = before.chunks(run_len).zip(&gates);
        let expected: Vec<_> = expected
            .flat_map(|(run, gate)| {
                let factor = function((*gate).into());
                run.iter().map(move |x| f64::from(*x) * factor)
            })
            .collect();
        assert_close(&attended, &expected, BF16_ROUNDING, 1e-4);
    }
}

/// A wrong result, or a state of another sequence, would be noticed.
#[test]
#[should_panic(expected = "element")]
fn noise_is_not_close() {
    let exact = [bf16::from_f32(1.0); 4];
    assert_close(&exact, &[1.0, 1.0, 1.02, 1.0], BF16_ROUNDING, 1e-4);
}
