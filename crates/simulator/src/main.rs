//! `inflight-sim`: predicts the performance of a config.pbtxt under a load.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser};
use inflight_simulator::cost::CostModel;
use inflight_simulator::fit::{Fit, Quality, fit};
use inflight_simulator::model::Model;
use inflight_simulator::report::Report;
use inflight_simulator::simulation::{self, Outcome, Setup};
use inflight_simulator::time::Time;
use inflight_simulator::workload::{Arrivals, Lengths, Workload};
use inflight_simulator::{Result, plots, trace};
use inflight_step_records::read;
use serde_json::json;

/// Measured cost of a step outside of the model (docs/src/results-server.md).
const DEFAULT_OVERHEAD_US: f64 = 100.0;
const DEFAULT_OVERHEAD_SEQUENCE_US: f64 = 1.0;

/// Runs the backend's batch manager with a cost model and a virtual clock: predicts throughput, latencies,
/// pauses and KV cache use of a configuration under a load, without a server
#[derive(Parser)]
#[command(name = "inflight-sim", version)]
struct Options {
    /// The model's configuration
    #[arg(long, value_name = "config.pbtxt")]
    config: PathBuf,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    cost: Cost,
    /// Free memory of the simulated machine in bytes, for `kv_cache_free_gpu_mem_fraction` [default: memory does not
    /// limit the KV cache]
    #[arg(long, value_name = "BYTES")]
    available_memory: Option<u64>,
    /// Print one JSON object per load instead of text
    #[arg(long)]
    json: bool,
    /// Write the plots kv-cache.svg and requests.svg of the last load into this folder, and plots of the
    /// latencies over the load if there are several loads
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write the statistics file of the last load, in the backend's format; `cargo xtask timeline` draws it
    #[arg(long, value_name = "FILE")]
    stats_file: Option<PathBuf>,
}

#[derive(Args)]
#[group(required = true, multiple = true)]
struct Kind {
    /// Requests per second, with random arrivals; several rates are simulated in sequence
    #[arg(long, value_name = "PER_SECOND,...", value_delimiter = ',', value_parser = positive)]
    rate: Vec<f64>,
    /// Clients that send one request after the other; several numbers are simulated in sequence
    #[arg(long, conflicts_with = "rate", value_name = "CLIENTS,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// A CSV file with the columns arrival (s), input and output (tokens); with --concurrency, that many
    /// clients send its requests, the first of each at its own time
    #[arg(long, value_name = "FILE", conflicts_with = "rate")]
    trace: Option<PathBuf>,
}

#[derive(Args)]
struct Load {
    #[command(flatten)]
    kind: Kind,
    /// With --rate: requests per arrival
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    burst: u32,
    /// Requests per simulation; a trace has its own
    #[arg(long, value_name = "N", default_value_t = 1000)]
    num_requests: usize,
    /// Tokens per prompt: fixed:N, uniform:FIRST..LAST or lognormal:MEDIAN,P99
    #[arg(long, value_name = "LENGTHS", default_value = "fixed:128")]
    input: Lengths,
    /// Tokens that each request generates, in the same notation
    #[arg(long, value_name = "LENGTHS", default_value = "fixed:128")]
    output: Lengths,
    /// Length of the prefix that all prompts share, in tokens; its blocks can be reused
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    shared_prefix: u32,
    /// Seed of the random workload
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// The cost of a step. Coefficients that are not given come from the fit, or from the synthetic runner's
/// configuration.
#[derive(Args)]
struct Cost {
    /// Fit all coefficients to a statistics file written by the backend
    #[arg(long, value_name = "STATS.jsonl")]
    fit: Option<PathBuf>,
    /// Microseconds per model call
    #[arg(long, value_name = "US", value_parser = not_negative)]
    step_us: Option<f64>,
    /// Microseconds per token
    #[arg(long, value_name = "US", value_parser = not_negative)]
    token_us: Option<f64>,
    /// Microseconds per sequence
    #[arg(long, value_name = "US", value_parser = not_negative)]
    sequence_us: Option<f64>,
    /// Microseconds per KV cache position read
    #[arg(long, value_name = "US", value_parser = not_negative)]
    position_us: Option<f64>,
    /// Microseconds between two steps [default: 100, or fitted]
    #[arg(long, value_name = "US", value_parser = not_negative)]
    overhead_us: Option<f64>,
    /// Microseconds between two steps per sequence of the first [default: 1, or fitted]
    #[arg(long, value_name = "US", value_parser = not_negative)]
    overhead_sequence_us: Option<f64>,
    /// One-way latency between client and server, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0.0, value_parser = not_negative)]
    latency_us: f64,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let model = Model::load(&options.config, options.available_memory)?;
    let (cost, quality) = options.cost.model(model.cost)?;
    if let Some(quality) = quality.as_ref().filter(|_| !options.json) {
        println!("{quality}\n");
    }
    let setup = Setup {
        cost,
        engine: model.engine,
        num_slots: model.num_slots,
        latency: Time::from_us(options.cost.latency_us),
        num_shared_tokens: options.load.shared_prefix,
    };
    let loads = options.load.workloads()?;
    let num_loads = loads.len();
    let mut reports = Vec::new();
    for (n, (name, load, workload)) in loads.into_iter().enumerate() {
        let is_last = n + 1 == num_loads;
        let outcome = match options.stats_file.as_deref().filter(|_| is_last) {
            Some(path) => run_with_records(&setup, &workload, path)?,
            None => simulation::run(&setup, &workload, None)?,
        };
        let report = Report::new(&setup, &outcome);
        if options.json {
            println!(
                "{}",
                json!({ "load": name, "cost": setup.cost, "fit": quality, "report": report })
            );
        } else {
            println!("{name}\n{report}");
        }
        if let Some(folder) = options.plots.as_deref().filter(|_| is_last) {
            fs::create_dir_all(folder)?;
            fs::write(
                folder.join("kv-cache.svg"),
                plots::kv_cache(&setup, &outcome),
            )?;
            fs::write(folder.join("requests.svg"), plots::requests(&outcome))?;
        }
        reports.push((load, report));
    }
    match &options.plots {
        Some(folder) if num_loads > 1 => plot_latencies(folder, options.load.label(), &reports),
        _ => Ok(()),
    }
}

fn run_with_records(setup: &Setup, workload: &Workload, path: &Path) -> Result<Outcome> {
    let file = File::create(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut file = BufWriter::new(file);
    let outcome = simulation::run(setup, workload, Some(&mut file))?;
    file.flush()?;
    Ok(outcome)
}

fn plot_latencies(folder: &Path, label: &str, reports: &[(f64, Report)]) -> Result<()> {
    let first = plots::latency("Time to first token over load", label, reports, |report| {
        report.time_to_first_token_ms
    });
    let each = plots::latency(
        "Time per output token over load",
        label,
        reports,
        |report| report.time_per_output_token_ms,
    );
    fs::write(folder.join("time-to-first-token.svg"), first)?;
    fs::write(folder.join("time-per-output-token.svg"), each)?;
    Ok(())
}

impl Load {
    /// Name, load and requests of each simulation.
    fn workloads(&self) -> Result<Vec<(String, f64, Workload)>> {
        let traced = match &self.kind.trace {
            Some(path) => Some((read_trace(path)?, path.display().to_string())),
            None => None,
        };
        if let Some((workload, name)) = traced.clone().filter(|_| self.kind.concurrency.is_empty())
        {
            return Ok(vec![(name, 0.0, workload)]);
        }
        let random = |arrivals| {
            let lengths = [self.input, self.output];
            Workload::random(self.num_requests, arrivals, lengths, self.seed)
        };
        let burst = self.burst;
        let open = self.kind.rate.iter().map(|&rate| {
            let workload = random(Arrivals::Open { rate, burst });
            (format!("{rate} requests/s"), rate, workload)
        });
        let closed = self.kind.concurrency.iter().map(|&clients| {
            let concurrency = clients as usize;
            let workload = match &traced {
                Some((workload, _)) => Workload {
                    concurrency: Some(concurrency),
                    ..workload.clone()
                },
                None => random(Arrivals::Closed { concurrency }),
            };
            (format!("{clients} clients"), f64::from(clients), workload)
        });
        Ok(open.chain(closed).collect())
    }

    fn label(&self) -> &'static str {
        if self.kind.rate.is_empty() {
            "clients"
        } else {
            "requests/s"
        }
    }
}

fn read_trace(path: &Path) -> Result<Workload> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    trace::read(&text).map_err(|error| format!("{}: {error}", path.display()).into())
}

impl Cost {
    /// The cost model: given values override fitted ones, which override configured ones. Also returns the
    /// quality of the fit, if there is one.
    fn model(&self, configured: Option<CostModel>) -> Result<(CostModel, Option<Quality>)> {
        let (base, quality) = match &self.fit {
            Some(path) => {
                let file =
                    File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
                let fitted = read(BufReader::new(file))
                    .map_err(Into::into)
                    .and_then(|records| fit(&records));
                let Fit { cost, quality } =
                    fitted.map_err(|error| format!("{}: {error}", path.display()))?;
                (cost, Some(quality))
            }
            None => {
                let cost = CostModel {
                    overhead_us: DEFAULT_OVERHEAD_US,
                    overhead_sequence_us: DEFAULT_OVERHEAD_SEQUENCE_US,
                    ..configured.unwrap_or_default()
                };
                (cost, None)
            }
        };
        if configured.is_none() && self.fit.is_none() && self.step_us.is_none() {
            return Err(
                "the cost of a step is unknown: give --fit STATS.jsonl, or --step-us and \
                        --token-us"
                    .into(),
            );
        }
        let cost = CostModel {
            step_us: self.step_us.unwrap_or(base.step_us),
            token_us: self.token_us.unwrap_or(base.token_us),
            sequence_us: self.sequence_us.unwrap_or(base.sequence_us),
            position_us: self.position_us.unwrap_or(base.position_us),
            overhead_us: self.overhead_us.unwrap_or(base.overhead_us),
            overhead_sequence_us: self
                .overhead_sequence_us
                .unwrap_or(base.overhead_sequence_us),
        };
        Ok((cost, quality))
    }
}

fn positive(text: &str) -> std::result::Result<f64, String> {
    number(text)
        .filter(|number| *number > 0.0)
        .ok_or_else(|| "write a number above 0".into())
}

fn not_negative(text: &str) -> std::result::Result<f64, String> {
    number(text)
        .filter(|number| *number >= 0.0)
        .ok_or_else(|| "write a number, 0 or above".into())
}

fn number(text: &str) -> Option<f64> {
    text.parse()
        .ok()
        .filter(|number: &f64| number.abs() <= 1e12)
}

#[cfg(test)]
#[path = "../../../tests/support/manual_page.rs"]
mod manual_page;

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::{Options, manual_page};

    const EXAMPLES: &str = r"
.SH EXAMPLES
What a configuration does under 10, 20 and 40 requests per second, with the costs that a server has measured:
.PP
.EX
inflight\-sim \-\-config my_model/config.pbtxt \-\-fit stats.jsonl \e
    \-\-rate 10,20,40 \-\-input lognormal:200,2000 \-\-output uniform:16..512
.EE
";

    #[test]
    fn the_manual_page_is_that_of_the_options() {
        manual_page::compare(Options::command(), EXAMPLES);
    }
}
