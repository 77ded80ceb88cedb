//! The origins whose pages may use the server in a browser (Fetch Standard, section 3.2: CORS).

use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// How long a browser may remember what is allowed.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("600");
/// The headers that a page may read besides those that every page may.
const READABLE: HeaderValue = HeaderValue::from_static("x-request-id, retry-after");

/// An origin such as `https://chat.example`, or `*` for any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_host = |rest: &str| {
            !rest.is_empty()
                && rest.bytes().all(|byte| byte.is_ascii_graphic())
                && !rest.contains(['/', '?', '#', '@', '*'])
        };
        let is_origin = match text.split_once("://") {
            Some(("http" | "https", rest)) => is_host(rest),
            _ => text == "*",
        };
        match is_origin {
            // As browsers write it.
            true => Ok(Self(text.to_ascii_lowercase())),
            false => Err(format!(
                "'{text}' is no origin; give one such as https://chat.example, without a path, or * for any"
            )),
        }
    }
}

/// The origin of a request, if it is one of these.
fn allowed<'a>(origins: &[Origin], headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let is_one = |known: &Origin| known.0 == "*" || known.0.as_bytes() == origin.as_bytes();
    origins.iter().any(is_one).then_some(origin)
}

/// Says to browsers whose pages may send a request and read the response. What a browser asks before it sends one is answered here.
pub async fn with_origin(
    State(origins): State<Arc<[Origin]>>,
    request: Request,
    next: Next,
) -> Response {
    let origin = allowed(&origins, request.headers()).cloned();
    let is_question = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Some(_) if is_question => answer(request.headers()),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, READABLE);
    }
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    response
}

/// Whatever headers the page wants to send may be sent: the server reads few of them.
fn answer(asked: &HeaderMap) -> Response {
    let methods = HeaderValue::from_static("GET, POST");
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_a_scheme_and_a_host() {
        for text in [
            "https://chat.example",
            "http://localhost:3000",
            "http://[::1]:80",
            "*",
        ] {
            assert!(text.parse::<Origin>().is_ok(), "{text}");
        }
        for text in [
            "",
            "chat.example",
            "https://",
            "https://a/",
            "ftp://a",
            "https://*.a",
            "https://a b",
        ] {
            let problem = text.parse::<Origin>().expect_err(text);
            assert!(problem.contains(&format!("'{text}'")));
        }
    }

    #[test]
    fn only_the_whole_origin_is_allowed() {
        let origins = ["https://Chat.example".parse().expect("an origin")];
        for (origin, is_allowed) in [
            ("https://chat.example", true),
            ("http://chat.example", false),
            ("https://chat.example.evil", false),
            ("null", false),
        ] {
            let headers =
                HeaderMap::from_iter([(header::ORIGIN, HeaderValue::from_static(origin))]);
            assert_eq!(
                allowed(&origins, &headers).is_some(),
                is_allowed,
                "{origin}"
            );
        }
        assert_eq!(allowed(&origins, &HeaderMap::new()), None);
    }
}
