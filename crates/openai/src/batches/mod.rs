//! `/v1/files` and `/v1/batches`: files of requests, which the server works off behind all other requests.
//!
//! | file | noun |
//! |---|---|
//! | `form.rs` | the parts of an upload |
//! | `lines.rs` | the lines of a batch: requests, and their results |
//! | `work.rs` | the work on batches |

pub mod form;
pub mod lines;
pub mod work;

use std::sync::Arc;

use axum::Router;
use axum::body::{Body as HttpBody, Bytes};
use axum::extract::{Extension, Path, Request, State};
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};

use crate::body::{Body, wrong};
use crate::content::Bodies;
use crate::conversations::metadata;
use crate::json_response::json_response;
use crate::keys::{Client, Owner};
use crate::pages::{list_of, page_query};
use crate::response_store::{Database, OpenBatch, Page, PageQuery, Part, ResponseStore};
use crate::{Error, ids};
use work::{ENDPOINTS, Work};

/// The longest name of a file.
const MAX_NAME_CHARS: usize = 256;

#[derive(Clone)]
struct Batches {
    bodies: Arc<Bodies>,
    store: ResponseStore,
    work: Work,
}

impl Batches {
    /// The response with the object that `read` finds.
    async fn object(
        &self,
        read: impl FnOnce(&Database) -> Result<Value, Error> + Send + 'static,
    ) -> Result<Response, Error> {
        let found = self.store.ask(|database| read(database));
        Ok(json_response(&found.await?))
    }

    /// The response with the page that `uri` asks for and `read` finds.
    async fn page(
        &self,
        uri: &Uri,
        read: impl FnOnce(&Database, &PageQuery) -> Result<Page, Error> + Send + 'static,
    ) -> Result<Response, Error> {
        let query = page_query(uri.query().unwrap_or_default())?;
        self.object(move |database| read(database, &query).map(list_of))
            .await
    }
}

/// The paths, whose bodies are read from `bodies`.
pub fn routes<S: Clone + Send + Sync + 'static>(
    bodies: Arc<Bodies>,
    store: ResponseStore,
    work: Work,
) -> Router<S> {
    Router::new()
        .route("/v1/files", get(files).post(upload))
        .route("/v1/files/{id}", get(file).delete(delete_file))
        .route("/v1/files/{id}/content", get(content))
        .route("/v1/batches", get(batches).post(create))
        .route("/v1/batches/{id}", get(batch))
        .route("/v1/batches/{id}/cancel", post(cancel))
        .with_state(Batches {
            bodies,
            store,
            work,
        })
}

async fn upload(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Error> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let body = state.bodies.read(request).await?;
    let parts = form::parts(&kind, &body)?;
    let mut file = None;
    let mut has_purpose = false;
    for part in parts {
        match part.name.as_str() {
            "purpose" if part.content == b"batch" => has_purpose = true,
            "purpose" => {
                let purpose = json!(String::from_utf8_lossy(part.content));
                return Err(wrong(
                    "purpose",
                    &purpose,
                    "'batch', the only use of files here",
                ));
            }
            "file" => file = Some(part),
            other => {
                let problem = format!("'{other}' is not supported; give 'file' and 'purpose'");
                return Err(Error::field(other, problem));
            }
        }
    }
    if !has_purpose {
        return Err(Error::field(
            "purpose",
            "'purpose' is missing: give 'batch'",
        ));
    }
    let part =
        file.ok_or_else(|| Error::field("file", "'file' is missing: give a file of JSON lines"))?;
    let name: String = part
        .file_name
        .unwrap_or_default()
        .chars()
        .take(MAX_NAME_CHARS)
        .collect();
    let content = part.content.to_vec();
    let added = state
        .store
        .ask(move |database| database.add_file(client.owner, &name, &content));
    Ok(json_response(&added.await?))
}

async fn files(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    uri: Uri,
) -> Result<Response, Error> {
    let read = move |database: &Database, query: &PageQuery| database.files(client.owner, query);
    state.page(&uri, read).await
}

async fn file(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    state
        .object(move |database| database.file(client.owner, &id))
        .await
}

async fn delete_file(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let deleted = id.clone();
    let work = state
        .store
        .ask(move |database| database.delete_file(client.owner, &deleted));
    work.await?;
    Ok(json_response(
        &json!({"id": id, "object": "file", "deleted": true}),
    ))
}

/// The content of a file, which is read while it is sent.
async fn content(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let first = part(&state.store, client.owner, id.clone(), 0).await?;
    let parts = stream::try_unfold((Some(first), state.store), move |(next, store)| {
        let (id, owner) = (id.clone(), client.owner);
        async move {
            let Some(Part { bytes, next }) = next else {
                return Ok::<_, std::io::Error>(None);
            };
            let next = match next {
                Some(from) => {
                    let read = part(&store, owner, id, from).await;
                    Some(read.map_err(|error| std::io::Error::other(error.message))?)
                }
                None => None,
            };
            Ok(Some((Bytes::from(bytes), (next, store))))
        }
    });
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, HttpBody::from_stream(parts)).into_response())
}

async fn part(store: &ResponseStore, owner: Owner, id: String, from: i64) -> Result<Part, Error> {
    store
        .ask(move |database| database.content(owner, &id, from))
        .await
}

async fn create(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Error> {
    let (_content, mut body) = state.bodies.fields(request).await?;
    let batch = object(&mut body)?;
    let endpoint = batch["endpoint"].as_str().unwrap_or_default().to_owned();
    let made = state
        .store
        .ask(move |database| database.create_batch(client.owner, batch));
    let batch = made.await?;
    state.work.start(OpenBatch {
        owner: client.owner,
        id: batch["id"].as_str().unwrap_or_default().to_owned(),
        endpoint,
    });
    Ok(json_response(&batch))
}

/// The object of a batch that a request makes, without its id.
fn object(body: &mut Body) -> Result<Value, Error> {
    let endpoint = body.required_text("endpoint")?;
    if !ENDPOINTS.contains(&endpoint.as_str()) {
        return Err(wrong("endpoint", &json!(endpoint), &ENDPOINTS.join(" or ")));
    }
    let input = body.required_text("input_file_id")?;
    let window = body
        .text("completion_window")?
        .unwrap_or_else(|| "24h".to_owned());
    if window != "24h" {
        return Err(wrong("completion_window", &json!(window), "'24h'"));
    }
    let metadata = metadata(body)?;
    if let Some(name) = body.first_left() {
        let problem = format!("'{name}' is not supported; leave it out");
        return Err(Error::field(&name, problem));
    }
    Ok(json!({
        "id": null,
        "object": "batch",
        "endpoint": endpoint,
        "errors": null,
        "input_file_id": input,
        "completion_window": window,
        "status": "validating",
        "output_file_id": null,
        "error_file_id": null,
        "created_at": ids::now(),
        "in_progress_at": null,
        "expires_at": null,
        "finalizing_at": null,
        "completed_at": null,
        "failed_at": null,
        "expired_at": null,
        "cancelling_at": null,
        "cancelled_at": null,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }))
}

async fn batches(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    uri: Uri,
) -> Result<Response, Error> {
    let read = move |database: &Database, query: &PageQuery| database.batches(client.owner, query);
    state.page(&uri, read).await
}

async fn batch(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    state
        .object(move |database| database.batch(client.owner, &id))
        .await
}

/// Ends a batch, whose results so far stay.
async fn cancel(
    State(state): State<Batches>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let ended = id.clone();
    let end = state
        .store
        .ask(move |database| database.end_batch(client.owner, &ended, "cancelled", &[]));
    let batch = end.await?;
    // The batch is the client's.
    state.work.stop(&id);
    Ok(json_response(&batch))
}
