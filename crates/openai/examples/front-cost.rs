//! Overhead of the server with OpenAI's API: `cargo xtask bench front` runs this program against a running server and
//! its tritonserver.
//!
//! The time to the first token is taken in turns of two clients, this crate's own of Triton's gRPC and one of HTTP on a
//! connection that is kept. The CPU time is that of the server's threads, as Linux counts it in `schedstat`. Its limit
//! is what a thread takes that does nothing but write as many bytes to as many clients, as often.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::StreamExt;
use inflight_openai::generation::{Generation, Prompt};
use inflight_openai::names::Names;
use inflight_openai::triton::Triton;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A short prompt: the time that the model takes is not what is measured.
const PROMPT: &str = "Once upon a time, there was a brave fox named Finn.";
/// First tokens that are not counted: connections are made, and memory is allocated.
const NUM_WARM_UPS: usize = 20;
/// An event of a completion with one short token.
const NUM_EVENT_BYTES: usize = 200;

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
    let (mut costs, mut limits, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let (cost, step) = cost_of_a_token(options)?;
        let limit = cost_of_a_write(options, step)?;
        costs.push(cost);
        limits.push(limit);
        ratios.push(cost / limit);
    }
    let (direct, through) = (median(direct), median(through));
    Ok(json!({
        "ttft_ms_grpc": rounded(direct),
        "ttft_ms_front": rounded(through),
        "ttft_ms_added": rounded(through - direct),
        "streams": options.streams,
        "tokens": options.streams * options.tokens,
        "cpu_us_per_token": rounded(median(costs)),
        "cpu_us_per_write": rounded(median(limits)),
        "ratio_to_write": rounded(median(ratios)),
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
        names: Names::of("prompt"),
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

/// The CPU time of the server for a token of many streams, in microseconds, and the time between two tokens of a
/// stream.
fn cost_of_a_token(options: &Options) -> Result<(f64, Duration)> {
    let clients = (0..options.streams).map(|_| Client::connect(&options.front));
    let clients: Vec<_> = clients.collect::<Result<_>>()?;
    let before = cpu_time(options.pid)?;
    let start = Instant::now();
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
    let step = start.elapsed() / options.tokens as u32;
    Ok((spent.as_secs_f64() * 1e6 / num_tokens as f64, step))
}

/// The CPU time of a thread for an event, in microseconds, that only writes: one to each client that waits for it, once
/// a step.
fn cost_of_a_write(options: &Options, step: Duration) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let mut event = vec![b' '; NUM_EVENT_BYTES];
    event[NUM_EVENT_BYTES - 1] = b'\n';
    let connect = |_| Ok((Client::connect(&address)?, listener.accept()?.0));
    let connections = (0..options.streams).map(connect);
    let (clients, streams): (Vec<_>, Vec<_>) =
        connections.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    for stream in &streams {
        stream.set_nodelay(true)?;
    }
    std::thread::scope(|scope| {
        for mut client in clients {
            scope.spawn(move || client.read_lines());
        }
        let writer = scope.spawn(move || {
            let thread = Path::new("/proc/thread-self/schedstat");
            let before = cpu_time_in(thread)?;
            let start = Instant::now();
            for count in 1..=options.tokens as u32 {
                for mut stream in &streams {
                    stream.write_all(&event)?;
                }
                std::thread::sleep((step * count).saturating_sub(start.elapsed()));
            }
            let spent = cpu_time_in(thread)? - before;
            Ok(spent.as_secs_f64() * 1e6 / (options.tokens * streams.len()) as f64)
        });
        writer.join().expect("no panic")
    })
}

/// The CPU time that the threads of a process have had.
fn cpu_time(pid: u32) -> Result<Duration> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"))?;
    threads
        .map(|thread| cpu_time_in(&thread?.path().join("schedstat")))
        .sum()
}

/// The CPU time in a thread's `schedstat`.
fn cpu_time_in(schedstat: &Path) -> Result<Duration> {
    let numbers = fs::read_to_string(schedstat)?;
    let on_cpu = numbers.split(' ').next().ok_or("an empty schedstat")?;
    Ok(Duration::from_nanos(on_cpu.parse()?))
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

    /// Reads lines until the connection is closed.
    fn read_lines(&mut self) -> io::Result<()> {
        let mut line = String::new();
        while self.stream.read_line(&mut line)? > 0 {
            line.clear();
        }
        Ok(())
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
