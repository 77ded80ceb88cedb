//! `cargo xtask coverage`: measures which lines of rooms are run by their tests.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Args;

use crate::process::{command, output, run as run_command};
use crate::room::Room;
use crate::{Result, setup, workspace};

/// The rooms that decide, and read what clients send.
const DEFAULT: &[&str] = &["engine", "sampling", "text", "guidance", "driver"];

#[derive(Args, Default)]
pub struct Options {
    /// The rooms, each a crate's folder or `driver` [default: engine, sampling, text, guidance, driver]
    rooms: Vec<Room>,
}

/// Runs the tests of the rooms, and prints a table to standard output.
pub fn run(options: &Options) -> Result<()> {
    let rooms = match options.rooms.is_empty() {
        true => Room::all(DEFAULT),
        false => options.rooms.clone(),
    };
    run_command(llvm_cov()?.args(["clean", "--workspace"]))?;
    let packages: Vec<_> = rooms
        .iter()
        .map(|room| format!("--package={}", room.package()))
        .collect();
    for (room, package) in rooms.iter().zip(&packages) {
        let tests = room.tests();
        run_command(llvm_cov()?.args(["--no-report", package]).args(tests))?;
    }
    let report = output(llvm_cov()?.args(["report", "--lcov"]).args(&packages))?;
    println!("| room | lines | covered |\n|---|---|---|");
    for room in &rooms {
        let lines = lines(&report, &room.sources(), |path| {
            fs::read_to_string(path).ok()
        });
        if lines.num == 0 {
            return Err(format!("the report has no line of {}", room.sources()).into());
        }
        println!(
            "| {} | {} | {:.1} % |",
            room.name(),
            lines.num,
            lines.percent()
        );
    }
    Ok(())
}

/// cargo-llvm-cov, with a folder of its own for what it compiles.
fn llvm_cov() -> Result<Command> {
    let tools = setup::llvm_tools()?;
    let mut command = command(setup::cargo_llvm_cov()?);
    command
        .arg("llvm-cov")
        .env("LLVM_COV", tools.cov)
        .env("LLVM_PROFDATA", tools.profdata)
        .env("CARGO_LLVM_COV_TARGET_DIR", workspace::target("coverage"))
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    Ok(command)
}

/// Lines with code, without those of the tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lines {
    num: usize,
    num_covered: usize,
}

impl Lines {
    fn percent(&self) -> f64 {
        100.0 * self.num_covered as f64 / self.num.max(1) as f64
    }
}

/// Adds up the lines below a folder of a report in lcov's format: `SF:` names a file, and each `DA:` one of its lines
/// and how often it was run.
fn lines(report: &str, folder: &str, read: impl Fn(&Path) -> Option<String>) -> Lines {
    let folder = format!("/{folder}");
    let mut lines = Lines::default();
    // Lines of the current file count before this one.
    let mut end = 0;
    for record in report.lines() {
        if let Some(path) = record.strip_prefix("SF:") {
            end = match path.contains(&folder) {
                true => first_line_of_tests(Path::new(path), &read),
                false => 0,
            };
        } else if let Some((line, times)) = line_and_times(record)
            && line < end
        {
            lines.num += 1;
            lines.num_covered += usize::from(times > 0);
        }
    }
    lines
}

fn line_and_times(record: &str) -> Option<(usize, u64)> {
    let mut fields = record.strip_prefix("DA:")?.split(',');
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// The number of the line from which a file has tests only. The first line is 1.
fn first_line_of_tests(path: &Path, read: impl Fn(&Path) -> Option<String>) -> usize {
    let folder = path.parent().unwrap_or(path);
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let declaration = format!("#[cfg(test)]\nmod {name};");
    let parents = [
        folder.join("lib.rs"),
        folder.join("mod.rs"),
        folder.with_extension("rs"),
    ];
    let mut parents = parents.iter().filter_map(|parent| read(parent));
    if parents.any(|text| text.contains(&declaration)) {
        return 0;
    }
    let text = read(path).unwrap_or_default();
    match text.split_once("#[cfg(test)]\nmod tests {") {
        Some((before, _)) => before.lines().count() + 1,
        None => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources of a room: `walks` are tests, as are the last lines of `a`.
    fn read(path: &Path) -> Option<String> {
        let text = match path.to_str()? {
            "/w/crates/engine/src/a.rs" => "fn f() {\n}\n\n#[cfg(test)]\nmod tests {\n}\n",
            "/w/crates/engine/src/kv.rs" => "mod pool;\n#[cfg(test)]\nmod walks;\nfn g() {}\n",
            "/w/crates/engine/src/kv/pool.rs" | "/w/crates/engine/src/kv/walks.rs" => "fn h() {}\n",
            _ => return None,
        };
        Some(text.to_owned())
    }

    #[test]
    fn lines_of_other_folders_and_of_tests_do_not_count() {
        let report = "SF:/w/crates/engine/src/a.rs\nFN:1,f\nDA:1,2\nDA:2,0\nDA:5,7\nLF:3\nend_of_record\n\
                      SF:/w/crates/engine/src/kv.rs\nDA:4,1\nend_of_record\n\
                      SF:/w/crates/engine/src/kv/pool.rs\nDA:1,0\nend_of_record\n\
                      SF:/w/crates/engine/src/kv/walks.rs\nDA:1,1\nend_of_record\n\
                      SF:/w/crates/text/src/b.rs\nDA:9,1\nend_of_record\n";
        let of = |folder| lines(report, folder, read);
        let expected = |num, num_covered| Lines { num, num_covered };
        assert_eq!(of("crates/engine/src/"), expected(4, 2));
        assert_eq!(of("crates/text/src/"), expected(1, 1));
        assert_eq!(of("crates/sampling/src/"), expected(0, 0));
        assert_eq!(expected(4, 3).percent(), 75.0);
    }
}
