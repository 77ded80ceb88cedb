//! Errors in the API's form: `{"error", "error_type"}`.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::Error;

/// An error of the API.
pub struct Refusal(Error);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl Refusal {
    /// The API's status, and its word for the kind of error. The API has no keys, paths and models of other names, so
    /// these errors keep their status.
    fn kind(&self) -> (StatusCode, &'static str) {
        match self.0.status {
            StatusCode::BAD_REQUEST => (StatusCode::PAYLOAD_TOO_LARGE, "Validation"),
            StatusCode::TOO_MANY_REQUESTS => (StatusCode::TOO_MANY_REQUESTS, "Overloaded"),
            StatusCode::SERVICE_UNAVAILABLE => (StatusCode::SERVICE_UNAVAILABLE, "Unhealthy"),
            status if status.is_client_error() => (status, "Validation"),
            _ => (StatusCode::FAILED_DEPENDENCY, "Backend"),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, kind) = self.kind();
        let body = json!({"error": self.0.message, "error_type": kind});
        self.0.worded(status, &body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_status_and_the_word_of_the_api() {
        for (error, status, word) in [
            (Error::invalid("no"), 413, "Validation"),
            (Error::too_large(8), 413, "Validation"),
            (Error::unknown_model("m"), 404, "Validation"),
            (Error::busy(8), 429, "Overloaded"),
            (Error::bad_response("nothing"), 424, "Backend"),
        ] {
            let (found, kind) = Refusal(error).kind();
            assert_eq!((found.as_u16(), kind), (status, word));
        }
    }
}
