//! Products with quantised weights, and their weights as bf16.

mod support;

use half::{bf16, f16};
use inflight_kernels_on_cpu::{Arg, Dims};

use support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, cases, e4m3, is_nan_e4m3, unwritten,
    unwritten_bf16,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int4,
    Int8,
    Fp8,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }

    fn bits(self) -> usize {
        match self {
            Self::Int4 => 4,
            Self::Int8 | Self::Fp8 => 8,
        }
    }

    fn random_code(self, random: &mut Random) -> i8 {
        match self {
            Self::Int4 => random.between(0, 15) as i8 - 8,
            Self::Int8 => random.between(0, 255) as u8 as i8,
            Self::Fp8 => match random.between(0, 255) as u8 {
                code if is_nan_e4m3(code) => 0,
                code => code as i8,
            },
        }
    }

    fn value(self, code: i8) -> f64 {
        match self {
            Self::Int4 | Self::Int8 => f64::from(code),
            Self::Fp8 => e4m3(code as u8),
        }
    }
}

/// A quantised matrix, as `kernels/quantised.cuh` packs it.
struct Matrix {
    kind: Kind,
    n: usize,
    k: usize,
    group_size: usize,
    /// `[n][k]`
    codes: Vec<i8>,
    packed: Vec<u32>,
    /// `[ceil(n / 16)][num_groups][16]`
    scales: Vec<f16>,
    offsets: Option<Vec<f16>>,
}

/// The unit of stored scales and offsets.
const UNIT: f64 = 1.0 / 4096.0;

impl Matrix {
    fn new(random: &mut Random, kind: Kind, n: usize, k: usize) -> Self {
        let group_size = random.one_of(&[32, 64, 96, 128, k]);
        let (num_groups, num_row_tiles) = (k.div_ceil(group_size), n.div_ceil(16));
        let codes: Vec<i8> = (0..n * k).map(|_| kind.random_code(random)).collect();
        let stored = |random: &mut Random, size: f32| -> Vec<f16> {
            let sizes = random.floats(num_row_tiles * num_groups * 16, size);
            sizes.into_iter().map(f16::from_f32).collect()
        };
        // Subnormal halves too.
        let size = random.one_of(&[1e-5, 40.0]);
        Self {
            kind,
            n,
            k,
            group_size,
            packed: pack(&codes, kind.bits(), n, k),
            codes,
            scales: stored(random, size),
            offsets: random.coin().then(|| stored(random, 4.0 * size)),
        }
    }

    /// A weight's two parts: its code with the scale, and its offset.
    fn parts(&self, row: usize, column: usize) -> [f64; 2] {
        let num_groups = self.k.div_ceil(self.group_size);
        let at = (row / 16 * num_groups + column / self.group_size) * 16 + row % 16;
        let offsets = self.offsets.as_ref();
        let offset = offsets.map_or(0.0, |offsets| offsets[at].to_f64());
        let code = self.kind.value(self.codes[row * self.k + column]);
        [self.scales[at].to_f64() * code * UNIT, offset * UNIT]
    }

    /// The parts of all weights, row by row.
    fn all_parts(&self) -> Vec<[f64; 2]> {
        let rows = 0..self.n;
        let places = rows.flat_map(|row| (0..self.k).map(move |column| (row, column)));
        places
            .map(|(row, column)| self.parts(row, column))
            .collect()
    }

    /// The arguments that all kernels have.
    fn args(&self) -> [Arg<'_>; 3] {
        [
            Arg::from(&self.packed[..]),
            Arg::from(&self.scales[..]),
            Arg::from(self.offsets.as_deref()),
        ]
    }
}

/// Codes in tiles of 16 rows, in the order of the tensor cores' operands.
fn pack(codes: &[i8], bits: usize, n: usize, k: usize) -> Vec<u32> {
    let tile_columns = if bits == 4 { 64 } else { 32 };
    let code = |row: usize, column: usize| {
        let is_inside = row < n && column < k;
        i32::from(if is_inside {
            codes[row * k + column]
        } else {
            0
        })
    };
    let mut words = Vec::new();
    for row_tile in 0..n.div_ceil(16) {
        for tile in 0..k.div_ceil(tile_columns) {
            for lane in 0..32 {
                let (g, t) = (lane / 4, lane % 4);
                // The two rows of the lane, and four consecutive columns.
                let rows = [16 * row_tile + g, 16 * row_tile + g + 8];
                for word in 0..4 {
                    let (half, step) = if bits == 4 {
                        (word / 2, word % 2)
                    } else {
                        (0, word / 2)
                    };
                    let column = tile * tile_columns + 32 * half + 8 * t + 4 * step;
                    let mut packed = 0;
                    if bits == 4 {
                        for i in 0..8 {
                            let (row, pair, element) = (rows[i % 2], i / 2 % 2, i / 4);
                            let code = code(row, column + 2 * pair + element) + 8;
                            packed |= (code as u32) << (4 * (i % 4) + 16 * element);
                        }
                    } else {
                        for i in 0..4 {
                            let (row, element) = (rows[i % 2], i / 2);
                            let code = code(row, column + 2 * (word % 2) + element) as u8;
                            packed |= u32::from(code) << (8 * i);
                        }
                    }
                    words.push(packed);
                }
            }
        }
    }
    words
}

fn matrix(random: &mut Random) -> Matrix {
    let kind = random.one_of(&[Kind::Int4, Kind::Int8, Kind::Fp8]);
    let n = match random.between(0, 1) {
        0 => 16 * random.between(1, 20),
        _ => random.between(1, 300),
    };
    let k = match random.between(0, 2) {
        0 => 64 * random.between(1, 6),
        1 => 8 * random.between(1, 40),
        _ => random.between(1, 300),
    };
    Matrix::new(random, kind, n, k)
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
    args.extend(matrix.args());
    args.extend([m, n, matrix.k, matrix.group_size].map(|size| Arg::from(size as i32)));
    let block_rows = if rows == 64 { 8 * 16 } else { 8 * 32 };
    let mut dims = Dims::new(n.div_ceil(block_rows), num_splits, 256);
    dims.grid[2] = m.div_ceil(rows) as u32;
    let kernel = format!("gemm_{}_m{rows}", matrix.kind.name());
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
fn products_with_codes_are_those_with_their_weights() {
    let random = &mut Random::new();
    for _ in cases(24) {
        let matrix = matrix(random);
        let rows = random.one_of(&[8, 16, 32, 64]);
        let m = random.between(1, 2 * rows).min(70);
        let x = random.bf16s(m * matrix.k, 1.0);
        let num_splits = random.between(1, 3);
        let out = multiply(random, &matrix, &x, rows, num_splits);
        let weights = matrix.all_parts();
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
        args.extend(matrix.args());
        args.extend([matrix.n, matrix.k, matrix.group_size].map(|size| Arg::from(size as i32)));
        let dims = Dims::new(matrix.n.div_ceil(16), random.between(1, 3), random.block(4));
        let kernel = format!("dequantise_{}", matrix.kind.name());
        // SAFETY: the matrix is packed as the kernel reads it, and `out` has its shape.
        unsafe { random.launch(&kernel, dims, &mut args) };
        let weights = matrix.all_parts().into_iter();
        let expected: Vec<f64> = weights.map(|[scaled, offset]| scaled + offset).collect();
        // Parts that cancel leave the rounding of their sum in f32.
        let size = matrix
            .all_parts()
            .into_iter()
            .flatten()
            .fold(0.0_f64, |size, part| size.max(part.abs()));
        let relative = BF16_ROUNDING + F32_ROUNDING;
        assert_close(&out, &expected, relative, 1e-3 * size);
    }
}
