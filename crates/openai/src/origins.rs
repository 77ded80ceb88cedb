//! The origins whose pages may use the server in a browser (Fetch Standard, section 3.2: CORS).

use std::str::FromStr;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// How long a browser may remember what is allowed.
const MAX_AGE: Duration = Duration::from_secs(600);
/// The headers that a page may read besides those that every page may.
const READABLE: [HeaderName; 3] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("request-id"),
    header::RETRY_AFTER,
];

/// An origin such as `https://chat.example`, or `*` for any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(HeaderValue);

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
        // As browsers write it.
        let value = HeaderValue::try_from(text.to_ascii_lowercase()).ok();
        value.filter(|_| is_origin).map(Self).ok_or_else(|| {
            format!(
                "'{text}' is no origin; give one such as https://chat.example, without a path, or * for any"
            )
        })
    }
}

/// Tells browsers that pages of these origins may send requests and read responses, refusals included. What a browser
/// asks before it sends a request is answered here, and needs no key.
pub fn layer(origins: Vec<Origin>) -> CorsLayer {
    let is_any = origins.iter().any(|origin| origin.0 == "*");
    let allowed = match is_any {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.into_iter().map(|origin| origin.0)),
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // The server reads few headers, so a page may send any.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(READABLE)
        .max_age(MAX_AGE)
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
}
