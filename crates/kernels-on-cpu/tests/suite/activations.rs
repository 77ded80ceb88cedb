//! The activations of feed-forward blocks, with a gate and without.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{BF16_ROUNDING, F32_ROUNDING, Random, assert_close, cases, unwritten_bf16};

const NUM_CASES: usize = 30;

/// An activation: its kernels, without and with a gate, and the function.
type Activation = (&'static str, &'static str, fn(f64) -> f64);

/// An activation without a gate: its kernel and the function.
const QUICK_GELU: (&str, fn(f64) -> f64) = ("quick_gelu", |x| x * sigmoid(1.702 * x));

const ACTIVATIONS: [Activation; 5] = [
    ("silu", "silu_mul", |x| x * sigmoid(x)),
    ("gelu", "gelu_mul", |x| x * normal_distribution(x)),
    ("gelu_tanh", "gelu_tanh_mul", |x| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    }),
    ("relu", "relu_mul", |x| x.max(0.0)),
    ("squared_relu", "squared_relu_mul", |x| x.max(0.0).powi(2)),
];

/// Below this, an error does not count as one of the result: the functions are nearly 0 there, and differences cancel.
const SMALL: f64 = 1e-4;

#[test]
fn each_activation_is_that_of_its_name() {
    let random = &mut Random::new();
    for case in cases(NUM_CASES) {
        let (kernel, activation) = match ACTIVATIONS.get(case % 6) {
            Some(&(kernel, _, activation)) => (kernel, activation),
            None => QUICK_GELU,
        };
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows(random, num_rows, width);
        let bias = random.coin().then(|| random.floats(width, 2.0));
        let mut out = unwritten_bf16(num_rows * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::from(bias.as_deref()),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: the bias and each row have this width, and there are as many rows as blocks.
        unsafe { random.launch(kernel, dims, &mut args) };
        let bias = |at: usize| bias.as_ref().map_or(0.0, |bias| bias[at]);
        // The sums with the bias are rounded to f32.
        let sums = x.iter().enumerate().map(|(at, x)| x + bias(at % width));
        let expected: Vec<f64> = sums.map(|x| activation(f64::from(x))).collect();
        assert_close(&out, &expected, BF16_ROUNDING + 4.0 * F32_ROUNDING, SMALL);
    }
}

#[test]
fn xielu_has_parameters() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows(random, num_rows, width);
        let [positive, negative] = [(); 2].map(|()| random.float(1.0));
        let mut out = unwritten_bf16(num_rows * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::NULL,
            (width as i32).into(),
            positive.into(),
            negative.into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: each row has this width, and there are as many rows as blocks.
        unsafe { random.launch("xielu", dims, &mut args) };
        for (out, x) in out.iter().zip(&x) {
            let x = f64::from(*x);
            let curved = match x > 0.0 {
                true => f64::from(positive) * x * x,
                false => f64::from(negative) * (x.min(-1e-6).exp_m1() - x),
            };
            let expected = 0.5 * x + curved;
            // The two terms may cancel each other out, and the error of f32 is relative to each.
            let terms = (0.5 * x).abs() + curved.abs();
            let arithmetic = 4.0 * F32_ROUNDING * terms / expected.abs().max(SMALL);
            assert_close(&[*out], &[expected], BF16_ROUNDING + arithmetic, SMALL);
        }
    }
}

#[test]
fn gates_multiply_what_they_let_through() {
    let random = &mut Random::new();
    for case in cases(NUM_CASES) {
        let (_, kernel, activation) = ACTIVATIONS[case % 5];
        let (num_rows, width) = (random.between(1, 4), random.width());
        let gate_up = rows(random, num_rows, 2 * width);
        let bias = random.coin().then(|| random.floats(2 * width, 2.0));
        let factor = random.one_of(&[1.0, 0.5]);
        let mut out = unwritten_bf16(num_rows * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&gate_up[..]),
            Arg::from(bias.as_deref()),
            (width as i32).into(),
            factor.into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        // SAFETY: the bias and each row of `gate_up` have two halves of this width.
        unsafe { random.launch(kernel, dims, &mut args) };
        let bias = |at: usize| bias.as_ref().map_or(0.0, |bias| bias[at]);
        let expected: Vec<f64> = gate_up
            .chunks(2 * width)
            .flat_map(|row| {
                (0..width).map(move |i| {
                    // The sums with the bias are rounded to f32.
                    let gate = f64::from(row[i] + bias(i));
                    activation(f64::from(factor) * gate)
                        * f64::from(row[width + i] + bias(width + i))
                })
            })
            .collect();
        assert_close(&out, &expected, BF16_ROUNDING + 4.0 * F32_ROUNDING, SMALL);
    }
}

#[test]
fn gates_of_any_size_give_finite_results() {
    let random = &mut Random::new();
    let gates = [-1e38, -1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e18];
    let gate_up: Vec<f32> = gates.into_iter().chain([1.0; 8]).collect();
    for (_, kernel, activation) in ACTIVATIONS {
        let mut out = unwritten_bf16(8);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&gate_up[..]),
            Arg::NULL,
            8_i32.into(),
            1.0_f32.into(),
        ];
        // SAFETY: one row of 8 gates and 8 others.
        unsafe { random.launch(kernel, Dims::new(1, 1, 32), &mut args) };
        assert!(
            out.iter().all(|x| x.to_f32().is_finite()),
            "{kernel}: {out:?}"
        );
        let expected: Vec<f64> = gate_up[4..8]
            .iter()
            .map(|x| activation(f64::from(*x)))
            .collect();
        assert_close(&out[4..], &expected, BF16_ROUNDING, 1e-30);
        assert_eq!(
            out[..4],
            [bf16::ZERO; 4].map(|zero| if kernel.contains("relu") { zero } else { -zero })
        );
    }
}

/// Rows whose elements have one size each.
fn rows(random: &mut Random, num_rows: usize, width: usize) -> Vec<f32> {
    let rows = (0..num_rows).flat_map(|_| {
        let size = random.one_of(&[1e-2, 1.0, 6.0, 50.0]);
        random.floats(width, size)
    });
    rows.collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The standard normal distribution function, by its series around 0 (Marsaglia, Journal of Statistical Software
/// 11(4)).
fn normal_distribution(x: f64) -> f64 {
    if x.abs() > 8.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-18 {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}
