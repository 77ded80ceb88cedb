//! Replies as server-sent events (HTML Living Standard, section 9.2).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

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
/// The most that is kept for a client who does not read. Beyond it, the answer waits for its client.
const MAX_AHEAD_BYTES: usize = 1 << 20;
/// How often the front looks whether a client reads.
const READ_AHEAD_PERIOD: Duration = Duration::from_millis(500);

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
    let source = Arc::new(Mutex::new(Source {
        answers: Some(answers),
        chunks,
        num_bytes: 0,
        ahead: Vec::new(),
        waker: None,
        is_taken: false,
    }));
    tokio::spawn(read_ahead(Arc::downgrade(&source)));
    let events = Events(source);
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Body::new(events)).into_response()
}

/// The body of a stream: a frame for each answer that has events.
struct Events<C>(Arc<Mutex<Source<C>>>);

/// The state from which frames are built.
struct Source<C> {
    /// `None` behind the last event.
    answers: Option<Answers>,
    chunks: C,
    /// The length of the longest frame. The next one has room for as many.
    num_bytes: usize,
    /// Events that a client who does not read has not taken yet.
    ahead: Vec<u8>,
    /// Wakes who sends frames.
    waker: Option<Waker>,
    /// Frames have been asked for since this was last looked at.
    is_taken: bool,
}

impl<C: Chunks> http_body::Body for Events<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        source.is_taken = true;
        match &mut source.waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => source.waker = Some(context.waker().clone()),
        }
        let events = match source.ahead.is_empty() {
            true => ready!(source.poll_events(context)),
            false => Some(std::mem::take(&mut source.ahead)),
        };
        Poll::Ready(events.map(|events| Ok(Frame::data(events.into()))))
    }
}

impl<C: Chunks> Source<C> {
    /// The next events, at least one; `None` behind the last.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        let mut out = Vec::new();
        while let Some(answers) = &mut self.answers
            && out.is_empty()
        {
            let answer = ready!(answers.poll_next_unpin(context));
            out.reserve(self.num_bytes);
            match answer {
                Some(Ok(answer)) => self.chunks.write(answer, &mut out),
                Some(Err(error)) => {
                    self.chunks.fail(&error, &mut out);
                    self.answers = None;
                }
                None => {
                    self.chunks.finish(&mut out);
                    out.extend_from_slice(self.chunks.end());
                    self.answers = None;
                }
            }
        }
        self.num_bytes = self.num_bytes.max(out.len()).min(MAX_RESERVED_BYTES);
        Poll::Ready((!out.is_empty()).then_some(out))
    }

    /// Reads the answers that are there, if no frame has been asked for since the last time. Returns whether there may
    /// be more.
    fn read_ahead(&mut self) -> bool {
        if !std::mem::take(&mut self.is_taken)
            && let Some(waker) = self.waker.clone()
        {
            let mut context = Context::from_waker(&waker);
            while self.ahead.len() < MAX_AHEAD_BYTES
                && let Poll::Ready(Some(events)) = self.poll_events(&mut context)
            {
                self.ahead.extend_from_slice(&events);
            }
        }
        self.answers.is_some()
    }
}

/// Reads the answers of a client who does not, so that they end with the model's work and give their place back.
async fn read_ahead<C: Chunks>(source: Weak<Mutex<Source<C>>>) {
    let has_more = || {
        let source = source.upgrade();
        source.is_some_and(|source| {
            let mut source = source.lock().unwrap_or_else(PoisonError::into_inner);
            source.read_ahead()
        })
    };
    loop {
        tokio::time::sleep(READ_AHEAD_PERIOD).await;
        if !has_more() {
            return;
        }
    }
}
