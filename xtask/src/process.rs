//! Child processes: run to completion and checked, or started as children that end with this process.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::Result;
use crate::workspace;

/// A command that runs in the root of the checkout.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace::root());
    command
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command to completion. Its output goes to standard error, because standard output is for results.
pub fn run(command: &mut Command) -> Result<()> {
    let status = start(command.stdout(io::stderr()), Command::status)?;
    check(command, status)
}

/// Runs a command to completion, with our standard output.
pub fn run_to_stdout(command: &mut Command) -> Result<()> {
    let status = start(command.stdout(Stdio::inherit()), Command::status)?;
    check(command, status)
}

/// Runs a command to completion; returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = start(command.stderr(Stdio::inherit()), Command::output)?;
    check(command, output.status)?;
    Ok(String::from_utf8(output.stdout)?)
}

/// Starts a child that gets SIGTERM when this process dies, for whatever reason, and no signals from our
/// terminal.
pub fn spawn_guarded(command: &mut Command) -> Result<Child> {
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: between fork and exec the closure makes two system calls that are async-signal-safe and
    // touches no memory of the parent.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call above took effect.
            if libc::getppid() as u32 != parent {
                return Err(io::Error::other("the parent process is gone"));
            }
            Ok(())
        });
    }
    start(command, Command::spawn)
}

/// Sends SIGTERM to a child.
pub fn terminate(child: &Child) {
    // SAFETY: kill(2) takes no pointers; the child has not been waited for, so the id is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
}

/// The time of processors that the children of this process, and theirs, have used, once they were waited for.
pub fn time_of_children() -> Duration {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: getrusage(2) writes one structure of this type; all of its bytes may be zero.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let microseconds = |time: libc::timeval| time.tv_sec * 1_000_000 + time.tv_usec;
    Duration::from_micros((microseconds(usage.ru_utime) + microseconds(usage.ru_stime)) as u64)
}

/// An exit status in words.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn start<T>(command: &mut Command, how: impl FnOnce(&mut Command) -> io::Result<T>) -> Result<T> {
    how(command).map_err(|error| format!("cannot start `{}`: {error}", line(command)).into())
}

/// An error if the command did not succeed.
pub fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    Err(format!("`{}` ended with {}", line(command), describe(status)).into())
}

/// The command line, for messages.
pub fn line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
