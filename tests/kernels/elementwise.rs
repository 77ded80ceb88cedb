//! RMS norm, SiLU, embedding.

use half::bf16;
use triton_inflight::device::cpu::{Dtype, RawMatrix, Simd};

use super::support::{Rng, bytes, cpu, simds};

/// Half a unit in the last place of bf16, which has 8 significant bits, and some f32 rounding before it.
const BF16_ROUNDING: f64 = 1.01 / 256.0;

fn assert_near(got: bf16, exact: f64, what: &str) {
    let error = (got.to_f64() - exact).abs();
    assert!(
        error <= BF16_ROUNDING * exact.abs() + 1e-30,
        "{what}: {got} for {exact}"
    );
}

#[test]
fn rms_norm_is_near_the_exact_one_and_alike_on_every_instruction_set() {
    let mut rng = Rng::new();
    for (m, d) in [(1, 1), (3, 8), (5, 100), (70, 768)] {
        let (x, weight, eps) = (rng.f32s(m * d), rng.f32s(d), 1e-5);
        let outs: Vec<_> = simds()
            .map(|simd| {
                let mut out = vec![bf16::NAN; m * d];
                cpu(simd, 3).rms_norm(&x, &weight, eps, &mut out);
                out
            })
            .collect();
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
        for (x, out) in x.chunks(d).zip(outs[0].chunks(d)) {
            let square_sum: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let scale = 1.0 / (square_sum / d as f64 + f64::from(eps)).sqrt();
            for i in 0..d {
                let exact = f64::from(x[i]) * scale * f64::from(weight[i]);
                assert_near(out[i], exact, "rms_norm");
            }
        }
    }
}

#[test]
fn silu_mul_is_near_the_exact_one_and_alike_on_every_instruction_set() {
    let mut rng = Rng::new();
    for (m, inter) in [(1, 1), (3, 24), (9, 3072)] {
        let gate_up: Vec<_> = rng.f32s(m * 2 * inter).iter().map(|v| v * 20.0).collect();
        let outs: Vec<_> = simds()
            .map(|simd| {
                let mut out = vec![bf16::NAN; m * inter];
                cpu(simd, 3).silu_mul(&gate_up, inter, &mut out);
                out
            })
            .collect();
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
        for (row, out) in gate_up.chunks(2 * inter).zip(outs[0].chunks(inter)) {
            for i in 0..inter {
                let (gate, up) = (f64::from(row[i]), f64::from(row[inter + i]));
                assert_near(out[i], gate / (1.0 + (-gate).exp()) * up, "silu_mul");
            }
        }
    }
}

#[test]
fn silu_of_extreme_gates_has_the_right_limit_and_nan_passes() {
    for simd in simds() {
        let mut out = [bf16::ONE; 4];
        let gate_up = [1e30, -1e30, f32::NAN, -200.0, 1.0, 1.0, 1.0, 1.0];
        cpu(simd, 1).silu_mul(&gate_up, 4, &mut out);
        assert_eq!(out[0], bf16::from_f32(1e30));
        assert!(out[2].is_nan());
        assert!(out[3].to_f32().abs() < 1e-30, "{}", out[3]);
    }
}

#[test]
fn embedding_copies_the_rows_of_any_element_type() {
    let mut rng = Rng::new();
    let (vocab, d) = (50, 24);
    let table = rng.bf16s(vocab * d);
    let f32_bytes: Vec<u8> = table
        .iter()
        .flat_map(|v| v.to_f32().to_le_bytes())
        .collect();
    let ids: Vec<u32> = (0..2000).map(|_| rng.below(vocab) as u32).collect();
    let mut cpu = cpu(Simd::detect(), 3);
    for (dtype, bytes) in [(Dtype::Bf16, bytes(&table)), (Dtype::F32, f32_bytes)] {
        let matrix = RawMatrix::new(dtype, vocab, d, &bytes);
        let mut out = vec![f32::NAN; ids.len() * d];
        cpu.embed(&matrix, &ids, &mut out);
        for (row, id) in out.chunks(d).zip(&ids) {
            let expected = &table[*id as usize * d..][..d];
            assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()));
        }
    }
}
