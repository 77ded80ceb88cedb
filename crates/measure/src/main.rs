//! `inflight-measure`: in-process speed and quality of the library, relative to the limits of the machine.

use std::process::ExitCode;

use clap::Parser;
use inflight_measure::{adapters, all_reduce, embed, engine, profile, quality, ranks};

#[derive(Parser)]
#[command(name = "inflight-measure", about = "Measures the library in process")]
enum Command {
    /// Measures prompt and generation throughput
    Engine(engine::Options),
    /// Measures how many texts a model embeds in a second
    Embed(embed::Options),
    /// Measures what adapters add to the time of a step
    Adapters(adapters::Options),
    /// Measures several ranks beside one that has as many threads
    Ranks(ranks::Options),
    /// Measures sums over the ranks of one host
    AllReduce(all_reduce::Options),
    /// Measures the time of a step, operation by operation
    Profile(profile::Options),
    /// Measures the quality that quantised weights lose, on a text
    Quality(quality::Options),
}

fn main() -> ExitCode {
    let measured = match Command::parse() {
        Command::Engine(options) => engine::run(&options),
        Command::Embed(options) => embed::run(&options),
        Command::Adapters(options) => adapters::run(&options),
        Command::Ranks(options) => ranks::run(&options),
        Command::AllReduce(options) => all_reduce::run(&options),
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
