//! The cost model of a measured run: least squares over the records of its statistics file.
//!
//! What the records do not tell apart (a run of generation steps has as many tokens as sequences) is laid
//! on the earlier coefficient; a coefficient that would be negative is zero, because no work takes less
//! than no time.

use std::collections::{HashMap, HashSet};

use inflight_records::{Record, Stage, runs};

use crate::Result;
use crate::cost::CostModel;

/// Below this share of its column's size, a pivot is rounding.
const MIN_PIVOT: f64 = 1e-9;

/// Fits all coefficients.
///
/// # Errors
/// There are too few records, or none of two steps that follow each other.
pub fn fit(records: &[Record]) -> Result<CostModel> {
    let mut calls = Samples::<4>::default();
    let mut gaps = Samples::<2>::default();
    for run in runs(records) {
        let mut cached = HashMap::new();
        for record in run {
            let [tokens, sequences, positions] = work_of(record, &mut cached);
            if sequences > 0.0 {
                calls.add([1.0, tokens, sequences, positions], record.model_us);
            }
        }
        for (before, after) in run.iter().zip(&run[1..]) {
            // Without a request in both, nothing may have been active in between.
            let ids: HashSet<_> = active(before).collect();
            if active(after).any(|id| ids.contains(&id)) {
                let gap = after.start_us - before.start_us - before.model_us;
                gaps.add([1.0, num_sequences(before)], gap);
            }
        }
    }
    let [step_us, token_us, sequence_us, position_us] =
        calls.solve().ok_or("there is no step in the file")?;
    let [overhead_us, overhead_sequence_us] = gaps
        .solve()
        .ok_or("there are no two steps in the file with a request in common")?;
    Ok(CostModel {
        step_us,
        token_us,
        sequence_us,
        position_us,
        overhead_us,
        overhead_sequence_us,
    })
}

fn active(record: &Record) -> impl Iterator<Item = u64> {
    record.requests.iter().map(|share| share.id)
}

fn num_sequences(record: &Record) -> f64 {
    record
        .requests
        .iter()
        .filter(|share| share.tokens > 0)
        .count() as f64
}

/// Tokens, sequences and KV positions of a step. `cached` is what each request has in the cache.
fn work_of(record: &Record, cached: &mut HashMap<u64, u64>) -> [f64; 3] {
    let (mut tokens, mut positions) = (0, 0);
    for share in &record.requests {
        let cached = cached.entry(share.id).or_default();
        if share.stage == Stage::Paused {
            *cached = 0;
        }
        if share.tokens > 0 {
            *cached += u64::from(share.tokens);
            tokens += u64::from(share.tokens);
            positions += *cached;
        }
    }
    [tokens as f64, num_sequences(record), positions as f64]
}

/// Sums over samples, each `N` known numbers and what came of them.
struct Samples<const N: usize> {
    /// Sums of the products of the known numbers.
    products: [[f64; N]; N],
    /// Sums of their products with the result.
    results: [f64; N],
    count: usize,
}

impl<const N: usize> Default for Samples<N> {
    fn default() -> Self {
        Self {
            products: [[0.0; N]; N],
            results: [0.0; N],
            count: 0,
        }
    }
}

impl<const N: usize> Samples<N> {
    fn add(&mut self, known: [f64; N], result: f64) {
        self.count += 1;
        for i in 0..N {
            self.results[i] += known[i] * result;
            for j in 0..N {
                self.products[i][j] += known[i] * known[j];
            }
        }
    }

    /// The coefficients, none negative; `None` without samples.
    fn solve(&self) -> Option<[f64; N]> {
        if self.count == 0 {
            return None;
        }
        let mut used = [true; N];
        loop {
            let coefficients = self.solve_for(used);
            let lowest = (0..N).min_by(|&i, &j| coefficients[i].total_cmp(&coefficients[j]))?;
            if coefficients[lowest] >= 0.0 {
                return Some(coefficients);
            }
            used[lowest] = false;
        }
    }

    /// The coefficients with those at zero that are not `used`: Gauss-Jordan elimination, in order.
    fn solve_for(&self, used: [bool; N]) -> [f64; N] {
        let (mut matrix, mut right) = (self.products, self.results);
        let mut is_pivot = [false; N];
        for pivot in 0..N {
            // What is left of a column that the earlier ones explain is rounding.
            if !used[pivot] || matrix[pivot][pivot] <= MIN_PIVOT * self.products[pivot][pivot] {
                continue;
            }
            is_pivot[pivot] = true;
            for row in (0..N).filter(|&row| row != pivot) {
                let factor = matrix[row][pivot] / matrix[pivot][pivot];
                right[row] -= factor * right[pivot];
                let pivot_row = matrix[pivot];
                for (cell, pivot_cell) in matrix[row].iter_mut().zip(pivot_row) {
                    *cell -= factor * pivot_cell;
                }
            }
        }
        std::array::from_fn(|i| match is_pivot[i] {
            true => right[i] / matrix[i][i],
            false => 0.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use inflight_records::Share;

    use super::*;

    fn share(id: u64, stage: Stage, tokens: u32) -> Share {
        Share { id, stage, tokens }
    }

    /// A run whose steps take what `cost` says. Request `n` joins in step `2 n`, with a prompt of `9 n`,
    /// and the third is paused for a while.
    fn run(cost: &CostModel, prompts: bool) -> Vec<Record> {
        let mut cached = HashMap::new();
        let mut start_us = 0.0;
        let mut records = Vec::new();
        for step in 0..40u64 {
            let requests = (1..=step / 2).map(|id| match step - 2 * id {
                0 if prompts => share(id, Stage::Context, 9 * id as u32),
                4..7 if id == 3 => share(id, Stage::Paused, 0),
                7 if id == 3 && prompts => share(id, Stage::Context, 31),
                _ => share(id, Stage::Generation, 1),
            });
            let mut record = Record {
                counter: step + 1,
                max_blocks: 0,
                used_blocks: 0,
                start_us,
                model_us: 0.0,
                requests: requests.collect(),
            };
            let [tokens, sequences, positions] = work_of(&record, &mut cached);
            record.model_us = cost.step_us
                + cost.token_us * tokens
                + cost.sequence_us * sequences
                + cost.position_us * positions;
            let overhead = cost.overhead_us + cost.overhead_sequence_us * sequences;
            start_us += record.model_us + overhead;
            records.push(record);
        }
        records
    }

    const COST: CostModel = CostModel {
        step_us: 2000.0,
        token_us: 11.0,
        sequence_us: 3.0,
        position_us: 0.02,
        overhead_us: 90.0,
        overhead_sequence_us: 1.5,
    };

    fn assert_near(found: CostModel, expected: CostModel) {
        let parts = |c: CostModel| {
            [
                c.step_us,
                c.token_us,
                c.sequence_us,
                c.position_us,
                c.overhead_us,
                c.overhead_sequence_us,
            ]
        };
        for (a, b) in parts(found).into_iter().zip(parts(expected)) {
            assert!(
                (a - b).abs() <= 1e-4 * b.max(1.0),
                "{found:?} is not {expected:?}"
            );
        }
    }

    #[test]
    fn the_coefficients_of_a_run_are_found_again() {
        assert_near(fit(&run(&COST, true)).expect("records"), COST);
    }

    #[test]
    fn what_cannot_be_told_apart_is_laid_on_the_token() {
        let expected = CostModel {
            token_us: COST.token_us + COST.sequence_us,
            sequence_us: 0.0,
            ..COST
        };
        assert_near(fit(&run(&COST, false)).expect("records"), expected);
    }

    #[test]
    fn no_work_takes_less_than_no_time() {
        // A constant time with a little noise, which a fit could explain with negative prices.
        let cost = CostModel {
            step_us: 1000.0,
            ..CostModel::default()
        };
        let mut records = run(&cost, true);
        for (n, record) in records.iter_mut().enumerate() {
            record.model_us -= n as f64;
        }
        let found = fit(&records).expect("records");
        assert!((900.0..1000.0).contains(&found.step_us), "{found:?}");
        assert_eq!(
            (found.token_us, found.sequence_us, found.position_us),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn a_pause_between_two_requests_is_no_overhead() {
        let mut records = run(&COST, true);
        let last = records.last().expect("records").clone();
        records.push(Record {
            counter: last.counter + 1,
            start_us: last.start_us + 1e9,
            requests: vec![share(999, Stage::Context, 5)],
            model_us: 2000.0 + 5.0 * 11.0 + 3.0 + 5.0 * 0.02,
            ..last
        });
        assert_near(fit(&records).expect("records"), COST);
    }

    #[test]
    fn too_little_to_fit_is_said() {
        assert_eq!(
            fit(&[]).expect_err("nothing").to_string(),
            "there is no step in the file"
        );
        let one = &run(&COST, true)[4..5];
        assert!(
            fit(one)
                .expect_err("one step")
                .to_string()
                .contains("two steps")
        );
    }
}
