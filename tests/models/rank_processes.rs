//! One model on ranks that are processes, as a server has them.
//!
//! Only the first rank has an engine. The oracle is one process, whose sums are cut into the same tiles.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::time::{Duration, Instant};

use inflight_base::{LoadError, SequenceId, StepError, Tokens};
use inflight_collective::Grid;
use inflight_engine::{Engine, NewRequest, StepOutput};
use inflight_machines::{LeadingRunner, RankLimits, RankTransport, rank_main};
use inflight_runner::{AdapterRoom, ModelSource, RunnerLimits};

use crate::copy::Copy;
use crate::devices::requests;
use crate::ranks::{alone, assert_same};
use crate::schedules::{assert_happened, beams, schedules};
use crate::support::{CallRunner, Setup, fixture, serve};

/// The program of the other ranks: this one. The tests of the server have the real one.
pub const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/rank.sh");

/// Longer than any step of these tests takes.
pub const PATIENT: RankLimits = RankLimits {
    load: Duration::from_secs(120),
    step: Duration::from_secs(120),
};

pub fn load(
    program: &Path,
    dir: &Path,
    setup: &Setup,
    grid: impl Into<Grid>,
    limits: RankLimits,
) -> Result<LeadingRunner, LoadError> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let runner_limits = RunnerLimits {
        adapters: AdapterRoom::default(),
        ..setup.runner_limits()
    };
    let transport = RankTransport::Processes(program.to_owned());
    let ranks = transport.connect(grid, limits.load)?;
    LeadingRunner::new(ranks, &source, runner_limits, &setup.cpu_options(), limits)
}

/// What `PROGRAM` runs.
#[test]
fn is_another_rank_if_started_as_one() {
    if env::var_os("INFLIGHT_TEST_RANK").is_some() {
        exit(rank_main().into());
    }
}

#[test]
fn ranks_that_are_processes_change_nothing() {
    let cases = schedules().into_iter().chain([beams()]);
    for (what, setup, requests) in cases {
        let dir = fixture("qwen3");
        let (expected, _) = alone(&dir, &setup, &requests);
        for num_ranks in [2, 4] {
            let runner = load(Path::new(PROGRAM), &dir, &setup, num_ranks, PATIENT);
            let mut runner = runner.expect("it loads");
            let (served, happened) = serve(&mut runner, &setup, &requests);
            assert_same(
                &format!("{what}, {num_ranks} processes"),
                &expected,
                &served,
            );
            assert_happened(what, &happened);
        }
    }
}

/// A program in place of that of the other ranks: a script of the shell.
pub struct Script(pub Copy);

impl Script {
    /// `script` may say `PROGRAM` for that of the other ranks, and `FOLDER` for that of the checkpoint.
    pub fn new(script: &str) -> Self {
        let copy = Copy::of("llama3");
        let folder = copy.dir().to_str().expect("a name");
        let script = script.replace("PROGRAM", PROGRAM).replace("FOLDER", folder);
        let path = copy.path("program");
        // Written by another process: one that a thread of this one starts in the meantime would hold the file open,
        // and the system runs no such program.
        let written = Command::new("/bin/sh")
            .args([
                "-c",
                r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod +x "$2""#,
            ])
            .args(["sh", &script])
            .arg(&path)
            .status();
        assert!(written.expect("a shell").success());
        Self(copy)
    }

    pub fn program(&self) -> PathBuf {
        self.0.path("program")
    }

    /// The error of a load with it.
    fn failure(&self, load_limit: Duration) -> String {
        let limits = RankLimits {
            load: load_limit,
            ..PATIENT
        };
        match load(&self.program(), self.0.dir(), &Setup::default(), 2, limits) {
            Ok(_) => panic!("the load fails"),
            Err(error) => error.to_string(),
        }
    }
}

#[test]
fn a_script_that_is_the_program_is_no_failure() {
    let script = Script::new("exec PROGRAM \"$@\"");
    let setup = Setup::default();
    let runner = load(&script.program(), script.0.dir(), &setup, 2, PATIENT);
    let (served, _) = serve(&mut runner.expect("it loads"), &setup, &requests());
    let (expected, _) = alone(&fixture("llama3"), &setup, &requests());
    assert_same("a script", &expected, &served);
}

#[test]
fn a_rank_that_cannot_load_is_named_with_the_reason() {
    for (script, parts) in [
        ("exit 7", &["rank 1", "it has ended", "exit status: 7"][..]),
        (
            "kill -9 $$",
            &["rank 1", "it has ended", "signal: 9 (SIGKILL)"],
        ),
        // A greeting of another build.
        (
            r#"printf '\021\000\000\000{"build":"0 old"}' >&0; exec sleep 100"#,
            &["build 0 old", "install both"],
        ),
        (
            r#"printf '\003\000\000\000???' >&0; exec sleep 100"#,
            &["rank 1", "expected value"],
        ),
        (
            "touch -d 2001-01-01 FOLDER/model.safetensors; exec PROGRAM",
            &["rank 1", "are not those that rank 0 has opened"],
        ),
        (
            "rm FOLDER/config.json; exec PROGRAM",
            &["rank 1", "config.json"],
        ),
    ] {
        let error = Script::new(script).failure(PATIENT.load);
        for part in parts {
            assert!(error.contains(part), "{script}: {error}");
        }
    }
}

#[test]
fn a_rank_that_does_not_answer_is_ended_at_the_time_limit() {
    let started = Instant::now();
    for script in ["exec sleep 1000", "kill -STOP $$; exec PROGRAM"] {
        let error = Script::new(script).failure(Duration::from_secs(1));
        assert!(
            error.contains("the process of rank 1: no answer in time"),
            "{script}: {error}"
        );
    }
    assert!(started.elapsed() < PATIENT.load / 2);
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let copy = Copy::of("llama3");
    let missing = copy.path("inflight-rank");
    match load(&missing, copy.dir(), &Setup::default(), 2, PATIENT) {
        Ok(_) => panic!("the load fails"),
        Err(error) => {
            let error = error.to_string();
            let path = missing.to_str().expect("a name");
            assert!(
                error.contains(path) && error.contains("No such file"),
                "{error}"
            );
        }
    }
}

/// Computes a request to its end, or to the first error.
pub fn compute(runner: &mut impl CallRunner, setup: &Setup) -> Result<(), StepError> {
    let mut engine = Engine::new(setup.engine_config());
    let request = NewRequest::new(SequenceId(0), (3..40).collect(), Tokens(50));
    engine.add(request).expect("a valid request");
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    while !engine.is_idle() {
        let step = engine.schedule();
        output.clear();
        step.plans()
            .try_for_each(|plan| runner.run(plan, &mut output))?;
        engine.apply(step, &mut output, &mut events);
    }
    Ok(())
}

#[test]
fn a_rank_that_ends_in_a_step_is_noticed_and_named() {
    // The system ends the process when it has computed for a second.
    let script = Script::new("ulimit -t 1; exec PROGRAM");
    let setup = Setup::default();
    let runner = load(&script.program(), script.0.dir(), &setup, 2, PATIENT);
    let mut runner = runner.expect("it loads");
    let watch = runner.watch();
    watch.check().expect("it lives");
    let started = Instant::now();
    let error = loop {
        match compute(&mut runner, &setup) {
            Err(error) => break error.to_string(),
            Ok(()) => assert!(started.elapsed() < PATIENT.step, "the rank never ends"),
        }
    };
    assert!(
        error.contains("rank 1") && error.contains("signal: "),
        "{error}"
    );
    let ended = watch.check().expect_err("it has ended").to_string();
    assert!(ended.contains("rank 1 has ended (signal: "), "{ended}");
    let again = compute(&mut runner, &setup).expect_err("it stays so");
    assert_eq!(again.to_string(), error);
}
