//! GEMM over quantised weights.

use half::{bf16, f16};
use inflight_device::Output;
use inflight_device_cpu::{Cpu, PackedMatrix, Rounded, Simd};
use inflight_numbers::{
    CodeBits, NotFinite, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, Stacking,
    can_be_packed_together,
};

use super::support::{Rng, bits, cpu, simds};

/// Inputs per block of activations that share a scale.
const BLOCK: usize = 32;

/// Shapes with whole and partial panels, tiles, chunks, blocks and groups.
const SHAPES: [(usize, usize); 6] = [
    (1, 1),
    (24, 16),
    (65, 258),
    (100, 33),
    (192, 768),
    (31, 2050),
];

/// A matrix of random codes.
struct Matrix {
    format: QuantFormat,
    rows: Vec<QuantisedRow>,
    columns: usize,
    order: Option<Vec<u32>>,
}

impl Matrix {
    fn new(rng: &mut Rng, rows: usize, columns: usize, format: QuantFormat) -> Self {
        let row = |rng: &mut Rng| {
            let mut row = QuantisedRow::default();
            row.resize(format, columns);
            for code in &mut row.codes {
                *code = match format.bits {
                    CodeBits::Four => rng.below(16) as i8 - 8,
                    CodeBits::Eight => rng.bits() as i8,
                    CodeBits::Fp8 => unreachable!("the CPU multiplies no FP8"),
                };
            }
            for number in row.scales.iter_mut().chain(&mut row.offsets) {
                *number = f16::from_f32(rng.unit() / 50.0).to_f32();
            }
            row
        };
        Self {
            format,
            rows: (0..rows).map(|_| row(rng)).collect(),
            columns,
            order: None,
        }
    }

    /// A random order of the inputs.
    fn shuffle(&mut self, rng: &mut Rng) {
        let mut order: Vec<_> = (0..self.columns as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        self.order = Some(order);
    }

    /// The weights, in the original order of the inputs.
    fn weights(&self) -> Vec<Vec<f64>> {
        let dequantise = |row: &QuantisedRow| {
            let mut by_column = vec![0.0; self.columns];
            row.dequantise(self.format, &mut by_column);
            let mut weights = vec![0.0; self.columns];
            for (column, weight) in by_column.into_iter().enumerate() {
                let input = self
                    .order
                    .as_ref()
                    .map_or(column, |order| order[column] as usize);
                weights[input] = f64::from(weight);
            }
            weights
        };
        self.rows.iter().map(dequantise).collect()
    }
}

impl QuantisedRows for Matrix {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: self.format,
            rows: self.rows.len(),
            columns: self.columns,
        }
    }

    fn input_order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.clone_from(&self.rows[index]);
    }
}

fn formats() -> impl Iterator<Item = QuantFormat> {
    let kinds = [CodeBits::Four, CodeBits::Eight].into_iter();
    kinds.flat_map(|bits| {
        [
            (32, false),
            (32, true),
            (64, true),
            (128, false),
            (usize::MAX, false),
        ]
        .map(move |(group_size, has_offsets)| QuantFormat {
            bits,
            group_size,
            has_offsets,
        })
    })
}

fn pack(cpu: &mut Cpu, parts: &[&dyn QuantisedRows]) -> PackedMatrix {
    cpu.pack_quantised(parts, Stacking::Concatenated)
        .expect("memory")
        .expect("finite")
}

/// A row of activations after rounding: blocks of 32 columns with 127 as the largest code.
fn rounded(x: &[bf16], order: Option<&[u32]>) -> Vec<f64> {
    let input = |column: usize| order.map_or(column, |order| order[column] as usize);
    let mut out = vec![0.0; x.len()];
    for first in (0..x.len()).step_by(BLOCK) {
        let columns = first..x.len().min(first + BLOCK);
        let largest = columns
            .clone()
            .map(|column| x[input(column)].to_f32().abs())
            .fold(0.0, f32::max);
        for column in columns {
            let x = x[input(column)].to_f32();
            let code = (x * (127.0 / largest)).round_ties_even();
            out[input(column)] = f64::from(code) * f64::from(largest / 127.0);
        }
    }
    out
}

#[test]
fn products_are_near_the_exact_results_of_the_rounded_operands_on_every_instruction_set() {
    let mut rng = Rng::new();
    for (n, k) in SHAPES {
        for format in formats() {
            let mut matrix = Matrix::new(&mut rng, n, k, format);
            if rng.below(2) == 0 {
                matrix.shuffle(&mut rng);
            }
            let weights = matrix.weights();
            for m in [1, 5, 13] {
                let x = rng.bf16s(m * k);
                let bias = rng.f32s(n);
                for simd in simds() {
                    let mut cpu = cpu(simd, 2);
                    let packed = pack(&mut cpu, &[&matrix]);
                    let mut out = vec![f32::NAN; m * n];
                    cpu.gemm(&x, m, &packed, Some(&bias), Output::Store, &mut out);
                    for (x, out) in x.chunks(k).zip(out.chunks(n)) {
                        let x = rounded(x, matrix.order.as_deref());
                        for ((weights, bias), out) in weights.iter().zip(&bias).zip(out) {
                            let terms = x.iter().zip(weights).map(|(x, w)| x * w);
                            let exact = terms.clone().sum::<f64>() + f64::from(*bias);
                            // Offsets and codes may cancel, so each is bounded by its own sum; there are two
                            // additions per block, and one for the bias.
                            let size = k as f64 * 3.0;
                            let bound =
                                (2 * k.div_ceil(BLOCK) + 4) as f64 * size * f64::from(f32::EPSILON);
                            let error = (f64::from(*out) - exact).abs();
                            assert!(
                                error <= bound,
                                "{simd} {format:?} {m}x{n}x{k}: {error:e} > {bound:e}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_in_any_batch_and_on_any_instruction_set() {
    let mut rng = Rng::new();
    let max_m = 300;
    for (n, k) in [(100, 33), (130, 1120), (65, 258)] {
        for format in formats() {
            let matrix = Matrix::new(&mut rng, n, k, format);
            let x = rng.bf16s(max_m * k);
            let mut alone = vec![0.0; max_m * n];
            let mut one = cpu(Simd::Portable, 1);
            let packed = pack(&mut one, &[&matrix]);
            for (x, out) in x.chunks(k).zip(alone.chunks_mut(n)) {
                one.gemm(x, 1, &packed, None, Output::Store, out);
            }
            for simd in simds() {
                for num_threads in [1, 3] {
                    let mut cpu = cpu(simd, num_threads);
                    let packed = pack(&mut cpu, &[&matrix]);
                    for m in [1, 2, 3, 4, 6, 7, 9, 31, 300] {
                        let first = rng.below(max_m - m + 1);
                        let mut out = vec![f32::NAN; m * n];
                        let x = &x[first * k..][..m * k];
                        cpu.gemm(x, m, &packed, None, Output::Store, &mut out);
                        assert!(
                            bits(&out) == bits(&alone[first * n..][..m * n]),
                            "{simd} {format:?} {m}x{n}x{k}, {num_threads} threads"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_one_kind_are_stacked() {
    let mut rng = Rng::new();
    for format in formats() {
        let parts = [50, 3, 90].map(|rows| Matrix::new(&mut rng, rows, 96, format));
        let parts = parts.each_ref().map(|part| part as &dyn QuantisedRows);
        assert!(can_be_packed_together(&parts));
        let mut cpu = cpu(Simd::detect(), 2);
        let stacked = pack(&mut cpu, &parts);
        assert_eq!((stacked.n(), stacked.k()), (143, 96));
        let x = rng.bf16s(2 * 96);
        let mut out = vec![0.0; 2 * 143];
        cpu.gemm(&x, 2, &stacked, None, Output::Store, &mut out);
        let mut first = 0;
        for part in parts {
            let packed = pack(&mut cpu, &[part]);
            let n = part.rows();
            let mut alone = vec![0.0; 2 * n];
            cpu.gemm(&x, 2, &packed, None, Output::Store, &mut alone);
            for (out, alone) in out.chunks(143).zip(alone.chunks(n)) {
                assert_eq!(bits(&out[first..][..n]), bits(alone));
            }
            first += n;
        }
    }
}

#[test]
fn parts_of_different_kinds_are_not() {
    let mut rng = Rng::new();
    let format = QuantFormat {
        bits: CodeBits::Four,
        group_size: 32,
        has_offsets: false,
    };
    let a = Matrix::new(&mut rng, 2, 64, format);
    let mut shuffled = Matrix::new(&mut rng, 2, 64, format);
    shuffled.shuffle(&mut rng);
    let wider = Matrix::new(&mut rng, 2, 96, format);
    let other = Matrix::new(
        &mut rng,
        2,
        64,
        QuantFormat {
            bits: CodeBits::Eight,
            ..format
        },
    );
    for b in [&shuffled, &wider, &other] {
        assert!(!can_be_packed_together(&[&a, b]));
    }
    assert!(can_be_packed_together(&[&shuffled, &shuffled]));
}

#[test]
fn a_scale_or_offset_that_cannot_be_represented_is_named() {
    let mut rng = Rng::new();
    let format = QuantFormat {
        bits: CodeBits::Four,
        group_size: 32,
        has_offsets: true,
    };
    for bad in [f32::NAN, f32::INFINITY, 17.0] {
        let good = Matrix::new(&mut rng, 100, 64, format);
        let mut scale = Matrix::new(&mut rng, 90, 64, format);
        scale.rows[70].scales[1] = bad;
        let mut offset = Matrix::new(&mut rng, 90, 64, format);
        offset.rows[70].offsets[1] = -bad;
        for part in [&scale, &offset] {
            let result =
                cpu(Simd::detect(), 2).pack_quantised(&[&good, part], Stacking::Concatenated);
            assert_eq!(
                result.expect("memory").err(),
                Some(NotFinite { part: 1, row: 70 })
            );
        }
    }
}

#[test]
fn a_row_with_nan_does_not_affect_the_others() {
    let mut rng = Rng::new();
    let (n, k) = (70, 65);
    for format in formats() {
        let matrix = Matrix::new(&mut rng, n, k, format);
        for simd in simds() {
            let mut cpu = cpu(simd, 2);
            let packed = pack(&mut cpu, &[&matrix]);
            let mut x = rng.bf16s(9 * k);
            let mut clean = vec![0.0; 9 * n];
            cpu.gemm(&x, 9, &packed, None, Output::Store, &mut clean);
            x[4 * k] = bf16::INFINITY;
            let mut out = vec![0.0; 9 * n];
            cpu.gemm(&x, 9, &packed, None, Output::Store, &mut out);
            for (row, (out, clean)) in out.chunks(n).zip(clean.chunks(n)).enumerate() {
                match row {
                    4 => assert!(out.iter().all(|v| v.is_nan())),
                    _ => assert_eq!(bits(out), bits(clean)),
                }
            }
        }
    }
}

#[test]
fn codes_of_fp8_are_refused() {
    let read = |_: usize, out: &mut [f32]| out.fill(1.0);
    let weights = Rounded::new(Simd::detect(), 1, 64, CodeBits::Fp8, 32, &read);
    let packed = cpu(Simd::detect(), 1).pack_quantised(&[&weights], Stacking::Concatenated);
    let error = packed.err().expect("refused").to_string();
    assert!(error.contains("round them to bf16"), "{error}");
}

#[test]
fn numbers_are_rounded_to_codes_near_them() {
    let mut rng = Rng::new();
    for (code_bits, num_steps) in [(CodeBits::Eight, 127.0), (CodeBits::Four, 7.0)] {
        for size in [1e-6, 0.02, 100.0] {
            let numbers = rng
                .f32s(160)
                .into_iter()
                .map(|x| x * size)
                .collect::<Vec<_>>();
            let read = |_: usize, out: &mut [f32]| out.copy_from_slice(&numbers);
            let rounded = Rounded::new(Simd::detect(), 1, 160, code_bits, 32, &read);
            let mut row = QuantisedRow::default();
            rounded.read_row(0, &mut row);
            let mut out = vec![0.0; 160];
            row.dequantise(rounded.format(), &mut out);
            for (numbers, out) in numbers.chunks(32).zip(out.chunks(32)) {
                let largest = numbers.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
                for (number, out) in numbers.iter().zip(out) {
                    // Half a step; with four bits, the largest values may be clipped by up to a step.
                    let bound = largest / num_steps
                        * if code_bits == CodeBits::Eight {
                            0.51
                        } else {
                            1.01
                        };
                    assert!((number - out).abs() <= bound, "{number} as {out}");
                }
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_rejected_and_zeros_are_kept() {
    let mut cpu = cpu(Simd::detect(), 1);
    for code_bits in [CodeBits::Eight, CodeBits::Four] {
        for bad in [f32::NAN, f32::INFINITY] {
            let read = |row: usize, out: &mut [f32]| {
                out.fill(0.0);
                if row == 3 {
                    out[40] = bad;
                }
            };
            let rounded = Rounded::new(Simd::detect(), 5, 64, code_bits, 32, &read);
            let result = cpu
                .pack_quantised(&[&rounded], Stacking::Concatenated)
                .expect("memory");
            assert_eq!(result.err(), Some(NotFinite { part: 0, row: 3 }));
        }
        let zeros = |_: usize, out: &mut [f32]| out.fill(0.0);
        let packed = pack(
            &mut cpu,
            &[&Rounded::new(Simd::detect(), 5, 64, code_bits, 32, &zeros)],
        );
        let mut out = [1.0; 5];
        cpu.gemm(&[bf16::ONE; 64], 1, &packed, None, Output::Store, &mut out);
        assert_eq!(out, [0.0; 5]);
    }
}
