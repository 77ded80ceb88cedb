//! The project's commands, `cargo xtask COMMAND`. They install what they need below `target/`.

mod bench;
#[cfg(feature = "bindings")]
mod bindings;
mod book;
mod coverage;
mod fuzz;
mod gpu_bundle;
mod kernels;
mod library;
mod mutants;
mod package;
mod pictures;
mod process;
mod room;
mod sanitize;
mod serve;
mod setup;
mod side_by_side;
mod soak;
mod source_paths;
mod test;
mod watched_models;
mod workspace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};
use xtask::{Result, timeline};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's commands")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the backend and serve a model repository with a real tritonserver, in the foreground
    Serve(serve::Options),
    /// Run all tests and checks, or the named ones
    Test(test::Options),
    /// Check the dependencies against RustSec's advisory database; needs github.com
    Advisories,
    /// Measure the backend inside a real tritonserver, or its library in process
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Profile a step operation by operation
    Profile(bench::Program),
    /// Run a real tritonserver under load from good and bad clients for a long time, and check its invariants
    Soak(soak::Options),
    /// Fuzz the parsers of files and requests
    Fuzz(fuzz::Options),
    /// Run tests under the compilers' address and thread sanitizers
    Sanitize(sanitize::Options),
    /// Measure which lines of rooms are run by their tests
    Coverage(coverage::Options),
    /// Change the code of rooms, one place at a time, and run their tests, which should notice
    Mutants(mutants::Options),
    /// Draw a timeline of every request in every step of a run
    Timeline(timeline::Options),
    /// Build the documentation as a site below target/book/, and check its links
    Book,
    /// Draw the documentation's pictures of recorded results
    Pictures(pictures::Options),
    /// The preprocessor that docs/book.toml makes mdBook run
    #[command(hide = true)]
    PreprocessBook { arguments: Vec<String> },
    /// Build the plug-in for ranks of several hosts; as root it installs Debian's Open MPI and libclang
    Mpi,
    /// Compile the CUDA kernels, so that the next build embeds them; downloads NVIDIA's compiler
    Kernels,
    /// Build the library and the programs, and pack them with checksums and a bill of materials
    Package(package::Options),
    /// Pack what checks and measures the library on a GPU machine that reaches no registry
    GpuBundle(gpu_bundle::Options),
    /// Write a checkpoint for measurements: with random weights, or with another number of layers than one that is
    /// there
    MakeModel {
        /// Random weights of this shape
        #[arg(
            long,
            required_unless_present = "like",
            value_parser = PossibleValuesParser::new(inflight_random_checkpoint::shapes())
        )]
        shape: Option<String>,
        /// The folder of a checkpoint: its first layers, or its own and others that add zero
        #[arg(
            long,
            value_name = "DIR",
            requires = "layers",
            conflicts_with = "shape"
        )]
        like: Option<PathBuf>,
        /// How many layers
        #[arg(long, value_name = "N", requires = "like")]
        layers: Option<usize>,
        /// The folder to write; created if it is missing
        dir: PathBuf,
    },
    /// Regenerate crates/triton/src/sys.rs from Triton's headers; needs libclang
    Bindings,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Serve(options) => serve::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Advisories => test::advisories(),
        Command::Bench(bench) => bench::run(&bench),
        Command::Profile(program) => bench::measure("profile", &program),
        Command::Soak(options) => soak::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Sanitize(options) => sanitize::run(&options),
        Command::Coverage(options) => coverage::run(&options),
        Command::Mutants(options) => mutants::run(&options),
        Command::Timeline(options) => timeline::run(&options),
        Command::Book => book::run(),
        Command::Pictures(options) => pictures::run(&options),
        Command::PreprocessBook { arguments } => book::preprocess(&arguments),
        Command::Mpi => library::mpi_plugin(library::Build::Shipped),
        Command::Kernels => kernels::run(kernels::ALL),
        Command::Package(options) => package::run(&options),
        Command::GpuBundle(options) => gpu_bundle::run(&options),
        Command::MakeModel {
            shape,
            like,
            layers,
            dir,
        } => make_model(shape.as_deref(), like.zip(layers), &dir),
        Command::Bindings => bindings(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn make_model(shape: Option<&str>, like: Option<(PathBuf, usize)>, dir: &Path) -> Result<()> {
    let num_bytes = match (shape, like) {
        (Some(shape), _) => inflight_random_checkpoint::write(shape, dir)?,
        (None, Some((source, num_layers))) => {
            inflight_random_checkpoint::with_layers(&source, num_layers, dir)?
        }
        (None, None) => return Err("give --shape, or --like and --layers".into()),
    };
    let megabytes = num_bytes as f64 / 1e6;
    println!("{}: {megabytes:.0} MB of weights", dir.display());
    Ok(())
}

#[cfg(feature = "bindings")]
fn bindings() -> Result<()> {
    Ok(bindings::run()?)
}

/// Runs this command in a build of xtask that includes the generator.
#[cfg(not(feature = "bindings"))]
fn bindings() -> Result<()> {
    process::run(process::cargo().args([
        "run",
        "--quiet",
        "--package=xtask",
        "--features=bindings",
        "--",
        "bindings",
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The commands after `cargo xtask` in a text.
    fn commands(text: &str) -> impl Iterator<Item = &str> {
        text.lines()
            .filter_map(|line| Some(line.split_once("- run: cargo xtask ")?.1.trim()))
    }

    #[test]
    fn the_commands_of_workflows_exist() {
        let folder = workspace::root().join(".github/workflows");
        let mut num_commands = 0;
        for entry in std::fs::read_dir(folder).expect("there are workflows") {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(&path).expect("a text");
            for command in commands(&text.replace("${{ matrix.part }}", "9")) {
                let words = ["xtask"].into_iter().chain(command.split_whitespace());
                if let Err(error) = Arguments::try_parse_from(words) {
                    panic!("{}: {command}: {error}", path.display());
                }
                num_commands += 1;
            }
        }
        assert!(num_commands >= 4, "{num_commands}");
    }
}
