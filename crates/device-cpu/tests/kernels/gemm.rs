//! GEMM and packing.

use half::{bf16, f16};
use inflight_device::{Linear, Output, Tile};
use inflight_device_cpu::{Cpu, PackedMatrix, Rounded, Simd};
use inflight_numbers::{CodeBits, Dtype, NotFinite, RawMatrix, Stacking};

use super::support::{Rng, bits, bytes, cpu, pack, simds};

/// Shapes with whole and partial panels, tiles and chunks, and an odd `k`.
const SHAPES: [(usize, usize); 8] = [
    (1, 1),
    (24, 16),
    (64, 256),
    (65, 258),
    (100, 33),
    (192, 768),
    (130, 1111),
    (31, 2050),
];

#[test]
fn products_are_near_the_exact_results_on_every_instruction_set() {
    let mut rng = Rng::new();
    for (n, k) in SHAPES {
        for m in [1, 5, 13] {
            let (x, w) = (rng.bf16s(m * k), rng.bf16s(n * k));
            let (bias, before) = (rng.f32s(n), rng.f32s(m * n));
            for simd in simds() {
                let mut cpu = cpu(simd, 2);
                let packed = pack(&mut cpu, n, k, &w);
                for (with_bias, output) in [
                    (false, Output::Store),
                    (true, Output::Store),
                    (false, Output::Add),
                    (true, Output::Add),
                ] {
                    let mut out = before.clone();
                    cpu.gemm(&x, m, &packed, with_bias.then_some(&bias), output, &mut out);
                    for row in 0..m {
                        for column in 0..n {
                            let terms = (0..k)
                                .map(|i| x[row * k + i].to_f64() * w[column * k + i].to_f64());
                            let mut exact: f64 = terms.clone().sum();
                            let mut size: f64 = terms.map(f64::abs).sum();
                            if with_bias {
                                exact += f64::from(bias[column]);
                                size += f64::from(bias[column].abs());
                            }
                            if output == Output::Add {
                                exact += f64::from(before[row * n + column]);
                                size += f64::from(before[row * n + column].abs());
                            }
                            // Each of k + 2 additions rounds a partial sum of magnitude up to `size`.
                            let bound = (k + 2) as f64 * size * f64::from(f32::EPSILON);
                            let error = (f64::from(out[row * n + column]) - exact).abs();
                            assert!(
                                error <= bound,
                                "{simd} {m}x{n}x{k} ({row}, {column}): {error:e} > {bound:e}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads() {
    let mut rng = Rng::new();
    for (n, k) in [(100, 33), (192, 768), (65, 258), (130, 1112)] {
        let max_m = 300;
        let (x, w) = (rng.bf16s(max_m * k), rng.bf16s(n * k));
        for simd in simds() {
            let mut alone = vec![0.0; max_m * n];
            let mut one = cpu(simd, 1);
            let packed = pack(&mut one, n, k, &w);
            for (x, out) in x.chunks(k).zip(alone.chunks_mut(n)) {
                one.gemm(x, 1, &packed, None, Output::Store, out);
            }
            for num_threads in [1, 2, 3] {
                let mut cpu = cpu(simd, num_threads);
                for m in [2, 3, 7, 8, 31, 33, 130, 300] {
                    let first = rng.below(max_m - m + 1);
                    let mut out = vec![f32::NAN; m * n];
                    cpu.gemm(
                        &x[first * k..][..m * k],
                        m,
                        &packed,
                        None,
                        Output::Store,
                        &mut out,
                    );
                    let expected = &alone[first * n..][..m * n];
                    assert!(
                        bits(&out) == bits(expected),
                        "{simd} {m}x{n}x{k}, {num_threads} threads"
                    );
                }
            }
        }
    }
}

#[test]
fn parts_are_stacked_and_every_element_type_is_rounded_to_bf16() {
    // Widths of one or more pairs and of half pairs, below and above the unit of packing.
    for k in [37, 128, 301] {
        stack(&mut Rng::new(), k);
    }
}

fn stack(rng: &mut Rng, k: usize) {
    let (a, b, c) = (rng.f32s(50 * k), rng.f32s(3 * k), rng.f32s(90 * k));
    let a_bytes = bytes(&a.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
    // Offset by one byte: checkpoints do not align their data.
    let mut b_bytes = vec![0];
    b_bytes.extend(b.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()));
    let c_bytes: Vec<u8> = c.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut cpu = cpu(Simd::detect(), 2);
    let packed = cpu
        .pack(
            &[
                RawMatrix::new(Dtype::Bf16, 50, k, &a_bytes),
                RawMatrix::new(Dtype::F16, 3, k, &b_bytes[1..]),
                RawMatrix::new(Dtype::F32, 90, k, &c_bytes),
            ],
            Stacking::Concatenated,
        )
        .expect("memory")
        .expect("finite");
    assert_eq!((packed.n(), packed.k()), (143, k));
    let half = b.iter().map(|&v| f16::from_f32(v).to_f32());
    let stacked: Vec<_> = a.iter().copied().chain(half).chain(c).collect();
    for column in 0..k {
        let mut x = vec![bf16::ZERO; k];
        x[column] = bf16::ONE;
        let mut out = vec![0.0; 143];
        cpu.gemm(&x, 1, &packed, None, Output::Store, &mut out);
        for (row, out) in out.iter().enumerate() {
            assert_eq!(
                *out,
                bf16::from_f32(stacked[row * k + column]).to_f32(),
                "({row}, {column})"
            );
        }
    }
}

#[test]
fn a_weight_that_is_not_finite_is_named() {
    let mut cpu = cpu(Simd::detect(), 2);
    let good = bytes(&[bf16::ONE; 6 * 100]);
    for bad_value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut values = [1.0_f32; 6 * 200];
        values[6 * 123 + 5] = bad_value;
        let bad: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let parts = [
            RawMatrix::new(Dtype::Bf16, 100, 6, &good),
            RawMatrix::new(Dtype::F32, 200, 6, &bad),
        ];
        let result = cpu.pack(&parts, Stacking::Concatenated).expect("memory");
        assert_eq!(result.err(), Some(NotFinite { part: 1, row: 123 }));
    }
}

#[test]
fn a_row_with_nan_does_not_affect_the_others() {
    let mut rng = Rng::new();
    let (n, k) = (70, 65);
    let (mut x, w) = (rng.bf16s(9 * k), rng.bf16s(n * k));
    for simd in simds() {
        let mut cpu = cpu(simd, 2);
        let packed = pack(&mut cpu, n, k, &w);
        let mut clean = vec![0.0; 9 * n];
        cpu.gemm(&x, 9, &packed, None, Output::Store, &mut clean);
        let before = x[4 * k];
        x[4 * k] = bf16::NAN;
        let mut out = vec![0.0; 9 * n];
        cpu.gemm(&x, 9, &packed, None, Output::Store, &mut out);
        x[4 * k] = before;
        for row in 0..9 {
            let (out, clean) = (&out[row * n..][..n], &clean[row * n..][..n]);
            if row == 4 {
                assert!(out.iter().all(|v| v.is_nan()));
            } else {
                assert_eq!(bits(out), bits(clean));
            }
        }
    }
}

/// Tiles with inputs at even and odd places, of even and odd numbers, and without any.
#[test]
fn tiles_are_summed_in_pairs_to_the_bits_of_their_products() {
    let mut rng = Rng::new();
    let n = 100;
    let widths = [
        [64, 32, 64, 32],
        [33, 64, 31, 7],
        [0, 48, 0, 0],
        [64, 0, 5, 96],
        [0; 4],
    ];
    for (widths, m) in widths
        .iter()
        .flat_map(|widths| [1, 5, 300].map(|m| (widths, m)))
    {
        let inputs: usize = widths.iter().sum();
        // A rank without inputs has no columns either.
        let width = if inputs == 0 { 0 } else { inputs + 3 };
        let x = rng.bf16s(m * width);
        for (simd, is_quantised) in simds().flat_map(|simd| [(simd, false), (simd, true)]) {
            let mut cpu = cpu(simd, 2);
            let mut first = 2;
            let tiles = widths.map(|len| {
                let inputs = first..first + len;
                first += len;
                let weights = rng.bf16s(n * len);
                let pack = |cpu: &mut Cpu| match is_quantised {
                    false => pack(cpu, n, len, &weights),
                    true => pack_rounded(cpu, n, len, &weights),
                };
                (len > 0).then(|| Tile {
                    inputs,
                    linear: Linear {
                        matrix: pack(&mut cpu),
                        bias: Some(rng.f32s(n)),
                        place: None,
                    },
                })
            });
            let mut product = |tile: &Option<Tile<Cpu>>| {
                let Tile { inputs, linear } = tile.as_ref()?;
                let rows = x.chunks_exact(width);
                let part: Vec<_> = rows.flat_map(|row| &row[inputs.clone()]).copied().collect();
                let mut out = vec![0.0; m * n];
                let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
                cpu.gemm(&part, m, matrix, bias, Output::Store, &mut out);
                Some(out)
            };
            let [a, b, c, d] = [0, 1, 2, 3].map(|tile| product(&tiles[tile]));
            let expected = sum(sum(a, b), sum(c, d)).unwrap_or(vec![-0.0; m * n]);
            let mut out = rng.f32s(m * n);
            cpu.gemm_tiles(&x, width, &tiles, &mut out);
            assert_eq!(
                bits(&out),
                bits(&expected),
                "{simd} {widths:?} {m} {is_quantised}"
            );
        }
    }
}

/// The weights in codes of 8 bits.
fn pack_rounded(cpu: &mut Cpu, n: usize, k: usize, weights: &[bf16]) -> PackedMatrix {
    let read = |row: usize, out: &mut [f32]| {
        for (out, weight) in out.iter_mut().zip(&weights[row * k..]) {
            *out = weight.to_f32();
        }
    };
    let rounded = Rounded::new(cpu.simd(), n, k, CodeBits::Eight, 32, &read);
    let packed = cpu.pack_quantised(&[&rounded], Stacking::Concatenated);
    packed.expect("memory").expect("finite")
}

fn sum(a: Option<Vec<f32>>, b: Option<Vec<f32>>) -> Option<Vec<f32>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| a + b).collect()),
        (a, b) => a.or(b),
    }
}
