//! `cargo xtask bench ranks`: several ranks beside one that has as many threads as all of them.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value, json};
use triton_inflight::device::cpu::CpuOptions;
use triton_inflight::runner::{CpuRunner, LeadingRunner, RankLimits, RunnerLimits};

use crate::Result;
use crate::figures::{median, round};
use crate::load::Load;
use crate::model;

/// Longer than any step takes.
const LIMITS: RankLimits = RankLimits {
    load: Duration::from_secs(3600),
    step: Duration::from_secs(600),
};

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    model: model::Options,
    /// The program of the other ranks, of the same build
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=16))]
    ranks: u32,
    /// Threads of each rank
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::MIN)]
    threads_per_rank: NonZeroUsize,
    /// Numbers of concurrent sequences
    #[arg(long, value_name = "N,...", default_value = "1,8,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    input: u32,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    output: u32,
    /// Rounds, in which both take turns; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let source = options.model.open()?;
    let loads: Vec<_> = options
        .concurrency
        .iter()
        .map(|&concurrency| Load {
            concurrency,
            input: options.input,
            output: options.output,
        })
        .collect();
    let config = options.model.engine_config(&loads)?;
    let limits = RunnerLimits {
        kv_dtype: options.model.kv_cache_dtype,
        ..RunnerLimits::of(&config)
    };
    let num_ranks = options.ranks as usize;
    let with_threads = |num_threads| CpuOptions {
        num_threads,
        simd: options.model.instructions,
    };
    let of_all = options.threads_per_rank.get() * num_ranks;
    let mut one = <CpuRunner>::new(
        &source,
        limits.clone(),
        &with_threads(NonZeroUsize::new(of_all)),
    )?;
    let mut several = LeadingRunner::new(
        &options.program,
        num_ranks,
        &source,
        limits,
        &with_threads(Some(options.threads_per_rank)),
        LIMITS,
    )?;
    let vocab_size = one.vocab_size();
    let mut rows = Vec::new();
    for load in &loads {
        let mut rates = [Vec::new(), Vec::new()];
        // The first round touches all memory.
        for number in 0..=options.rounds {
            let outcomes = [
                load.run_by(vocab_size, &config, |plan, output| one.run(plan, output))?,
                load.run_by(vocab_size, &config, |plan, output| {
                    several.run(plan, output)
                })?,
            ];
            for (rates, outcome) in rates.iter_mut().zip(&outcomes) {
                let rate = outcome
                    .output_tokens_per_s()
                    .ok_or("no period in which all sequences generate: raise --output")?;
                if number > 0 {
                    rates.push(rate);
                }
            }
        }
        let [one, several] = rates.map(median);
        let mut row = Map::new();
        row.insert("sequences".to_owned(), load.concurrency.into());
        row.insert("one_rank_tokens_per_s".to_owned(), round(one));
        row.insert("ranks_tokens_per_s".to_owned(), round(several));
        row.insert("ratio".to_owned(), round(several / one));
        rows.push(row);
    }
    Ok(match options.json {
        true => rows
            .iter()
            .map(|row| format!("{}\n", json!(row)))
            .collect::<String>(),
        false => table(options, &rows),
    })
}

fn table(options: &Options, rows: &[Map<String, Value>]) -> String {
    let Options {
        ranks,
        threads_per_rank,
        ..
    } = options;
    let of_all = threads_per_rank.get() * *ranks as usize;
    let mut text = format!(
        "Output tokens per second, while all sequences generate.\n\n| sequences | 1 rank of {of_all} threads | {ranks} ranks of \
         {threads_per_rank} | ratio |\n|--:|--:|--:|--:|\n"
    );
    for row in rows {
        let of = |name: &str| row.get(name).map_or(String::new(), Value::to_string);
        let [sequences, one, several, ratio] = [
            of("sequences"),
            of("one_rank_tokens_per_s"),
            of("ranks_tokens_per_s"),
            of("ratio"),
        ];
        let _ = writeln!(text, "| {sequences} | {one} | {several} | {ratio} |");
    }
    text
}
