//! Commands of this program that run beside each other. Each line of their output starts with a name, so that the lines
//! of one command can be told from those of others.

use std::fmt::{self, Display, Formatter};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread;

use crate::Result;
use crate::process::{check, line};
use crate::workspace;

/// This program, even if its file has been replaced by another build since it started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// A command of this program.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(THIS_PROGRAM);
    command.current_dir(workspace::root()).args(arguments);
    command
}

/// Runs a command to completion. Its output goes to standard error, line by line, after the name. The error of a
/// command that fails has the lines that name its failures.
pub fn run(name: &str, command: &mut Command) -> Result<()> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start `{}`: {error}", line(command)))?;
    let output = child.stdout.take().expect("standard output is piped");
    let errors = child.stderr.take().expect("standard error is piped");
    let (mut from_output, mut from_errors) = (Failures::default(), Failures::default());
    thread::scope(|scope| {
        let reader = scope.spawn(|| copy(name, output, io::stderr(), &mut from_output));
        copy(name, errors, io::stderr(), &mut from_errors)
            .and(reader.join().expect("copying does not panic"))
    })?;
    check(command, child.wait()?)
        .map_err(|error| format!("{error}{from_output}{from_errors}").into())
}

/// Copies lines, each after the name.
fn copy(
    name: &str,
    from: impl Read,
    mut to: impl Write,
    failures: &mut Failures,
) -> io::Result<()> {
    for line in BufReader::new(from).split(b'\n') {
        let line = line?;
        // One call, so that no other line comes between.
        let named = [name.as_bytes(), b" | ", &line, b"\n"].concat();
        to.write_all(&named)?;
        failures.read(&line);
    }
    Ok(())
}

/// The lines of an output that name failures, as cargo, Rust's test harness, pytest and cargo-mutants write them.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    /// A build or a suite that fails as a whole names more than anybody reads.
    const MAX_LINES: usize = 50;

    fn read(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let starts = [
            "FAILED test_",
            "ERROR test_",
            "error: ",
            "error[",
            "MISSED ",
            "TIMEOUT ",
        ];
        let is_failure = starts.iter().any(|start| line.starts_with(start))
            || (line.starts_with("test ") && line.ends_with(" ... FAILED"));
        if is_failure && self.0.len() < Self::MAX_LINES {
            self.0.push(line.into_owned());
        }
    }
}

impl Display for Failures {
    fn fmt(&self, formatter: &mut Formatter) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|line| write!(formatter, "\n    {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_gets_the_name_and_the_last_one_an_end() {
        let mut copied = Vec::new();
        let mut failures = Failures::default();
        copy("unit", &b"a\n\n\xffb"[..], &mut copied, &mut failures).expect("memory takes bytes");
        assert_eq!(copied, b"unit | a\nunit | \nunit | \xffb\n");
    }

    #[test]
    fn a_command_that_fails_is_an_error_that_names_it() {
        let mut fails = Command::new("sh");
        let error = run("sh", fails.args(["-c", "exit 3"])).expect_err("it fails");
        assert!(error.to_string().contains("exit status 3"), "{error}");
        run("true", &mut Command::new("true")).expect("it succeeds");
    }

    #[test]
    fn the_error_of_a_command_names_its_failures() {
        let lines = [
            "test cache::blocks_are_freed ... FAILED",
            "test cache::blocks_are_reused ... ok",
            "FAILED test_queue.py::test_order[two] - AssertionError",
            "error[E0308]: mismatched types",
            "ERROR    root:client.py:7 what a failed test has logged",
            "the word FAILED in a sentence",
            "MISSED   crates/engine/src/budget.rs:88:35: replace > with >= in TokenBudget::is_open",
        ];
        let mut fails = Command::new("sh");
        fails.args(["-c", "printf '%s\\n' \"$@\"; exit 1", "sh"]);
        let error = run("sh", fails.args(lines)).expect_err("it fails");
        let error = error.to_string();
        let failures: Vec<&str> = error
            .lines()
            .filter_map(|line| line.strip_prefix("    "))
            .collect();
        assert_eq!(failures, [lines[0], lines[2], lines[3], lines[6]]);
    }
}
