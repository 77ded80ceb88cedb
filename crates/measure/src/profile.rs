//! `cargo xtask profile`: the time of a step by operation, relative to the limits of the machine.

use std::fmt::Write;
use std::time::Instant;

use clap::Args;
use inflight_engine::{Engine, EngineConfig, StepOutput};
use inflight_runner::{CpuRunner, Operation};
use serde_json::{Value, json};

use crate::Result;
use crate::figures::{median, round};
use crate::load::Load;
use crate::machine::Machine;
use crate::model::{self, BLOCK_SIZE};
use crate::roofline::Precision;
use crate::stopwatch::{Lap, Stopwatch};

/// Tokens per prompt of the profiled generation steps.
const INPUT: u32 = 128;
/// Tokens of the profiled context.
const CONTEXT: u32 = 512;
/// Row name of the engine's part of a step, which is not an operation of the model.
const ENGINE: &str = "engine";

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    model: model::Options,
    /// Numbers of sequences that generate concurrently
    #[arg(long, value_name = "N,...", default_value = "1,8,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// Generation steps; each figure is the median over the steps
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    steps: u32,
    /// Contexts; each figure is the median over the contexts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=4096))]
    contexts: u32,
    /// One JSON object per row on standard output, instead of a page of tables
    #[arg(long)]
    json: bool,
}

/// A kind of step, with its measurements.
struct Kind {
    /// Its name in rows.
    name: &'static str,
    num_sequences: u32,
    num_tokens: u32,
    /// The engine's time, in seconds.
    engine: f64,
    /// Each operation's totals.
    laps: Vec<Lap>,
}

/// One measured step: the engine's time in seconds, and each operation's totals.
type Seen = (f64, [Lap; Operation::ALL.len()]);

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let source = options.model.open()?;
    let generations = options.concurrency.iter().map(|&concurrency| Load {
        concurrency,
        input: INPUT,
        // Enough output tokens for `steps` full generation steps, even if contexts arrive one block per step.
        output: options.steps + concurrency * INPUT.div_ceil(BLOCK_SIZE) + 1,
    });
    let generations: Vec<_> = generations.collect();
    let context = Load {
        concurrency: 1,
        input: CONTEXT.min(options.model.max_num_tokens),
        output: 1,
    };
    let mut loads = generations.clone();
    loads.push(context);
    let model = &mut options.model.load(&source, &loads, Stopwatch::start())?;
    drop(source);
    let machine = Machine::measure(model)?;
    // Warm-up: touches all memory once.
    steps(&context, 1, &mut model.runner, &model.config)?;
    let mut kinds = Vec::new();
    for load in &generations {
        let seen = steps(load, options.steps, &mut model.runner, &model.config)?;
        let num_tokens = load.concurrency;
        kinds.push(Kind::of("generation", load.concurrency, num_tokens, &seen));
    }
    let mut seen = Vec::new();
    for _ in 0..options.contexts {
        seen.append(&mut steps(&context, 1, &mut model.runner, &model.config)?);
    }
    kinds.push(Kind::of("context", 1, context.input, &seen));
    let machine = machine.and(&Machine::measure(model)?);
    let precision = model.cost.precision;
    let rows: Vec<_> = kinds
        .iter()
        .map(|kind| (kind, kind.rows(precision, &machine)))
        .collect();
    Ok(match options.json {
        true => {
            let of_kinds = rows.iter().flat_map(|(_, rows)| rows);
            let lines = of_kinds.map(|row| format!("{row}\n"));
            format!("{}\n{}", machine.row(), lines.collect::<String>())
        }
        false => page(&machine, precision, &rows),
    })
}

/// The first `num_steps` steps of a load in which all of its sequences do the same: generate, or compute
/// their contexts.
fn steps(
    load: &Load,
    num_steps: u32,
    runner: &mut CpuRunner<Stopwatch>,
    config: &EngineConfig,
) -> Result<Vec<Seen>> {
    let mut engine = load.start(runner.vocab_size(), config)?;
    let is_context = load.output == 1;
    let mut seen = Vec::new();
    while !engine.is_idle() && seen.len() < num_steps as usize {
        let (num_sequences, num_tokens, step) = step(&mut engine, runner)?;
        let is_generation = num_tokens == num_sequences;
        if is_context || (is_generation && num_sequences == load.concurrency as usize) {
            seen.push(step);
        }
    }
    if seen.is_empty() {
        return Err(format!("{load:?} has no step with all sequences in the same phase").into());
    }
    Ok(seen)
}

/// Runs one step; returns the number of sequences, the number of tokens, and the measurements.
fn step(engine: &mut Engine, runner: &mut CpuRunner<Stopwatch>) -> Result<(usize, usize, Seen)> {
    let started = Instant::now();
    let step = engine.schedule();
    let scheduled = started.elapsed();
    let size = (step.sequences().len(), step.num_tokens().index());
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    *runner.probe_mut() = Stopwatch::start();
    for plan in step.plans() {
        runner.run(plan, &mut output)?;
    }
    let laps = *runner.probe_mut().laps();
    let computed = Instant::now();
    engine.apply(step, &mut output, &mut events);
    let engine = scheduled + computed.elapsed();
    Ok((size.0, size.1, (engine.as_secs_f64(), laps)))
}

impl Kind {
    fn of(name: &'static str, num_sequences: u32, num_tokens: u32, seen: &[Seen]) -> Self {
        let of = |figure: &dyn Fn(&Seen) -> f64| median(seen.iter().map(figure).collect());
        let lap = |operation: Operation| {
            let index = operation as usize;
            Lap {
                seconds: of(&|(_, laps)| laps[index].seconds),
                num_bytes: of(&|(_, laps)| laps[index].num_bytes as f64) as u64,
                num_operations: of(&|(_, laps)| laps[index].num_operations as f64) as u64,
            }
        };
        Self {
            name,
            num_sequences,
            num_tokens,
            engine: of(&|(engine, _)| *engine),
            laps: Operation::ALL.map(lap).to_vec(),
        }
    }

    fn seconds(&self) -> f64 {
        self.engine + self.laps.iter().map(|lap| lap.seconds).sum::<f64>()
    }

    fn rows(&self, precision: Precision, machine: &Machine) -> Vec<Value> {
        let engine = Lap {
            seconds: self.engine,
            ..Lap::default()
        };
        let operations = Operation::ALL.into_iter().zip(&self.laps);
        let mut rows: Vec<_> = operations
            // A model without experts has no router.
            .filter(|(_, lap)| lap.seconds > 0.0)
            .map(|(operation, lap)| self.row(operation.as_str(), lap, precision, machine))
            .collect();
        rows.push(self.row(ENGINE, &engine, precision, machine));
        rows
    }

    fn row(&self, operation: &str, lap: &Lap, precision: Precision, machine: &Machine) -> Value {
        let (bytes, operations) = (lap.num_bytes as f64, lap.num_operations as f64);
        let peak = precision.peak(&machine.limits);
        let at_least = machine.limits.seconds(bytes, operations, peak);
        json!({
            "row": "operation",
            "precision": precision,
            "step": self.name,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "operation": operation,
            "us": round(lap.seconds * 1e6),
            "step_share": round(lap.seconds / self.seconds()),
            "bytes": lap.num_bytes,
            "operations": lap.num_operations,
            "gb_per_s": round(bytes / lap.seconds / 1e9),
            "gflop_per_s": round(operations / lap.seconds / 1e9),
            "limit_share": round(at_least / lap.seconds),
        })
    }
}

fn page(machine: &Machine, precision: Precision, rows: &[(&Kind, Vec<Value>)]) -> String {
    let mut page = format!(
        "# Where a step's time goes\n\n\
         Written by `cargo xtask profile`. The limit is the time to read an operation's operands from memory or to\n\
         compute it, whichever is longer, at the rates measured in the same run; operands still in a cache are read\n\
         faster. Times are sums over all layers and medians over steps.\n\n{machine}\n"
    );
    if let Some(warning) = machine.warning(precision) {
        let _ = writeln!(page, "\n{warning}");
    }
    for (kind, rows) in rows {
        let what = match kind.name {
            "context" => format!("A context of {} tokens", kind.num_tokens),
            _ => format!("Generation, sequences: {}", kind.num_sequences),
        };
        let _ = write!(
            page,
            "\n## {what}\n\n{:.0} us a step.\n\n\
             | operation | us | of the step | MB | MFLOP | GB/s | GFLOP/s | of the limit |\n\
             |---|---|---|---|---|---|---|---|\n",
            kind.seconds() * 1e6
        );
        for row in rows {
            let of = |name: &str| row[name].as_f64().unwrap_or_default();
            let limit = match of("bytes") + of("operations") {
                0.0 => String::new(),
                _ => format!("{:.0} %", of("limit_share") * 100.0),
            };
            let _ = writeln!(
                page,
                "| {} | {} | {:.1} % | {:.2} | {:.1} | {:.1} | {:.1} | {limit} |",
                row["operation"].as_str().unwrap_or_default(),
                row["us"],
                of("step_share") * 100.0,
                of("bytes") / 1e6,
                of("operations") / 1e6,
                of("gb_per_s"),
                of("gflop_per_s"),
            );
        }
    }
    page
}
