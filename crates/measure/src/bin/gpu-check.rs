//! `gpu-check`: checks and measures the library on a GPU machine.

use std::process::ExitCode;

use clap::Parser;
use inflight_measure::gpu_check::{self, Options};

fn main() -> ExitCode {
    match gpu_check::run(Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
