//! The work on batches: each line is a request to the paths of this server, behind all others.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body as HttpBody, to_bytes};
use axum::http::{Request, StatusCode, header};
use futures_util::{StreamExt, stream};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::lines::{self, Line};
use crate::Error;
use crate::access_log::REQUEST_ID;
use crate::background::Background;
use crate::beside_streams::beside_streams;
use crate::error::MODEL_HAS_FAILED;
use crate::keys::{Client, Keys};
use crate::response_store::{OpenBatch, ResponseStore};

/// The paths that a batch may have.
pub const ENDPOINTS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
];
/// The option that puts a request behind all others.
const PRIORITY: &str = "request_priority";
/// The largest answer to a line.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// How long a line waits that found no room, at first and at most.
const WAITS: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];

/// Runs the lines of batches.
#[derive(Clone)]
pub struct Work {
    store: ResponseStore,
    /// The paths that lines ask.
    paths: Router,
    keys: Arc<RwLock<Keys>>,
    /// The options that clients may send; `None` for all.
    options: Option<Vec<String>>,
    background: Background,
    /// Room for lines that run.
    turns: Arc<Semaphore>,
    max_requests: usize,
}

/// The bounds of the work on batches.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The most lines that run at a time.
    pub max_requests: usize,
    /// The batches that are worked on.
    pub background: Background,
}

impl Work {
    /// The work on the batches in a store, which are asked of `paths` for clients with these keys.
    pub fn new(
        store: ResponseStore,
        paths: Router,
        keys: Arc<RwLock<Keys>>,
        options: Option<Vec<String>>,
        settings: Settings,
    ) -> Self {
        Self {
            store,
            paths,
            keys,
            options,
            background: settings.background,
            turns: Arc::new(Semaphore::new(settings.max_requests)),
            max_requests: settings.max_requests,
        }
    }

    /// Goes on with the batches that are open.
    pub async fn resume(&self) {
        match self.store.ask(|database| database.open_batches()).await {
            Ok(batches) => batches.into_iter().for_each(|batch| self.start(batch)),
            Err(error) => eprintln!("inflight-openai: batches do not go on: {}", error.message),
        }
    }

    /// Starts the work on a batch.
    pub fn start(&self, batch: OpenBatch) {
        let work = self.clone();
        let id = batch.id.clone();
        self.background.start(id, async move {
            let (status, errors) = match work.lines(&batch).await {
                Ok(()) => ("completed", Vec::new()),
                Err(errors) => ("failed", errors),
            };
            let OpenBatch { owner, id, .. } = batch;
            let ended = work
                .store
                .ask(move |database| database.end_batch(owner, &id, status, &errors));
            if let Err(error) = ended.await {
                eprintln!("inflight-openai: a batch does not end: {}", error.message);
            }
        });
    }

    /// Stops the work on a batch.
    pub fn stop(&self, id: &str) {
        self.background.stop(id);
    }

    /// Has the lines of a batch computed that have no result.
    async fn lines(&self, batch: &OpenBatch) -> Result<(), Vec<Value>> {
        let failed = |error: Error| {
            vec![
                json!({"code": "server_error", "message": error.message, "line": null, "param": null}),
            ]
        };
        let (owner, id) = (batch.owner, batch.id.clone());
        let input = self
            .store
            .ask(move |database| database.batch_input(owner, &id));
        let (content, done) = input.await.map_err(failed)?;
        let read = || lines::requests(&content, &batch.endpoint);
        let lines = beside_streams(content.len(), read).await?;
        drop(content);
        let (id, num_lines) = (batch.id.clone(), lines.len());
        let begun = self
            .store
            .ask(move |database| database.begin_batch(owner, &id, num_lines));
        begun.await.map_err(failed)?;
        let done: HashSet<_> = done.into_iter().collect();
        let lines = lines.into_iter().filter(|line| !done.contains(&line.index));
        let results = stream::iter(lines).map(|line| self.line(batch, line));
        let mut results = std::pin::pin!(results.buffer_unordered(self.max_requests));
        while let Some(result) = results.next().await {
            result.map_err(failed)?;
        }
        Ok(())
    }

    /// Has a line computed, and stores its result.
    async fn line(&self, batch: &OpenBatch, line: Line) -> Result<(), Error> {
        let [mut wait, max_wait] = WAITS;
        let (status, request_id, answer) = loop {
            let turn = self.turns.acquire().await;
            // The keys may have been read again.
            let keys = self
                .keys
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            let Some(client) = keys.client_of(batch.owner) else {
                let error = Error::unauthorized("the key of the batch is no longer known");
                break (StatusCode::UNAUTHORIZED, String::new(), error.body());
            };
            let asked = match client.rights.admit(Instant::now()) {
                Err((_, wait)) => Err(wait),
                Ok(()) => match self.ask(&client, batch, &line).await? {
                    (status, _, answer) if has_no_room(status, &answer) => Err(wait),
                    asked => Ok(asked),
                },
            };
            match asked {
                Ok(asked) => break asked,
                Err(least) => {
                    // Lines of other keys may find room.
                    drop(turn);
                    tokio::time::sleep(least.max(wait)).await;
                }
            }
            wait = (wait * 2).min(max_wait);
        };
        let result = lines::result(&line.custom_id, status.as_u16(), &request_id, &answer);
        let (owner, id) = (batch.owner, batch.id.clone());
        let is_error = status != StatusCode::OK;
        let add = move |database: &mut crate::response_store::Database| {
            database.add_result(owner, &id, line.index, is_error, &result)
        };
        self.store.ask(add).await
    }

    /// The status of an answer to a line, the id of its request, and the answer.
    async fn ask(
        &self,
        client: &Client,
        batch: &OpenBatch,
        line: &Line,
    ) -> Result<(StatusCode, String, Value), Error> {
        let options = client.rights.options().or(self.options.as_deref());
        let mut body = line.body.clone();
        if options.is_none_or(|options| options.iter().any(|option| option == PRIORITY)) {
            let mut fields: Value = serde_json::from_str(&body).unwrap_or_default();
            fields[PRIORITY] = json!(i32::MAX);
            body = fields.to_string();
        }
        let request = Request::post(&batch.endpoint)
            .header(header::CONTENT_TYPE, "application/json")
            .extension(client.clone())
            .body(HttpBody::from(body))
            .map_err(|error| Error::invalid(error.to_string()))?;
        let service = TowerToHyperService::new(self.paths.clone());
        let Ok(response) = service.call(request).await;
        let status = response.status();
        let id = response.headers().get(REQUEST_ID);
        let id = id
            .and_then(|id| id.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let bytes = to_bytes(response.into_body(), MAX_ANSWER_BYTES).await;
        let bytes = bytes.map_err(|error| Error::bad_response(&error.to_string()))?;
        let answer = serde_json::from_slice(&bytes);
        Ok((status, id, answer.unwrap_or_default()))
    }
}

/// Whether a request was refused because there is no room for it now, or no server.
fn has_no_room(status: StatusCode, answer: &Value) -> bool {
    let passes = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    passes && answer["error"]["code"] != MODEL_HAS_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_behind_all_others_if_its_client_may_say_so() {
        use std::path::Path;

        use axum::routing::post;
        use tokio::runtime::Builder;

        use crate::keys::Owner;
        use crate::response_store::Bounds;

        let bounds = Bounds {
            max_bytes: 1 << 20,
            max_age: Duration::from_secs(100),
            max_history_bytes: 1 << 20,
            max_batch_bytes: 1 << 20,
        };
        let priority = |options: Option<&str>| {
            let runtime = Builder::new_current_thread().build().expect("a thread");
            let name = format!("inflight-batch-work-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let store = ResponseStore::open(Path::new(&path), bounds).expect("a store");
            let settings = Settings {
                max_requests: 1,
                background: Background::default(),
            };
            let options = options.map(|option| vec![option.to_owned()]);
            let echo = post(|body: String| async { body });
            let paths = Router::new().route(ENDPOINTS[1], echo);
            let work = Work::new(store, paths, Arc::default(), options, settings);
            let batch = OpenBatch {
                owner: Owner::default(),
                id: "batch-1".to_owned(),
                endpoint: ENDPOINTS[1].to_owned(),
            };
            let line = Line {
                index: 0,
                custom_id: "a".to_owned(),
                body: json!({"prompt": "a", "request_priority": 3}).to_string(),
            };
            let client = Client::default();
            let asked = runtime.block_on(work.ask(&client, &batch, &line));
            let (status, _, body) = asked.expect("an answer");
            std::fs::remove_file(path).expect("removed");
            assert_eq!((status, &body["prompt"]), (StatusCode::OK, &json!("a")));
            body[PRIORITY].clone()
        };
        assert_eq!(priority(None), json!(i32::MAX));
        assert_eq!(priority(Some(PRIORITY)), json!(i32::MAX));
        assert_eq!(priority(Some("top_k")), json!(3), "it is refused there");
    }

    #[test]
    fn a_line_waits_for_room_and_not_for_a_model_that_has_failed() {
        let busy = json!({"error": {"code": null}});
        let failed = json!({"error": {"code": MODEL_HAS_FAILED}});
        assert!(has_no_room(StatusCode::TOO_MANY_REQUESTS, &busy));
        assert!(has_no_room(StatusCode::SERVICE_UNAVAILABLE, &busy));
        assert!(!has_no_room(StatusCode::SERVICE_UNAVAILABLE, &failed));
        assert!(!has_no_room(StatusCode::BAD_REQUEST, &busy));
    }
}
