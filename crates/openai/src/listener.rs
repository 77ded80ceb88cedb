//! The connections of clients: accepted, bounded in number and time, and ended in order.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use futures_util::future::{Either, select};
use http_body::{Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// How long the listener rests where a connection cannot be accepted: the process has no more files.
const REST: Duration = Duration::from_millis(100);
/// How often a server that stops looks for connections without a request.
const END_PERIOD: Duration = Duration::from_millis(100);

/// What connections are served with.
#[derive(Clone)]
pub struct Service {
    /// Answers requests.
    pub router: Router,
    /// Encrypts connections. May be replaced while they are served.
    pub tls: Option<Arc<RwLock<TlsAcceptor>>>,
    /// The most connections. Further ones wait in the system's queue.
    pub max_connections: u32,
    /// How long the head of a request may take to arrive, and before it a connection's encryption. A connection
    /// without a request, and one whose client takes nothing of an answer, are closed after this time, too.
    pub max_head_time: Duration,
    /// How long requests in flight may take when the server stops.
    pub max_drain_time: Duration,
}

/// The phase of a shutdown, as connections see it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// End behind the request in flight.
    Stopping,
    /// End at once.
    Ended,
}

/// Serves whoever connects until `stop` is ready, and then until the requests in flight are answered, or the time for
/// that is over.
pub async fn serve(listener: TcpListener, service: Service, stop: impl Future<Output = ()>) {
    let max = service.max_connections;
    let max_drain_time = service.max_drain_time;
    let room = Arc::new(Semaphore::new(max as usize));
    let (tell, phase) = watch::channel(Phase::Serving);
    let accept = accept(listener, service, phase, room.clone());
    match select(std::pin::pin!(accept), std::pin::pin!(stop)).await {
        Either::Left((never, _)) => match never {},
        Either::Right(((), _)) => {}
    }
    tell.send_replace(Phase::Stopping);
    if timeout(max_drain_time, room.acquire_many(max))
        .await
        .is_err()
    {
        tell.send_replace(Phase::Ended);
        let _ = room.acquire_many(max).await;
    }
}

/// Accepts connections. Whoever drops this closes the port.
async fn accept(
    listener: TcpListener,
    service: Service,
    phase: watch::Receiver<Phase>,
    room: Arc<Semaphore>,
) -> Infallible {
    loop {
        let permit = room.clone().acquire_owned().await;
        let permit = permit.expect("nobody closes the semaphore");
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(service.clone().serve(stream, phase.clone(), permit));
            }
            Err(error) if is_of_the_client(&error) => {}
            Err(error) => {
                eprintln!("inflight-openai: a connection cannot be accepted: {error}");
                sleep(REST).await;
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
    async fn serve(
        self,
        stream: TcpStream,
        mut phase: watch::Receiver<Phase>,
        _permit: OwnedSemaphorePermit,
    ) {
        // A token is sent as soon as it is there.
        let _ = stream.set_nodelay(true);
        let use_ = Arc::new(Use::default());
        let stream = Patient::new(stream, self.max_head_time, use_.clone());
        let Some(tls) = &self.tls else {
            return self.serve_requests(stream, phase, use_).await;
        };
        let tls = tls
            .read()
            .unwrap_or_else(|poison| poison.into_inner())
            .clone();
        let encrypted = timeout(self.max_head_time, tls.accept(stream));
        let stops = phase.wait_for(|phase| *phase != Phase::Serving);
        let encrypted = match select(std::pin::pin!(encrypted), std::pin::pin!(stops)).await {
            Either::Left((Ok(Ok(stream)), _)) => stream,
            _ => return,
        };
        self.serve_requests(encrypted, phase, use_).await;
    }

    /// Serves the requests of a connection, one after the other.
    async fn serve_requests<S>(self, stream: S, mut phase: watch::Receiver<Phase>, use_: Arc<Use>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let router = TowerToHyperService::new(self.router);
        let requests = service_fn(|request| {
            let request_in_flight = InFlight::new(use_.clone());
            let response = router.call(request);
            async move {
                let response = response.await?;
                Ok::<_, Infallible>(response.map(|body| Tracked {
                    body,
                    _in_flight: request_in_flight,
                }))
            }
        });
        // Frames of streams are short: to copy them into one buffer costs less than to write a list of their parts.
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.max_head_time)
            .writev(false)
            .serve_connection(TokioIo::new(stream), requests);
        let mut connection = std::pin::pin!(connection);
        {
            let stops = phase.wait_for(|phase| *phase != Phase::Serving);
            if let Either::Left(_) = select(connection.as_mut(), std::pin::pin!(stops)).await {
                return;
            }
        }
        connection.as_mut().graceful_shutdown();
        let idle = async {
            let ended = phase.wait_for(|phase| *phase == Phase::Ended);
            let unused = async {
                // A request that is there may not have been read yet.
                sleep(END_PERIOD).await;
                while use_.is_used() {
                    sleep(END_PERIOD).await;
                }
            };
            select(std::pin::pin!(ended), std::pin::pin!(unused)).await;
        };
        select(connection, std::pin::pin!(idle)).await;
    }
}

/// Whether a connection has a request in flight, or an answer to send.
#[derive(Default)]
struct Use {
    num_requests: AtomicUsize,
    is_writing: AtomicBool,
}

impl Use {
    fn is_used(&self) -> bool {
        self.num_requests.load(Ordering::Relaxed) > 0 || self.is_writing.load(Ordering::Relaxed)
    }
}

/// A request of a connection, until its answer is handed over.
struct InFlight(Arc<Use>);

impl InFlight {
    fn new(connection: Arc<Use>) -> Self {
        connection.num_requests.fetch_add(1, Ordering::Relaxed);
        Self(connection)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.num_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer, which belongs to a request in flight.
struct Tracked {
    body: Body,
    _in_flight: InFlight,
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream to a client that fails when the client takes nothing for some time.
struct Patient<S> {
    stream: S,
    max_wait: Duration,
    /// `None` until something has to wait for the client.
    wait: Option<Pin<Box<Sleep>>>,
    connection: Arc<Use>,
}

impl<S> Patient<S> {
    fn new(stream: S, max_wait: Duration, connection: Arc<Use>) -> Self {
        Self {
            stream,
            max_wait,
            wait: None,
            connection,
        }
    }

    /// Passes on the outcome of a write, or a timeout error if the write has been pending for too long.
    fn bounded<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        let is_writing = &self.connection.is_writing;
        if written.is_ready() {
            if self.wait.take().is_some() {
                is_writing.store(false, Ordering::Relaxed);
            }
            return written;
        }
        is_writing.store(true, Ordering::Relaxed);
        let end = Instant::now() + self.max_wait;
        let wait = self
            .wait
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        ready!(wait.as_mut().poll(context));
        let problem = "the client takes nothing of its answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, problem)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Not bounded: flushing a socket is a no-op, and no sign of what the client has read.
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
