//! `cargo xtask fuzz`: runs the parsers of files and requests on inputs that libFuzzer derives from code coverage
//! (tests/fuzz).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use crate::process::{cargo, check, command, run as run_command, spawn_guarded};
use crate::{Result, workspace};

/// A longer input counts as a hang.
const MAX_SECONDS_PER_INPUT: u32 = 20;
/// A larger process counts as unbounded memory.
const MAX_MEMORY_MIB: u32 = 2048;

/// The address sanitizer, and the counters and comparisons that guide libFuzzer (the flags of cargo-fuzz).
const FLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

#[derive(Args)]
pub struct Options {
    /// The targets, by their file in tests/fuzz/targets [default: all]
    targets: Vec<String>,
    /// How long to run each of them
    #[arg(long, value_name = "MINUTES", default_value_t = 60.0)]
    minutes: f64,
}

impl Options {
    /// All targets for a few seconds each: the committed inputs, and some thousands of variants.
    pub fn short() -> Self {
        Self {
            targets: Vec::new(),
            minutes: 0.1,
        }
    }
}

/// Fuzzes the targets one after the other; fails if an input fails.
pub fn run(options: &Options) -> Result<()> {
    let known = targets()?;
    if let Some(unknown) = options.targets.iter().find(|name| !known.contains(name)) {
        return Err(format!("no target '{unknown}'; there are {}", known.join(", ")).into());
    }
    let chosen = match options.targets.is_empty() {
        true => &known,
        false => &options.targets,
    };
    let programs = build()?;
    let seconds = (options.minutes * 60.0).ceil() as u32;
    let mut failed = Vec::new();
    for target in chosen {
        eprintln!("--- {target}");
        if let Err(error) = fuzz(&programs, target, seconds) {
            eprintln!("error: {error}");
            failed.push(target.as_str());
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("failed: {}", failed.join(", ")).into()),
    }
}

/// The names of all targets, in alphabetical order.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(package().join("targets"))? {
        let path = entry?.path();
        if let Some(name) = path.file_stem() {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Builds all targets, and returns the folder of their programs.
fn build() -> Result<PathBuf> {
    let target = workspace::target("fuzz");
    // With a named machine, the flags do not apply to build scripts and macros.
    let machine = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    run_command(
        cargo()
            .current_dir(package())
            .args(["build", "--release", "--locked", "--target", &machine])
            .arg("--target-dir")
            .arg(&target)
            // The flags are unstable, and the stable compiler takes them with this variable.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", FLAGS),
    )?;
    Ok(target.join(machine).join("release"))
}

/// Runs one target. New inputs that reach new code go to target/fuzz/corpus, failing inputs to target/fuzz/failures.
fn fuzz(programs: &Path, target: &str, seconds: u32) -> Result<()> {
    let found = workspace::target("fuzz/corpus").join(target);
    let failures = workspace::target("fuzz/failures").join(target);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&failures)?;
    run_libfuzzer(
        command(programs.join(target))
            .arg(found)
            .arg(corpus(target))
            .args([
                format!("-max_total_time={seconds}"),
                format!("-timeout={MAX_SECONDS_PER_INPUT}"),
                format!("-rss_limit_mb={MAX_MEMORY_MIB}"),
                // The slash makes it a folder.
                format!("-artifact_prefix={}/", failures.display()),
                "-print_final_stats=1".to_owned(),
                "-print_funcs=0".to_owned(),
            ]),
        &Folder::new(target)?,
    )
}

/// Runs a target's program to completion, without libFuzzer's line for each input that it keeps.
fn run_libfuzzer(command: &mut Command, folder: &Folder) -> Result<()> {
    command.env("TMPDIR", &folder.0).stderr(Stdio::piped());
    let mut child = spawn_guarded(command)?;
    let output = child.stderr.take().expect("standard error is piped");
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if !line.contains("\tNEW ") && !line.contains("\tREDUCE ") {
            eprintln!("{line}");
        }
    }
    check(command, child.wait()?)
}

fn package() -> PathBuf {
    workspace::root().join("tests/fuzz")
}

fn corpus(target: &str) -> PathBuf {
    package().join("corpus").join(target)
}

/// A folder in memory for the files that a target writes, removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(target: &str) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let parent = match memory.is_dir() {
            true => memory.to_owned(),
            false => std::env::temp_dir(),
        };
        let path = parent.join(format!("xtask-fuzz-{}-{target}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder in memory that remains costs little.
        let _ = fs::remove_dir_all(&self.0);
    }
}
