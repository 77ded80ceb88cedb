//! Replies as server-sent events (HTML Living Standard, section 9.2).

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use crate::Error;
use crate::answer::{Answer, Answers};

/// What the events of a stream consist of.
pub trait Chunks: Send + 'static {
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
    serde_json::to_writer(&mut *out, value).expect("chunks are JSON, and a vector takes all bytes");
    out.extend_from_slice(b"\n\n");
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
    let bodies = stream::unfold(Some((answers, chunks)), |state| async move {
        let (mut answers, mut chunks) = state?;
        let mut out = Vec::new();
        loop {
            match answers.next().await {
                Some(Ok(answer)) => {
                    chunks.write(answer, &mut out);
                    if !out.is_empty() {
                        return Some((out, Some((answers, chunks))));
                    }
                }
                Some(Err(error)) => {
                    chunks.fail(&error, &mut out);
                    return Some((out, None));
                }
                None => {
                    chunks.finish(&mut out);
                    out.extend_from_slice(chunks.end());
                    return Some((out, None));
                }
            }
        }
    });
    let bodies = bodies.map(|bytes| Ok::<_, Infallible>(Bytes::from(bytes)));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Body::from_stream(bodies)).into_response()
}
