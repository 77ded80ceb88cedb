//! The options of the command.

use std::path::PathBuf;

use clap::Parser;

use super::stage::Stage;

/// Checks and measures this library on a GPU.
#[derive(Parser, Clone, Debug)]
#[command(name = "gpu-check")]
pub struct Options {
    /// The bundle's folder [default: the folder of this program]
    #[arg(long, value_name = "DIR")]
    pub bundle: Option<PathBuf>,
    /// Where the report and checkpoints are written [default: the current folder]
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// The GPU, as the driver counts them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: usize,
    /// Seconds for everything
    #[arg(long, value_name = "SECONDS", default_value_t = 480)]
    pub seconds: u64,
    /// The shape of the model that is measured
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b")]
    pub shape: String,
    /// Sizes that a stand-in for a GPU can compute, of a tiny model
    #[arg(long)]
    pub quick: bool,
    /// Only these stages
    #[arg(value_enum)]
    pub stages: Vec<Stage>,
}
