//! Where a request belongs in a trace: the headers of W3C's Trace Context, which are handed on to tritonserver.

use axum::http::HeaderMap;
use tonic::Request;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

/// The headers, by name.
const HEADERS: [&str; 2] = ["traceparent", "tracestate"];
/// The longest value that is handed on. W3C asks for 512 bytes of `tracestate` at least.
const MAX_BYTES: usize = 4096;

/// The headers of a request that say which trace it belongs to, if it has some.
#[derive(Clone, Debug, Default)]
pub struct Trace([Option<AsciiMetadataValue>; 2]);

impl Trace {
    /// The trace of these headers.
    pub fn of(headers: &HeaderMap) -> Self {
        Self(HEADERS.map(|name| {
            let value = headers.get(name)?.as_bytes();
            let value = Some(value).filter(|value| value.len() <= MAX_BYTES)?;
            AsciiMetadataValue::try_from(value).ok()
        }))
    }

    /// A request to tritonserver that belongs to the same trace.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.add_to(request.metadata_mut());
        request
    }

    fn add_to(&self, metadata: &mut MetadataMap) {
        for (name, value) in HEADERS.into_iter().zip(&self.0) {
            if let Some(value) = value {
                metadata.insert(name, value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_headers_of_traces_are_handed_on_and_no_others() {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_static("00-1-2-01"));
        headers.insert("authorization", HeaderValue::from_static("Bearer sk-one"));
        let long = HeaderValue::try_from("a".repeat(MAX_BYTES + 1)).expect("text");
        headers.insert("tracestate", long);
        let request = Trace::of(&headers).request(());
        let metadata = request.metadata();
        assert_eq!(metadata.len(), 1);
        assert_eq!(metadata.get("traceparent").expect("handed on"), "00-1-2-01");
    }
}
