//! `inflight-measure`: the library's speed in this process, beside the limits of the machine.

use std::process::ExitCode;

use clap::Parser;
use inflight_measure::{engine, profile, quality};

#[derive(Parser)]
#[command(name = "inflight-measure", about = "Measures the library in process")]
enum Command {
    /// How fast prompts are taken in and tokens generated
    Engine(engine::Options),
    /// Where the time of a step goes, operation by operation
    Profile(profile::Options),
    /// What weights of a few bits cost, along a text
    Quality(quality::Options),
}

fn main() -> ExitCode {
    let measured = match Command::parse() {
        Command::Engine(options) => engine::run(&options),
        Command::Profile(options) => profile::run(&options),
        Command::Quality(options) => quality::run(&options),
    };
    match measured {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
