//! Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::access_log::REQUEST_ID;
use crate::body::Body;
use crate::{Error, ids};

/// The header with the version of Anthropic's API that a client speaks.
const VERSION: &str = "anthropic-version";
/// The path of the API, and the beginning of others below it.
const PATH: &str = "/v1/messages";
/// The header with the id of a request, in this API.
const ID: HeaderName = HeaderName::from_static("request-id");
/// The code of a request that asks the server to store the conversation.
pub const NO_THREADS: &str = "thread_unsupported_request";
/// The beginning of the backend's refusal of an option.
const UNKNOWN: &str = "unknown field '";

/// Whether a request is one of Anthropic's API.
pub fn is_of_client(path: &str, headers: &HeaderMap) -> bool {
    let below = path.strip_prefix(PATH);
    let is_path = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    is_path || headers.contains_key(VERSION)
}

/// Answers requests of Anthropic's API with its errors, and with the header `request-id`.
pub async fn worded(request: Request, next: Next) -> Response {
    let is_ours = is_of_client(request.uri().path(), request.headers());
    let response = next.run(request).await;
    match is_ours {
        true => with_id(response),
        false => response,
    }
}

/// The body of an error, for a request of this id.
pub fn body(error: &Error, request_id: &str) -> Value {
    let mut fields = json!({"type": kind(error), "message": message(error)});
    if error.code == Some(NO_THREADS) {
        fields["details"] = json!({"error_code": NO_THREADS});
    }
    json!({"type": "error", "error": fields, "request_id": request_id})
}

/// Refuses an object with a field that nothing has taken.
///
/// # Errors
/// There is one.
pub fn check_extra(object: &Body) -> Result<(), Error> {
    match object.first_left() {
        None => Ok(()),
        Some(place) => Err(extra(&place)),
    }
}

/// A field that the API does not know, in the API's words.
pub fn extra(place: &str) -> Error {
    Error::field(place, format!("{place}: Extra inputs are not permitted"))
}

/// Anthropic's word for the kind of error.
fn kind(error: &Error) -> &'static str {
    match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::SERVICE_UNAVAILABLE if error.is_temporary() => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

/// The message, where the backend does not know a field: in the API's words.
fn message(error: &Error) -> String {
    let unknown = error.message.strip_prefix(UNKNOWN);
    match unknown.and_then(|rest| rest.split_once('\'')) {
        Some((name, rest)) => format!("{}{rest}", extra(name).message),
        None => error.message.clone(),
    }
}

fn with_id(mut response: Response) -> Response {
    let given = response.headers().get(REQUEST_ID).cloned();
    let id = given.unwrap_or_else(|| {
        HeaderValue::try_from(ids::id("req_")).expect("ids are letters and digits")
    });
    let error = response.extensions_mut().remove::<Error>();
    if let Some(error) = error {
        let body = body(&error, id.to_str().unwrap_or_default()).to_string();
        let (mut parts, _) = response.into_parts();
        parts.headers.remove(header::CONTENT_LENGTH);
        response = (parts, body).into_response();
    }
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id.clone());
    headers.insert(ID, id);
    response
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    #[test]
    fn requests_are_known_by_their_path_or_their_version() {
        let none = HeaderMap::new();
        for (path, expected) in [
            ("/v1/messages", true),
            ("/v1/messages/count_tokens", true),
            ("/v1/messages/batches", true),
            ("/v1/messagesandmore", false),
            ("/v1/models", false),
        ] {
            assert_eq!(is_of_client(path, &none), expected, "{path}");
        }
        let version = (
            HeaderName::from_static(VERSION),
            HeaderValue::from_static("2023-06-01"),
        );
        assert!(is_of_client("/v1/models", &[version].into_iter().collect()));
    }

    #[test]
    fn errors_have_the_types_of_their_status() {
        let refused = |status| Error::of_triton(&status, "m");
        for (error, expected) in [
            (Error::invalid("no"), "invalid_request_error"),
            (Error::unauthorized("no key"), "authentication_error"),
            (Error::unknown_model("m"), "not_found_error"),
            (Error::too_large(8), "request_too_large"),
            (Error::busy(8), "rate_limit_error"),
            (refused(Status::unavailable("stopping")), "overloaded_error"),
            (refused(Status::deadline_exceeded("late")), "timeout_error"),
            (refused(Status::internal("step failed")), "api_error"),
            (Error::bad_response("no outputs"), "api_error"),
        ] {
            assert_eq!(body(&error, "req_1")["error"]["type"], expected);
        }
    }

    #[test]
    fn an_option_that_the_backend_does_not_know_is_an_extra_input() {
        let error = Error::invalid("unknown field 'tempo'; did you mean 'temperature'?");
        let expected = json!({
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "tempo: Extra inputs are not permitted; did you mean 'temperature'?",
            },
            "request_id": "req_1",
        });
        assert_eq!(body(&error, "req_1"), expected);
    }

    #[test]
    fn a_response_has_an_id_and_an_error_the_same() {
        let response = with_id(Error::busy(8).into_response());
        let id = response.headers()[&ID].clone();
        assert_eq!(response.headers()[REQUEST_ID], id);
        assert!(id.to_str().expect("text").starts_with("req_"));
        assert_eq!(response.headers()["retry-after"], "1");
        let known = ([(REQUEST_ID, "msg_1")], "").into_response();
        assert_eq!(with_id(known).headers()[&ID], "msg_1");
    }
}
