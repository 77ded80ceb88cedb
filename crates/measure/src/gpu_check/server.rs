//! A tritonserver, and a client that needs nothing beside this program.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::budget::Budget;
use super::check::Check;
use super::programs::die_with_parent;
use crate::Result;

const POLL: Duration = Duration::from_millis(50);
/// How long a server may take to stop.
const STOP: Duration = Duration::from_secs(20);

/// A running server. Dropping it stops it.
pub struct Server {
    process: Child,
    http_port: u16,
    agent: ureq::Agent,
}

/// The programs of a server.
pub struct Programs {
    server: PathBuf,
    backends: PathBuf,
}

impl Programs {
    /// Those of the bundle, or those that `TRITONSERVER` and `TRITON_BACKENDS` name; nothing if there are none.
    pub fn find(check: &Check) -> Option<Self> {
        let place = |inside: &str, variable: &str| {
            let path = check.bundle.join(inside);
            match path.exists() {
                true => Some(path),
                false => std::env::var_os(variable).map(PathBuf::from),
            }
        };
        Some(Self {
            server: place("triton/bin/tritonserver", "TRITONSERVER")?,
            backends: place("backends", "TRITON_BACKENDS")?,
        })
    }
}

impl Server {
    /// Serves a repository, once all its models are loaded. The log goes beside it.
    ///
    /// # Errors
    /// It does not start in time, or a model does not load: the end of the log.
    pub fn start(programs: &Programs, repository: &Path, budget: &Budget) -> Result<Self> {
        let [http_port, grpc_port, metrics_port] = free_ports()?;
        let log = repository.with_extension("log");
        let output = File::create(&log)?;
        let mut command = Command::new(&programs.server);
        command
            .arg(format!("--model-repository={}", repository.display()))
            .arg(format!(
                "--backend-directory={}",
                programs.backends.display()
            ))
            .args(["http", "grpc", "metrics"].map(|name| format!("--{name}-address=127.0.0.1")))
            .arg(format!("--http-port={http_port}"))
            .arg(format!("--grpc-port={grpc_port}"))
            .arg(format!("--metrics-port={metrics_port}"))
            .arg("--allow-gpu-metrics=false")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        die_with_parent(&mut command);
        let mut server = Self {
            process: command.spawn()?,
            http_port,
            agent: agent(),
        };
        while !server.is_ready() {
            if let Some(status) = server.process.try_wait()? {
                return Err(format!("tritonserver ended with {status}\n{}", tail(&log)).into());
            }
            if budget.is_over() {
                return Err(format!("tritonserver was not ready in time\n{}", tail(&log)).into());
            }
            thread::sleep(POLL);
        }
        Ok(server)
    }

    /// One request; `on_response` gets each of its responses.
    ///
    /// # Errors
    /// The server's, or the time is over.
    pub fn generate(
        &self,
        model: &str,
        body: &Value,
        budget: &Budget,
        mut on_response: impl FnMut(&Value),
    ) -> Result<()> {
        let request = self
            .agent
            .post(self.url(&format!("v2/models/{model}/generate_stream")))
            .config()
            .timeout_global(Some(budget.left()))
            .build();
        let response = request
            .header("Content-Type", "application/json")
            .send(body.to_string())?;
        let status = response.status();
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line?;
            let event = line.strip_prefix("data: ");
            if let Some(text) = event.or((!status.is_success()).then_some(&*line)) {
                let response: Value = serde_json::from_str(text)?;
                match response["error"].as_str() {
                    Some(error) => return Err(error.into()),
                    None => on_response(&response),
                }
            }
        }
        Ok(())
    }

    fn is_ready(&self) -> bool {
        let answer = self.agent.get(self.url("v2/health/ready")).call();
        answer.is_ok_and(|answer| answer.status().is_success())
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.http_port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: the process is a child that has not been waited for, so the id is still its own.
        unsafe { libc::kill(self.process.id() as i32, libc::SIGTERM) };
        let budget = Budget::new(STOP);
        while !budget.is_over() {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(POLL);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Adds a model that serves a checkpoint; `config` is text of its config.pbtxt.
///
/// # Errors
/// The folder cannot be written.
pub fn add_model(repository: &Path, name: &str, checkpoint: &Path, config: &str) -> Result<()> {
    let folder = repository.join(name);
    fs::create_dir_all(folder.join("1"))?;
    let checkpoint = checkpoint.canonicalize()?;
    let text = format!(
        "backend: \"inflight\"\n{}{config}\n",
        parameter("gpt_model_path", &checkpoint.display().to_string())
    );
    Ok(fs::write(folder.join("config.pbtxt"), text)?)
}

/// A line of a config.pbtxt.
pub fn parameter(key: &str, value: &str) -> String {
    format!("parameters {{ key: {key:?} value {{ string_value: {value:?} }} }}\n")
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        // A server that stops waits half a minute for open connections, even if they are idle.
        .max_idle_connections(0)
        .build()
        .into()
}

fn free_ports() -> Result<[u16; 3]> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    // Open together, so that they differ.
    let sockets = [bind()?, bind()?, bind()?];
    let mut ports = [0; 3];
    for (port, socket) in ports.iter_mut().zip(&sockets) {
        *port = socket.local_addr()?.port();
    }
    Ok(ports)
}

/// The end of a log.
fn tail(log: &Path) -> String {
    const NUM_LINES: usize = 25;
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('+')).collect();
    lines[lines.len().saturating_sub(NUM_LINES)..].join("\n")
}
