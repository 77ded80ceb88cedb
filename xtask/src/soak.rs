//! `cargo xtask soak`: a long load from good and bad clients, through the server with OpenAI's API too, with checks of
//! the invariants (tools/soak).

use std::hash::{BuildHasher, RandomState};
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
    /// Instead, have so many clients leave the server with OpenAI's API in the middle of a stream, on a model of each
    /// driver, and count crashes, lost requests and what stays held
    #[arg(long, value_name = "N", conflicts_with_all = ["minutes", "clients", "round", "cancel_every"])]
    leaving_clients: Option<u32>,
    /// The most clients in a second that leave
    #[arg(
        long,
        value_name = "N",
        default_value_t = 200.0,
        requires = "leaving_clients"
    )]
    rate: f64,
    /// Keep the model repository and the server's logs in this folder, which must not exist
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Print one JSON object on standard output instead of text
    #[arg(long)]
    json: bool,
}

impl Options {
    /// What `cargo xtask test --all` runs: ten minutes with another seed in each run.
    pub fn in_tests() -> Self {
        Self {
            minutes: 10.0,
            seed: RandomState::new().hash_one("seed"),
            clients: 18,
            round: 40.0,
            cancel_every: 20.0,
            leaving_clients: None,
            rate: 200.0,
            keep: None,
            json: false,
        }
    }
}

/// Runs the soak test and prints a summary; an error if it found a problem.
pub fn run(options: &Options) -> Result<()> {
    let mut script = command(setup::python()?);
    let folder = workspace::root().join("tools/soak");
    match options.leaving_clients {
        None => script.arg(folder.join("soak.py")).args([
            format!("--minutes={}", options.minutes),
            format!("--clients={}", options.clients),
            format!("--round={}", options.round),
            format!("--cancel-every={}", options.cancel_every),
        ]),
        Some(number) => script.arg(folder.join("leaving.py")).args([
            format!("--leaving-clients={number}"),
            format!("--rate={}", options.rate),
        ]),
    };
    script
        .arg(format!("--seed={}", options.seed))
        .args(options.json.then_some("--json"))
        .env("TRITONSERVER", setup::tritonserver()?)
        .env(
            "TRITON_BACKENDS",
            library::backend_directory(Build::Shipped)?,
        )
        .env("INFLIGHT_OPENAI", library::openai(Build::Shipped)?);
    if let Some(folder) = &options.keep {
        script.arg("--keep").arg(std::path::absolute(folder)?);
    }
    run_to_stdout(&mut script)
}
