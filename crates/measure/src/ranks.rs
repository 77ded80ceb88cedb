//! `cargo xtask bench ranks`: several ranks beside one that has as many threads as all of them; and with several
//! stages, two micro-batches that they compute at a time.

use std::collections::VecDeque;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use inflight_base::{CpuSet, StepError};
use inflight_collective::{Grid, MpiWorld};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{EngineConfig, Step, StepOutput};
use inflight_machines::{LeadingRunner, RankLimits, RankTransport, leave_mpi_world};
use inflight_manager::{ComputedStep, StepComputer};
use inflight_runner::{CpuRunner, Runner, RunnerLimits};
use serde_json::{Map, Value, json};

use crate::Result;
use crate::figures::{median, round};
use crate::load::Load;
use crate::model;
use crate::rank_sums::{self, options_of_ranks};

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
    /// Under `mpirun`: the plug-in for MPI. The other ranks are its other processes, `inflight-rank --mpi`
    #[arg(long, value_name = "FILE")]
    mpi_library: Option<PathBuf>,
    /// Ranks of each stage
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    ranks: u32,
    /// Stages of the layers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    stages: u32,
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
    /// Rounds, in which all take turns; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
    /// The CPUs of each rank, such as `0-3;4-7` [default: all]
    #[arg(long, value_name = "LISTS", value_delimiter = ';')]
    rank_cpus: Vec<CpuSet>,
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let measured = compare(options);
    // The other processes of mpirun end as well.
    leave_mpi_world();
    measured
}

fn compare(options: &Options) -> Result<String> {
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
    let config = model::engine_config(&loads, options.model.max_num_tokens)?;
    let limits = RunnerLimits {
        kv_dtype: options.model.kv_cache_dtype,
        ..RunnerLimits::of(&config)
    };
    let grid = Grid {
        num_stages: options.stages as usize,
        ranks_per_stage: options.ranks as usize,
    };
    let with_threads = |num_threads, rank_cpus| CpuOptions {
        num_threads,
        simd: options.model.instructions,
        rank_cpus,
        ..CpuOptions::default()
    };
    let of_all = options.threads_per_rank.get() * grid.num_ranks();
    let mut one = <CpuRunner>::new(
        &source,
        limits.clone(),
        &with_threads(NonZeroUsize::new(of_all), Vec::new()),
    )?;
    let mut tiled = <CpuRunner>::new(
        &source,
        limits.clone(),
        &CpuOptions {
            deterministic: true,
            ..with_threads(NonZeroUsize::new(of_all), Vec::new())
        },
    )?;
    let transport = match &options.mpi_library {
        None => RankTransport::Processes(options.program.clone()),
        Some(plugin) => RankTransport::Mpi(MpiWorld::join(plugin, Some(LIMITS.load))?),
    };
    let mut several = LeadingRunner::new(
        transport.connect(grid, LIMITS.load)?,
        &source,
        limits.clone(),
        &with_threads(Some(options.threads_per_rank), options.rank_cpus.clone()),
        LIMITS,
    )?;
    let vocab_size = one.vocab_size();
    let overlapping = EngineConfig {
        num_micro_batches: 2,
        ..config.clone()
    };
    // Processes of several hosts do not share memory, and stages do not sum.
    let shares = match options.mpi_library.is_none() && options.stages == 1 && options.ranks > 1 {
        true => {
            let all = with_threads(None, options.rank_cpus.clone());
            let of_ranks = options_of_ranks(&all, grid.num_ranks(), options.threads_per_rank);
            rank_sums::measure(&source, &loads, &config, &limits, &of_ranks)?
        }
        false => Vec::new(),
    };
    let mut rows = Vec::new();
    for (index, load) in loads.iter().enumerate() {
        let mut rates = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
        // One sequence makes no two micro-batches.
        let is_overlapped = grid.num_stages > 1 && load.concurrency > 1;
        // The first round touches all memory.
        for number in 0..=options.rounds {
            let mut outcomes = vec![
                load.run_by(vocab_size, &config, |plan, output| one.run(plan, output))?,
                load.run_by(vocab_size, &config, |plan, output| tiled.run(plan, output))?,
                load.run_by(vocab_size, &config, |plan, output| {
                    several.run(plan, output)
                })?,
            ];
            if is_overlapped {
                let computer = OverlappedRunner::new(&mut several);
                outcomes.push(load.run_overlapped(vocab_size, &overlapping, computer)?);
            }
            for (rates, outcome) in rates.iter_mut().zip(&outcomes) {
                let rate = outcome
                    .output_tokens_per_s()
                    .ok_or("no period in which all sequences generate: raise --output")?;
                if number > 0 {
                    rates.push(rate);
                }
            }
        }
        let mut row = Map::new();
        row.insert("sequences".to_owned(), load.concurrency.into());
        let [one, tiled, several, overlapped] = rates;
        let one = median(one);
        let mut insert = |name: &str, rates: Vec<f64>| {
            let rate = median(rates);
            row.insert(format!("{name}_tokens_per_s"), round(rate));
            row.insert(format!("{name}_ratio"), round(rate / one));
        };
        insert("tiles", tiled);
        insert("ranks", several);
        if is_overlapped {
            insert("overlapped", overlapped);
        }
        row.insert("one_rank_tokens_per_s".to_owned(), round(one));
        if let Some(shares) = shares.get(index) {
            row.insert("sums_percent".to_owned(), round(100.0 * shares.mean));
            row.insert("least_sums_percent".to_owned(), round(100.0 * shares.least));
        }
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
        stages,
        threads_per_rank,
        ..
    } = options;
    let of_all = threads_per_rank.get() * (*ranks * *stages) as usize;
    let several = match stages {
        1 => format!("{ranks} ranks of {threads_per_rank}"),
        _ => format!("{stages} stages of {ranks} x {threads_per_rank}"),
    };
    let mut text = format!(
        "Output tokens per second, while all sequences generate.\n\n| sequences | 1 rank of {of_all} threads | with tiles | ratio | {several} | ratio |"
    );
    let mut names = vec![
        "sequences",
        "one_rank_tokens_per_s",
        "tiles_tokens_per_s",
        "tiles_ratio",
        "ranks_tokens_per_s",
        "ranks_ratio",
    ];
    if *stages > 1 {
        text.push_str(" with overlap | ratio |");
        names.extend(["overlapped_tokens_per_s", "overlapped_ratio"]);
    }
    if rows.iter().any(|row| row.contains_key("sums_percent")) {
        text.push_str(" in sums, % | least of a rank, % |");
        names.extend(["sums_percent", "least_sums_percent"]);
    }
    let _ = writeln!(text, "\n|{}", "--:|".repeat(names.len()));
    for row in rows {
        for name in &names {
            let value = row.get(*name).map_or("-".to_owned(), Value::to_string);
            let _ = write!(text, "| {value} ");
        }
        text.push_str("|\n");
    }
    text
}

/// Ranks in stages, which compute two micro-batches at a time.
struct OverlappedRunner<'a> {
    runner: &'a mut LeadingRunner,
    launched: VecDeque<Step>,
    spare: Vec<StepOutput>,
}

impl<'a> OverlappedRunner<'a> {
    fn new(runner: &'a mut LeadingRunner) -> Self {
        Self {
            runner,
            launched: VecDeque::new(),
            spare: Vec::new(),
        }
    }
}

impl StepComputer for OverlappedRunner<'_> {
    type Timing = ();

    fn launch(&mut self, step: Step) -> std::result::Result<(), StepError> {
        step.plans()
            .try_for_each(|plan| self.runner.launch(&plan))?;
        self.launched.push_back(step);
        Ok(())
    }

    fn land(&mut self) -> std::result::Result<ComputedStep<()>, StepError> {
        let step = self.launched.pop_front().expect("a step was launched");
        let mut output = self.spare.pop().unwrap_or_default();
        output.clear();
        step.plans()
            .try_for_each(|plan| self.runner.collect(&plan, &mut output))?;
        Ok(ComputedStep {
            step,
            output,
            timing: (),
        })
    }

    fn recycle(&mut self, output: StepOutput) {
        self.spare.push(output);
    }
}
