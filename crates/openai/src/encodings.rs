//! Compressed bodies of requests.

use axum::extract::Request;
use axum::http::header::CONTENT_ENCODING;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tower_http::decompression::RequestDecompressionLayer;

use crate::Error;

/// The encodings that are read, as the header `Accept-Encoding` lists them.
pub const READ: &str = "gzip, deflate, zstd";

/// Decompresses bodies as they are read, so that the limits on a body are limits on what comes out.
pub fn layer() -> RequestDecompressionLayer {
    RequestDecompressionLayer::new()
}

/// Refuses encodings that are not read. Belongs in front of [`layer`], which knows the names in one spelling.
///
/// # Errors
/// There is another encoding, or more than one.
pub async fn check(mut request: Request, next: Next) -> Result<Response, Error> {
    if let Some(name) = encoding(request.headers())? {
        let name = HeaderValue::from_static(name);
        request.headers_mut().insert(CONTENT_ENCODING, name);
    } else {
        request.headers_mut().remove(CONTENT_ENCODING);
    }
    Ok(next.run(request).await)
}

/// The encoding of a body; `None` if it is none.
fn encoding(headers: &HeaderMap) -> Result<Option<&'static str>, Error> {
    let values = headers.get_all(CONTENT_ENCODING).iter();
    let names: Vec<_> = values
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase())
        .filter(|name| !name.is_empty() && name != "identity")
        .collect();
    match &names[..] {
        [] => Ok(None),
        [name] => match &name[..] {
            // RFC 9110, 8.4.1.3.
            "gzip" | "x-gzip" => Ok(Some("gzip")),
            "deflate" => Ok(Some("deflate")),
            "zstd" => Ok(Some("zstd")),
            other => Err(Error::unknown_encoding(other)),
        },
        several => Err(Error::unknown_encoding(&several.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_encoding_is_read_in_any_spelling() {
        let of = |values: &[&'static str]| {
            let values = values.iter();
            let headers = values.map(|value| (CONTENT_ENCODING, HeaderValue::from_static(value)));
            encoding(&headers.collect())
        };
        for (values, expected) in [
            (&[][..], None),
            (&["identity"], None),
            (&["GZip"], Some("gzip")),
            (&["x-gzip"], Some("gzip")),
            (&[" deflate "], Some("deflate")),
            (&["zstd, identity"], Some("zstd")),
        ] {
            assert_eq!(of(values), Ok(expected), "{values:?}");
        }
        for values in [&["br"][..], &["gzip, gzip"], &["gzip", "zstd"]] {
            let error = of(values).expect_err("refused");
            assert_eq!(error.status.as_u16(), 415, "{values:?}");
        }
    }
}
