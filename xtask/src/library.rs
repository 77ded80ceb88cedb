//! The backend: built the way it ships, and laid out as a backend directory of Triton; the project's programs.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::Result;
use crate::process::{cargo, output};
use crate::workspace::target;

/// Builds `libtriton_inflight.so` and returns a backend directory that holds it.
pub fn backend_directory() -> Result<PathBuf> {
    let library = build()?;
    let backends = target("backends");
    let folder = backends.join("inflight");
    fs::create_dir_all(&folder)?;
    // A rename leaves the file alone that a running server may have mapped.
    let new = folder.join("libtriton_inflight.so.new");
    fs::copy(library, &new)?;
    fs::rename(new, folder.join("libtriton_inflight.so"))?;
    Ok(backends)
}

/// Builds `inflight-sim` (crates/simulator) with a profile of Cargo.toml and returns the program.
pub fn simulator(profile: &str) -> Result<PathBuf> {
    program("inflight-simulator", profile)
}

/// Builds the program that measures the library in process, and returns it.
pub fn measure() -> Result<PathBuf> {
    program("inflight-measure", "release")
}

/// Builds this program and returns it. Where a test step asks for it, the file that was started may be gone:
/// `cargo test --workspace` puts another build in its place.
pub fn xtask() -> Result<PathBuf> {
    program("xtask", "dev")
}

fn program(package: &str, profile: &str) -> Result<PathBuf> {
    let messages = output(
        cargo()
            .args(["build", "--package", package, "--profile", profile])
            .arg("--message-format=json-render-diagnostics"),
    )?;
    artifacts(&messages)
        .find_map(|artifact| artifact["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo built no {package}").into())
}

/// Builds the release library. With `rustc --crate-type cdylib` cargo passes the profile's LTO on, which it
/// drops without a word from a plain `build` of a crate that is an rlib too (cargo issue 9672).
fn build() -> Result<PathBuf> {
    let messages = output(cargo().args([
        "rustc",
        "--package=triton-inflight",
        "--release",
        "--lib",
        "--crate-type=cdylib",
        "--message-format=json-render-diagnostics",
    ]))?;
    artifacts(&messages)
        .filter_map(|message| message["filenames"].as_array().cloned())
        .flatten()
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.ends_with("libtriton_inflight.so"))
        .ok_or_else(|| "cargo built no libtriton_inflight.so".into())
}

/// What cargo says that it has built.
fn artifacts(messages: &str) -> impl Iterator<Item = Value> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact")
}
