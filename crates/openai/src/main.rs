//! `inflight-openai`: OpenAI's API and Anthropic's in front of a tritonserver.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use clap::Parser;
use inflight_openai::adapters::Adapters;
use inflight_openai::background::Background;
use inflight_openai::batches::work::Settings;
use inflight_openai::content::Limits;
use inflight_openai::downloads::{Downloads, ImageHost};
use inflight_openai::keys::Keys;
use inflight_openai::listener::{self, Service};
use inflight_openai::live::Live;
use inflight_openai::origins::Origin;
use inflight_openai::place::Place;
use inflight_openai::prompts::Prompts;
use inflight_openai::response_store::{Bounds, ResponseStore};
use inflight_openai::server::{Access, router};
use inflight_openai::step_file::Source;
use inflight_openai::tls;
use inflight_openai::triton::Triton;
use inflight_openai::triton_metrics::TritonMetrics;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_rustls::TlsAcceptor;

/// Serves OpenAI's API and Anthropic's in front of a tritonserver with models of the backend `inflight`
#[derive(Parser)]
#[command(name = "inflight-openai", version)]
struct Options {
    /// The tritonserver's address for gRPC
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8001")]
    triton: String,
    /// A PEM file with the certificates that the tritonserver's may be signed by: connects with TLS [default: without
    /// TLS]
    #[arg(long, value_name = "FILE")]
    triton_ca: Option<PathBuf>,
    /// The tritonserver's address for metrics, without TLS: /metrics has them, also under the names of vLLM's server,
    /// and /health says that a model is not ready whose instance has failed, which servers before 25.12 call ready
    #[arg(long, value_name = "HOST:PORT")]
    triton_metrics: Option<String>,
    /// The address to listen on
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// The port to listen on; 0 is any that is free
    #[arg(long, value_name = "N", default_value_t = 9000)]
    port: u16,
    /// The largest body of a request
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20)]
    max_request_bytes: usize,
    /// The most bytes that the bodies of all requests have together until they are passed on; requests beyond them are
    /// refused with status 429
    #[arg(long, value_name = "BYTES", default_value_t = 128 << 20)]
    max_body_bytes: usize,
    /// The most prompts that are in flight; requests beyond them are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..1 << 20))]
    max_requests: usize,
    /// Threads that serve connections. A token costs least with one; add some where it is always busy
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    threads: usize,
    /// The most connections of clients; further ones wait in the system's queue
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..1 << 20))]
    max_connections: u32,
    /// How long the head of a request may take to arrive, and after it its body. A connection without a request, or
    /// whose client takes nothing of its answer, is closed after this time, too
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    request_timeout: u64,
    /// How long requests in flight may take after SIGTERM. Those that are not answered by then are stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    drain_timeout: u64,
    /// Lists the adapters of a model, which are named MODEL:ADAPTER. PATH is the model's lora_dir or multi_lora.json.
    /// May be given several times
    #[arg(long, value_name = "MODEL=PATH")]
    adapters: Vec<Place>,
    /// Reads the prompts of an embedding model, which prompt_name and input_type choose. PATH is the model's folder or
    /// config_sentence_transformers.json. May be given several times
    #[arg(long, value_name = "MODEL=PATH")]
    prompts: Vec<Place>,
    /// A PEM file with the server's certificate, and those that it is signed by: serves HTTPS only [default: HTTP]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// A PEM file with the private key of the certificate
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// A file with the keys of clients, one a line, with what each may do [default: clients need none]. SIGHUP reads it
    /// again, and the certificate
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Downloads images at http and https URLs of this host, from public addresses and without redirects. May be given
    /// several times [default: images come as data]
    #[arg(long, value_name = "HOST[:PORT]")]
    allow_image_host: Vec<ImageHost>,
    /// Clients may load and unload models of a tritonserver with --model-control-mode=explicit
    #[arg(long)]
    allow_model_control: bool,
    /// Stores responses of /v1/responses in this SQLite database, so that requests can continue them and ask for them
    /// again [default: nothing is stored]
    #[arg(long, value_name = "FILE")]
    response_store: Option<PathBuf>,
    /// The most bytes of stored responses and their inputs. The oldest ones make room
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, requires = "response_store")]
    response_store_bytes: u64,
    /// How long responses are stored
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=36500), requires = "response_store")]
    response_store_days: u64,
    /// Works off batches of OpenAI's API, with this many requests at a time, behind all other requests; files and
    /// results are stored with the responses [default: there are no batches]
    #[arg(long, value_name = "N", requires = "response_store", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    batch_requests: Option<usize>,
    /// The most bytes of the files and results of batches
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, requires = "batch_requests")]
    batch_bytes: u64,
    /// Shows the steps of a model at /live, and on the page. PATH is the model's stats_file, on this machine. May be
    /// given several times
    #[arg(long, value_name = "[NAME=]PATH")]
    stats_file: Vec<Source>,
    /// Pages of this origin may use the server in a browser: https://chat.example, or * for any. May be given several
    /// times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<Origin>,
    /// The request options that clients may send besides the APIs' fields, such as top_k,min_p; others are refused
    /// [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    allow_options: Vec<String>,
    /// Write a line of JSON for each request to standard error
    #[arg(long)]
    access_log: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let threads = Builder::new_multi_thread()
        .worker_threads(options.threads)
        .enable_all()
        .build();
    let runtime = match threads {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.to_string()),
    };
    match runtime.block_on(serve(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => failed(&problem),
    }
}

fn failed(problem: &str) -> ExitCode {
    eprintln!("inflight-openai: {problem}");
    ExitCode::FAILURE
}

/// Serves until SIGTERM or SIGINT, and then until the requests in flight are answered.
async fn serve(options: &Options) -> Result<(), String> {
    let authorities = match &options.triton_ca {
        Some(path) => Some(tls::read(path).map_err(|problem| format!("--triton-ca {problem}"))?),
        None => None,
    };
    let triton = Triton::at(&options.triton, authorities.as_deref())
        .map_err(|problem| format!("--triton {problem}"))?;
    let tls = read_tls(options)?.map(|tls| Arc::new(RwLock::new(tls)));
    let adapters = Adapters::of(options.adapters.clone())
        .map_err(|problem| format!("--adapters {problem}"))?;
    let prompts =
        Prompts::of(&options.prompts).map_err(|problem| format!("--prompts {problem}"))?;
    let request_timeout = Duration::from_secs(options.request_timeout);
    let limits = Limits {
        max_request_bytes: options.max_request_bytes,
        // One request must find room.
        max_body_bytes: options.max_body_bytes.max(options.max_request_bytes),
        max_requests: options.max_requests,
        max_body_time: request_timeout,
    };
    let keys = Arc::new(RwLock::new(read_keys(options)?));
    let store = open_store(options)?;
    let written = store.clone();
    let live = Live::of(options.stats_file.clone())
        .map_err(|problem| format!("--stats-file {problem}"))?;
    let (address, port) = (options.address, options.port);
    let listener = TcpListener::bind((address, port)).await.map_err(|error| {
        format!("--address {address} --port {port}: {error}; choose another port")
    })?;
    let stopped = |kind| signal(kind).map_err(|error| error.to_string());
    let (mut terminated, mut interrupted) = (
        stopped(SignalKind::terminate())?,
        stopped(SignalKind::interrupt())?,
    );
    let reloads = stopped(SignalKind::hangup())?;
    let local = listener.local_addr().map_err(|error| error.to_string())?;
    // For programs that start this one. They may have closed the pipe.
    let scheme = if tls.is_some() { "https" } else { "http" };
    let _ = writeln!(std::io::stdout(), "ready {scheme}://{local}");

    let shown = live.clone();
    let stop = async move {
        futures_util::future::select(
            std::pin::pin!(terminated.recv()),
            std::pin::pin!(interrupted.recv()),
        )
        .await;
        shown.stop();
    };
    let origins = options.allow_origin.clone();
    let log = options.access_log;
    let (background, batches) = (Background::default(), Background::default());
    let access = Access {
        keys: keys.clone(),
        metrics: options
            .triton_metrics
            .clone()
            .map(|address| TritonMetrics { address }),
        prompts,
        store,
        downloads: match &options.allow_image_host[..] {
            [] => None,
            hosts => Some(Downloads::new(hosts.to_vec())?),
        },
        controls_models: options.allow_model_control,
        background: background.clone(),
        batches: options.batch_requests.map(|max_requests| Settings {
            max_requests,
            background: batches.clone(),
        }),
        options: (!options.allow_options.is_empty()).then(|| options.allow_options.clone()),
    };
    let router = router(triton.clone(), adapters, limits, access, live, origins, log);
    let max_drain_time = Duration::from_secs(options.drain_timeout);
    let service = Service {
        router,
        tls: tls.clone(),
        max_connections: options.max_connections,
        max_head_time: request_timeout,
        max_drain_time,
    };
    let serve = async {
        listener::serve(listener, service, stop).await;
        background.ended_within(max_drain_time).await;
        // The next server runs the lines again that have no result.
        batches.ended_within(Duration::ZERO).await;
        // A process that ends cancels what it has asked for. Those requests end within seconds.
        triton.drained().await;
        if let Some(store) = written {
            store.flushed().await;
        }
    };
    let reload = reload(options, reloads, &keys, tls.as_deref());
    futures_util::future::select(std::pin::pin!(serve), std::pin::pin!(reload)).await;
    Ok(())
}

/// Reads the certificate and key, if the options name them.
fn read_tls(options: &Options) -> Result<Option<TlsAcceptor>, String> {
    match (&options.tls_certificate, &options.tls_key) {
        (Some(certificate), Some(key)) => tls::acceptor(certificate, key)
            .map(Some)
            .map_err(|problem| format!("--tls-certificate, --tls-key: {problem}")),
        _ => Ok(None),
    }
}

/// The database of stored responses, if the options name one.
fn open_store(options: &Options) -> Result<Option<ResponseStore>, String> {
    let Some(path) = &options.response_store else {
        return Ok(None);
    };
    let bounds = Bounds {
        max_bytes: options.response_store_bytes,
        max_age: Duration::from_secs(options.response_store_days * 24 * 60 * 60),
        max_history_bytes: options.max_request_bytes,
        max_batch_bytes: options.batch_bytes,
    };
    let store = ResponseStore::open(path, bounds);
    store
        .map(Some)
        .map_err(|problem| format!("--response-store {problem}"))
}

/// The keys of clients.
fn read_keys(options: &Options) -> Result<Keys, String> {
    match &options.api_key_file {
        Some(path) => Keys::read(path).map_err(|problem| format!("--api-key-file {problem}")),
        None => Ok(Keys::default()),
    }
}

/// Reads keys and certificate again with each signal. Those of before stay if a file is wrong, and connections that are
/// open keep theirs.
async fn reload(
    options: &Options,
    mut signals: Signal,
    keys: &RwLock<Keys>,
    tls: Option<&RwLock<TlsAcceptor>>,
) {
    while signals.recv().await.is_some() {
        match read_keys(options) {
            Ok(new) => replace(keys, new),
            Err(problem) => eprintln!("inflight-openai: {problem}; the keys of before stay"),
        }
        match (read_tls(options), tls) {
            (Ok(Some(new)), Some(tls)) => replace(tls, new),
            (Err(problem), _) => {
                eprintln!("inflight-openai: {problem}; the certificate of before stays");
            }
            _ => {}
        }
        eprintln!("inflight-openai: keys and certificate have been read again");
    }
}

fn replace<T>(place: &RwLock<T>, new: T) {
    *place.write().unwrap_or_else(PoisonError::into_inner) = new;
}

#[cfg(test)]
#[path = "../../../tests/support/manual_page.rs"]
mod manual_page;

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::{Options, manual_page};

    const EXAMPLES: &str = r#"
.SH EXIT STATUS
.TP
.B 0
SIGTERM or SIGINT has ended the server, and it has answered the requests in flight, or stopped those that took longer than
.BR \-\-drain\-timeout .
.TP
.B 1
It could not listen. Standard error says why.
.SH FILES
.TP
.I /usr/lib/systemd/system/inflight\-openai.service
The service, which is not started by the installation.
.TP
.I /etc/default/inflight\-openai
.B OPTIONS=
is a line of options for the service. The file may be missing.
.SH EXAMPLES
.EX
inflight\-openai \-\-triton 127.0.0.1:8001 &
curl http://127.0.0.1:9000/v1/models
.EE
"#;

    #[test]
    fn the_manual_page_is_that_of_the_options() {
        manual_page::compare(Options::command(), EXAMPLES);
    }
}
