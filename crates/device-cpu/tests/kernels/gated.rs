//! The gate-up product and its activation.

use half::bf16;
use inflight_device::{Activation, Gating, Output};
use inflight_device_cpu::{Cpu, PackedMatrix, Rounded, Simd};
use inflight_numbers::{CodeBits, Dtype, NotFinite, RawMatrix, Stacking};

use super::support::{Rng, assert_near_after, bytes, cpu, simds};

/// Outputs per part, and inputs: whole panels, partial panels, and both.
const SHAPES: [(usize, usize); 5] = [(1, 1), (24, 16), (96, 64), (50, 33), (100, 258)];

/// Gate and up of `[inter, k]` each, in the format under test.
fn pack(
    cpu: &mut Cpu,
    bits: Option<CodeBits>,
    parts: [&[bf16]; 2],
    k: usize,
    stacking: Stacking,
) -> PackedMatrix {
    let parts = parts.map(bytes);
    let parts = parts.each_ref().map(|bytes| {
        let inter = bytes.len() / 2 / k;
        RawMatrix::new(Dtype::Bf16, inter, k, bytes)
    });
    let packed = match bits {
        None => cpu.pack(&parts, stacking),
        Some(bits) => {
            let [gate, up] = parts;
            let gate_rows = |row: usize, out: &mut [f32]| gate.row_to_f32(row, out);
            let up_rows = |row: usize, out: &mut [f32]| up.row_to_f32(row, out);
            let (inter, simd) = (gate.rows(), Simd::detect());
            let gate = Rounded::new(simd, inter, k, bits, 32, &gate_rows);
            let up = Rounded::new(simd, inter, k, bits, 32, &up_rows);
            cpu.pack_quantised(&[&gate, &up], stacking)
        }
    };
    packed.expect("memory").expect("finite")
}

#[test]
fn the_activation_is_near_the_exact_result_for_the_same_sums() {
    const LIMIT: f32 = 0.75;
    let limit = f64::from(LIMIT);
    let mut rng = Rng::new();
    for bits in [None, Some(CodeBits::Eight), Some(CodeBits::Four)] {
        for (inter, k) in SHAPES {
            let (gate, up) = (rng.bf16s(inter * k), rng.bf16s(inter * k));
            let bias: Vec<_> = rng.f32s(2 * inter).iter().map(|v| v * 10.0).collect();
            for m in [1, 5, 13, 300] {
                let x = rng.bf16s(m * k);
                for simd in simds() {
                    let mut cpu = cpu(simd, 3);
                    let below = pack(&mut cpu, bits, [&gate, &up], k, Stacking::Concatenated);
                    let in_turn = pack(&mut cpu, bits, [&gate, &up], k, Stacking::Interleaved);
                    assert_eq!((in_turn.n(), in_turn.k()), (2 * inter, k));
                    let biases = [None, Some(&bias[..])].into_iter();
                    let cases = biases.zip(Activation::ALL.into_iter().cycle().skip(m % 5));
                    for (bias, activation) in cases {
                        let mut sums = vec![f32::NAN; m * 2 * inter];
                        cpu.gemm(&x, m, &below, bias, Output::Store, &mut sums);
                        let mut out = vec![bf16::NAN; m * inter];
                        let factor = if m == 5 { 0.7_f32 } else { 1.0 };
                        let gating = match m {
                            5 => Gating::Scaled(activation, factor),
                            13 => Gating::Bounded(activation, LIMIT),
                            _ => activation.into(),
                        };
                        cpu.gemm_gated(&x, m, &in_turn, bias, gating, &mut out);
                        for (sums, out) in sums.chunks(2 * inter).zip(out.chunks(inter)) {
                            for i in 0..inter {
                                let gate = f64::from(sums[i] * factor);
                                let up = f64::from(sums[inter + i]);
                                let gate_and_up = match m {
                                    13 => {
                                        let bounded = activated(activation, gate).min(limit);
                                        [bounded, up.clamp(-limit, limit)]
                                    }
                                    _ => [activated(activation, gate), up],
                                };
                                let exact = gate_and_up[0] * gate_and_up[1];
                                // GELU's distribution has an absolute error, as an `erf` of f32 has.
                                let before = match activation {
                                    Activation::Gelu => 3e-7 * (gate * up).abs(),
                                    _ => 0.0,
                                };
                                assert_near_after(
                                    out[i],
                                    exact,
                                    before,
                                    &format!("{activation:?}"),
                                );
                            }
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
    let (inter, k, max_m) = (130, 258, 300);
    let (x, gate, up) = (
        rng.bf16s(max_m * k),
        rng.bf16s(inter * k),
        rng.bf16s(inter * k),
    );
    for simd in simds() {
        let mut one = cpu(simd, 1);
        let packed = pack(&mut one, None, [&gate, &up], k, Stacking::Interleaved);
        let mut alone = vec![bf16::ZERO; max_m * inter];
        for (x, out) in x.chunks(k).zip(alone.chunks_mut(inter)) {
            one.gemm_gated(x, 1, &packed, None, Activation::Silu, out);
        }
        for num_threads in [1, 2, 3] {
            let mut cpu = cpu(simd, num_threads);
            for m in [2, 7, 33, 300] {
                let first = rng.below(max_m - m + 1);
                let mut out = vec![bf16::NAN; m * inter];
                cpu.gemm_gated(
                    &x[first * k..][..m * k],
                    m,
                    &packed,
                    None,
                    Activation::Silu,
                    &mut out,
                );
                assert!(
                    out == alone[first * inter..][..m * inter],
                    "{simd} m={m}, {num_threads} threads"
                );
            }
        }
    }
}

#[test]
fn extreme_gates_have_the_right_limit_and_nan_is_kept() {
    let gates = [1e30, -1e30, f32::NAN, -200.0];
    let bias: Vec<_> = gates.into_iter().chain([1.0; 4]).collect();
    for simd in simds() {
        let mut cpu = cpu(simd, 1);
        let zeros = [bf16::ZERO; 8];
        let packed = pack(&mut cpu, None, [&zeros, &zeros], 2, Stacking::Interleaved);
        let mut out = [bf16::ONE; 4];
        cpu.gemm_gated(
            &[bf16::ONE; 2],
            1,
            &packed,
            Some(&bias),
            Activation::Silu,
            &mut out,
        );
        assert_eq!(out[0], bf16::from_f32(1e30));
        assert!(out[1].to_f32().abs() < 1e-5, "{}", out[1]);
        assert!(out[2].is_nan());
        assert!(out[3].to_f32().abs() < 1e-30, "{}", out[3]);
    }
}

#[test]
fn a_weight_that_is_not_finite_is_named_with_its_part() {
    let mut up = vec![bf16::ONE; 200 * 6];
    up[6 * 123 + 5] = bf16::NAN;
    let (gate, up) = (bytes(&[bf16::ONE; 200 * 6]), bytes(&up));
    let parts = [&gate, &up].map(|bytes| RawMatrix::new(Dtype::Bf16, 200, 6, bytes));
    let result = cpu(Simd::detect(), 2).pack(&parts, Stacking::Interleaved);
    assert_eq!(
        result.expect("memory").err(),
        Some(NotFinite { part: 1, row: 123 })
    );
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / (1.0 + (-2.0 * u).exp())
        }
        Activation::Relu => x.max(0.0),
        Activation::SquaredRelu => x.max(0.0).powi(2),
    }
}

include!("../../../../tests/support/normal_distribution.rs");
