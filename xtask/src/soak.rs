//! `cargo xtask soak`: many clients, good and bad, for a long time, and what must hold meanwhile (tools/soak).

use std::path::PathBuf;

use clap::Args;

use crate::process::{command, run_to_stdout};
use crate::{Result, library, setup, workspace};

#[derive(Args)]
pub struct Options {
    /// For how long
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0)]
    minutes: f64,
    /// Another seed is other requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Clients that behave, beside those that do not
    #[arg(long, value_name = "N", default_value_t = 18)]
    clients: u32,
    /// Seconds of load between two looks at the server when nothing runs
    #[arg(long, value_name = "SECONDS", default_value_t = 40.0)]
    round: f64,
    /// Seconds between two gRPC calls that are cancelled, at least: Triton 2.51 itself may die of them
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    cancel_every: f64,
    /// A folder that does not exist yet, for the model repository and the server's logs
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// One JSON object on standard output, instead of lines
    #[arg(long)]
    json: bool,
}

/// Runs it, and prints what was tried; an error where something was found.
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
        .env("TRITON_BACKENDS", library::backend_directory()?);
    if let Some(folder) = &options.keep {
        script.arg("--keep").arg(std::path::absolute(folder)?);
    }
    run_to_stdout(&mut script)
}
