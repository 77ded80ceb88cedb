//! `cargo xtask serve`: a real tritonserver in the foreground, from a clean checkout.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::process::{command, describe, spawn_guarded, terminate};
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
}

/// Serves until a signal arrives or the server exits.
pub fn run(options: &Options) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let repository = match &options.model_repository {
        Some(folder) => folder.clone(),
        None => workspace::root().join("model_repository"),
    };
    let repository = fs::canonicalize(&repository)
        .map_err(|error| format!("--model-repository {}: {error}", repository.display()))?;
    let server = setup::tritonserver()?;
    let backends = library::backend_directory()?;
    for (option, port) in [
        ("--http-port", options.http_port),
        ("--grpc-port", options.grpc_port),
        ("--metrics-port", options.metrics_port),
    ] {
        // Another server on the same port must not be mistaken for ours.
        TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .map_err(|error| format!("{option} {port}: {error}; choose another port"))?;
    }

    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let mut child = spawn_guarded(
        command(server)
            .arg(format!("--model-repository={}", repository.display()))
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
    let mut told_ready = false;
    let mut told_stop = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return match (told_stop, status.success()) {
                (true, true) => Ok(()),
                (true, false) => Err(format!(
                    "tritonserver was stopped and exited with {}; see its log above",
                    describe(status)
                )
                .into()),
                (false, _) => Err(format!(
                    "tritonserver exited unexpectedly with {}; see its log above",
                    describe(status)
                )
                .into()),
            };
        }
        if stop.load(Ordering::Relaxed) && !told_stop {
            terminate(&child);
            told_stop = true;
        }
        if !told_ready && !told_stop && is_ready(options.http_port) {
            announce(options.http_port, &repository)?;
            told_ready = true;
        }
        std::thread::sleep(POLL);
    }
}

/// Announces that the server is ready: one line on standard output for programs, an example request on
/// standard error.
fn announce(port: u16, repository: &Path) -> Result<()> {
    println!("ready http://127.0.0.1:{port}");
    std::io::stdout().flush()?;
    let mut models: Vec<String> = fs::read_dir(repository)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| repository.join(name).is_dir())
        .collect();
    models.sort();
    for model in models {
        eprintln!(
            "try: curl --no-buffer http://127.0.0.1:{port}/v2/models/{model}/generate_stream \
             -d '{{\"text_input\": \"Once upon a time\", \"max_tokens\": 200, \"stream\": true}}'"
        );
    }
    Ok(())
}

/// Whether the server reports that it and all its models are ready.
fn is_ready(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
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
