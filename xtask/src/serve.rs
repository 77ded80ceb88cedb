//! `cargo xtask serve`: a real tritonserver in the foreground, with OpenAI's API in front of it, from a clean checkout.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::library::Build;
use crate::process::{command, describe, spawn_guarded, terminate};
use crate::watched_models::WatchedModels;
use crate::{Result, library, setup, workspace};

/// Polling interval for the child and for signals.
const POLL: Duration = Duration::from_millis(50);

#[derive(Args)]
pub struct Options {
    /// The folder with the models [default: the checkout's model_repository]
    #[arg(long, value_name = "DIR")]
    model_repository: Option<PathBuf>,
    #[arg(long, value_name = "N", default_value_t = 8000)]
    http_port: u16,
    #[arg(long, value_name = "N", default_value_t = 8001)]
    grpc_port: u16,
    #[arg(long, value_name = "N", default_value_t = 8002)]
    metrics_port: u16,
    /// The port of OpenAI's API
    #[arg(long, value_name = "N", default_value_t = 9000)]
    openai_port: u16,
}

/// How far the servers are on their way to the end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Serving,
    /// The server with OpenAI's API answers its last requests.
    FrontStops,
    /// The server behind it does.
    ServerStops,
}

/// Serves until a signal arrives or a server exits.
pub fn run(options: &Options) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let repository = match &options.model_repository {
        Some(folder) => folder.clone(),
        None => workspace::root().join("model_repository"),
    };
    let repository = fs::canonicalize(&repository)
        .map_err(|error| format!("--model-repository {}: {error}", repository.display()))?;
    let [server, backends, front] = programs()?;
    for (option, port) in [
        ("--http-port", options.http_port),
        ("--grpc-port", options.grpc_port),
        ("--metrics-port", options.metrics_port),
        ("--openai-port", options.openai_port),
    ] {
        // Another server on the same port must not be mistaken for ours.
        TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .map_err(|error| format!("{option} {port}: {error}; choose another port"))?;
    }

    // The port belongs to this one.
    let folder = workspace::target("serve").join(options.http_port.to_string());
    let models = WatchedModels::of(&repository, folder)?;
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let mut child = spawn_guarded(
        command(server)
            .arg(format!(
                "--model-repository={}",
                models.repository().display()
            ))
            .arg(format!("--backend-directory={}", backends.display()))
            .args([
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                "--metrics-address=127.0.0.1",
            ])
            .arg(format!("--http-port={}", options.http_port))
            .arg(format!("--grpc-port={}", options.grpc_port))
            .arg(format!("--metrics-port={}", options.metrics_port))
            .stdout(std::io::stderr()),
    )?;
    let mut front = spawn_guarded(
        command(front)
            .arg(format!("--triton=127.0.0.1:{}", options.grpc_port))
            .arg(format!("--port={}", options.openai_port))
            .args(models.options())
            .stdout(std::io::stderr()),
    )?;
    let mut told_ready = false;
    let mut stage = Stage::Serving;
    loop {
        if let Some(status) = child.try_wait()? {
            if stage != Stage::ServerStops {
                terminate(&front);
                front.wait()?;
            }
            return match (stage, status.success()) {
                (Stage::ServerStops, true) => Ok(()),
                (Stage::ServerStops, false) => Err(format!(
                    "tritonserver was stopped and exited with {}; see its log above",
                    describe(status)
                )
                .into()),
                _ => Err(format!(
                    "tritonserver exited unexpectedly with {}; see its log above",
                    describe(status)
                )
                .into()),
            };
        }
        if stage == Stage::Serving && stop.load(Ordering::Relaxed) {
            terminate(&front);
            stage = Stage::FrontStops;
        }
        if stage != Stage::ServerStops
            && let Some(status) = front.try_wait()?
        {
            terminate(&child);
            if stage == Stage::Serving {
                child.wait()?;
                return Err(format!(
                    "inflight-openai exited unexpectedly with {}",
                    describe(status)
                )
                .into());
            }
            stage = Stage::ServerStops;
        }
        if !told_ready && stage == Stage::Serving && is_ready(options) {
            announce(options, &repository)?;
            told_ready = true;
        }
        models.empty_large_files();
        thread::sleep(POLL);
    }
}

/// Installs tritonserver, builds the backend, and builds the server with OpenAI's API, all beside each other. Returns
/// their paths.
fn programs() -> Result<[PathBuf; 3]> {
    fn path(result: Result<PathBuf>) -> std::result::Result<PathBuf, String> {
        result.map_err(|error| error.to_string())
    }
    thread::scope(|scope| {
        let server = scope.spawn(|| path(setup::tritonserver()));
        let front = scope.spawn(|| path(library::openai(Build::Shipped)));
        let backends = library::backend_directory(Build::Shipped)?;
        let [server, front] =
            [server, front].map(|thread| thread.join().expect("no thread panics"));
        Ok([server?, backends, front?])
    })
}

/// Announces that the servers are ready: one line on standard output for programs, example requests on
/// standard error.
fn announce(options: &Options, repository: &Path) -> Result<()> {
    let (port, openai_port) = (options.http_port, options.openai_port);
    println!("ready http://127.0.0.1:{port}");
    std::io::stdout().flush()?;
    let mut models: Vec<String> = fs::read_dir(repository)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| repository.join(name).is_dir())
        .collect();
    models.sort();
    eprintln!("try: http://127.0.0.1:{openai_port}/ in a browser");
    for model in models {
        eprintln!(
            "try: curl --no-buffer http://127.0.0.1:{openai_port}/v1/chat/completions \
             -d '{{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Tell me a story.\"}}], \
             \"max_tokens\": 200, \"stream\": true}}'"
        );
        eprintln!(
            "try: curl --no-buffer http://127.0.0.1:{port}/v2/models/{model}/generate_stream \
             -d '{{\"text_input\": \"Once upon a time\", \"max_tokens\": 200, \"stream\": true}}'"
        );
    }
    Ok(())
}

/// Whether the server reports that it and all its models are ready, and the server in front of it takes connections.
fn is_ready(options: &Options) -> bool {
    let connect = |port: u16| TcpStream::connect((Ipv4Addr::LOCALHOST, port));
    let (Ok(_), Ok(mut stream)) = (connect(options.openai_port), connect(options.http_port)) else {
        return false;
    };
    let mut answer = String::new();
    stream
        .set_read_timeout(Some(Duration::from_secs(1)))
        .is_ok()
        && stream
            .write_all(
                b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
            )
            .is_ok()
        && stream.read_to_string(&mut answer).is_ok()
        && answer.starts_with("HTTP/1.1 200")
}
