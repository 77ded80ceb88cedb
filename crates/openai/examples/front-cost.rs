//! What the server with OpenAI's API costs: `cargo xtask bench front` runs this beside a running one and its tritonserver.
//!
//! The time to the first token is taken in turns of two clients, this crate's own of Triton's gRPC and one of HTTP on a
//! connection that is kept. The CPU time is that of the server's threads, as Linux counts it in `schedstat`.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::StreamExt;
use inflight_openai::generation::{Generation, Prompt};
use inflight_openai::triton::Triton;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A short prompt: the time that the model takes is not what is measured.
const PROMPT: &str = "Once upon a time, there was a brave fox named Finn.";
/// First tokens that are not counted: connections are made, and memory is allocated.
const NUM_WARM_UPS: usize = 20;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
struct Options {
    /// The tritonserver's address for gRPC
    #[arg(long)]
    triton: String,
    /// The address of the server with OpenAI's API
    #[arg(long)]
    front: String,
    /// Its process
    #[arg(long)]
    pid: u32,
    #[arg(long)]
    model: String,
    /// Times that the first token is waited for, of each client
    #[arg(long)]
    firsts: usize,
    /// Concurrent streams
    #[arg(long)]
    streams: usize,
    /// Tokens of each
    #[arg(long)]
    tokens: usize,
    /// Rounds of streams
    #[arg(long)]
    rounds: usize,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(row) => {
            println!("{row}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("front-cost: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<Value> {
    let runtime = Runtime::new()?;
    let entered = runtime.enter();
    let triton = Triton::at(&options.triton, None)?;
    drop(entered);
    let mut client = Client::connect(&options.front)?;
    let (mut direct, mut through) = (Vec::new(), Vec::new());
    for turn in 0..NUM_WARM_UPS + options.firsts {
        let without = runtime.block_on(first_token(&triton, options, turn))?;
        let (with, _) = client.stream(&options.model, 2)?;
        if turn >= NUM_WARM_UPS {
            direct.push(without.as_secs_f64() * 1e3);
            through.push(with.as_secs_f64() * 1e3);
        }
    }
    let mut costs = Vec::new();
    for _ in 0..options.rounds {
        costs.push(cost_of_a_token(options)?);
    }
    let (direct, through) = (median(direct), median(through));
    Ok(json!({
        "ttft_ms_grpc": rounded(direct),
        "ttft_ms_front": rounded(through),
        "ttft_ms_added": rounded(through - direct),
        "streams": options.streams,
        "tokens": options.streams * options.tokens,
        "cpu_us_per_token": rounded(median(costs)),
        "firsts": options.firsts,
        "rounds": options.rounds,
    }))
}

/// The time to the first token of a request to Triton itself.
async fn first_token(triton: &Triton, options: &Options, turn: usize) -> Result<Duration> {
    let fields = json!({
        "max_tokens": 2, "stream": true, "seed": 1, "n": 1, "ignore_eos": true, "exclude_input_in_output": true,
    });
    let generation = Generation {
        prompt: Prompt {
            model: options.model.clone(),
            id: format!("direct-{turn}"),
            text: PROMPT.to_owned(),
            options: fields.as_object().cloned().unwrap_or_default(),
        },
        outputs: Vec::new(),
    };
    let start = Instant::now();
    let mut replies = triton.generate(generation);
    let first = replies.next().await.ok_or("no response")?;
    let time = start.elapsed();
    first.map_err(|error| error.message)?;
    while let Some(reply) = replies.next().await {
        reply.map_err(|error| error.message)?;
    }
    Ok(time)
}

/// The CPU time of the server for a token of many streams, in microseconds.
fn cost_of_a_token(options: &Options) -> Result<f64> {
    let clients = (0..options.streams).map(|_| Client::connect(&options.front));
    let clients: Vec<_> = clients.collect::<Result<_>>()?;
    let before = cpu_time(options.pid)?;
    let num_tokens = std::thread::scope(|scope| {
        let streams = clients.into_iter().map(|mut client| {
            scope.spawn(move || Ok(client.stream(&options.model, options.tokens)?.1))
        });
        let streams: Vec<_> = streams.collect();
        let tokens = streams
            .into_iter()
            .map(|stream| stream.join().expect("no panic"));
        tokens.sum::<Result<usize>>()
    })?;
    let spent = cpu_time(options.pid)? - before;
    Ok(spent.as_secs_f64() * 1e6 / num_tokens as f64)
}

/// The CPU time that the threads of a process have had.
fn cpu_time(pid: u32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let numbers = fs::read_to_string(thread?.path().join("schedstat"))?;
        let on_cpu = numbers.split(' ').next().ok_or("an empty schedstat")?;
        nanoseconds += on_cpu.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// A connection that is kept.
struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    fn connect(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// A completion as a stream: the time until its first event, and its events with tokens.
    fn stream(&mut self, model: &str, num_tokens: usize) -> Result<(Duration, usize)> {
        let body = json!({
            "model": model, "prompt": PROMPT, "max_tokens": num_tokens, "stream": true, "seed": 1, "ignore_eos": true,
        });
        let body = body.to_string();
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let start = Instant::now();
        self.stream.get_mut().write_all(request.as_bytes())?;
        let (mut first, mut num_events) = (None, 0);
        let mut line = String::new();
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            if line.starts_with("HTTP/1.1 ") && !line.contains(" 200 ") {
                return Err(format!("the answer is {line}").into());
            }
            if line.starts_with("data: {") {
                first.get_or_insert_with(|| start.elapsed());
                num_events += 1;
            } else if line == "0\r\n" {
                self.stream.read_line(&mut line)?;
                return Ok((first.ok_or("no event")?, num_events));
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
