//! Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

use std::error::Error as _;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::encodings;

/// The details of a status that the backend has named.
pub const OF_THE_BACKEND: &[u8] = b"inflight";

/// The code of an error that lasts until somebody loads the model again.
pub const MODEL_HAS_FAILED: &str = "model_has_failed";

/// Why a request was refused, or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The status of the HTTP response.
    pub status: StatusCode,
    /// What is wrong, and what to do instead.
    pub message: String,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
}

impl Error {
    /// A mistake of the client.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A mistake of the client in one field of the request.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(name.to_owned()),
            ..Self::invalid(message)
        }
    }

    /// The body of the request has more bytes than the front takes.
    pub fn too_large(max_bytes: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!(
                "the request is larger than {max_bytes} bytes; shorten it, or start the server with a larger --max-request-bytes"
            ),
        )
    }

    /// The body of the request has an encoding that is not read.
    pub fn unknown_encoding(name: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!(
                "the body has the encoding '{}', and those that are read are {}; send one of them, or none",
                name.chars().take(64).collect::<String>(),
                encodings::READ
            ),
        )
    }

    /// The body of the request has not arrived in time.
    pub fn too_slow(limit: Duration) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "the body of the request has not arrived within {} s; send it faster, or start the server with a longer --request-timeout",
                limit.as_secs()
            ),
        )
    }

    /// The client has no key, or none that is known.
    pub fn unauthorized(problem: &str) -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(StatusCode::UNAUTHORIZED, problem)
        }
    }

    /// As many requests are in flight as the front takes.
    pub fn busy(max_requests: usize) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            ..Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "{max_requests} requests are in flight, which is the limit; try again later"
                ),
            )
        }
    }

    /// The request has more prompts than may ever be in flight.
    pub fn too_many_prompts(num_prompts: usize, max_requests: usize) -> Self {
        Self::field(
            "prompt",
            format!(
                "'prompt' has {num_prompts} prompts, and at most {max_requests} are in flight at a time; send them in several \
                 requests, or start the server with a larger --max-requests"
            ),
        )
    }

    /// The bodies of requests in flight have as many bytes as the front takes.
    pub fn too_many_bytes(max_bytes: usize) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            ..Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "the bodies of all requests together have {max_bytes} bytes, which is the limit; try again later"
                ),
            )
        }
    }

    /// The front knows no file with the steps of a model.
    pub fn nothing_live() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "there are no steps to show; give the model a 'stats_file', and start inflight-openai with --stats-file",
        )
    }

    /// As many clients look at the steps as the front serves.
    pub fn too_many_look(max_clients: usize) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("{max_clients} clients look at /live, which is the limit; close one"),
        )
    }

    /// No path has this name.
    pub fn unknown_path(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("there is no {method} {path}"),
        )
    }

    /// The path has no such method.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        Self {
            code: Some("method_not_supported"),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("there is no {method} {path}; the header Allow names its methods"),
            )
        }
    }

    /// There is no model of this name.
    pub fn unknown_model(name: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                format!("there is no model '{name}'; GET /v1/models lists those there are"),
            )
        }
    }

    /// The model has another task, or is decoupled.
    pub fn not_of_task(model: &str, task: &str) -> Self {
        Self::field(
            "model",
            format!(
                "model '{model}' cannot be used here; name one with 'task: {task}' that is not decoupled"
            ),
        )
    }

    /// The model is none that writes text.
    pub fn no_text(model: &str) -> Self {
        Self::field(
            "model",
            format!(
                "model '{model}' writes no text; name one that generates, or ask /v1/embeddings for vectors if it embeds, /rerank or /score if it scores, /classify if it classifies"
            ),
        )
    }

    /// The server behind the front sent what it never should.
    pub fn bad_response(problem: &str) -> Self {
        Self::new(
            StatusCode::BAD_GATEWAY,
            format!("the response of tritonserver has {problem}"),
        )
    }

    /// A refusal of the server behind the front, or of the connection to it, for a request to `model`.
    pub fn of_triton(status: &Status, model: &str) -> Self {
        if status.source().is_some() {
            let message = format!("no connection to tritonserver: {}", status.message());
            return Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        }
        let message = status.message();
        let is_of_the_backend = status.details() == OF_THE_BACKEND;
        // A model instance that has failed. Waiting does not mend it.
        let has_failed = is_of_the_backend && message.contains("has failed");
        // Triton's queue is full, or the backend has no room.
        let is_full = message.contains("maximum queue size") || is_of_the_backend && !has_failed;
        let http = match status.code() {
            // A part of the model, such as an adapter.
            Code::NotFound if is_of_the_backend => {
                return Self {
                    message: message.to_owned(),
                    ..Self::unknown_model(model)
                };
            }
            Code::NotFound => return Self::unknown_model(model),
            Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
                StatusCode::BAD_REQUEST
            }
            // gRPC has the same code for a message above the server's size limit, which no retry can mend.
            Code::ResourceExhausted if message.contains("larger than max") => {
                StatusCode::PAYLOAD_TOO_LARGE
            }
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unavailable if is_full => StatusCode::TOO_MANY_REQUESTS,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let code = match http {
            StatusCode::TOO_MANY_REQUESTS => Some("rate_limit_exceeded"),
            _ if has_failed => Some(MODEL_HAS_FAILED),
            _ => None,
        };
        Self {
            code,
            ..Self::new(http, message)
        }
    }

    /// The body of the response.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// Whether the same request may succeed later.
    pub fn is_temporary(&self) -> bool {
        let passes = matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        passes && self.code != Some(MODEL_HAS_FAILED)
    }

    /// OpenAI's word for the kind of error.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// An error of this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        self.worded(self.status, &self.body())
    }
}

impl Error {
    /// The response with a status and a body in the words of an API.
    pub fn worded(&self, status: StatusCode, body: &Value) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response =
            (status, [(header::CONTENT_TYPE, json)], body.to_string()).into_response();
        // Other APIs word it differently.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        if self.is_temporary() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            let read = HeaderValue::from_static(encodings::READ);
            headers.insert(header::ACCEPT_ENCODING, read);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_triton_keep_their_text_and_get_their_status() {
        for (status, http, kind) in [
            (
                Status::invalid_argument("option"),
                400,
                "invalid_request_error",
            ),
            (Status::not_found("no"), 404, "invalid_request_error"),
            (
                Status::unavailable("inference request to model 'm': Exceeds maximum queue size"),
                429,
                "rate_limit_error",
            ),
            (Status::unavailable("stopping"), 503, "server_error"),
            (Status::internal("step failed"), 500, "server_error"),
        ] {
            let error = Error::of_triton(&status, "m");
            assert_eq!(
                (error.status.as_u16(), error.kind()),
                (http, kind),
                "{status}"
            );
        }
        let busy =
            |text: &str| Status::with_details(Code::Unavailable, text, OF_THE_BACKEND.into());
        let found = |status: &Status| {
            let error = Error::of_triton(status, "m");
            (error.status.as_u16(), error.is_temporary())
        };
        for (status, expected) in [
            (busy("try again when some are done"), (429, true)),
            (
                busy("the model instance has failed, load it again"),
                (503, false),
            ),
            (Status::resource_exhausted("memory"), (429, true)),
            (
                Status::resource_exhausted("Received message larger than max (9 vs. 4)"),
                (413, false),
            ),
        ] {
            assert_eq!(found(&status), expected, "{status}");
        }
        let no_adapter = Status::with_details(Code::NotFound, "no adapter", OF_THE_BACKEND.into());
        let error = Error::of_triton(&no_adapter, "m:a");
        assert_eq!(
            (error.status, &error.message[..]),
            (StatusCode::NOT_FOUND, "no adapter")
        );
        assert_eq!(error.code, Some("model_not_found"));
        let error = Error::of_triton(&Status::invalid_argument("option 'n'"), "m");
        assert_eq!(error.message, "option 'n'");
    }

    #[test]
    fn a_client_is_told_when_to_try_again() {
        let response = Error::busy(8).into_response();
        assert_eq!(response.headers()["retry-after"], "1");
        assert!(
            !Error::invalid("no")
                .into_response()
                .headers()
                .contains_key("retry-after")
        );
    }
}
