//! `cargo xtask test`: all checks and tests as named steps, with a summary at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::process::{cargo, command, run as run_command};
use crate::{Result, book, fuzz, kernels, library, setup, side_by_side, source_paths, workspace};

/// One check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    /// The CUDA kernels compile, without spills and within their registers; what is built afterwards has them
    Kernels,
    /// Formatting of the sources
    Fmt,
    /// Clippy without warnings
    Clippy,
    /// The API documentation builds without warnings
    Doc,
    /// Licences, sources and bans of the dependencies; `cargo xtask advisories` checks the rest
    Deny,
    /// The book builds, and no link in the documentation is broken
    Book,
    /// All programs and tests of the workspace compile
    Build,
    /// The library and the programs compile as they ship
    Release,
    /// The parsers of files and requests, for a few seconds on inputs that libFuzzer derives from the committed ones
    Fuzz,
    /// Unit, integration and documentation tests
    Unit,
    /// The pages drawn by commands, in a real browser
    Pages,
    /// The backend in a real tritonserver, with real clients
    Server,
}

/// The order of all steps: stages, of two rows that run beside each other, so that one computes while the other waits for the
/// network, a linker or a server. Kernels come first, because later builds embed them. No stage compiles behind those before
/// the tests: a build would keep commands that tests give to cargo waiting. The limits of the server's clients are a minute and
/// more, so that they hold on two cores that the other row shares.
const STAGES: [[&[Step]; 2]; 3] = [
    [&[Step::Kernels], &[Step::Fmt, Step::Deny, Step::Book]],
    [
        &[Step::Clippy, Step::Doc, Step::Build],
        &[Step::Release, Step::Fuzz],
    ],
    [&[Step::Unit, Step::Pages], &[Step::Server]],
];

#[derive(Args)]
pub struct Options {
    /// The steps to run, one after the other [default: all, two at a time]
    #[arg(value_enum)]
    steps: Vec<Step>,
    /// A step of a run of all
    #[arg(long, hide = true)]
    is_part: bool,
    /// Arguments for pytest in the steps `pages` and `server`
    #[arg(last = true, value_name = "PYTEST ARGUMENTS")]
    pytest: Vec<String>,
}

/// What became of a step.
struct Outcome {
    step: Step,
    /// None of a step that passed.
    error: Option<String>,
    elapsed: Duration,
}

/// Runs all steps, even if one fails.
pub fn run(options: &Options) -> Result<()> {
    if options.is_part {
        return options
            .steps
            .iter()
            .try_for_each(|&step| run_step(step, &options.pytest));
    }
    if let Err(error) = fs::remove_file(skipped_tests_file())
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error.into());
    }
    let report = match options.steps.is_empty() {
        true => run_all(&options.pytest),
        false => {
            let all = Step::value_variants().iter();
            let chosen = all.filter(|step| options.steps.contains(step));
            chosen
                .map(|&step| timed(step, || run_step(step, &options.pytest)))
                .collect()
        }
    };
    summarise(&report)
}

/// Prints what was skipped, the verdicts, and last the failures, since the end of a long output is what is looked at.
fn summarise(report: &[Outcome]) -> Result<()> {
    eprintln!();
    let skipped = fs::read_to_string(skipped_tests_file()).unwrap_or_default();
    for (what, num_tests) in skipped_tests(&skipped) {
        eprintln!("skipped  {what} ({num_tests} tests)");
    }
    for outcome in report {
        eprintln!(
            "{:<8} {:<6} {:>4} s",
            format!("{:?}", outcome.step),
            verdict(outcome),
            seconds(outcome.elapsed)
        );
    }
    for outcome in report {
        if let Some(error) = &outcome.error {
            eprintln!("error: {:?}: {error}", outcome.step);
        }
    }
    match report.iter().all(|outcome| outcome.error.is_none()) {
        true => Ok(()),
        false => Err("some steps failed".into()),
    }
}

/// Runs the stages one after the other, and the rows of each beside each other.
fn run_all(pytest: &[String]) -> Vec<Outcome> {
    let run_row = |row: &[Step]| -> Vec<Outcome> {
        let steps = row.iter();
        steps
            .map(|&step| timed(step, || run_part(step, pytest)))
            .collect()
    };
    let mut report = Vec::new();
    for [first, second] in STAGES {
        let (first, second) = thread::scope(|scope| {
            let first = scope.spawn(|| run_row(first));
            let second = run_row(second);
            (first.join().expect("steps do not panic"), second)
        });
        report.extend(first);
        report.extend(second);
    }
    report
}

/// Runs a step in a process of its own, whose lines start with the step's name.
fn run_part(step: Step, pytest: &[String]) -> Result<()> {
    let value = step.to_possible_value().expect("no step is hidden");
    let name = value.get_name();
    let mut command = side_by_side::command(&["test", "--is-part", name, "--"]);
    side_by_side::run(name, command.args(pytest))
}

fn timed(step: Step, run: impl FnOnce() -> Result<()>) -> Outcome {
    eprintln!("\n=== {step:?}");
    let start = Instant::now();
    let ended = run();
    if let Err(error) = &ended {
        eprintln!("error: {step:?}: {error}");
    }
    Outcome {
        step,
        error: ended.err().map(|error| error.to_string()),
        elapsed: start.elapsed(),
    }
}

fn run_step(step: Step, pytest: &[String]) -> Result<()> {
    match step {
        Step::Kernels => kernels::run(),
        Step::Fmt => {
            run_command(cargo().args(["fmt", "--all", "--check"]))?;
            let fuzz = "--manifest-path=tests/fuzz/Cargo.toml";
            run_command(cargo().args(["fmt", fuzz, "--check"]))
        }
        Step::Clippy => run_command(cargo().args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "--deny=warnings",
        ])),
        Step::Doc => run_command(
            cargo()
                .args([
                    "doc",
                    "--workspace",
                    "--no-deps",
                    "--document-private-items",
                ])
                .env("RUSTDOCFLAGS", "--deny=warnings"),
        ),
        Step::Deny => {
            // cargo-deny reads all dependencies, also those that no build has fetched yet.
            run_command(cargo().args(["fetch", "--locked"]))?;
            run_command(command(setup::cargo_deny()?).args([
                "--offline",
                "check",
                "bans",
                "licenses",
                "sources",
            ]))
        }
        Step::Book => book::run(),
        Step::Build => run_command(cargo().args(["test", "--workspace", "--no-run"])),
        Step::Release => {
            library::backend_directory()?;
            library::simulator()?;
            // A test installs it by cmake.
            library::embed()?;
            library::openai()?;
            library::front_cost()?;
            build_mpi_plugin();
            Ok(())
        }
        // Some of the tests use the plug-in.
        Step::Unit => {
            build_mpi_plugin();
            run_command(
                cargo()
                    .args(["test", "--workspace", "--no-fail-fast"])
                    .env("INFLIGHT_SKIPPED_TESTS", skipped_tests_file()),
            )
        }
        Step::Fuzz => fuzz::run(&fuzz::Options::short()),
        Step::Pages => page_tests(pytest),
        Step::Server => server_tests(pytest),
    }
}

/// Checks the dependencies for known vulnerabilities. Not a test step: tests pass with no network beyond the
/// package registries.
pub fn advisories() -> Result<()> {
    run_command(command(setup::cargo_deny()?).args(["check", "advisories"]))
}

fn page_tests(pytest: &[String]) -> Result<()> {
    run_command(
        command(setup::python()?)
            .current_dir(workspace::root().join("tests/pages"))
            .args(["-m", "pytest"])
            .args(pytest)
            .env("XTASK", library::xtask()?)
            .env("CHROMIUM", setup::browser()?)
            .env("INFLIGHT_SIM", library::simulator()?),
    )
}

fn server_tests(pytest: &[String]) -> Result<()> {
    let python = setup::python()?;
    let aiperf = setup::aiperf()?;
    let server = setup::tritonserver()?;
    let simulator = library::simulator()?;
    let backends = library::backend_directory()?;
    let stand_in = library::cuda_stand_in()?;
    build_mpi_plugin();
    let mut tests = command(python);
    match setup::prometheus() {
        Ok(programs) => {
            tests.env("PROMETHEUS", programs);
        }
        // Its tests are skipped, and say so.
        Err(error) => eprintln!("no Prometheus: {error}"),
    }
    run_command(
        tests
            .current_dir(workspace::root().join("tests/server"))
            .args(["-m", "pytest"])
            .args(pytest)
            .env("XTASK", library::xtask()?)
            .env("CHROMIUM", setup::browser()?)
            .env("AIPERF_PYTHON", aiperf)
            .env("PYTHON_BACKEND_PACKAGES", setup::python_backend_packages()?)
            .env("NODE_CLIENTS", setup::node_clients()?)
            .env("INFLIGHT_OPENAI", library::openai()?)
            .env("INFLIGHT_EMBED", library::embed()?)
            .env("INFLIGHT_FRONT_COST", library::front_cost()?)
            .env("CUDA_STAND_IN", stand_in)
            .env("TRITONSERVER", server)
            .env("TRITON_BACKENDS", backends)
            .env("INFLIGHT_SIM", simulator)
            .env("RELEASE_RUSTFLAGS", source_paths::rustflags()?.join("\x1f"))
            .env("INFLIGHT_SKIPPED_TESTS", skipped_tests_file()),
    )
}

/// Builds the plug-in for MPI. Its tests are skipped, and say so, where MPI cannot be had.
fn build_mpi_plugin() {
    if let Err(error) = library::mpi_plugin() {
        eprintln!("no plug-in for MPI: {error}");
    }
}

/// The file in which tests record what the machine lacks (tests/support/missing.rs).
fn skipped_tests_file() -> PathBuf {
    workspace::target("skipped-tests.txt")
}

/// The number of tests that were skipped in whole or in part, by program and reason. Each line names a program, a test and a
/// reason, and is written as often as the test skips something.
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

fn verdict(outcome: &Outcome) -> &'static str {
    match outcome.error {
        None => "passed",
        Some(_) => "FAILED",
    }
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

    #[test]
    fn a_run_of_all_has_every_step_once_and_kernels_before_what_embeds_them() {
        let steps: Vec<Step> = STAGES
            .iter()
            .flatten()
            .copied()
            .flatten()
            .copied()
            .collect();
        for step in Step::value_variants() {
            let times = steps.iter().filter(|other| *other == step).count();
            assert_eq!(times, 1, "{step:?}");
        }
        let embeds = [
            Step::Clippy,
            Step::Doc,
            Step::Build,
            Step::Release,
            Step::Fuzz,
        ];
        let early: Vec<Step> = STAGES[0].iter().copied().flatten().copied().collect();
        assert!(early.contains(&Step::Kernels) && !embeds.iter().any(|step| early.contains(step)));
    }
}
