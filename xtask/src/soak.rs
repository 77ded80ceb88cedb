//! `cargo xtask soak`: a long load from good and bad clients, with checks of the server's invariants
//! (tools/soak).

use std::path::PathBuf;

use clap::Args;

use crate::library::Build;
use crate::process::{command, run_to_stdout};
use crate::{Result, library, setup, workspace};

#[derive(Args)]
pub struct Options {
    /// Duration of the load
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0)]
    minutes: f64,
    /// Seed of the random requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of well-behaved clients, besides the bad ones
    #[arg(long, value_name = "N", default_value_t = 18)]
    clients: u32,
    /// Seconds of load between two checks of the idle server
    #[arg(long, value_name = "SECONDS", default_value_t = 40.0)]
    round: f64,
    /// Minimum seconds between two cancelled gRPC calls: they can crash Triton 2.51 itself
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    cancel_every: f64,
    /// Keep the model repository and the server's logs in this folder, which must not exist
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the soak test and prints a summary; an error if it found a problem.
pub fn run(options: &Options) -> Result<()> {
    let mut script = command(setup::python()?);
    script
        .arg(workspace::root().join("tools/soak/soak.py"))
        .args([
            format!("--minutes={}", options.minutes),
            format!("--seed={}", options.seed),
            format!("--clients={}", options.clients),
            format!("--round={}", options.round),
            format!("--cancel-every={}", options.cancel_every),
        ])
        .args(options.json.then_some("--json"))
        .env("TRITONSERVER", setup::tritonserver()?)
        .env(
            "TRITON_BACKENDS",
            library::backend_directory(Build::Shipped)?,
        );
    if let Some(folder) = &options.keep {
        script.arg("--keep").arg(std::path::absolute(folder)?);
    }
    run_to_stdout(&mut script)
}
