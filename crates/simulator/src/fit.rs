//! Fits the cost model to a measured run: least squares over the records of its statistics file, without
//! outliers. Where the records cannot separate two coefficients (a run of generation steps has one token per
//! sequence), the earlier one takes the whole effect.

use std::collections::{HashMap, HashSet};
use std::fmt;

use inflight_step_records::{Record, Stage, runs};
use serde::Serialize;

use crate::Result;
use crate::cost::CostModel;
use crate::least_squares::Samples;

/// A cost model and the quality of its fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The coefficients.
    pub cost: CostModel,
    /// Quality of the fit.
    pub quality: Quality,
}

/// How well a cost model predicts the model calls that it was fitted to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Number of steps fitted, including outliers.
    pub num_steps: usize,
    /// Number of outliers: steps far slower or faster than predicted, excluded from the fit.
    pub num_outliers: usize,
    /// Duration and prediction of the longest outlier.
    pub worst_outlier_us: Option<[f64; 2]>,
    /// Median error of the other steps, as a share of the step's time.
    pub median_error: f64,
    /// 90th percentile of the errors of the other steps.
    pub p90_error: f64,
    /// Number of excluded gaps between two steps.
    pub num_gap_outliers: usize,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (median, p90) = (self.median_error * 100.0, self.p90_error * 100.0);
        write!(
            f,
            "fitted to {} steps: the error is up to {median:.1} % for half of them and up to \
             {p90:.1} % for 90 %",
            self.num_steps
        )?;
        if let Some([took, predicted]) = self.worst_outlier_us {
            let (took, predicted) = (took / 1e3, predicted / 1e3);
            write!(
                f,
                "; outliers: {}, the longest took {took:.2} ms instead of {predicted:.2} ms",
                self.num_outliers
            )?;
        }
        if self.num_gap_outliers > 0 {
            write!(f, "; outliers between two steps: {}", self.num_gap_outliers)?;
        }
        Ok(())
    }
}

/// Fits all coefficients.
///
/// # Errors
/// If there are too few records, or no two consecutive steps.
pub fn fit(records: &[Record]) -> Result<Fit> {
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
            // Without a common request, the instance may have been idle in between.
            let ids: HashSet<_> = active(before).collect();
            if active(after).any(|id| ids.contains(&id)) {
                let gap = after.start_us - before.start_us - before.model_us;
                gaps.add([1.0, num_sequences(before)], gap);
            }
        }
    }
    let calls = calls.solve().ok_or("the file has no steps")?;
    let gaps = gaps
        .solve()
        .ok_or("the file has no two consecutive steps with a common request")?;
    let [step_us, token_us, sequence_us, position_us] = calls.coefficients;
    let [overhead_us, overhead_sequence_us] = gaps.coefficients;
    let percentile = |percent: usize| {
        let index = (calls.errors.len() * percent / 100).min(calls.errors.len().saturating_sub(1));
        calls.errors.get(index).copied().unwrap_or_default()
    };
    let longest = calls
        .outliers
        .iter()
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(Fit {
        cost: CostModel {
            step_us,
            token_us,
            sequence_us,
            position_us,
            overhead_us,
            overhead_sequence_us,
        },
        quality: Quality {
            num_steps: calls.errors.len() + calls.outliers.len(),
            num_outliers: calls.outliers.len(),
            worst_outlier_us: longest.map(|&(took, predicted)| [took, predicted]),
            median_error: percentile(50),
            p90_error: percentile(90),
            num_gap_outliers: gaps.outliers.len(),
        },
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

/// Tokens, sequences and KV positions of a step. `cached` is the number of tokens of each request in the
/// cache.
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

#[cfg(test)]
mod tests {
    use inflight_step_records::Share;

    use super::*;

    fn share(id: u64, stage: Stage, tokens: u32) -> Share {
        Share { id, stage, tokens }
    }

    /// A run with steps that take the time predicted by `cost`. Request `n` joins in step `2 n` with a prompt
    /// of `9 n` tokens, and the third request is paused for a while.
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
                start_us,
                requests: requests.collect(),
                ..Record::default()
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
    fn recovers_the_coefficients_of_a_run() {
        let found = fit(&run(&COST, true)).expect("records");
        assert_near(found.cost, COST);
        let quality = found.quality;
        assert_eq!((quality.num_steps, quality.num_outliers), (38, 0));
        assert!(quality.p90_error < 1e-6, "{quality}");
    }

    #[test]
    fn inseparable_costs_go_to_the_token_coefficient() {
        let expected = CostModel {
            token_us: COST.token_us + COST.sequence_us,
            sequence_us: 0.0,
            ..COST
        };
        assert_near(fit(&run(&COST, false)).expect("records").cost, expected);
    }

    #[test]
    fn coefficients_are_never_negative() {
        // A constant time with a little noise, which a fit could explain with negative coefficients.
        let cost = CostModel {
            step_us: 1000.0,
            ..CostModel::default()
        };
        let mut records = run(&cost, true);
        for (n, record) in records.iter_mut().enumerate() {
            record.model_us -= n as f64;
        }
        let found = fit(&records).expect("records").cost;
        assert!((900.0..1000.0).contains(&found.step_us), "{found:?}");
        assert_eq!(
            (found.token_us, found.sequence_us, found.position_us),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn idle_time_between_requests_is_not_overhead() {
        let mut records = run(&COST, true);
        let last = records.last().expect("records").clone();
        records.push(Record {
            counter: last.counter + 1,
            start_us: last.start_us + 1e9,
            requests: vec![share(999, Stage::Context, 5)],
            model_us: 2000.0 + 5.0 * 11.0 + 3.0 + 5.0 * 0.02,
            ..last
        });
        assert_near(fit(&records).expect("records").cost, COST);
    }

    #[test]
    fn a_step_that_waited_for_something_else_is_an_outlier() {
        for slow in [3, 12, 38] {
            let mut records = run(&COST, true);
            let predicted = records[slow].model_us;
            // Seen in a real run: such a step made `step_us` zero.
            records[slow].model_us = 732_000.0;
            for later in &mut records[slow + 1..] {
                later.start_us += 732_000.0 - predicted;
            }
            let found = fit(&records).expect("records");
            assert_near(found.cost, COST);
            let quality = found.quality;
            assert_eq!((quality.num_steps, quality.num_outliers), (38, 1));
            let [took, should] = quality.worst_outlier_us.expect("one");
            assert!(took == 732_000.0 && (should - predicted).abs() < 0.01);
            let words = format!(
                "outliers: 1, the longest took 732.00 ms instead of {:.2} ms",
                predicted / 1e3
            );
            assert!(quality.to_string().contains(&words), "{quality}");
        }
    }

    #[test]
    fn a_long_gap_between_two_steps_is_an_outlier() {
        let mut records = run(&COST, true);
        for later in &mut records[20..] {
            later.start_us += 50_000.0;
        }
        let found = fit(&records).expect("records");
        assert_near(found.cost, COST);
        assert_eq!(found.quality.num_gap_outliers, 1);
    }

    #[test]
    fn reports_the_quality_of_the_fit() {
        let mut records = run(&COST, true);
        for (n, record) in records.iter_mut().enumerate() {
            record.model_us *= [0.9, 1.1, 1.1, 0.9][n % 4];
        }
        let found = fit(&records).expect("records");
        let Quality {
            num_outliers,
            median_error,
            p90_error,
            ..
        } = found.quality;
        assert_eq!(num_outliers, 0, "small errors are not outliers");
        assert!((0.07..0.12).contains(&median_error), "{median_error}");
        assert!((median_error..0.15).contains(&p90_error), "{p90_error}");
        assert!(
            (found.cost.step_us / COST.step_us - 1.0).abs() < 0.1,
            "{found:?}"
        );
    }

    #[test]
    fn too_few_records_are_an_error() {
        assert_eq!(
            fit(&[]).expect_err("nothing").to_string(),
            "the file has no steps"
        );
        let one = &run(&COST, true)[4..5];
        assert!(
            fit(one)
                .expect_err("one step")
                .to_string()
                .contains("two consecutive steps")
        );
    }
}
