//! The models of which an instance has failed. Older servers call them ready, so their metrics tell.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::Error;

/// The gauge of instances that serve no requests any more.
const GAUGE: &str = "nv_inflight_failed_instances{";
/// The largest answer that is read.
const MAX_BYTES: u64 = 16 << 20;
/// How long an answer may take.
const MAX_TIME: Duration = Duration::from_secs(5);

/// The metrics of a tritonserver.
#[derive(Clone, Debug)]
pub struct Failures {
    /// Such as `127.0.0.1:8002`.
    pub address: String,
}

impl Failures {
    /// The models of which an instance has failed, in order.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn models(&self) -> Result<Vec<String>, Error> {
        let problem = match tokio::time::timeout(MAX_TIME, self.metrics()).await {
            Ok(Ok(text)) => return Ok(failed(&text)),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", MAX_TIME.as_secs()),
        };
        Err(Error {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: format!("no metrics of tritonserver: {problem}"),
            param: None,
            code: None,
        })
    }

    /// The answer with the metrics, with its head.
    async fn metrics(&self) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MAX_BYTES).read_to_end(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

/// The models of samples of the gauge that are not 0.
fn failed(text: &str) -> Vec<String> {
    let samples = text.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix(GAUGE)?.split_once("} ")?;
        let is_failed = value.trim().parse().is_ok_and(|num: f64| num > 0.0);
        let (_, model) = labels.split_once("model=\"")?;
        let (model, _) = model.split_once('"')?;
        is_failed.then(|| model.to_owned())
    });
    samples.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_with_a_failed_instance_is_named_once() {
        let text = "# TYPE nv_inflight_failed_instances gauge\n\
            nv_inflight_failed_instances{model=\"b\",version=\"1\"} 1.000000\n\
            nv_inflight_failed_instances{model=\"b\",version=\"2\"} 2\n\
            nv_inflight_failed_instances{model=\"a\",version=\"1\"} 0\n\
            nv_inference_count{model=\"a\",version=\"1\"} 7\n";
        assert_eq!(failed(text), ["b"]);
        assert_eq!(failed("HTTP/1.1 404 Not Found\r\n\r\n"), [""; 0]);
    }
}
