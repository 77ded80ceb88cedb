//! The metrics of the tritonserver, as text.

use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::Error;

/// The largest answer that is read.
const MAX_BYTES: u64 = 16 << 20;
/// How long an answer may take.
const MAX_TIME: Duration = Duration::from_secs(5);

/// The address of the metrics.
#[derive(Clone, Debug)]
pub struct TritonMetrics {
    /// Such as `127.0.0.1:8002`.
    pub address: String,
}

/// A value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'t> {
    /// The name, of a histogram with its ending.
    pub name: &'t str,
    /// The labels as they are written, without braces.
    labels: &'t str,
    /// The value.
    pub value: f64,
}

impl TritonMetrics {
    /// The text of all metrics.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn text(&self) -> Result<String, Error> {
        let problem = match tokio::time::timeout(MAX_TIME, self.fetch()).await {
            Ok(Ok(text)) => return Ok(text),
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

    async fn fetch(&self) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let request = format!(
            "GET /metrics HTTP/1.0\r\nHost: {}\r\nConnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MAX_BYTES).read_to_end(&mut answer).await?;
        let answer = String::from_utf8_lossy(&answer);
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body);
        Ok(body.unwrap_or_default().to_owned())
    }
}

/// The samples of a text in Prometheus's format. Lines that are none are left out.
pub fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter_map(|line| {
        let line = line.trim();
        if line.starts_with('#') {
            return None;
        }
        let (name, labels, value) = match line.split_once('{') {
            Some((name, rest)) => {
                let (labels, value) = rest.rsplit_once('}')?;
                (name, labels, value)
            }
            None => {
                let (name, value) = line.split_once(' ')?;
                (name, "", value)
            }
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some(Sample {
            name,
            labels,
            value,
        })
    })
}

impl<'t> Sample<'t> {
    /// The value of a label, as it is written.
    pub fn label(&self, name: &str) -> Option<&'t str> {
        let mut rest = self.labels;
        while !rest.is_empty() {
            let (found, behind) = rest.trim_start_matches([',', ' ']).split_once("=\"")?;
            let end = end_of_value(behind)?;
            if found == name {
                return Some(&behind[..end]);
            }
            rest = &behind[end + 1..];
        }
        None
    }
}

/// The quote that ends a value; one behind a backslash does not.
fn end_of_value(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_labels_and_values() {
        let text = "# HELP a A metric {of} \"words\"\n# TYPE a gauge\na{model=\"m\\\"},x\",version=\"1\"} 1.5\n\
                    b_bucket{le=\"+Inf\"} 7 1700000000000\nc 3\nno sample\n\nd{x=\"1\" 4\n";
        let found: Vec<_> = samples(text).collect();
        let values = found.iter().map(|it| (it.name, it.value));
        assert_eq!(
            values.collect::<Vec<_>>(),
            [("a", 1.5), ("b_bucket", 7.0), ("c", 3.0)]
        );
        assert_eq!(found[0].label("model"), Some("m\\\"},x"));
        assert_eq!(found[0].label("version"), Some("1"));
        assert_eq!(found[1].label("le"), Some("+Inf"));
        assert_eq!((found[0].label("le"), found[2].label("le")), (None, None));
    }
}
