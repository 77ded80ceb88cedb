//! A line of JSON for each request, when its answer is sent or its client has left.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use serde_json::json;

/// The header with the id of an answer, which is also in Triton's request ids.
pub const REQUEST_ID: &str = "x-request-id";

/// Serves a request, and writes its line to standard error.
pub async fn logged(request: Request, next: Next) -> Response {
    let mut line = Line {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        status: None,
        id: None,
        num_bytes: 0,
        is_whole: false,
        started: Instant::now(),
    };
    let response = next.run(request).await;
    line.status = Some(response.status().as_u16());
    let id = response.headers().get(REQUEST_ID);
    line.id = id.and_then(|id| id.to_str().ok()).map(str::to_owned);
    response.map(|body| Body::new(Logged { body, line }))
}

/// What is written about a request.
struct Line {
    method: String,
    path: String,
    /// `None` if the client left before there was an answer.
    status: Option<u16>,
    id: Option<String>,
    num_bytes: u64,
    is_whole: bool,
    started: Instant,
}

impl Drop for Line {
    fn drop(&mut self) {
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let line = json!({
            "time": time.as_millis() as f64 / 1e3,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "id": self.id,
            "duration_ms": self.started.elapsed().as_micros() as f64 / 1e3,
            "num_bytes": self.num_bytes,
            "is_whole": self.is_whole,
        });
        eprintln!("{line}");
    }
}

/// A body that counts its bytes. Its line is written when it is dropped.
struct Logged {
    body: Body,
    line: Line,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                let data = frame.data_ref();
                self.line.num_bytes += data.map_or(0, |data| data.len() as u64);
                // A body of known length is not asked for its end.
                self.line.is_whole = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.line.is_whole = true,
            _ => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
