//! A JSON value as a response.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// The response with this value.
pub fn json_response(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}
