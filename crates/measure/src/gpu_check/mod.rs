//! `gpu-check`: one command for a GPU machine that reaches no registry. `cargo xtask gpu-bundle` packs it with all that
//! it needs.
//!
//! ```text
//! options.rs stage.rs check.rs    the options, the stages, and what stages share
//! report.rs       one JSON file and one table, written again after every row
//! budget.rs       the time that is left
//! libraries.rs    where cuBLASLt and NCCL are
//! programs.rs     test programs of the bundle: kernels against their references, whole models against the CPU
//! machine.rs      the GPU, and what it can do
//! checkpoint.rs   the model that is measured
//! operations.rs one_step.rs    the time of each operation of a layer, in a step of its own
//! all_reduce.rs checked_sums.rs    sums over several GPUs, and whether they are right
//! steps.rs host_gap.rs    steps of a whole model, in process, and what the host takes of them
//! server.rs       a tritonserver and a client
//! serving.rs prompts.rs    checks and throughput of models inside it, and the loads
//! ```
//!
//! What matters most comes first. A stage that fails does not stop the others, and a stage for which no time is left is
//! skipped and said so.

mod all_reduce;
mod bench;
mod budget;
mod check;
mod checked_sums;
mod checkpoint;
mod host_gap;
mod latent;
mod libraries;
mod machine;
mod one_step;
mod operations;
mod options;
mod programs;
mod prompts;
mod report;
mod server;
mod serving;
mod stage;
mod steps;

use std::time::{Duration, Instant};

use crate::Result;
use budget::Budget;
use check::Check;
pub use options::Options;
use report::Report;
use stage::Stage;

/// Runs all stages; returns whether none has failed. Starts the program again where the linker does not find cuBLASLt
/// or NCCL.
///
/// # Errors
/// The report cannot be written.
pub fn run(mut options: Options) -> Result<bool> {
    libraries::find();
    if options.quick {
        options.shape = "tiny".to_owned();
    }
    let budget = Budget::new(Duration::from_secs(options.seconds));
    let bundle = match &options.bundle {
        Some(folder) => folder.clone(),
        None => std::env::current_exe()?
            .parent()
            .ok_or("the program is in no folder")?
            .to_owned(),
    };
    std::fs::create_dir_all(&options.out)?;
    let mut report = Report::new(&options.out)?;
    let mut check = Check {
        bundle: bundle.canonicalize()?,
        limits: None,
        options,
    };
    for stage in Stage::ALL {
        if check.options.stages.is_empty() || check.options.stages.contains(&stage) {
            run_stage(stage, &mut check, &budget, &mut report)?;
        }
    }
    println!("\n{}", report.table());
    Ok(report.has_succeeded())
}

fn run_stage(stage: Stage, check: &mut Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let scale = check.options.seconds as f64 / 480.0;
    let seconds = Duration::from_secs(stage.seconds(check.options.quick));
    let part = budget.part(seconds.mul_f64(scale));
    report.begin(stage.name());
    if part.is_over() {
        return report.skipped("no time is left");
    }
    let start = Instant::now();
    let outcome = match stage {
        Stage::Machine => machine::run(check, report),
        Stage::Kernels => programs::kernels(check, &part, report),
        Stage::Models => programs::models(check, &part, report),
        Stage::Server => serving::check_answers(check, &part, report),
        Stage::Steps => steps::run(check, &part, report),
        Stage::Operations => operations::run(check, &part, report),
        Stage::AllReduce => all_reduce::run(check, &part, report),
        Stage::Throughput => serving::throughput(check, &part, report),
        Stage::Fp8 => serving::fp8_throughput(check, &part, report),
    };
    if let Err(error) = outcome {
        report.failed("stage", &error.to_string())?;
    }
    report.ended(start.elapsed())
}
