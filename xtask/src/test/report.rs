//! What became of the steps of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::step::Step;
use crate::{Result, workspace};

/// What became of a step.
pub(super) struct Outcome {
    step: Step,
    /// None of a step that passed.
    error: Option<String>,
    elapsed: Duration,
}

impl Outcome {
    /// Runs a step, and prints its name and its error.
    pub(super) fn of(step: Step, run: impl FnOnce() -> Result<()>) -> Self {
        eprintln!("\n=== {step:?}");
        let start = Instant::now();
        let ended = run();
        if let Err(error) = &ended {
            eprintln!("error: {step:?}: {error}");
        }
        Self {
            step,
            error: ended.err().map(|error| error.to_string()),
            elapsed: start.elapsed(),
        }
    }

    fn verdict(&self) -> &'static str {
        match self.error {
            None => "passed",
            Some(_) => "FAILED",
        }
    }
}

/// Prints what was skipped, the verdicts, and last the failures, since the end of a long output is what is looked at.
pub(super) fn summarise(outcomes: &[Outcome], elapsed: Duration) -> Result<()> {
    eprintln!();
    let skipped = fs::read_to_string(skipped_tests_file()).unwrap_or_default();
    for (what, num_tests) in skipped_tests(&skipped) {
        eprintln!("skipped  {what} ({num_tests} tests)");
    }
    for outcome in outcomes {
        eprintln!(
            "{:<8} {:<6} {:>4} s",
            format!("{:?}", outcome.step),
            outcome.verdict(),
            seconds(outcome.elapsed)
        );
    }
    eprintln!("All steps took {} s", seconds(elapsed));
    for outcome in outcomes {
        if let Some(error) = &outcome.error {
            eprintln!("error: {:?}: {error}", outcome.step);
        }
    }
    match outcomes.iter().all(|outcome| outcome.error.is_none()) {
        true => Ok(()),
        false => Err("some steps failed".into()),
    }
}

/// Records tests of a program that do not run, for the summary.
pub(super) fn leave_out(program: &str, tests: &[String], reason: &str) -> Result<()> {
    let lines = tests.iter();
    let lines: String = lines
        .map(|test| format!("{program}: {test}: {reason}\n"))
        .collect();
    let file = File::options()
        .create(true)
        .append(true)
        .open(skipped_tests_file());
    Ok(file?.write_all(lines.as_bytes())?)
}

/// The file in which tests record what the machine lacks (tests/support/missing.rs), and which of them do not run
/// (tools/harness/left_out.py).
pub(super) fn skipped_tests_file() -> PathBuf {
    workspace::target("skipped-tests.txt")
}

/// The number of tests that were skipped in whole or in part, by program and reason. Each line names a program, a test
/// and a reason, and is written as often as the test skips something.
fn skipped_tests(lines: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in lines.lines().collect::<BTreeSet<_>>() {
        let what = match line.splitn(3, ": ").collect::<Vec<_>>()[..] {
            [program, _test, reason] => format!("{program}: {reason}"),
            _ => line.to_owned(),
        };
        *counts.entry(what).or_default() += 1;
    }
    counts
}

fn seconds(elapsed: Duration) -> u64 {
    elapsed.as_secs_f64().round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_tests_are_counted_by_program_and_reason() {
        let lines = "models: a::b: no amx_bf16\nmodels: a::c: no amx_bf16\nmodels: a::b: no amx_bf16\n\
                     models: a::b: no avx512_bf16\ntest_pages: no browser\n";
        let counts: Vec<_> = skipped_tests(lines).into_iter().collect();
        assert_eq!(
            counts,
            [
                ("models: no amx_bf16".to_owned(), 2),
                ("models: no avx512_bf16".to_owned(), 1),
                ("test_pages: no browser".to_owned(), 1),
            ]
        );
    }
}
