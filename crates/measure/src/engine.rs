//! `cargo xtask bench engine`: prompt and generation throughput, relative to the limits of the machine.

use std::fmt::Write;

use clap::Args;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::figures::{median, round};
use crate::load::{Load, Outcome};
use crate::machine::Machine;
use crate::model::{self, Model};

/// Number of sequences with a long context, and the tokens that each generates after it.
const LONG_CONTEXT: [u32; 2] = [8, 96];

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    model: model::Options,
    /// Numbers of concurrent sequences
    #[arg(long, value_name = "N,...", default_value = "1,8,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// Tokens per prompt in the generation rows
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    input: u32,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    output: u32,
    /// Tokens of the prompt in the prompt row
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens per context in the long-context row, which has 8 sequences; 0 omits the row
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    long_context: u32,
    /// Rounds; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

/// The measurement of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// A single prompt and its first token.
    Prompt(Load),
    /// Concurrent sequences that generate.
    Generation(Load),
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let source = options.model.open()?;
    let cases = cases(options, source.spec().max_seq_len());
    let loads: Vec<_> = cases.iter().map(Case::load).collect();
    let mut model = options.model.load(&source, &loads, ())?;
    drop(source);
    let machine = Machine::measure(&model)?;
    let outcomes = measure(&mut model, &cases, options.rounds)?;
    let machine = machine.and(&Machine::measure(&model)?);
    let rows: Vec<_> = cases
        .iter()
        .zip(&outcomes)
        .map(|(case, outcomes)| row(case, outcomes, &model, &machine))
        .collect();
    Ok(match options.json {
        true => lines(&machine, &rows),
        false => table(&machine, &rows),
    })
}

/// The requested cases that fit into `max_seq_len`.
fn cases(options: &Options, max_seq_len: usize) -> Vec<Case> {
    let Options { input, output, .. } = *options;
    let mut cases = vec![Case::Prompt(Load {
        concurrency: 1,
        input: options.prompt,
        output: 1,
    })];
    cases.extend(options.concurrency.iter().map(|&concurrency| {
        Case::Generation(Load {
            concurrency,
            input,
            output,
        })
    }));
    if options.long_context > 0 {
        let [concurrency, output] = LONG_CONTEXT;
        // A model with fewer positions uses all of them.
        let input = options
            .long_context
            .min((max_seq_len as u32).saturating_sub(output));
        cases.push(Case::Generation(Load {
            concurrency,
            input,
            output,
        }));
    }
    cases.retain(|case| case.load().num_tokens().index() <= max_seq_len);
    cases.dedup();
    cases
}

/// Runs every case once per round, after a short warm-up run that touches all memory.
fn measure(model: &mut Model, cases: &[Case], rounds: u32) -> Result<Vec<Vec<Outcome>>> {
    let mut outcomes = vec![Vec::new(); cases.len()];
    for case in cases {
        let warm_up = Load {
            input: case.load().input.min(512),
            output: case.load().output.min(2),
            ..case.load()
        };
        warm_up.run(&mut model.runner, &model.config)?;
    }
    for _ in 0..rounds {
        for (case, outcomes) in cases.iter().zip(&mut outcomes) {
            outcomes.push(case.load().run(&mut model.runner, &model.config)?);
        }
    }
    Ok(outcomes)
}

impl Case {
    fn load(&self) -> Load {
        match *self {
            Self::Prompt(load) | Self::Generation(load) => load,
        }
    }
}

fn row(case: &Case, outcomes: &[Outcome], model: &Model, machine: &Machine) -> Map<String, Value> {
    let limits = &machine.limits;
    let load = case.load();
    let of = |figure: fn(&Outcome) -> f64| median(outcomes.iter().map(figure).collect());
    let while_all = outcomes.iter().map(Outcome::output_tokens_per_s);
    let mut row = Map::new();
    let mut set = |name: &str, value: Value| row.insert(name.to_owned(), value);
    let precision = model.cost.precision;
    let (name, rate, roofline) = match case {
        Case::Prompt(_) => (
            "prompt_tokens_per_s",
            Some(of(Outcome::prompt_tokens_per_s)),
            model.cost.prompt_tokens_per_s(load.input, limits),
        ),
        Case::Generation(_) => (
            "output_tokens_per_s",
            // With too few tokens there is no period in which all sequences generate.
            while_all.collect::<Option<_>>().map(median),
            model.cost.generation_tokens_per_s(&load, limits),
        ),
    };
    let kind = match case {
        Case::Prompt(_) => "prompt",
        Case::Generation(_) => "generation",
    };
    set("row", kind.into());
    set("precision", json!(precision));
    set("concurrency", load.concurrency.into());
    set("input", load.input.into());
    set("output", load.output.into());
    set(name, rate.map_or(Value::Null, round));
    if let Case::Generation(_) = case {
        let end_to_end = of(Outcome::end_to_end_tokens_per_s);
        set("end_to_end_tokens_per_s", round(end_to_end));
    }
    set("ttft_ms_mean", round(of(Outcome::mean_ttft) * 1e3));
    set("roofline_tokens_per_s", round(roofline));
    set(
        "roofline_share",
        rate.map_or(Value::Null, |rate| round(rate / roofline)),
    );
    set("read_gb_per_s", round(limits.read_bytes_per_s / 1e9));
    set("peak_gflop_per_s", round(precision.peak(limits) / 1e9));
    set("limits_spread", round(machine.spread(precision)));
    set("rounds", outcomes.len().into());
    if let Some(warning) = machine.warning(precision) {
        set("warning", warning.into());
    }
    row
}

fn lines(machine: &Machine, rows: &[Map<String, Value>]) -> String {
    let mut lines = format!("{}\n", machine.row());
    for row in rows {
        let _ = writeln!(lines, "{}", json!(row));
    }
    lines
}

fn table(machine: &Machine, rows: &[Map<String, Value>]) -> String {
    let mut table = format!(
        "{machine}\n\n\
         | precision | sequences | in | out | tokens/s | end to end | limit | share |\n\
         |---|---|---|---|---|---|---|---|\n"
    );
    for row in rows {
        let rate = row
            .get("output_tokens_per_s")
            .map(Value::to_string)
            .unwrap_or_else(|| format!("{} (prompt)", row["prompt_tokens_per_s"]));
        let end_to_end = row.get("end_to_end_tokens_per_s");
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} | {rate} | {} | {} | {} |",
            row["precision"].as_str().unwrap_or_default(),
            row["concurrency"],
            row["input"],
            row["output"],
            end_to_end.map(Value::to_string).unwrap_or_default(),
            row["roofline_tokens_per_s"],
            row["roofline_share"]
                .as_f64()
                .map_or_else(String::new, |share| format!("{:.0} %", share * 100.0)),
        );
    }
    // All rows have the same limits.
    if let Some(warning) = rows.first().and_then(|row| row.get("warning")?.as_str()) {
        let _ = writeln!(table, "\n{warning}");
    }
    table
}
