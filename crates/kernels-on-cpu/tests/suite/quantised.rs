//! Products with quantised weights, and their weights as bf16.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::quantised_matrix::{Format, Kind, Matrix};
use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, cases, unwritten, unwritten_bf16,
};

/// The kinds that these kernels have.
const KINDS: [Kind; 4] = [Kind::Int4, Kind::Int8, Kind::Fp8, Kind::E2m1];

/// The kind, as kernels are named after it.
fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Int4 => "int4",
        Kind::Int8 => "int8",
        Kind::Fp8 => "fp8",
        Kind::E2m1 => "e2m1",
    }
}

/// The parts of all weights, row by row.
fn all_parts(matrix: &Matrix) -> Vec<[f64; 2]> {
    let rows = 0..matrix.n;
    let places = rows.flat_map(|row| (0..matrix.k).map(move |column| (row, column)));
    places
        .map(|(row, column)| matrix.parts(row, column))
        .collect()
}

/// The arguments that all kernels have.
fn weight_args(matrix: &Matrix) -> [Arg<'_>; 3] {
    [
        Arg::from(&matrix.packed[..]),
        Arg::from(&matrix.scales[..]),
        Arg::from(matrix.offsets.as_deref()),
    ]
}

fn matrix(random: &mut Random) -> Matrix {
    let n = match random.between(0, 1) {
        0 => 16 * random.between(1, 20),
        _ => random.between(1, 300),
    };
    let k = match random.between(0, 2) {
        0 => 64 * random.between(1, 6),
        1 => 8 * random.between(1, 40),
        _ => random.between(1, 300),
    };
    let format = Format::random(random, &KINDS, k);
    Matrix::new(random, format, n, k)
}

/// The sums of all splits, computed with products for `rows` rows of `x` at once.
fn multiply(
    random: &mut Random,
    matrix: &Matrix,
    x: &[bf16],
    rows: usize,
    num_splits: usize,
) -> Vec<f32> {
    let (m, n) = (x.len() / matrix.k, matrix.n);
    let mut partials = unwritten(num_splits * m * n);
    let mut args = vec![Arg::from(&mut partials[..]), Arg::from(x)];
    args.extend(weight_args(matrix));
    args.extend([m, n, matrix.k, matrix.format.group_size].map(|size| Arg::from(size as i32)));
    let block_rows = if rows == 64 { 8 * 16 } else { 8 * 32 };
    let mut dims = Dims::new(n.div_ceil(block_rows), num_splits, 256);
    dims.grid[2] = m.div_ceil(rows) as u32;
    let kernel = format!("gemm_{}_m{rows}", name(matrix.format.kind));
    // SAFETY: the matrix is packed as the kernel reads it, `x` is [m, k], and there are as many partial sums as splits.
    unsafe { random.launch(&kernel, dims, &mut args) };
    let mut out = unwritten(m * n);
    sum_splits(random, &mut out, &partials, None, n, false);
    out
}

fn sum_splits(
    random: &mut Random,
    out: &mut [f32],
    partials: &[f32],
    bias: Option<&[f32]>,
    n: usize,
    is_added: bool,
) {
    let (m, num_splits) = (out.len() / n, partials.len() / out.len());
    let dims = Dims::new(m, random.between(1, 3), random.block(3));
    let mut args = [
        out.into(),
        partials.into(),
        bias.into(),
        (num_splits as i32).into(),
        (n as i32).into(),
        i32::from(is_added).into(),
    ] as [Arg<'_>; 6];
    // SAFETY: `out` and each split are [m, n], the bias is [n].
    unsafe { random.launch("sum_splits", dims, &mut args) };
}

#[test]
fn floats_of_four_bits_have_the_bits_of_integers_of_eight() {
    let random = &mut Random::new();
    for _ in cases(6) {
        let [m, n, k] = [20, 100, 200].map(|most| random.between(1, most));
        let floats = Format::random(random, &[Kind::E2m1], k);
        let floats = Matrix::new(random, floats, n, k);
        let integers = floats.in_eight_bits();
        let x = random.bf16s(m * k, 1.0);
        // Sums over the same columns: tiles have 64 of them, and 32.
        let [of_floats, of_integers] =
            [&floats, &integers].map(|matrix| multiply(random, matrix, &x, 16, 1));
        let bits = |sums: Vec<f32>| sums.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(of_floats), bits(of_integers));
    }
}

#[test]
fn products_with_codes_are_those_with_their_weights() {
    let random = &mut Random::new();
    for _ in cases(24) {
        let matrix = matrix(random);
        let rows = random.one_of(&[8, 16, 32, 64]);
        let m = random.between(1, 2 * rows).min(70);
        let x = random.bf16s(m * matrix.k, 1.0);
        let num_splits = random.between(1, 3);
        let out = multiply(random, &matrix, &x, rows, num_splits);
        let weights = all_parts(&matrix);
        for (x, out) in x.chunks(matrix.k).zip(out.chunks(matrix.n)) {
            for (weights, out) in weights.chunks(matrix.k).zip(out) {
                let (mut sum, mut size) = (0.0, 0.0);
                for ([scaled, offset], x) in weights.iter().zip(x) {
                    sum += (scaled + offset) * x.to_f64();
                    // The parts are added up by themselves, and may cancel.
                    size += (scaled.abs() + offset.abs()) * x.to_f64().abs();
                }
                let error = (f64::from(*out) - sum).abs();
                assert!(error <= 4.0 * F32_ROUNDING * size, "{out}, not {sum}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let random = &mut Random::new();
    for _ in cases(8) {
        let matrix = matrix(random);
        let m = random.between(2, 40);
        let x = random.bf16s(m * matrix.k, 1.0);
        let num_splits = random.between(1, 3);
        let all = multiply(random, &matrix, &x, 64, num_splits);
        for rows in [8, 16, 32] {
            assert_eq!(multiply(random, &matrix, &x, rows, num_splits), all);
        }
        let row = random.between(0, m - 1);
        let x = &x[row * matrix.k..][..matrix.k];
        let alone = multiply(random, &matrix, x, 8, num_splits);
        assert_eq!(alone, all[row * matrix.n..][..matrix.n]);
    }
}

#[test]
fn splits_are_added_in_order_with_bias_and_residual() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_splits, m, n) = (
            random.between(1, 5),
            random.between(1, 4),
            random.between(1, 200),
        );
        let partials = random.floats(num_splits * m * n, 2.0);
        let bias = random.coin().then(|| random.floats(n, 1.0));
        let is_added = random.coin();
        let before = random.floats(m * n, 1.0);
        let mut out = before.clone();
        sum_splits(random, &mut out, &partials, bias.as_deref(), n, is_added);
        let expected: Vec<f32> = (0..m * n)
            .map(|at| {
                let sum = partials
                    .iter()
                    .skip(at)
                    .step_by(m * n)
                    .copied()
                    .reduce(|a, b| a + b);
                let sum = sum.expect("a split") + bias.as_ref().map_or(0.0, |bias| bias[at % n]);
                if is_added { before[at] + sum } else { sum }
            })
            .collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn codes_become_weights() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let matrix = matrix(random);
        let mut out = unwritten_bf16(matrix.n * matrix.k);
        let mut args = vec![Arg::from(&mut out[..])];
        args.extend(weight_args(&matrix));
        args.extend(
            [matrix.n, matrix.k, matrix.format.group_size].map(|size| Arg::from(size as i32)),
        );
        let dims = Dims::new(matrix.n.div_ceil(16), random.between(1, 3), random.block(4));
        let kernel = format!("dequantise_{}", name(matrix.format.kind));
        // SAFETY: the matrix is packed as the kernel reads it, and `out` has its shape.
        unsafe { random.launch(&kernel, dims, &mut args) };
        let weights = all_parts(&matrix).into_iter();
        let expected: Vec<f64> = weights.map(|[scaled, offset]| scaled + offset).collect();
        // Parts that cancel leave the rounding of their sum in f32.
        let size = all_parts(&matrix)
            .into_iter()
            .flatten()
            .fold(0.0_f64, |size, part| size.max(part.abs()));
        let relative = BF16_ROUNDING + F32_ROUNDING;
        assert_close(&out, &expected, relative, 1e-3 * size);
    }
}
