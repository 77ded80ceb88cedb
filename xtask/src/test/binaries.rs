//! Runs the workspace's test binaries one after the other, with a limit for each test.
//!
//! `cargo test` has no such limit: a test that hangs would take the run's whole time, and nobody would know which it
//! was.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;
use crate::process::{cargo, check, line, output};
use crate::workspace;

/// The test harness says so of a test that takes longer than a minute.
const OVER_A_MINUTE: &str = " has been running for over 60 seconds";
const A_MINUTE: Duration = Duration::from_secs(60);
/// How long a test may take: the longest ones take half a minute on two idle cores, and ten times that beside other
/// programs.
const LIMIT: Duration = Duration::from_secs(420);

/// An executable of tests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestBinary {
    /// The target's name: of the library, the program or the file in `tests/`.
    pub name: String,
    executable: PathBuf,
    /// The folder of its package, in which it runs.
    package: PathBuf,
    /// The tests that run; all of them if there are none.
    tests: Vec<String>,
}

/// An executable with some of its tests.
pub(super) struct Choice {
    /// It runs the chosen ones.
    pub binary: TestBinary,
    /// The names of the others.
    pub left_out: Vec<String>,
}

impl TestBinary {
    /// The executable with those of its tests that are chosen.
    ///
    /// # Errors
    /// The executable does not list its tests.
    pub(super) fn with_tests(mut self, is_chosen: impl Fn(&str) -> bool) -> Result<Choice> {
        let names = output(command(&self, &[]).args(["--list", "--format=terse"]))?;
        let names = names.lines().filter_map(|line| line.strip_suffix(": test"));
        let (chosen, left_out) = names.map(str::to_owned).partition(|name| is_chosen(name));
        self.tests = chosen;
        Ok(Choice {
            binary: self,
            left_out,
        })
    }
}

/// Compiles the tests of the workspace; returns their executables.
///
/// # Errors
/// They do not compile.
pub(super) fn compile() -> Result<Vec<TestBinary>> {
    let messages = "--message-format=json-render-diagnostics";
    let messages = output(cargo().args(["test", "--workspace", "--no-run", messages]))?;
    Ok(binaries(&messages))
}

/// The executables of tests among cargo's messages, in their order.
fn binaries(messages: &str) -> Vec<TestBinary> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let binary = |message: Value| {
        let is_test = message["profile"]["test"].as_bool()?;
        let package = PathBuf::from(message["manifest_path"].as_str()?);
        is_test.then_some(TestBinary {
            name: message["target"]["name"].as_str()?.to_owned(),
            executable: message["executable"].as_str()?.into(),
            package: package.parent()?.to_owned(),
            tests: Vec::new(),
        })
    };
    messages.filter_map(binary).collect()
}

/// Runs all tests of the executables, even if one fails.
///
/// # Errors
/// The executables that have failed, and the tests that have taken longer than the limit.
pub(super) fn run<'a>(
    binaries: impl IntoIterator<Item = &'a TestBinary>,
    variables: &[(&str, String)],
) -> Result<()> {
    let mut failures = Vec::new();
    for binary in binaries {
        let mut command = command(binary, variables);
        eprintln!(
            "     Running {} ({})",
            binary.name,
            binary.executable.display()
        );
        if let Err(error) = run_within(&mut command, LIMIT) {
            failures.push(error.to_string());
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("\n").into()),
    }
}

/// An executable as `cargo test` runs it.
fn command(binary: &TestBinary, variables: &[(&str, String)]) -> Command {
    let mut command = Command::new(&binary.executable);
    command
        .current_dir(&binary.package)
        .env("CARGO_MANIFEST_DIR", &binary.package)
        // Shared libraries that are built with the tests.
        .env("LD_LIBRARY_PATH", library_path())
        .envs(variables.iter().map(|(name, value)| (name, value)));
    // With a single thread, the harness ends the line of a test only with the test.
    if thread::available_parallelism().is_ok_and(|threads| threads.get() == 1) {
        command.arg("--test-threads=2");
    }
    if !binary.tests.is_empty() {
        command.arg("--exact").args(&binary.tests);
    }
    command
}

fn library_path() -> std::ffi::OsString {
    let built = workspace::target("debug");
    let mut path = std::ffi::OsString::from(built.join("deps"));
    path.push(":");
    path.push(built);
    if let Some(others) = env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(others);
    }
    path
}

/// Runs an executable until one of its tests takes longer than the limit. Its lines are copied.
fn run_within(command: &mut Command, limit: Duration) -> Result<()> {
    command.stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start `{}`: {error}", line(command)))?;
    let lines = lines_of(child.stdout.take().expect("standard output is piped"));
    let watched = watch(&lines, limit);
    if watched.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    watched?;
    // Without the names of tests, of which there may be hundreds.
    check(&Command::new(command.get_program()), status)
}

/// The lines of an output, as they come.
fn lines_of(output: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output)
            .split(b'\n')
            .map_while(io::Result::ok)
        {
            if sender
                .send(String::from_utf8_lossy(&line).into_owned())
                .is_err()
            {
                break;
            }
        }
    });
    receiver
}

/// Copies lines to standard error until they end, or a test takes longer than the limit.
fn watch(lines: &Receiver<String>, limit: Duration) -> Result<()> {
    // Tests that take longer than a minute, and when each of them is over the limit.
    let mut long: Vec<(String, Instant)> = Vec::new();
    loop {
        let next = match long.iter().map(|(_, deadline)| *deadline).min() {
            Some(deadline) => {
                lines.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            }
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(line) => {
                writeln!(io::stderr(), "{line}")?;
                let Some(rest) = line.strip_prefix("test ") else {
                    continue;
                };
                if let Some(name) = rest.strip_suffix(OVER_A_MINUTE) {
                    long.push((
                        name.to_owned(),
                        Instant::now() + limit.saturating_sub(A_MINUTE),
                    ));
                } else if let Some((name, _)) = rest.split_once(" ... ") {
                    long.retain(|(other, _)| other != name);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let over = long.iter().filter(|(_, deadline)| *deadline <= now);
                let names: Vec<_> = over.map(|(name, _)| name.as_str()).collect();
                if !names.is_empty() {
                    let limit = limit.as_secs();
                    return Err(format!("longer than {limit} s: {}", names.join(", ")).into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executables_are_those_of_tests() {
        let message = |name: &str, is_test: bool, executable: Value| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": "/w/crates/text/Cargo.toml",
                "target": {"name": name},
                "profile": {"test": is_test},
                "executable": executable,
            })
        };
        let messages = [
            message("a_library", false, Value::Null),
            message("a_program", false, "/t/a_program".into()),
            message("the_tests", true, "/t/the_tests".into()),
            serde_json::json!({"reason": "build-finished", "success": true}),
        ];
        let messages = messages.map(|message| message.to_string()).join("\n");
        let expected = TestBinary {
            name: "the_tests".into(),
            executable: "/t/the_tests".into(),
            package: "/w/crates/text".into(),
            tests: Vec::new(),
        };
        assert_eq!(binaries(&messages), [expected]);
    }

    /// What becomes of a program that writes these lines, and then waits for ever or ends.
    fn watched(lines: &[&str], then: &str, limit: Duration) -> std::result::Result<(), String> {
        let mut shell = Command::new("sh");
        let script = format!("printf '%s\\n' \"$@\"; exec {then}");
        shell.args(["-c", &script, "sh"]).args(lines);
        run_within(&mut shell, limit).map_err(|error| error.to_string())
    }

    #[test]
    fn a_test_that_does_not_end_is_named_and_its_program_killed() {
        let lines = ["test slow::hangs has been running for over 60 seconds"];
        let error = watched(&lines, "sleep 1000", A_MINUTE).expect_err("it hangs");
        assert_eq!(error, "longer than 60 s: slow::hangs");
        assert_eq!(watched(&lines, "true", LIMIT), Ok(()));
    }

    #[test]
    fn a_long_test_that_ends_is_not_over_the_limit() {
        let (sender, lines) = mpsc::channel();
        for line in [
            "test slow::but_ends has been running for over 60 seconds",
            "test slow::hangs has been running for over 60 seconds",
            "test slow::but_ends ... ok",
        ] {
            sender.send(line.to_owned()).expect("a receiver");
        }
        let error = watch(&lines, A_MINUTE).expect_err("one hangs").to_string();
        assert_eq!(error, "longer than 60 s: slow::hangs");
    }

    #[test]
    fn a_program_that_fails_is_an_error() {
        let error = watched(&["test a ... ok"], "false", LIMIT).expect_err("it fails");
        assert!(error.contains("exit status 1"), "{error}");
    }
}
