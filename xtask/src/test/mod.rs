//! `cargo xtask test`: checks and tests as named steps, with a summary at the end.

mod binaries;
mod commands;
mod report;
mod step;
mod tier;

use std::fs;
use std::io::ErrorKind;
use std::thread;
use std::time::Instant;

use clap::{Args, ValueEnum};

use crate::{Result, process, side_by_side};
use commands::run_step;
use report::Outcome;
use step::Step;
use tier::Tier;

pub use commands::advisories;

#[derive(Args)]
pub struct Options {
    /// The steps to run, one after the other [default: the steps of the tier, beside each other]
    #[arg(value_enum)]
    steps: Vec<Step>,
    /// Everything: all steps, all tests, the library as it ships
    #[arg(long, conflicts_with = "rotation")]
    all: bool,
    /// One of ten parts, from 0 to 9, of what the default leaves out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(tier::NUM_PARTS)))]
    rotation: Option<u32>,
    /// A step of a run of several
    #[arg(long, hide = true)]
    is_part: bool,
    /// Arguments for pytest in the steps `pages`, `server` and `shipped`
    #[arg(last = true, value_name = "PYTEST ARGUMENTS")]
    pytest: Vec<String>,
}

impl Options {
    fn tier(&self) -> Tier {
        match (self.all, self.rotation) {
            (true, _) => Tier::All,
            (false, Some(part)) => Tier::Part(part),
            // Who names a step wants all of its tests, except in a run of several.
            (false, None) if self.steps.is_empty() || self.is_part => Tier::Quick,
            (false, None) => Tier::Step,
        }
    }
}

/// Runs the steps, even if one fails.
pub fn run(options: &Options) -> Result<()> {
    let tier = options.tier();
    if options.is_part {
        let mut steps = options.steps.iter();
        let ended = steps.try_for_each(|&step| run_step(step, tier, &options.pytest));
        eprintln!(
            "{:.0} s of processor time",
            process::time_of_children().as_secs_f64()
        );
        return ended;
    }
    if let Err(error) = fs::remove_file(report::skipped_tests_file())
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error.into());
    }
    let start = Instant::now();
    let outcomes = match options.steps.is_empty() {
        true => run_stages(tier, &options.pytest),
        false => {
            let all = Step::value_variants().iter();
            let chosen = all.filter(|step| options.steps.contains(step));
            chosen
                .map(|&step| Outcome::of(step, || run_step(step, tier, &options.pytest)))
                .collect()
        }
    };
    report::summarise(&outcomes, start.elapsed())
}

/// Runs the stages one after the other, and the rows of each beside each other.
fn run_stages(tier: Tier, pytest: &[String]) -> Vec<Outcome> {
    let run_row = |row: &[Step]| -> Vec<Outcome> {
        let steps = row.iter();
        steps
            .map(|&step| Outcome::of(step, || run_part(step, tier, pytest)))
            .collect()
    };
    let mut outcomes = Vec::new();
    for rows in tier.stages() {
        thread::scope(|scope| {
            let rows: Vec<_> = rows
                .iter()
                .map(|row| scope.spawn(|| run_row(row)))
                .collect();
            for row in rows {
                outcomes.extend(row.join().expect("steps do not panic"));
            }
        });
    }
    outcomes
}

/// Runs a step in a process of its own, whose lines start with the step's name.
fn run_part(step: Step, tier: Tier, pytest: &[String]) -> Result<()> {
    let value = step.to_possible_value().expect("no step is hidden");
    let name = value.get_name();
    let mut command = side_by_side::command(&["test", "--is-part", name]);
    command.args(tier.option()).arg("--").args(pytest);
    side_by_side::run(name, &mut command)
}
