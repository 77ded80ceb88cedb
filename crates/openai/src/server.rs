//! The paths, the limits, and what all endpoints share.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use axum::Router;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use crate::access_log::{REQUEST_ID, logged};
use crate::adapters::{Adapters, split};
use crate::answer::{Answer, Answers};
use crate::anthropic::fields::COUNT_TOKENS;
use crate::anthropic::request::Messages;
use crate::background::Background;
use crate::batches::work::{Settings, Work};
use crate::beside_streams::beside_streams;
use crate::body::Body;
use crate::chat::Chat;
use crate::classes::{Classes, Classify};
use crate::completions::Completions;
use crate::content::{Bodies, Content, Limits};
use crate::downloads::Downloads;
use crate::embeddings::{Embedding, Embeddings};
use crate::endpoint::Endpoint;
use crate::fields::{COMPLETIONS, DETOKENIZE, Field, TOKENIZE};
use crate::generation::Generation;
use crate::json_response::json_response;
use crate::keys::{Client, Keys};
use crate::live::Live;
use crate::load::{Held, Load};
use crate::metrics::{Traffic, aliases, counted, failed_models};
use crate::models::{self, KnownModels, Model};
use crate::names::Names;
use crate::origins::{self, Origin};
use crate::pooled::{Output, Pooled};
use crate::pooling::Pooling;
use crate::prompts::Prompts;
use crate::protocol::ModelInferRequest;
use crate::rerank::{CohereError, Rerank};
use crate::response_store::{ResponseStore, StoreFields};
use crate::responses::Responses;
use crate::scores::{Score, Scores};
use crate::sse::Chunks;
use crate::tei::embed::Embed;
use crate::tei::errors::Refusal;
use crate::tei::predict::Predict;
use crate::tokens::{Read, Tokens};
use crate::trace::Trace;
use crate::triton::Triton;
use crate::triton_metrics::TritonMetrics;
use crate::{Error, anthropic, batches, conversations, encodings, ids, page, sse, stored, tei};

/// Who may ask, and for what.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The keys, which may be replaced while requests are served.
    pub keys: Arc<RwLock<Keys>>,
    /// The options that clients may send besides the APIs' fields; `None` for all.
    pub options: Option<Vec<String>>,
    /// The metrics of tritonserver. None without `--triton-metrics`.
    pub metrics: Option<TritonMetrics>,
    /// The prompts of embedding models.
    pub prompts: Prompts,
    /// Stored responses. None without `--response-store`.
    pub store: Option<ResponseStore>,
    /// Downloads images. None without `--allow-image-host`.
    pub downloads: Option<Downloads>,
    /// Whether clients may load and unload models.
    pub controls_models: bool,
    /// Responses in the background.
    pub background: Background,
    /// The work on batches. None without `--batch-requests`.
    pub batches: Option<Settings>,
}

/// How many inputs of a client's request, which may have more of them than a model has slots for, are in flight at a
/// time: as many as a model has slots for by default.
const MAX_INPUTS_AT_ONCE: usize = 64;

/// About the bytes of a vector in an answer.
const ABOUT_BYTES_PER_OUTPUT: usize = 4096;

struct Server {
    metrics: Option<TritonMetrics>,
    store: Option<ResponseStore>,
    background: Background,
    controls_models: bool,
    traffic: Arc<Traffic>,
    /// The options that clients may send; `None` for all.
    options: Option<Vec<String>>,
    bodies: Arc<Bodies>,
    triton: Triton,
    adapters: Adapters,
    prompts: Prompts,
    known_models: KnownModels,
    limits: Limits,
    load: Arc<Load>,
    started: u64,
}

/// The service in front of a tritonserver. `log` writes a line for each request.
pub fn router(
    triton: Triton,
    adapters: Adapters,
    limits: Limits,
    access: Access,
    live: Live,
    origins: Vec<Origin>,
    log: bool,
) -> Router {
    let traffic = Arc::new(Traffic::default());
    let bodies = Arc::new(Bodies::new(limits, access.downloads.clone()));
    let stored = stored::routes(access.store.clone(), access.background.clone());
    let conversations = conversations::routes(bodies.clone(), access.store.clone());
    let server = Server {
        options: access.options,
        metrics: access.metrics,
        store: access.store.clone(),
        background: access.background,
        controls_models: access.controls_models,
        traffic: traffic.clone(),
        bodies: bodies.clone(),
        triton,
        adapters,
        prompts: access.prompts,
        known_models: KnownModels::default(),
        limits,
        load: Load::new(limits.max_requests),
        started: ids::now(),
    };
    let server = Arc::new(server);
    let batches = match (access.batches, access.store) {
        (Some(settings), Some(store)) => {
            let paths = paths_of_batches().with_state(server.clone());
            let (keys, options) = (access.keys.clone(), server.options.clone());
            let work = Work::new(store.clone(), paths, keys, options, settings);
            let resumed = work.clone();
            tokio::spawn(async move { resumed.resume().await });
            batches::routes(bodies, store, work)
        }
        _ => Router::new(),
    };
    let router = Router::new()
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*name}", get(model).post(control_model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(reply::<Chat>))
        .route("/v1/responses", post(respond))
        .merge(stored)
        .merge(conversations)
        .merge(batches)
        .route("/v1/messages", post(reply::<Messages>))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/embeddings", post(pooled::<Embeddings>))
        .route("/rerank", post(rerank))
        .route("/v1/rerank", post(pooled::<Rerank>))
        .route("/v2/rerank", post(worded::<Rerank, CohereError>))
        .route("/score", post(pooled::<Scores>))
        .route("/v1/score", post(pooled::<Scores>))
        .route("/classify", post(pooled::<Classify>))
        .route("/pooling", post(pooling))
        .route("/embed", post(worded::<Embed, Refusal>))
        .route("/predict", post(worded::<Predict, Refusal>))
        .route("/", post(of_only_model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(encodings::layer())
        .layer(from_fn(encodings::check))
        .layer(from_fn_with_state(server.clone(), with_wait))
        .route("/live", get(move || async move { live.response() }))
        .layer(from_fn_with_state(access.keys, with_key))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/", get(page::show))
        // The fallback applies only to routes that are added before it.
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(anthropic::errors::worded))
        .layer(from_fn_with_state(traffic, counted))
        .with_state(server);
    let router = match origins.is_empty() {
        true => router,
        false => router.layer(origins::layer(origins)),
    };
    match log {
        true => router.layer(from_fn(logged)),
        false => router,
    }
}

/// The paths that lines of batches ask.
fn paths_of_batches() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(reply::<Chat>))
        .route("/v1/responses", post(respond))
        .route("/v1/embeddings", post(pooled::<Embeddings>))
}

async fn with_key(
    State(keys): State<Arc<RwLock<Keys>>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Error> {
    let client = keys
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .client(request.headers())?;
    if request.method() == Method::POST
        && let Err((error, wait)) = client.rights.admit(Instant::now())
    {
        let mut response = error.into_response();
        let seconds = HeaderValue::from(wait.as_secs() + 1);
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
        return Ok(response);
    }
    request.extensions_mut().insert(client);
    Ok(next.run(request).await)
}

/// Says how long a client that finds no room should wait.
async fn with_wait(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        let seconds = HeaderValue::from(server.load.refuse());
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    response
}

async fn health(State(server): State<Arc<Server>>) -> Result<Response, Error> {
    let is_ready = server.triton.is_ready().await?;
    let failed = match &server.metrics {
        Some(metrics) => failed_models(&metrics.text().await?),
        None => Vec::new(),
    };
    if !failed.is_empty() {
        let body = json!({"status": "not ready", "failed_models": failed});
        Ok((StatusCode::SERVICE_UNAVAILABLE, json_response(&body)).into_response())
    } else if is_ready {
        Ok(json_response(&json!({"status": "ready"})))
    } else {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Ok((status, json_response(&json!({"status": "not ready"}))).into_response())
    }
}

async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let triton = match &server.metrics {
        Some(metrics) => Some(metrics.text().await.ok()),
        None => None,
    };
    let has_triton = triton.as_ref().map(Option::is_some);
    let own = server.traffic.text(server.load.num_in_flight(), has_triton);
    let triton = triton.flatten().unwrap_or_default();
    let text = [own, aliases(&triton), triton].concat();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn version() -> Response {
    json_response(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn list_models(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Error> {
    let models = server.models(&client).await?;
    Ok(json_response(
        &match anthropic::errors::is_of_client(uri.path(), &headers) {
            true => anthropic::models::list(&models),
            false => models,
        },
    ))
}

async fn model(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Client>,
    Path(name): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Error> {
    let models = server.models(&client).await?;
    let models = models["data"].as_array();
    match models.and_then(|models| models.iter().find(|model| model["id"] == name)) {
        Some(model) if anthropic::errors::is_of_client(uri.path(), &headers) => {
            Ok(json_response(&anthropic::models::model(model)))
        }
        Some(model) => Ok(json_response(model)),
        None => Err(Error::unknown_model(&name)),
    }
}

/// Loads a model, or unloads it: `NAME/load`, `NAME/unload`.
async fn control_model(
    State(server): State<Arc<Server>>,
    Path(path): Path<String>,
    request: Request,
) -> Result<Response, Error> {
    let Some((name, verb @ ("load" | "unload"))) = path.rsplit_once('/') else {
        let mut response = Error::wrong_method("POST", request.uri().path()).into_response();
        let allowed = HeaderValue::from_static("GET,HEAD");
        response.headers_mut().insert(header::ALLOW, allowed);
        return Ok(response);
    };
    if !server.controls_models {
        let problem = "models are loaded and unloaded only with --allow-model-control";
        return Err(Error::new(StatusCode::FORBIDDEN, problem));
    }
    if !Client::of(&request).rights.has_model(name) {
        let problem = format!("the key may not use the model '{name}'");
        return Err(Error::new(StatusCode::FORBIDDEN, problem));
    }
    let triton = server.triton_for(&request);
    if !triton.has_model(name).await? {
        return Err(Error::unknown_model(name));
    }
    match verb {
        "load" => triton.load(name).await?,
        _ => triton.unload(name).await?,
    }
    server.known_models.clear();
    Ok(json_response(
        &json!({"id": name, "object": "model", "is_loaded": verb == "load"}),
    ))
}

async fn completions(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let bytes = server.bodies.read(request).await?;
    let read = || Completions::read(server.body(&bytes, COMPLETIONS)?, ids::random());
    let mut request = beside_streams(bytes.len(), read).await?;
    let id = ids::id("cmpl-");
    let (prompts, unread): (Vec<_>, Vec<_>) = request.unread(&id).into_iter().unzip();
    let names = Names::of("prompt");
    let reads = server.read(&triton, unread, &names).await?;
    for (prompt, read) in prompts.into_iter().zip(reads) {
        request.set_text(prompt, read.into_text());
    }
    let answers = || server.answers(triton, request.generations(&id));
    let answers = beside_streams(bytes.len(), answers).await?;
    drop(bytes);
    if request.sampling.stream {
        streamed(&id, answers, request.chunks(id.clone())).await
    } else {
        collected(&id, answers, |all| request.answer(id.clone(), all)).await
    }
}

/// The answer to a conversation.
async fn reply<E: Endpoint>(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let bytes = server.bodies.read(request).await?;
    let read = || E::read(server.body(&bytes, E::FIELDS)?, ids::random());
    let request = beside_streams(bytes.len(), read).await?;
    server.reply(triton, bytes, request).await
}

/// The response to items, and to the stored response that they continue.
async fn respond(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let (mut content, body) = server.bodies.fields(request).await?;
    let mut body = server.permitted(body, Responses::FIELDS, &client)?;
    let Some(store) = &server.store else {
        let read = || Responses::read(body, ids::random());
        let request = beside_streams(content.len(), read).await?;
        return server.reply(triton, content, request).await;
    };
    let mut fields = beside_streams(content.len(), || StoreFields::read(&mut body)).await?;
    let owner = client.owner;
    let history = store.history(owner, &fields).await?;
    content.grow(server.bodies.room(history.num_bytes)?, history.num_bytes);
    let num_bytes = content.num_bytes();
    let read = || {
        let input = fields.give_back(&mut body);
        let request = Responses::continued(history.items, body, ids::random())?;
        let target = store.target(owner, &fields, input, content.room.take())?;
        Ok(request.stored(&fields, target))
    };
    let request = beside_streams(num_bytes, read).await?;
    if !fields.is_background {
        return server.reply(triton, content, request).await;
    }
    if request.is_stream() {
        let problem = "background responses cannot be streamed; leave out 'stream', and ask for the response by its id";
        return Err(Error::field("stream", problem));
    }
    let id = ids::id(Responses::ID);
    let answers = || server.answers(triton, vec![request.generation(&id)]);
    let answers = beside_streams(num_bytes, answers).await?;
    let (response, work) = request.in_background(id.clone(), answers.try_collect());
    server.background.start(id.clone(), work);
    Ok(identified(&id, json_response(&response)))
}

/// The answer of a pooling model.
async fn pooled<P: Pooled>(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let (content, body) = server.bodies.fields(request).await?;
    server.pool::<P>(triton, content, body).await
}

/// The answer of a pooling model, with errors of another form than OpenAI's.
async fn worded<P: Pooled, E: From<Error>>(
    server: State<Arc<Server>>,
    request: Request,
) -> Result<Response, E> {
    Ok(pooled::<P>(server, request).await?)
}

/// The documents of `/rerank` in their order. Two APIs have this path: documents are called `texts` by Text Embeddings
/// Inference.
async fn rerank(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Result<Response, Refusal>, Error> {
    let triton = server.triton_for(&request);
    let (content, body) = server.bodies.fields(request).await?;
    match body.has("texts") {
        true => Ok(server.rank_texts(triton, content, body).await),
        false => Ok(Ok(server.pool::<Rerank>(triton, content, body).await?)),
    }
}

/// The numbers of texts, by the task of the model.
async fn pooling(State(server): State<Arc<Server>>, request: Request) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let (content, body) = server.bodies.fields(request).await?;
    let name = body.text_of("model").unwrap_or_default();
    let models = server.known_models().await?;
    let model = models.iter().find(|model| model.name == split(name).0);
    let has_task = |task| model.is_some_and(|model| model.has_task(task));
    if has_task(Classes::TASK) {
        server.pool::<Pooling<Classes>>(triton, content, body).await
    } else if has_task(Score::TASK) {
        server.pool::<Pooling<Score>>(triton, content, body).await
    } else {
        // Of a model without a task, or that is not there, the error says so.
        server
            .pool::<Pooling<Embedding>>(triton, content, body)
            .await
    }
}

/// The vectors, classes or order of texts, by the task of the only model that has one of these tasks.
async fn of_only_model(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Refusal> {
    let triton = server.triton_for(&request);
    let (content, body) = server.bodies.fields(request).await?;
    if body.has("texts") {
        return server.rank_texts(triton, content, body).await;
    }
    let models = server.known_models().await?;
    let has_task = |task| models.iter().any(|model| model.has_task(task));
    let tasks = [Embedding::TASK, Classes::TASK].map(has_task);
    match tasks {
        [true, false] => Ok(server.pool::<Embed>(triton, content, body).await?),
        [false, true] => Ok(server.pool::<Predict>(triton, content, body).await?),
        [false, false] => Err(Error::invalid("no model embeds or classifies").into()),
        [true, true] => {
            let both = "models embed and classify; ask /embed or /predict";
            Err(Error::invalid(both).into())
        }
    }
}

async fn tokenize(State(server): State<Arc<Server>>, request: Request) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let bytes = server.bodies.read(request).await?;
    let request = beside_streams(bytes.len(), || {
        Tokens::of_text(server.body(&bytes, TOKENIZE)?)
    })
    .await?;
    Ok(json_response(
        &server.read_prompt(triton, request).await?.tokens(),
    ))
}

async fn count_tokens(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let bytes = server.bodies.read(request).await?;
    let read = || anthropic::request::tokens(server.body(&bytes, COUNT_TOKENS)?);
    let request = beside_streams(bytes.len(), read).await?;
    let read = server.read_prompt(triton, request).await?;
    Ok(json_response(&json!({"input_tokens": read.num_tokens()})))
}

async fn detokenize(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response, Error> {
    let triton = server.triton_for(&request);
    let bytes = server.bodies.read(request).await?;
    let request = beside_streams(bytes.len(), || {
        Tokens::of_ids(server.body(&bytes, DETOKENIZE)?)
    })
    .await?;
    let read = match request.is_empty() {
        true => Read::default(),
        false => server.read_prompt(triton, request).await?,
    };
    Ok(json_response(&read.text()))
}

async fn unknown(method: Method, uri: Uri) -> Error {
    Error::unknown_path(method.as_str(), uri.path())
}

/// The answer to an unsupported method of a known path. The router adds the header `Allow`.
async fn wrong_method(method: Method, uri: Uri) -> Error {
    Error::wrong_method(method.as_str(), uri.path())
}

impl Server {
    /// The fields of a request, which its client may use.
    fn body(&self, content: &Content, fields: &[Field]) -> Result<Body, Error> {
        self.permitted(Body::parse(content)?, fields, &content.client)
    }

    /// The fields, if the client may use them.
    fn permitted(&self, body: Body, fields: &[Field], client: &Client) -> Result<Body, Error> {
        let options = client.rights.options().or(self.options.as_deref());
        body.of_models(&client.rights)?.permitted(fields, options)
    }

    /// The models of these names.
    async fn models_of(&self, names: Vec<String>) -> Vec<Model> {
        let models = names.into_iter().map(async |name| {
            // A model that was unloaded in the meantime has no configuration.
            let config = self.triton.config(&name).await.ok();
            Model::new(name, config.as_ref())
        });
        let models = stream::iter(models).buffered(MAX_INPUTS_AT_ONCE);
        models.collect().await
    }

    /// The models that are ready, whose configurations may be as they were ten seconds ago.
    async fn known_models(&self) -> Result<Vec<Model>, Error> {
        let names = self.triton.models().await?;
        let now = Instant::now();
        if let Some(models) = self.known_models.get(&names, now) {
            return Ok(models);
        }
        let models = self.models_of(names).await;
        self.known_models.set(models.clone(), now);
        Ok(models)
    }

    /// The models that are ready, and their adapters, as far as a client may use them.
    async fn models(&self, client: &Client) -> Result<Value, Error> {
        let models = self.models_of(self.triton.models().await?).await;
        let adapters = self.adapters.clone();
        // They are files.
        let adapters = tokio::task::spawn_blocking(move || adapters.names()).await;
        let mut list = models::list(&models, &adapters.unwrap_or_default(), self.started);
        if let Value::Array(models) = &mut list["data"] {
            let is_allowed = |model: &Value| {
                model["id"]
                    .as_str()
                    .is_some_and(|id| client.rights.has_model(id))
            };
            models.retain(is_allowed);
        }
        Ok(list)
    }

    /// The answer to a conversation, whose body is in memory until it has been passed on.
    async fn reply<E: Endpoint>(
        &self,
        triton: Triton,
        content: Content,
        request: E,
    ) -> Result<Response, Error> {
        let id = ids::id(E::ID);
        let answers = || self.answers(triton, vec![request.generation(&id)]);
        let answers = beside_streams(content.num_bytes(), answers).await?;
        drop(content);
        if request.is_stream() {
            streamed(&id, answers, request.chunks(id.clone())).await
        } else {
            collected(&id, answers, |all| request.answer(id.clone(), all)).await
        }
    }

    /// The texts of a request of Text Embeddings Inference, in the order of their relevance.
    async fn rank_texts(
        &self,
        triton: Triton,
        content: Content,
        body: Body,
    ) -> Result<Response, Refusal> {
        let answer = self.pool::<tei::rerank::Rerank>(triton, content, body);
        Ok(answer.await?)
    }

    /// Has a pooling model compute the texts of a request, several at once. Their messages are made one
    /// after the other, since all together may be much larger than the body.
    async fn pool<P: Pooled>(
        &self,
        triton: Triton,
        content: Content,
        body: Body,
    ) -> Result<Response, Error> {
        let read = || {
            P::read(match P::HAS_OPTIONS {
                true => self.permitted(body, P::FIELDS, &content.client)?,
                false => body.of_models(&content.client.rights)?,
            })
        };
        let request = beside_streams(content.len(), read).await?;
        let texts = request.texts();
        let model = match texts.model() {
            Some(model) => model.to_owned(),
            None => self.only_model_of_task(P::Output::TASK).await?,
        };
        let id = ids::id(P::ID);
        let embeds = P::Output::TASK == Embedding::TASK;
        let before = match embeds || texts.prompt().is_some() {
            true => self.prompts.before(&model, texts.prompt())?,
            false => "",
        };
        let num_at_once = self.num_at_once(texts.num());
        let _held = self.hold(num_at_once)?;
        let outputs = (0..texts.num()).map(|index| {
            let message = texts.message(index, &id, &model, before, P::Output::NAMES);
            triton.pool(message, texts.names())
        });
        let outputs = stream::iter(outputs).buffered(num_at_once);
        // All of them, even if one fails: the others compute on, and have their place until they end.
        let outputs: Vec<Result<P::Output, Error>> = outputs.collect().await;
        let outputs = outputs.into_iter().collect::<Result<Vec<_>, _>>()?;
        let write = || json_response(&request.answer(&id, &model, outputs));
        let response = beside_streams(texts.num() * ABOUT_BYTES_PER_OUTPUT, write).await;
        Ok(identified(&id, response))
    }

    /// The server behind this one, for what a request asks of it.
    fn triton_for(&self, request: &Request) -> Triton {
        let trace = Trace::of(request.headers());
        self.triton.within(trace, Client::of(request).rights)
    }

    /// Has a model read a prompt.
    async fn read_prompt(&self, triton: Triton, request: Tokens) -> Result<Read, Error> {
        let model = match &request.model {
            Some(model) => model.clone(),
            None => self.only_model().await?,
        };
        let names = request.names.clone();
        let message = request.message(model, &ids::id("tok-"));
        let read = self.read(&triton, vec![message], &names).await?;
        read.into_iter()
            .next()
            .ok_or_else(|| Error::bad_response("no outputs"))
    }

    /// Has models read prompts, several at once.
    async fn read(
        &self,
        triton: &Triton,
        messages: Vec<ModelInferRequest>,
        names: &Names,
    ) -> Result<Vec<Read>, Error> {
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let num_at_once = self.num_at_once(messages.len());
        let _held = self.hold(num_at_once)?;
        let reads = messages
            .into_iter()
            .map(|message| triton.read_prompt(message, names));
        // All of them, even if one fails: Triton may lose a request that is cancelled.
        let reads: Vec<_> = stream::iter(reads).buffered(num_at_once).collect().await;
        reads.into_iter().collect()
    }

    /// How many of the inputs of a client's request are in flight at a time.
    fn num_at_once(&self, num_inputs: usize) -> usize {
        num_inputs.min(MAX_INPUTS_AT_ONCE.min(self.limits.max_requests))
    }

    /// The model that a request means which names none.
    async fn only_model(&self) -> Result<String, Error> {
        only(self.triton.models().await?)
    }

    /// The model with a task that a request means which names none.
    async fn only_model_of_task(&self, task: &str) -> Result<String, Error> {
        let models = self.known_models().await?;
        let of_task = models.into_iter().filter(|model| model.has_task(task));
        only(of_task.map(|model| model.name).collect())
    }

    /// Sends requests to Triton, all at once.
    fn answers(&self, triton: Triton, generations: Vec<Generation>) -> Result<Answers, Error> {
        let held = self.hold(generations.len())?;
        let generations = generations.into_iter();
        let replies = generations.map(|generation| triton.generate(generation));
        Ok(Answers::new(replies, held))
    }

    /// Counts requests as in flight until what is returned is dropped.
    fn hold(&self, num_requests: usize) -> Result<Held, Error> {
        let max_requests = self.limits.max_requests;
        if num_requests > max_requests {
            return Err(Error::too_many_prompts(num_requests, max_requests));
        }
        let held = self.load.hold(num_requests);
        held.ok_or_else(|| Error::busy(max_requests))
    }
}

/// The only one of the models that a request may mean.
fn only(names: Vec<String>) -> Result<String, Error> {
    let num = names.len();
    <[String; 1]>::try_from(names)
        .map(|[name]| name)
        .map_err(|_| {
            let problem =
                format!("the request names no model, and {num} could be meant; give 'model'");
            Error::field("model", problem)
        })
}

/// The response that sends what `chunks` makes of the answers, as they come.
async fn streamed(id: &str, answers: Answers, chunks: impl Chunks) -> Result<Response, Error> {
    let answers = answers.begun().await?;
    let warning = answers.warning();
    let response = identified(id, sse::response(answers, chunks));
    Ok(warned(warning.as_deref(), response))
}

/// The response with what `write` makes of all answers.
async fn collected(
    id: &str,
    answers: Answers,
    write: impl FnOnce(Vec<Answer>) -> Value,
) -> Result<Response, Error> {
    let answers: Vec<_> = answers.try_collect().await?;
    let mut warnings = answers
        .iter()
        .filter_map(|answer: &Answer| answer.reply.warning.clone());
    let warning = warnings.next();
    let response = identified(id, json_response(&write(answers)));
    Ok(warned(warning.as_deref(), response))
}

/// A response with the header `Warning`, in the form of RFC 7234, if there is something to warn of.
fn warned(warning: Option<&str>, mut response: Response) -> Response {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    let value = warning.map(|text| format!("299 inflight \"{}\"", quoted(text)));
    if let Some(value) = value.and_then(|value| HeaderValue::from_str(&value).ok()) {
        response.headers_mut().insert(header::WARNING, value);
    }
    response
}

/// A response with the id that the log and Triton know it by.
fn identified(id: &str, mut response: Response) -> Response {
    if let Ok(value) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}
