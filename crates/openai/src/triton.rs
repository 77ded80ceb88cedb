//! The connection to tritonserver.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::http::uri::PathAndQuery;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream, StreamExt, TryFutureExt, TryStreamExt, future, stream};
use prost::Message;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinError;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::Error;
use crate::error::OF_THE_BACKEND;
use crate::generation::{Ends, Generation, Reply};
use crate::load::Held;
use crate::names::Names;
use crate::pooled::Output;
use crate::protocol::{
    ModelConfig, ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelInferResponse,
    ModelStreamInferResponse, RepositoryIndexRequest, RepositoryIndexResponse,
    RepositoryModelRequest, RepositoryModelResponse, SERVICE, ServerReadyRequest,
    ServerReadyResponse,
};
use crate::rights::Rights;
use crate::tokens::Read;
use crate::trace::Trace;

/// The largest response that is read. The log-probabilities of a long answer have some MiB.
const MAX_RESPONSE_BYTES: usize = 256 << 20;
/// The most requests that run to their end without a client. Those beyond are cancelled.
const MAX_LEFT: u32 = 4096;
/// How long a request is asked to stop until it is cancelled. A step of a long prompt takes seconds.
const MAX_STOP_TIME: Duration = Duration::from_secs(60);
/// How long a request may go on before it is asked again to stop, at first and at most: it may not have begun, or be
/// one of another instance of its model.
const STOP_PERIODS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];
/// How long a process that ends waits for requests without a client.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(10);
/// How long a new connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A tritonserver. Copies share one connection, which is made again when it breaks.
#[derive(Clone)]
pub struct Triton {
    grpc: Grpc<Channel>,
    trace: Trace,
    /// Of the key that requests are for.
    rights: Arc<Rights>,
    /// Room for requests that run to their end without a client.
    left: Arc<Semaphore>,
}

/// The replies to a request. Whoever drops the stream earlier than its end has the request stopped.
pub struct Replies {
    model: String,
    names: Names,
    call: Call,
    ends: Ends,
    rights: Arc<Rights>,
    /// The tokens so far, for which the key was charged.
    num_charged: u32,
    /// Stops the request.
    stop: Option<Box<(Triton, ModelInferRequest)>>,
    /// The request's place among those in flight, until the model is done with it.
    place: Option<Arc<Held>>,
}

/// A request, and the responses to it.
enum Call {
    Starting(BoxFuture<'static, Result<Responses, Status>>),
    Started(Box<Responses>),
    Ended,
}

impl Triton {
    /// The server at an address such as `127.0.0.1:8001`. With TLS if there are authorities, in PEM, that sign its
    /// certificate. Connects with the first call.
    ///
    /// # Errors
    /// It is not an address, or the authorities are no certificates.
    pub fn at(address: &str, authorities: Option<&[u8]>) -> Result<Self, String> {
        let problem = |error: tonic::transport::Error| format!("{address}: {error}");
        let scheme = if authorities.is_some() {
            "https"
        } else {
            "http"
        };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(problem)?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true);
        if let Some(pem) = authorities {
            let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
            endpoint = endpoint.tls_config(tls).map_err(problem)?;
        }
        let grpc = Grpc::new(endpoint.connect_lazy());
        Ok(Self {
            grpc: grpc.max_decoding_message_size(MAX_RESPONSE_BYTES),
            trace: Trace::default(),
            rights: Arc::default(),
            left: Arc::new(Semaphore::new(MAX_LEFT as usize)),
        })
    }

    /// A handle on this server for requests of a trace, whose tokens count for a key.
    pub fn within(&self, trace: Trace, rights: Arc<Rights>) -> Self {
        Self {
            grpc: self.grpc.clone(),
            trace,
            rights,
            left: self.left.clone(),
        }
    }

    /// Whether the server and all its models take requests.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn is_ready(&self) -> Result<bool, Error> {
        let answer: ServerReadyResponse =
            self.call("ServerReady", ServerReadyRequest {}, "").await?;
        Ok(answer.ready)
    }

    /// The names of the models that take requests, in order.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn models(&self) -> Result<Vec<String>, Error> {
        let mut names = self.index(true).await?;
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Whether the repository has a model, loaded or not.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn has_model(&self, model: &str) -> Result<bool, Error> {
        Ok(self.index(false).await?.iter().any(|name| name == model))
    }

    /// The names of the models in the repository, or of those that are `ready`, once for each version.
    async fn index(&self, ready: bool) -> Result<Vec<String>, Error> {
        let request = RepositoryIndexRequest { ready };
        let answer: RepositoryIndexResponse = self.call("RepositoryIndex", request, "").await?;
        Ok(answer.models.into_iter().map(|model| model.name).collect())
    }

    /// Loads a model of the repository, which takes as long as reading its weights.
    ///
    /// # Errors
    /// There is no such model, it cannot be loaded, or the server loads no models on demand.
    pub async fn load(&self, model: &str) -> Result<(), Error> {
        self.control("RepositoryModelLoad", model).await
    }

    /// Has a model unloaded when its requests have ended.
    ///
    /// # Errors
    /// The server unloads no models on demand.
    pub async fn unload(&self, model: &str) -> Result<(), Error> {
        self.control("RepositoryModelUnload", model).await
    }

    async fn control(&self, method: &'static str, model: &str) -> Result<(), Error> {
        let request = RepositoryModelRequest {
            model_name: model.to_owned(),
        };
        let _: RepositoryModelResponse = self.call(method, request, model).await?;
        Ok(())
    }

    /// The configuration of a model.
    ///
    /// # Errors
    /// There is no such model, or no answer.
    pub async fn config(&self, model: &str) -> Result<ModelConfig, Error> {
        let request = ModelConfigRequest {
            name: model.to_owned(),
        };
        let answer: ModelConfigResponse = self.call("ModelConfig", request, model).await?;
        Ok(answer.config.unwrap_or_default())
    }

    /// Sends a request for text.
    pub fn generate(&self, generation: Generation) -> Replies {
        Replies {
            model: generation.prompt.model.clone(),
            names: generation.names.clone(),
            stop: Some(Box::new((self.clone(), generation.stop_message()))),
            call: Call::Starting(self.clone().infer(generation.into_message()).boxed()),
            ends: Ends::default(),
            rights: self.rights.clone(),
            num_charged: 0,
            place: None,
        }
    }

    /// Waits for the requests whose clients have left, for a bounded time.
    pub async fn drained(&self) {
        let all = self.left.acquire_many(MAX_LEFT);
        let _ = tokio::time::timeout(MAX_DRAIN_TIME, all).await;
    }

    /// Runs a call to its end, even if the client leaves: server 2.51 may lose a cancelled request, or crash.
    async fn to_its_end<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        let permit = self.left.clone().try_acquire_owned();
        let call = tokio::spawn(async move {
            let _permit = permit;
            call.await
        });
        let panicked = |error: JoinError| Err(Status::internal(error.to_string()));
        call.await.unwrap_or_else(panicked)
    }

    /// Sends a request whose only response is its prompt.
    ///
    /// # Errors
    /// The server or the model refuses it, or there is no answer.
    pub async fn read_prompt(
        &self,
        message: ModelInferRequest,
        names: &Names,
    ) -> Result<Read, Error> {
        let model = message.model_name.clone();
        let responses = self.clone().infer(message).try_flatten_stream();
        let responses: Vec<_> = self
            .to_its_end(responses.try_collect())
            .await
            .map_err(|status| names.apply(text_refusal(&status, &model)))?;
        match responses.first() {
            Some(response) => Read::of(response),
            None => Err(Error::bad_response("no outputs")),
        }
    }

    /// One request in a stream of its own, so that cancelling the stream cancels the request.
    ///
    /// Server 2.51 loses requests, and never unloads their model, if a client says before the last response that no
    /// more requests follow. With the header `triton_grpc_error`, which gives errors a status, it crashes.
    async fn infer(mut self, message: ModelInferRequest) -> Result<Responses, Status> {
        self.ready().await?;
        let (open, closed) = oneshot::channel::<Infallible>();
        let no_more = stream::once(closed).filter_map(|_| future::ready(None));
        let requests = stream::once(future::ready(message)).chain(no_more);
        let codec: ProstCodec<_, ModelStreamInferResponse> = ProstCodec::default();
        let call = self.grpc.streaming(
            self.trace.request(requests),
            path("ModelStreamInfer"),
            codec,
        );
        Ok(Responses {
            messages: call.await?.into_inner(),
            open: Some(open),
            failure: None,
        })
    }

    /// Sends a request to a model that has one response to each.
    ///
    /// # Errors
    /// The server or the model refuses it, or there is no answer.
    pub async fn pool<O: Output>(
        &self,
        message: ModelInferRequest,
        names: &Names,
    ) -> Result<O, Error> {
        let model = message.model_name.clone();
        let response = self.call("ModelInfer", message, &model).await;
        match response {
            Ok(response) => {
                let output = O::read(&response)?;
                self.rights.charge(output.num_tokens(), Instant::now);
                Ok(output)
            }
            // A model with several responses to a request, as those that generate text have.
            Err(error) if error.status == StatusCode::NOT_IMPLEMENTED || lacks_output(&error) => {
                Err(Error::not_of_task(&model, O::TASK))
            }
            Err(error) => Err(names.apply(error)),
        }
    }

    async fn call<Q, A>(&self, method: &'static str, request: Q, model: &str) -> Result<A, Error>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut triton = self.clone();
        let call = async move {
            triton.ready().await?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            triton
                .grpc
                .unary(triton.trace.request(request), path(method), codec)
                .await
        };
        let answer = self
            .to_its_end(call)
            .await
            .map_err(|status| Error::of_triton(&of_the_backend(status), model))?;
        Ok(answer.into_inner())
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.grpc.ready().await;
        ready
            .map_err(|error| Status::unavailable(format!("no connection to tritonserver: {error}")))
    }
}

/// The responses of a stream that has one request. Those without an output are left out.
struct Responses {
    messages: Streaming<ModelStreamInferResponse>,
    /// As long as it is there, more requests may follow in the stream: until the last response has come.
    open: Option<oneshot::Sender<Infallible>>,
    /// What the stream ends with.
    failure: Option<Status>,
}

impl Stream for Responses {
    type Item = Result<ModelInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let message = match ready!(self.messages.poll_next_unpin(context)) {
                Some(Ok(message)) => message,
                Some(Err(status)) => {
                    let status = self.failure.take().unwrap_or(status);
                    return Poll::Ready(Some(Err(status)));
                }
                None => return Poll::Ready(self.failure.take().map(Err)),
            };
            if !message.error_message.is_empty() {
                self.failure = Some(refusal(message.error_message));
                self.open = None;
            } else if let Some(response) = message.infer_response {
                if response.is_final() {
                    self.open = None;
                }
                // The last response may say nothing but that it is the last.
                if !response.outputs.is_empty() {
                    return Poll::Ready(Some(Ok(response)));
                }
            }
        }
    }
}

impl Stream for Replies {
    type Item = Result<Reply, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = loop {
            match &mut self.call {
                Call::Started(responses) => break ready!(responses.poll_next_unpin(context)),
                Call::Ended => break None,
                Call::Starting(call) => match ready!(call.poll_unpin(context)) {
                    Ok(responses) => self.call = Call::Started(Box::new(responses)),
                    Err(status) => break Some(Err(status)),
                },
            }
        };
        if !matches!(next, Some(Ok(_))) {
            self.call = Call::Ended;
            self.place = None;
        }
        Poll::Ready(next.map(|response| match response {
            Ok(response) => Reply::read(&response).map(|reply| {
                self.charge(&reply);
                self.ends.once(reply)
            }),
            Err(status) => Err(self.names.apply(text_refusal(&status, &self.model))),
        }))
    }
}

impl Replies {
    /// Charges the key for the tokens that are new.
    fn charge(&mut self, reply: &Reply) {
        let num_output_tokens: u32 = reply.rows.iter().map(|row| row.num_tokens).sum();
        let num_tokens = reply.num_prompt_tokens + num_output_tokens;
        let num_new = num_tokens.saturating_sub(self.num_charged);
        self.rights.charge(num_new, Instant::now);
        self.num_charged += num_new;
    }

    /// Holds `place` until the model is done with the request, even if the client leaves.
    pub fn holding(self, place: Arc<Held>) -> Self {
        let mut replies = self;
        replies.place = Some(place);
        replies
    }
}

/// The client has left. A cancellation that meets a response can crash server 2.51, so the request is stopped, and its
/// responses are read to their end.
impl Drop for Replies {
    fn drop(&mut self) {
        let call = std::mem::replace(&mut self.call, Call::Ended);
        let (Some(stop), Ok(runtime)) = (self.stop.take(), Handle::try_current()) else {
            return;
        };
        let (triton, message) = *stop;
        if matches!(call, Call::Ended) {
            return;
        }
        let place = self.place.take();
        if let Ok(permit) = triton.left.clone().try_acquire_owned() {
            runtime.spawn(async move {
                let (_permit, _place) = (permit, place);
                triton.stop(call, message).await;
            });
        }
    }
}

impl Triton {
    /// Asks that a request be stopped, until its last response has come. One that is not stopped in time, because
    /// Triton has no room for the stop requests, is cancelled.
    async fn stop(self, call: Call, message: ModelInferRequest) {
        let stops = async {
            let [mut period, longest] = STOP_PERIODS;
            loop {
                // A stop request is refused if the queue is full. The request may end before the answer to this one,
                // which must not be cancelled either.
                let stop = self.clone().infer(message.clone()).try_flatten_stream();
                let _: Result<Vec<_>, _> = self.to_its_end(stop.try_collect()).await;
                tokio::time::sleep(period).await;
                period = longest.min(period * 2);
            }
        };
        let rest = call.read().boxed();
        let ends = future::select(rest, stops.boxed());
        let _ = tokio::time::timeout(MAX_STOP_TIME, ends).await;
    }
}

impl Call {
    /// Reads what is left.
    async fn read(self) {
        let mut responses = match self {
            Self::Started(responses) => responses,
            Self::Starting(call) => match call.await {
                Ok(responses) => Box::new(responses),
                Err(_) => return,
            },
            Self::Ended => return,
        };
        while let Some(Ok(_)) = responses.next().await {}
    }
}

/// The refusal of a request for text.
fn text_refusal(status: &Status, model: &str) -> Error {
    let error = Error::of_triton(status, model);
    match lacks_output(&error) {
        true => Error::no_text(model),
        false => error,
    }
}

/// Whether Triton says that the model lacks an output that every model of an endpoint has.
fn lacks_output(error: &Error) -> bool {
    const OF_ALL: [&str; 10] = [
        "embedding",
        "finish_reason",
        "labels",
        "num_input_tokens",
        "num_output_tokens",
        "output_ids",
        "probs",
        "score",
        "text_input",
        "text_output",
    ];
    let words = [
        "unexpected inference output '",
        "unexpected inference input '",
    ];
    let mut names = words.into_iter().filter_map(|words| {
        let (_, rest) = error.message.split_once(words)?;
        rest.split('\'').next()
    });
    names.any(|name| OF_ALL.contains(&name))
}

/// A status with its details, if the backend has named it: its text then begins with its code.
fn of_the_backend(status: Status) -> Status {
    match status.message().split_once(": ") {
        Some((name, text)) if code_of(name) == Some(status.code()) => {
            Status::with_details(status.code(), text, OF_THE_BACKEND.into())
        }
        _ => status,
    }
}

/// The status of a refusal in a stream, which has only a text. That of the backend begins with its code; details of the
/// status say so. Triton's own have none, so their words tell.
fn refusal(message: String) -> Status {
    const OF_A_MODEL: [&str; 1] = ["unknown model"];
    const OF_THE_MOMENT: [&str; 4] = [
        "maximum queue size",
        "not ready",
        "stopping",
        "timeout expired",
    ];
    if let Some((name, text)) = message.split_once(": ")
        && let Some(code) = code_of(name)
    {
        return Status::with_details(code, text, OF_THE_BACKEND.into());
    }
    let has = |words: &[&str]| words.iter().any(|words| message.contains(words));
    if has(&OF_A_MODEL) {
        Status::not_found(message)
    } else if has(&OF_THE_MOMENT) {
        Status::unavailable(message)
    } else {
        Status::invalid_argument(message)
    }
}

/// The status for the name of one of Triton's codes.
fn code_of(name: &str) -> Option<Code> {
    Some(match name {
        "UNKNOWN" => Code::Unknown,
        "INTERNAL" => Code::Internal,
        "NOT_FOUND" => Code::NotFound,
        "INVALID_ARG" => Code::InvalidArgument,
        "UNAVAILABLE" => Code::Unavailable,
        "UNSUPPORTED" => Code::Unimplemented,
        "ALREADY_EXISTS" => Code::AlreadyExists,
        "CANCELLED" => Code::Cancelled,
        _ => return None,
    })
}

/// The path of a method of Triton's service.
fn path(method: &str) -> PathAndQuery {
    PathAndQuery::try_from(format!("/{SERVICE}/{method}")).expect("names of methods are plain")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_code_that_the_backend_names() {
        for (text, code, message) in [
            (
                "INTERNAL: step failed: device error",
                Code::Internal,
                "step failed: device error",
            ),
            (
                "NOT_FOUND: the adapter 'a' is not known: maximum queue size",
                Code::NotFound,
                "the adapter 'a' is not known: maximum queue size",
            ),
            ("UNAVAILABLE: later", Code::Unavailable, "later"),
        ] {
            let status = refusal(text.to_owned());
            assert_eq!((status.code(), status.message()), (code, message));
            assert_eq!(status.details(), OF_THE_BACKEND);
        }
    }

    #[test]
    fn a_code_that_a_text_begins_with_is_no_part_of_it() {
        let status = of_the_backend(Status::invalid_argument("INVALID_ARG: option 'dimensions'"));
        assert_eq!(status.message(), "option 'dimensions'");
        assert_eq!(status.details(), OF_THE_BACKEND);
        for other in [
            Status::invalid_argument("INTERNAL: of somebody else"),
            Status::invalid_argument("expected 1 inputs"),
            Status::internal("INVALID_ARG: a"),
        ] {
            let text = other.message().to_owned();
            assert_eq!(of_the_backend(other).message(), text);
        }
    }

    #[test]
    fn a_model_without_the_outputs_of_an_endpoint_is_another_kind_of_model() {
        for (text, is_another) in [
            (
                "unexpected inference output 'finish_reason' for model 'm'",
                true,
            ),
            (
                "[request id: a] unexpected inference input 'text_input' for model 'm'",
                true,
            ),
            (
                "unexpected inference output 'reasoning_content' for model 'm'",
                false,
            ),
            ("option 'text_output'", false),
        ] {
            let error = text_refusal(&Status::invalid_argument(text), "m");
            assert_eq!(error.param.is_some(), is_another, "{text}");
            assert_eq!(error.message.contains("writes no text"), is_another);
        }
    }

    #[test]
    fn the_words_of_tritons_own_refusals_tell_their_status() {
        for (text, code) in [
            (
                "Request for unknown model: 'm' is not found",
                Code::NotFound,
            ),
            ("Exceeds maximum queue size", Code::Unavailable),
            ("Request timeout expired", Code::Unavailable),
            (
                "expected 1 inputs but got 2 inputs for model 'm'",
                Code::InvalidArgument,
            ),
        ] {
            let status = refusal(text.to_owned());
            assert_eq!((status.code(), status.message()), (code, text));
            assert!(status.details().is_empty());
        }
    }
}
