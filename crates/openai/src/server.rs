//! The paths, the limits, and what all endpoints share.

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::body::Body;
use crate::chat::Chat;
use crate::completions::Completions;
use crate::generation::{Generation, Reply};
use crate::triton::Triton;
use crate::{Error, ids, models, sse};

/// What a client may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest body of a request.
    pub max_request_bytes: usize,
    /// The most requests to Triton that are in flight. Each prompt of a request counts.
    pub max_requests: usize,
}

/// A reply to one of the prompts of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Which prompt.
    pub prompt: usize,
    /// The reply.
    pub reply: Reply,
}

/// The replies to all prompts of a request, as they come. Whoever drops the stream cancels what is in flight.
pub type Answers = Pin<Box<dyn Stream<Item = Result<Answer, Error>> + Send>>;

struct Server {
    triton: Triton,
    limits: Limits,
    in_flight: Arc<Semaphore>,
    started: u64,
}

/// The service in front of a tritonserver.
pub fn router(triton: Triton, limits: Limits) -> Router {
    let server = Server {
        triton,
        limits,
        in_flight: Arc::new(Semaphore::new(limits.max_requests)),
        started: ids::now(),
    };
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .fallback(unknown)
        .method_not_allowed_fallback(unknown)
        .with_state(Arc::new(server))
}

async fn health(State(server): State<Arc<Server>>) -> Result<Response, Error> {
    if server.triton.is_ready().await? {
        Ok(json_response(&json!({"status": "ready"})))
    } else {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Ok((status, json_response(&json!({"status": "not ready"}))).into_response())
    }
}

async fn list_models(State(server): State<Arc<Server>>) -> Result<Response, Error> {
    let names = server.triton.models().await?;
    Ok(json_response(&models::list(&names, server.started)))
}

async fn model(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
) -> Result<Response, Error> {
    let names = server.triton.models().await?;
    if names.contains(&name) {
        Ok(json_response(&models::model(&name, server.started)))
    } else {
        Err(Error::unknown_model(&name))
    }
}

async fn completions(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let body = Body::parse(&server.bytes(request).await?)?;
    let request = Completions::read(body, ids::random())?;
    let id = ids::id("cmpl");
    let answers = server.answers(request.generations(&id))?;
    if request.sampling.stream {
        let answers = begun(answers).await?;
        Ok(sse::response(answers, request.chunks(id)))
    } else {
        let answers = answers.try_collect().await?;
        Ok(json_response(&request.answer(id, answers)))
    }
}

async fn chat(State(server): State<Arc<Server>>, request: Request) -> Result<Response, Error> {
    let body = Body::parse(&server.bytes(request).await?)?;
    let request = Chat::read(body, ids::random())?;
    let id = ids::id("chatcmpl");
    let answers = server.answers(vec![request.generation(&id)])?;
    if request.sampling.stream {
        let answers = begun(answers).await?;
        Ok(sse::response(answers, request.chunks(id)))
    } else {
        let answers = answers.try_collect().await?;
        Ok(json_response(&request.answer(id, answers)))
    }
}

async fn unknown(method: Method, uri: Uri) -> Error {
    Error::unknown_path(method.as_str(), uri.path())
}

impl Server {
    /// The body of a request.
    async fn bytes(&self, request: Request) -> Result<Vec<u8>, Error> {
        let max_bytes = self.limits.max_request_bytes;
        let mut bytes = Vec::new();
        let mut parts = request.into_body().into_data_stream();
        while let Some(part) = parts.next().await {
            let part: Bytes =
                part.map_err(|error| Error::invalid(format!("the body is cut off: {error}")))?;
            if part.len() > max_bytes - bytes.len() {
                return Err(Error::too_large(max_bytes));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    }

    /// Sends requests to Triton, all at the same time.
    fn answers(&self, generations: Vec<Generation>) -> Result<Answers, Error> {
        let held = self.hold(generations.len())?;
        let replies = generations
            .into_iter()
            .enumerate()
            .map(|(prompt, generation)| {
                let replies = self.triton.generate(generation);
                replies.map_ok(move |reply| Answer { prompt, reply })
            });
        let answers = stream::select_all(replies);
        // The stream holds its permits as long as it exists.
        let held = move |answer| (answer, &held).0;
        Ok(Box::pin(answers.map(held)))
    }

    /// Counts requests as in flight until the permit is dropped.
    fn hold(&self, num_requests: usize) -> Result<OwnedSemaphorePermit, Error> {
        let busy = || Error::busy(self.limits.max_requests);
        let num_requests = u32::try_from(num_requests).map_err(|_| busy())?;
        let permits = self.in_flight.clone().try_acquire_many_owned(num_requests);
        permits.map_err(|_| busy())
    }
}

/// The answers, of which the first has come: an error before it is the error of the whole request.
async fn begun(mut answers: Answers) -> Result<Answers, Error> {
    match answers.next().await {
        Some(Ok(first)) => Ok(Box::pin(stream::iter([Ok(first)]).chain(answers))),
        Some(Err(error)) => Err(error),
        None => Err(Error::bad_response("no outputs")),
    }
}

fn json_response(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}
