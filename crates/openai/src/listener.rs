//! The connections of clients: accepted, bounded in time, and ended in order.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::time::Duration;

use axum::Router;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};

/// How long the listener rests where a connection cannot be accepted: the process has no more files.
const REST: Duration = Duration::from_millis(100);

/// Serves a router's paths to whoever connects, until `stop` is ready, and then until the requests in flight are answered. A
/// connection whose client takes longer than `max_head_time` for the head of a request is closed, and so is one without a
/// request in this time.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    max_head_time: Duration,
    stop: impl Future<Output = ()>,
) {
    let connections = GracefulShutdown::new();
    let accept = accept(listener, router, max_head_time, &connections);
    match select(std::pin::pin!(accept), std::pin::pin!(stop)).await {
        Either::Left((never, _)) => match never {},
        Either::Right(((), _)) => {}
    }
    connections.shutdown().await;
}

/// Accepts connections. Whoever drops this closes the port.
async fn accept(
    listener: TcpListener,
    router: Router,
    max_head_time: Duration,
    connections: &GracefulShutdown,
) -> Infallible {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let connection = Connection {
                    router: router.clone(),
                    max_head_time,
                    watcher: connections.watcher(),
                };
                tokio::spawn(connection.serve(stream));
            }
            Err(error) if is_of_the_client(&error) => {}
            Err(error) => {
                eprintln!("inflight-openai: a connection cannot be accepted: {error}");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

/// Whether a connection was closed before it was accepted.
fn is_of_the_client(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
    )
}

/// What a connection is served with.
struct Connection {
    router: Router,
    max_head_time: Duration,
    watcher: Watcher,
}

impl Connection {
    /// Serves the requests of a connection, one after the other. What goes wrong ends it, and concerns its client alone.
    async fn serve(self, stream: TcpStream) {
        // A token is sent as soon as it is there.
        let _ = stream.set_nodelay(true);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.max_head_time)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.router));
        let _ = self.watcher.watch(connection).await;
    }
}
