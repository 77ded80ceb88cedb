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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// How long the listener rests where a connection cannot be accepted: the process has no more files.
const REST: Duration = Duration::from_millis(100);

/// What connections are served with.
#[derive(Clone)]
pub struct Service {
    /// Answers requests.
    pub router: Router,
    /// Encrypts connections.
    pub tls: Option<TlsAcceptor>,
    /// How long the head of a request may take to arrive, and before it a connection's encryption. A connection
    /// without a request is closed after this time, too.
    pub max_head_time: Duration,
}

/// Serves whoever connects until `stop` is ready, and then until the requests in flight are answered.
pub async fn serve(listener: TcpListener, service: Service, stop: impl Future<Output = ()>) {
    let connections = GracefulShutdown::new();
    let accept = accept(listener, service, &connections);
    match select(std::pin::pin!(accept), std::pin::pin!(stop)).await {
        Either::Left((never, _)) => match never {},
        Either::Right(((), _)) => {}
    }
    connections.shutdown().await;
}

/// Accepts connections. Whoever drops this closes the port.
async fn accept(
    listener: TcpListener,
    service: Service,
    connections: &GracefulShutdown,
) -> Infallible {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(service.clone().serve(stream, connections.watcher()));
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

impl Service {
    /// Serves a connection. What goes wrong ends it, and concerns its client alone.
    async fn serve(self, stream: TcpStream, watcher: Watcher) {
        // A token is sent as soon as it is there.
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else {
            return self.serve_requests(stream, watcher).await;
        };
        let encrypted = tokio::time::timeout(self.max_head_time, tls.accept(stream)).await;
        if let Ok(Ok(stream)) = encrypted {
            self.serve_requests(stream, watcher).await;
        }
    }

    /// Serves the requests of a connection, one after the other.
    async fn serve_requests<S>(self, stream: S, watcher: Watcher)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Frames of streams are short: to copy them into one buffer costs less than to write a list of their parts.
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.max_head_time)
            .writev(false)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.router));
        let _ = watcher.watch(connection).await;
    }
}
