//! Adapters that are added to rows of projections.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use inflight_device::{AdaptedRows, AdapterRun, AdapterWeights, LowRank};

use super::support::{Rng, cpu, simds};

/// Random weights for some outputs.
fn weights(rng: &mut Rng, rank: usize, k: usize, outputs: Range<usize>) -> LowRank {
    let scale = 0.5 + rng.unit().abs();
    let mut weights = LowRank::new(rank, k, outputs.clone(), scale).expect("memory");
    for index in 0..rank {
        weights.set_rank(index, &rng.bf16s(k));
    }
    for output in 0..outputs.len() {
        weights.set_output(output, &rng.bf16s(rank));
    }
    weights
}

/// What the adapters of a row add to one output, and the sum of the magnitudes.
fn exact(adapter: &AdapterWeights, x: &[bf16], output: usize) -> (f64, f64) {
    let mut sums = (0.0, 0.0);
    for part in adapter.at(0).parts() {
        let outputs = part.outputs();
        if !outputs.contains(&output) {
            continue;
        }
        for rank in 0..part.rank() {
            let products = x.iter().enumerate();
            let products = products.map(|(input, x)| x.to_f64() * part.a(rank, input).to_f64());
            let shrunk: f64 = products.clone().sum();
            let largest: f64 = products.map(f64::abs).sum();
            let b = f64::from(part.scale()) * part.b(output - outputs.start, rank).to_f64();
            sums.0 += b * shrunk;
            sums.1 += b.abs() * largest;
        }
    }
    sums
}

#[test]
fn rows_get_what_their_adapters_make_of_them_and_others_keep_their_bits() {
    let mut rng = Rng::new();
    for (k, n, ranks) in [
        (1, 1, [1, 3]),
        (33, 70, [5, 16]),
        (64, 200, [17, 8]),
        (258, 96, [64, 1]),
    ] {
        let adapters = ranks.map(|rank| {
            let mut adapter = AdapterWeights::new(1);
            // One has two linear layers of the projection, the other one of them.
            let middle = n / 3;
            adapter.push(0, weights(&mut rng, rank, k, middle..n));
            if rank == ranks[0] && middle > 0 {
                adapter.push(0, weights(&mut rng, rank + 1, k, 0..middle));
            }
            Arc::new(adapter)
        });
        let m = 60;
        let (x, before) = (rng.bf16s(m * k), rng.f32s(m * n));
        // A context, rows of a generation, and rows without an adapter.
        let runs: Vec<_> = [(0, 2..39), (1, 40..41), (0, 41..42), (1, 44..59)]
            .into_iter()
            .map(|(index, rows): (usize, _)| AdapterRun {
                weights: Arc::clone(&adapters[index]),
                rows,
            })
            .collect();
        for simd in simds() {
            let mut alone = cpu(simd, 1);
            let mut cpu = cpu(simd, 3);
            let mut out = before.clone();
            let adapted = AdaptedRows {
                runs: &runs,
                place: 0,
            };
            cpu.add_adapters(&x, adapted, &mut out, n);
            for row in 0..m {
                let run = runs.iter().find(|run| run.rows.contains(&(row as u32)));
                let (out, before) = (&out[row * n..][..n], &before[row * n..][..n]);
                let Some(run) = run else {
                    assert_eq!(out, before, "row {row} has no adapter");
                    continue;
                };
                let x = &x[row * k..][..k];
                for (output, (out, before)) in out.iter().zip(before).enumerate() {
                    let (sum, largest) = exact(&run.weights, x, output);
                    let expected = f64::from(*before) + sum;
                    let error = (f64::from(*out) - expected).abs();
                    assert!(
                        error <= 1e-5 * (1.0 + largest),
                        "{out} for {expected}, {simd}"
                    );
                }
                let mut one = before.to_vec();
                let of_one = AdapterRun {
                    weights: Arc::clone(&run.weights),
                    rows: 0..1,
                };
                let adapted = AdaptedRows {
                    runs: &[of_one],
                    place: 0,
                };
                alone.add_adapters(x, adapted, &mut one, n);
                assert_eq!(out, one, "row {row} alone, {simd}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "ascending rows")]
fn a_row_has_one_adapter() {
    let adapter = Arc::new(AdapterWeights::new(1));
    let run = |rows| AdapterRun {
        weights: Arc::clone(&adapter),
        rows,
    };
    let adapted = AdaptedRows {
        runs: &[run(0..2), run(1..3)],
        place: 0,
    };
    let simd = simds().next().expect("one at least");
    cpu(simd, 1).add_adapters(&[bf16::ONE; 3], adapted, &mut [0.0; 3], 1);
}
