//! `cargo xtask bench`: measurements through a real tritonserver under load from benches/drivers, and of the
//! library in process (crates/measure/).

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use clap::{Args, Subcommand};

use xtask::schemes;

use crate::library::Build;
use crate::process::{command, output, run_to_stdout};
use crate::{Result, library, setup, workspace};

#[derive(Subcommand)]
pub enum Bench {
    /// Overhead of a step besides the model, on the synthetic runner
    Steps(Steps),
    /// Output tokens per second and latencies of a checkpoint
    Throughput(Throughput),
    /// Comparison of batching schemes, on the synthetic runner
    Schemes(Schemes),
    /// Effect of the most expensive requests on the steps of other requests, on the demo model
    Neighbours(Neighbours),
    /// Triton's sequence batcher and its dynamic batcher under the same load, on the synthetic runner
    Batchers(Batchers),
    /// Time to first token of conversations that return, with and without KV cache blocks in host memory
    Returning(Returning),
    /// What the server with OpenAI's API adds to the time to first token, and its CPU time for a token, on the demo
    /// model
    Front(Front),
    /// Accuracy of inflight-sim's predictions, on the synthetic runner
    Simulator(Simulator),
    /// Prompt and generation throughput in process, relative to the limits of the machine
    Engine(Program),
    /// Texts that a model embeds in a second, in process
    Embed(Program),
    /// Time that adapters add to a generation step, in process
    Adapters(Program),
    /// Several ranks beside one that has as many threads, in process and in processes of theirs
    Ranks(Program),
    /// Sums over the ranks of one host by size, beside the memory's bandwidth, in process
    AllReduce(Program),
    /// Requests with different adapters in a real tritonserver, beside llama.cpp's server
    AdapterPeers(Program),
    /// Other engines on the same checkpoint, alternating with ours: llama.cpp, OpenVINO GenAI, vLLM
    Peers(Program),
    /// Quality lost by int8 and int4 weights, compared with llama.cpp's formats of the same checkpoint
    Quality(Program),
}

/// Arguments of a measuring program, whose own help `--help` shows.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub struct Program {
    /// Its arguments: `--model DIR` and more
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(Args)]
pub struct Steps {
    /// Numbers of concurrent streams
    #[arg(long, value_name = "N,...", default_value = "1,8,32,128,256")]
    streams: String,
    /// Tokens per streamed response
    #[arg(long, value_name = "N,...", default_value = "1")]
    stream_interval: String,
    /// Rounds; each row has their median
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Throughput {
    /// The checkpoint's folder
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Numbers of concurrent requests
    #[arg(long, value_name = "N,...", default_value = "1,8,32")]
    concurrency: String,
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    input: u32,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    output: u32,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Schemes {
    /// Requests per load
    #[arg(long, value_name = "N", default_value_t = 128)]
    requests: u32,
    /// Rounds; each figure is their median
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Arrival rate, as a share of the throughput of in-flight batching
    #[arg(long, value_name = "SHARE", default_value_t = 0.8)]
    load: f64,
    /// Speed of the runner relative to the model that it represents
    #[arg(long, value_name = "TIMES", default_value_t = 4.0)]
    speed_up: f64,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
    /// Draw the rows into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Args)]
pub struct Neighbours {
    /// Rounds; each row has the medians of their figures
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// Only run the hostile requests whose names contain this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Batchers {
    /// Numbers of clients, which send one request after the other
    #[arg(long, value_name = "N,...", default_value = "32,256")]
    clients: String,
    /// Clients that wait beside running requests
    #[arg(long, value_name = "N", default_value_t = 1000)]
    waiting: u32,
    /// Rounds; each row has their median
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Returning {
    /// The checkpoint's folder [default: the demo model]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Users who take turns
    #[arg(long, value_name = "N", default_value_t = 6)]
    users: u32,
    /// Tokens of a conversation when its user returns
    #[arg(long, value_name = "TOKENS", default_value_t = 768)]
    tokens: u32,
    /// Rounds of new conversations
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Front {
    /// Times that the first token is waited for, with and without the server
    #[arg(long, value_name = "N", default_value_t = 300)]
    firsts: u32,
    /// Numbers of concurrent streams
    #[arg(long, value_name = "N,...", default_value = "1,64")]
    streams: String,
    /// Tokens of each stream
    #[arg(long, value_name = "TOKENS", default_value_t = 800)]
    tokens: u32,
    /// Rounds of streams; each figure is their median
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Simulator {
    /// Seed of the random load
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object per row on standard output instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs a benchmark and prints its rows on standard output.
pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Steps(steps) => {
            let arguments = [
                format!("--streams={}", steps.streams),
                format!("--stream-interval={}", steps.stream_interval),
                format!("--rounds={}", steps.rounds),
            ];
            run_to_stdout(script("steps.py")?.args(arguments).args(json(steps.json)))
        }
        Bench::Throughput(throughput) => {
            let model = std::path::absolute(&throughput.model)?;
            let arguments = [
                format!("--model={}", model.display()),
                format!("--concurrency={}", throughput.concurrency),
                format!("--input={}", throughput.input),
                format!("--output={}", throughput.output),
            ];
            let script = &mut script("throughput.py")?;
            run_to_stdout(script.args(arguments).args(json(throughput.json)))
        }
        Bench::Schemes(schemes) => run_schemes(schemes),
        Bench::Neighbours(neighbours) => {
            let only = neighbours
                .only
                .as_ref()
                .map(|text| format!("--only={text}"));
            let rounds = format!("--rounds={}", neighbours.rounds);
            let script = &mut script("neighbours.py")?;
            run_to_stdout(script.arg(rounds).args(only).args(json(neighbours.json)))
        }
        Bench::Batchers(batchers) => {
            let arguments = [
                format!("--clients={}", batchers.clients),
                format!("--waiting={}", batchers.waiting),
                format!("--rounds={}", batchers.rounds),
            ];
            let script = &mut script("batchers.py")?;
            run_to_stdout(script.args(arguments).args(json(batchers.json)))
        }
        Bench::Returning(returning) => {
            let model = returning.model.as_ref().map(std::path::absolute);
            let model = model.transpose()?;
            let arguments = [
                format!("--users={}", returning.users),
                format!("--tokens={}", returning.tokens),
                format!("--rounds={}", returning.rounds),
            ];
            let model = model.map(|model| format!("--model={}", model.display()));
            let script = &mut script("returning.py")?;
            run_to_stdout(
                script
                    .args(arguments)
                    .args(model)
                    .args(json(returning.json)),
            )
        }
        Bench::Front(front) => {
            let arguments = [
                format!("--firsts={}", front.firsts),
                format!("--streams={}", front.streams),
                format!("--tokens={}", front.tokens),
                format!("--rounds={}", front.rounds),
            ];
            run_to_stdout(
                script("front.py")?
                    .args(arguments)
                    .args(json(front.json))
                    .env("INFLIGHT_OPENAI", library::openai(Build::Shipped)?)
                    .env("INFLIGHT_FRONT_COST", library::front_cost(Build::Shipped)?),
            )
        }
        Bench::Simulator(simulator) => run_to_stdout(
            script("simulator.py")?
                .arg(format!("--seed={}", simulator.seed))
                .args(json(simulator.json))
                .env("INFLIGHT_SIM", library::simulator(Build::Shipped)?),
        ),
        Bench::Engine(program) => measure("engine", program),
        Bench::Embed(program) => measure("embed", program),
        Bench::Adapters(program) => measure("adapters", program),
        Bench::Ranks(program) => {
            let mut arguments = vec!["--program".into(), library::rank_program()?.into()];
            arguments.extend_from_slice(&program.arguments);
            measure("ranks", &Program { arguments })
        }
        Bench::AllReduce(program) => measure("all-reduce", program),
        Bench::AdapterPeers(program) => {
            run_to_stdout(script("adapter_peers.py")?.args(&program.arguments))
        }
        Bench::Peers(program) => run_to_stdout(&mut with_measure(script("peers.py")?, program)?),
        Bench::Quality(program) => {
            let script = python_script("quality.py")?;
            run_to_stdout(&mut with_measure(script, program)?)
        }
    }
}

/// Runs the program that measures the library in process. It keeps our working directory, so that paths mean
/// what the caller intends.
pub fn measure(what: &str, program: &Program) -> Result<()> {
    run_to_stdout(
        Command::new(library::measure()?)
            .arg(what)
            .args(&program.arguments),
    )
}

fn run_schemes(options: &Schemes) -> Result<()> {
    let measured = output(script("schemes.py")?.args([
        format!("--requests={}", options.requests),
        format!("--rounds={}", options.rounds),
        format!("--load={}", options.load),
        format!("--speed-up={}", options.speed_up),
    ]))?;
    let rows = schemes::read(&measured)?;
    if let Some(file) = &options.svg {
        std::fs::write(file, schemes::draw(&rows))
            .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    }
    let text = if options.json {
        measured
    } else {
        schemes::table(&rows)
    };
    print!("{text}");
    Ok(())
}

/// A script of benches/drivers.
fn python_script(name: &str) -> Result<Command> {
    let mut script = command(setup::python()?);
    script.arg(workspace::root().join("benches/drivers").join(name));
    Ok(script)
}

/// A script of benches/drivers, with the server and the backend to measure.
fn script(name: &str) -> Result<Command> {
    let mut script = python_script(name)?;
    script.env("TRITONSERVER", setup::tritonserver()?).env(
        "TRITON_BACKENDS",
        library::backend_directory(Build::Shipped)?,
    );
    Ok(script)
}

/// Adds the in-process measuring program and the arguments to a script, in our working directory.
fn with_measure(mut script: Command, program: &Program) -> Result<Command> {
    script
        .current_dir(std::env::current_dir()?)
        .args(&program.arguments)
        .env("INFLIGHT_MEASURE", library::measure()?);
    Ok(script)
}

fn json(wanted: bool) -> Option<&'static str> {
    wanted.then_some("--json")
}
