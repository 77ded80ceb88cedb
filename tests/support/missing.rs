//! What a machine lacks: a test that needs it says so, and `cargo xtask test` says it once more at its end.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::thread;

/// Names the file that takes a line for each thing that a test had to leave out.
pub const SKIPPED_TESTS: &str = "INFLIGHT_SKIPPED_TESTS";

/// Whether the machine has it. Where not, it is reported that the running test skips what needs it.
pub fn present_or_reported(what: &dyn Display, is_present: bool) -> bool {
    if !is_present {
        report(what);
    }
    is_present
}

/// Reports that the running test skips what needs this. Without the file it goes to standard error, past the test
/// harness, which shows only what tests print that fail.
fn report(missing: &dyn Display) {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    // Cargo puts a hash behind the name.
    let program = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    let thread = thread::current();
    let test = thread.name().unwrap_or("?");
    let line = format!("{program}: {test}: no {missing}\n");
    let written = match std::env::var_os(SKIPPED_TESTS) {
        // One write a line: tests run side by side.
        Some(file) => File::options()
            .create(true)
            .append(true)
            .open(file)
            .and_then(|mut file| file.write_all(line.as_bytes())),
        None => io::stderr().write_all(line.as_bytes()),
    };
    written.expect("a place for what is skipped");
}
