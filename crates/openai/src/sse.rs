//! Replies as server-sent events (HTML Living Standard, section 9.2).

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use http_body::Frame;
use serde::Serialize;

use crate::Error;
use crate::answer::{Answer, Answers};

/// The most that is reserved for a frame before it is written.
const MAX_RESERVED_BYTES: usize = 1024;

/// What the events of a stream consist of.
pub trait Chunks: Send + Unpin + 'static {
    /// Writes the events of an answer.
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>);

    /// Writes the events behind the last answer.
    fn finish(&mut self, out: &mut Vec<u8>);

    /// Writes the last events of a stream that fails.
    fn fail(&mut self, error: &Error, out: &mut Vec<u8>) {
        event(&error.body(), out);
    }

    /// What ends a stream that does not fail.
    fn end(&self) -> &'static [u8] {
        b"data: [DONE]\n\n"
    }
}

/// Writes one event with JSON.
pub fn event(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    json(value, out);
    out.extend_from_slice(b"\n\n");
}

/// Writes JSON.
pub fn json(value: &(impl Serialize + ?Sized), out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("events are JSON, and a vector takes all bytes");
}

/// Writes one event with a name.
pub fn named_event(name: &str, value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    event(value, out);
}

/// A response that sends what `chunks` makes of the answers. An error behind the first event is the last event.
/// The answers end when the client has left.
pub fn response(answers: Answers, chunks: impl Chunks) -> Response {
    let events = Events {
        answers: Some(answers),
        chunks,
        num_bytes: 0,
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Body::new(events)).into_response()
}

/// The body of a stream: a frame for each answer that has events.
struct Events<C> {
    /// `None` behind the last event.
    answers: Option<Answers>,
    chunks: C,
    /// The length of the longest frame. The next one has room for as many.
    num_bytes: usize,
}

impl<C: Chunks> http_body::Body for Events<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let mut out = Vec::new();
        while let Some(answers) = &mut this.answers
            && out.is_empty()
        {
            let answer = ready!(answers.poll_next_unpin(context));
            out.reserve(this.num_bytes);
            match answer {
                Some(Ok(answer)) => this.chunks.write(answer, &mut out),
                Some(Err(error)) => {
                    this.chunks.fail(&error, &mut out);
                    this.answers = None;
                }
                None => {
                    this.chunks.finish(&mut out);
                    out.extend_from_slice(this.chunks.end());
                    this.answers = None;
                }
            }
        }
        this.num_bytes = this.num_bytes.max(out.len()).min(MAX_RESERVED_BYTES);
        let has_events = !out.is_empty();
        Poll::Ready(has_events.then(|| Ok(Frame::data(out.into()))))
    }
}
