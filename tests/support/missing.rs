//! Reports missing machine features: a test that needs one says so, and `cargo xtask test` repeats it in its
//! summary.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::thread;

/// Names the file that gets a line for each skipped part of a test.
pub const SKIPPED_TESTS: &str = "INFLIGHT_SKIPPED_TESTS";

/// Whether the machine has a feature. If not, reports that the running test skips the part that needs it.
pub fn present_or_reported(what: &dyn Display, is_present: bool) -> bool {
    if !is_present {
        report(what);
    }
    is_present
}

/// Reports that the running test skips the part that needs this. Without the file, the report goes to
/// standard error directly, because the test harness only shows the output of failed tests.
fn report(missing: &dyn Display) {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    // Cargo appends a hash to the name.
    let program = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    let thread = thread::current();
    let test = thread.name().unwrap_or("?");
    let line = format!("{program}: {test}: no {missing}\n");
    let written = match std::env::var_os(SKIPPED_TESTS) {
        // A single write per line: tests run concurrently.
        Some(file) => File::options()
            .create(true)
            .append(true)
            .open(file)
            .and_then(|mut file| file.write_all(line.as_bytes())),
        None => io::stderr().write_all(line.as_bytes()),
    };
    written.expect("the report of a skipped test can be written");
}
