//! `cargo xtask bench adapters`: what adapters add to the time of a generation step.

use std::fmt::Write;
use std::sync::Arc;

use clap::Args;
use half::bf16;
use inflight_device::{AdapterWeights, LowRank};
use inflight_engine::Adapter;
use inflight_runner::{ModelSpec, UsedAdapter};
use serde_json::json;

use crate::Result;
use crate::figures::{median, round};
use crate::load::Load;
use crate::model;

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    model: model::Options,
    /// Concurrent sequences
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Numbers of adapters that the sequences have in turns, compared with none
    #[arg(long, value_name = "N,...", default_value = "1,8,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    adapters: Vec<u32>,
    /// The rank of each, for every projection of the model
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    rank: u32,
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    input: u32,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    output: u32,
    /// Rounds; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, memory is short, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let source = options.model.open()?;
    let load = Load {
        concurrency: options.concurrency,
        input: options.input,
        output: options.output,
    };
    let mut model = options.model.load(&source, &[load], ())?;
    let most = options.adapters.iter().max().copied().unwrap_or_default();
    let adapters = (0..most).map(|seed| adapter(source.spec(), options.rank as usize, seed));
    let adapters = adapters.collect::<Result<Vec<_>>>()?;
    drop(source);
    let mut numbers = vec![0];
    numbers.extend_from_slice(&options.adapters);
    let mut times = vec![Vec::new(); numbers.len()];
    // The first round touches all memory.
    for round in 0..=options.rounds {
        for (number, times) in numbers.iter().zip(&mut times) {
            let adapters = &adapters[..*number as usize];
            let outcome = load.run_with(&mut model.runner, &model.config, adapters)?;
            let rate = outcome.output_tokens_per_s();
            let rate = rate.ok_or("the sequences never generate together: raise --output")?;
            if round > 0 {
                times.push(f64::from(options.concurrency) / rate * 1e3);
            }
        }
    }
    let times: Vec<_> = times.into_iter().map(median).collect();
    let mut text = String::new();
    if !options.json {
        let _ = writeln!(
            text,
            "{} sequences, adapters of rank {} of all projections, {}\n\n\
             | adapters | ms a step | times none |\n|---|---|---|",
            options.concurrency,
            options.rank,
            model.runner.description()
        );
    }
    for (number, time) in numbers.iter().zip(&times) {
        let share = time / times[0];
        let _ = match options.json {
            true => writeln!(
                text,
                "{}",
                json!({
                    "row": "adapters",
                    "concurrency": options.concurrency,
                    "rank": options.rank,
                    "adapters": number,
                    "step_ms": round(*time),
                    "times_none": round(share),
                    "rounds": options.rounds,
                })
            ),
            false => writeln!(text, "| {number} | {time:.2} | {share:.2} |"),
        };
    }
    Ok(text)
}

/// An adapter of all projections with small weights.
fn adapter(spec: &ModelSpec, rank: usize, seed: u32) -> Result<Adapter> {
    let mut weights = AdapterWeights::new(spec.num_places());
    let mut state = seed;
    let mut next = || {
        // Numerical Recipes' linear congruential generator.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32(((state >> 16) as f32 / 32768.0 - 1.0) * 0.02)
    };
    for (place, (_, projection)) in spec.projections().enumerate() {
        let mut first = 0;
        for part in &projection.parts {
            let outputs = first..first + part.num_outputs;
            first = outputs.end;
            let mut part_weights = LowRank::new(rank, projection.num_inputs, outputs, 1.0)?;
            let mut row = vec![bf16::ZERO; projection.num_inputs];
            for index in 0..rank {
                row.fill_with(&mut next);
                part_weights.set_rank(index, &row);
            }
            let mut row = vec![bf16::ZERO; rank];
            for output in 0..part.num_outputs {
                row.fill_with(&mut next);
                part_weights.set_output(output, &row);
            }
            weights.push(place, part_weights);
        }
    }
    weights.gather()?;
    let used = UsedAdapter::new(Arc::new(weights.into()), || {});
    Ok(Adapter::new(Arc::new(used), 1))
}
