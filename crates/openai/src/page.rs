//! The page at `/`: a conversation with the models, in one file that loads nothing else.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page.html");

/// What a browser may do with the page: run its script, use its style, send requests to this server, and nothing else
/// (Content Security Policy Level 3; Trusted Types: no text becomes HTML).
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let script = hash(element(PAGE, "script"));
    let style = hash(element(PAGE, "style"));
    format!(
        "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'"
    )
});

/// The response with the page.
pub async fn show() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

/// The text of the only element of this name, which has no attributes.
fn element<'a>(page: &'a str, name: &str) -> &'a str {
    let text = page
        .split_once(&format!("<{name}>"))
        .and_then(|(_, rest)| rest.split_once(&format!("</{name}>")));
    text.expect("the page has the element").0
}

/// The source expression of a policy that allows this text.
fn hash(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_has_the_hash_of_the_script() {
        // The example of Content Security Policy Level 3, section 8.2.
        let text = element("<p><script>alert('Hello, world.');</script>", "script");
        assert_eq!(
            hash(text),
            "sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng="
        );
        assert!(POLICY.contains(&format!("script-src '{}';", hash(element(PAGE, "script")))));
    }

    #[test]
    fn the_page_names_no_other_server() {
        let page = PAGE.replace("http://www.w3.org/2000/svg", "");
        for word in ["http:", "https:", "src=", "url(", "@import", "innerHTML"] {
            assert!(!page.contains(word), "{word}");
        }
    }
}
