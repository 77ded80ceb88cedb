//! Commands of this program that run beside each other. Each line of their output starts with a name, so that the lines of
//! one command can be told from those of others.

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

/// Runs a command to completion. Its output goes to standard error, line by line, after the name.
pub fn run(name: &str, command: &mut Command) -> Result<()> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start `{}`: {error}", line(command)))?;
    let output = child.stdout.take().expect("standard output is piped");
    let errors = child.stderr.take().expect("standard error is piped");
    thread::scope(|scope| {
        let reader = scope.spawn(|| copy(name, output, io::stderr()));
        copy(name, errors, io::stderr()).and(reader.join().expect("copying does not panic"))
    })?;
    check(command, child.wait()?)
}

/// Copies lines, each after the name.
fn copy(name: &str, from: impl Read, mut to: impl Write) -> io::Result<()> {
    for line in BufReader::new(from).split(b'\n') {
        let line = line?;
        // One call, so that no other line comes between.
        let named = [name.as_bytes(), b" | ", &line, b"\n"].concat();
        to.write_all(&named)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_gets_the_name_and_the_last_one_an_end() {
        let mut copied = Vec::new();
        copy("unit", &b"a\n\n\xffb"[..], &mut copied).expect("memory takes bytes");
        assert_eq!(copied, b"unit | a\nunit | \nunit | \xffb\n");
    }

    #[test]
    fn a_command_that_fails_is_an_error_that_names_it() {
        let mut fails = Command::new("sh");
        let error = run("sh", fails.args(["-c", "exit 3"])).expect_err("it fails");
        assert!(error.to_string().contains("exit status 3"), "{error}");
        run("true", &mut Command::new("true")).expect("it succeeds");
    }
}
