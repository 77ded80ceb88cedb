//! Steps of a whole model, in process: generation by batch size, and the first token of long prompts.

use std::time::Instant;

use inflight_device::KvDtype;
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::EngineConfig;
use inflight_machines::CudaRunner;
use inflight_runner::{ModelRunner, ModelSource, RunnerLimits};
use serde_json::{Value, json};

use super::budget::Budget;
use super::check::Check;
use super::checkpoint;
use super::host_gap::HostGap;
use super::report::Report;
use crate::Result;
use crate::figures::four_digits;
use crate::load::Load;
use crate::model;
use crate::roofline::{ModelCost, Precision};

/// Measures steps of the model.
pub fn run(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let folder = checkpoint::folder(check, report)?;
    let source = ModelSource::open(&folder)?;
    let is_quick = check.options.quick;
    let generation: Vec<Load> = match is_quick {
        true => [1, 4].map(|concurrency| load(concurrency, 8, 4)).into(),
        false => [1, 32, 128, 256]
            .map(|concurrency| load(concurrency, 128, 128))
            .into(),
    };
    let long = if is_quick {
        load(3, 30, 6)
    } else {
        load(32, 1024, 64)
    };
    let prompts = if is_quick { [24, 60] } else { [1024, 8192] }.map(|input| load(1, input, 1));
    let all: Vec<Load> = generation
        .iter()
        .chain([&long])
        .chain(&prompts)
        .copied()
        .collect();
    let (mut runner, config) = open(check, &source, &all, report)?;
    let block_size = config.block_size;
    let cost = ModelCost::of::<Cuda>(source.spec(), Precision::Bf16, block_size, KvDtype::Bf16);
    for load in generation.iter().chain([&long]) {
        if budget.is_over() {
            return report.skipped("no time is left");
        }
        let outcome = load.run(&mut runner, &config)?;
        let Some(tokens_per_s) = outcome.output_tokens_per_s() else {
            report.failed(&name(load), "no step has all sequences")?;
            continue;
        };
        let mut figures = json!({
            "step_ms": four_digits(1e3 * f64::from(load.concurrency) / tokens_per_s),
            "tokens_per_s": four_digits(tokens_per_s),
        });
        if let Some(limits) = &check.limits {
            let bound = cost.generation_tokens_per_s(load, limits);
            figures["roofline_share"] = four_digits(tokens_per_s / bound);
        }
        report.figures(&name(load), figures)?;
    }
    for &Load { concurrency, .. } in &generation {
        if budget.is_over() {
            return report.skipped("no time is left");
        }
        let load = gap_load(concurrency, is_quick);
        let name = format!("host gap, batch of {concurrency}");
        match HostGap::measure(&mut runner, &config, &load)? {
            Some(gap) => report.figures(&name, gap_figures(&gap))?,
            None => report.failed(&name, "no step is a graph")?,
        }
    }
    for load in &prompts {
        if budget.is_over() {
            return report.skipped("no time is left");
        }
        // The first one chooses algorithms for its shapes.
        load.run(&mut runner, &config)?;
        let outcome = load.run(&mut runner, &config)?;
        let mut figures = json!({ "first_token_ms": four_digits(1e3 * outcome.mean_ttft()) });
        if let Some(limits) = &check.limits {
            let bound = cost.prompt_tokens_per_s(load.input, limits);
            figures["roofline_share"] = four_digits(outcome.prompt_tokens_per_s() / bound);
        }
        report.figures(&format!("prompt of {}", load.input), figures)?;
    }
    Ok(())
}

/// Enough steps for a mean.
fn gap_load(concurrency: u32, is_quick: bool) -> Load {
    load(
        concurrency,
        if is_quick { 8 } else { 128 },
        if is_quick { 6 } else { 24 },
    )
}

fn gap_figures(gap: &HostGap) -> Value {
    json!({
        "host_gap_us": four_digits(gap.us()),
        "step_ms": four_digits(1e3 * gap.step.as_secs_f64()),
        "graph_ms": four_digits(1e3 * gap.graph.as_secs_f64()),
    })
}

fn open(
    check: &Check,
    source: &ModelSource,
    loads: &[Load],
    report: &mut Report,
) -> Result<(CudaRunner, EngineConfig)> {
    let start = Instant::now();
    // A prompt is one step.
    let longest = loads.iter().map(|load| load.input).max();
    let config = model::engine_config(loads, longest.unwrap_or(1))?;
    let options = CudaOptions {
        gpu: check.options.gpu,
        ..CudaOptions::default()
    };
    let runner = ModelRunner::<Cuda>::new(source, RunnerLimits::of(&config), &options)?;
    let seconds = start.elapsed().as_secs_f64();
    report.figures("load", json!({ "seconds": four_digits(seconds) }))?;
    Ok((runner, config))
}

const fn load(concurrency: u32, input: u32, output: u32) -> Load {
    Load {
        concurrency,
        input,
        output,
    }
}

fn name(load: &Load) -> String {
    let Load {
        concurrency,
        input,
        output,
    } = load;
    format!("generation {concurrency} x {input}/{output}")
}
