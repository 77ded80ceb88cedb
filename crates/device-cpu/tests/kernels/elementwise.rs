//! RMS norm and embedding.

use half::bf16;
use inflight_device_cpu::Simd;
use inflight_numbers::{Dtype, RawMatrix};

use super::support::{Rng, assert_near, bits, bytes, cpu, pack, simds};

#[test]
fn rms_norm_is_near_the_exact_result_and_the_same_on_every_instruction_set() {
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
fn a_norm_fused_with_the_residual_add_gives_the_bits_of_both() {
    let mut rng = Rng::new();
    for (m, d) in [(1, 1), (5, 100), (70, 768)] {
        let (x, hidden, weight) = (rng.f32s(m * d), rng.f32s(m * d), rng.f32s(d));
        let sums: Vec<_> = hidden.iter().zip(&x).map(|(a, b)| a + b).collect();
        for simd in simds() {
            let (mut hidden, mut out) = (hidden.clone(), vec![bf16::NAN; m * d]);
            let mut cpu = cpu(simd, 3);
            cpu.add_rms_norm(&x, &mut hidden, &weight, 1e-5, &mut out);
            assert_eq!(bits(&hidden), bits(&sums), "{simd}");
            let mut expected = vec![bf16::NAN; m * d];
            cpu.rms_norm(&sums, &weight, 1e-5, &mut expected);
            assert_eq!(out, expected, "{simd}");
        }
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
        cpu.embed(&matrix, &ids, 1.0, &mut out);
        for (row, id) in out.chunks(d).zip(&ids) {
            let expected = &table[*id as usize * d..][..d];
            assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()));
        }
    }
}

#[test]
fn rows_can_be_read_back_from_a_packed_matrix() {
    let mut rng = Rng::new();
    for (vocab, d) in [(50, 24), (97, 131)] {
        let table = rng.bf16s(vocab * d);
        let ids: Vec<u32> = (0..500).map(|_| rng.below(vocab) as u32).collect();
        let mut cpu = cpu(Simd::detect(), 2);
        let packed = pack(&mut cpu, vocab, d, &table);
        assert!(packed.has_rows());
        let mut out = vec![f32::NAN; ids.len() * d];
        cpu.embed_packed(&packed, &ids, 1.0, &mut out);
        for (row, id) in out.chunks(d).zip(&ids) {
            let expected = &table[*id as usize * d..][..d];
            assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()));
        }
    }
}
