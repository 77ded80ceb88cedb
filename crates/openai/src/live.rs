//! `/live`: the steps of the models as they happen, from the statistics files that the backend writes.
//!
//! One reader serves any number of clients. It reads only while there are some, and only what is appended from then on.
//! A client that is too slow misses steps, and nobody waits for it.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::step_file::{Source, StepFile};
use crate::{Error, sse};

/// The most files.
pub const MAX_FILES: usize = 16;
/// The most clients at a time.
const MAX_CLIENTS: usize = 64;
/// Events that a client may be behind before it misses some.
const MAX_EVENTS_BEHIND: usize = 64;
/// How often the files are read. The backend writes ten times a second.
const PERIOD: Duration = Duration::from_millis(50);
/// How long a client hears nothing. A connection that is gone is noticed when something is sent.
const MAX_SILENCE: Duration = Duration::from_secs(15);

/// The steps of the models, for those who look.
#[derive(Clone)]
pub struct Live(Arc<Feed>);

struct Feed {
    names: Vec<String>,
    /// `None` without files, and once the server stops.
    sender: Mutex<Option<Sender<Bytes>>>,
    clients: Arc<Semaphore>,
    /// A client has come.
    wanted: Notify,
}

impl Live {
    /// A feed of these files, which need not exist yet. Reads them in a task of its own.
    ///
    /// # Errors
    /// Two files have the same name, or there are too many.
    pub fn of(sources: Vec<Source>) -> Result<Self, String> {
        if sources.len() > MAX_FILES {
            return Err(format!("{} files; at most {MAX_FILES}", sources.len()));
        }
        let names: Vec<_> = sources.iter().map(|source| source.name.clone()).collect();
        for (index, name) in names.iter().enumerate() {
            if names[..index].contains(name) {
                return Err(format!("two files are named '{name}'; write NAME=PATH"));
            }
        }
        let has_files = !sources.is_empty();
        let feed = Arc::new(Feed {
            names,
            sender: Mutex::new(has_files.then(|| broadcast::channel(MAX_EVENTS_BEHIND).0)),
            clients: Arc::new(Semaphore::new(MAX_CLIENTS)),
            wanted: Notify::new(),
        });
        if has_files {
            tokio::spawn(read(feed.clone(), sources));
        }
        Ok(Self(feed))
    }

    /// Ends all streams.
    pub fn stop(&self) {
        self.0.lock().take();
    }

    /// A stream of events for a client.
    ///
    /// # Errors
    /// There are no files, or too many clients.
    pub fn response(&self) -> Result<Response, Error> {
        let feed = &self.0;
        if feed.names.is_empty() {
            return Err(Error::nothing_live());
        }
        let permit = feed.clients.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Error::too_many_look(MAX_CLIENTS))?;
        let receiver = feed.lock().as_ref().map(Sender::subscribe);
        feed.wanted.notify_one();
        let mut first = Vec::new();
        sse::event(&json!({"models": feed.names}), &mut first);
        let state = Some((Some(first), receiver, permit));
        let events = stream::unfold(state, |state| async move { next(state?).await });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        Ok((headers, Body::from_stream(events)).into_response())
    }
}

/// What a client's stream goes on with: the first event, the later ones, and its place among the clients.
type State = (
    Option<Vec<u8>>,
    Option<Receiver<Bytes>>,
    OwnedSemaphorePermit,
);

async fn next(
    (first, receiver, permit): State,
) -> Option<(Result<Bytes, Infallible>, Option<State>)> {
    if let Some(first) = first {
        return Some((Ok(first.into()), Some((None, receiver, permit))));
    }
    let mut receiver = receiver?;
    let event = loop {
        match timeout(MAX_SILENCE, receiver.recv()).await {
            Ok(Ok(event)) => break event,
            Ok(Err(RecvError::Lagged(_))) => {}
            Ok(Err(RecvError::Closed)) => return None,
            Err(_) => break Bytes::from_static(b":\n\n"),
        }
    };
    Some((Ok(event), Some((None, Some(receiver), permit))))
}

impl Feed {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Sender<Bytes>>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends events; returns whether anybody looks, or `None` once the server stops.
    fn send(&self, events: Vec<Vec<u8>>) -> Option<bool> {
        let sender = self.lock();
        let sender = sender.as_ref()?;
        for event in events {
            // Nobody need be there.
            let _ = sender.send(event.into());
        }
        Some(sender.receiver_count() > 0)
    }
}

/// Reads the files while there are clients.
async fn read(feed: Arc<Feed>, sources: Vec<Source>) {
    let mut files: Vec<_> = sources.into_iter().map(StepFile::of).collect();
    while let Some(is_watched) = feed.send(Vec::new()) {
        if !is_watched {
            feed.wanted.notified().await;
            files.iter_mut().for_each(StepFile::forget);
        }
        let reading = spawn_blocking(move || {
            let events = files.iter_mut().filter_map(StepFile::new_steps).collect();
            (files, events)
        });
        let Ok((read, events)) = reading.await else {
            return;
        };
        files = read;
        if feed.send(events).is_none() {
            return;
        }
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Runtime;

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        Runtime::new().expect("threads").block_on(test);
    }

    #[test]
    fn files_have_names_of_their_own() {
        run(async {
            let sources = |texts: &[&str]| -> Vec<Source> {
                texts.iter().map(|text| text.parse().expect(text)).collect()
            };
            let error = Live::of(sources(&["/a/stats.jsonl", "/b/stats.jsonl"])).err();
            assert_eq!(
                error.as_deref(),
                Some("two files are named 'stats'; write NAME=PATH")
            );
            let names: Vec<_> = (0..=MAX_FILES).map(|n| format!("/{n}")).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            assert!(Live::of(sources(&names)).is_err());
            assert!(Live::of(sources(&names[1..])).is_ok());
        });
    }

    #[test]
    fn clients_are_limited_and_a_stop_ends_their_streams() {
        run(async {
            let source = "/nowhere/stats.jsonl".parse().expect("a path");
            let live = Live::of(vec![source]).expect("one file");
            let responses: Vec<_> = (0..MAX_CLIENTS)
                .map(|_| live.response().expect("a place"))
                .collect();
            assert_eq!(live.response().expect_err("no place").status.as_u16(), 429);
            live.stop();
            for response in responses {
                let body = axum::body::to_bytes(response.into_body(), 1 << 10).await;
                let body = body.expect("a body that ends");
                assert_eq!(&body[..], b"data: {\"models\":[\"stats\"]}\n\n");
            }
            assert!(live.response().is_ok());
        });
    }

    #[test]
    fn without_files_there_is_nothing_to_see() {
        run(async {
            let live = Live::of(Vec::new()).expect("no files");
            assert_eq!(live.response().expect_err("none").status.as_u16(), 404);
        });
    }
}
