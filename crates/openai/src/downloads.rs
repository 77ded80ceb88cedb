//! Images at URLs: downloaded from hosts that the operator names, and put into the request as data.
//!
//! A request may ask for any URL, so that nothing is left to it: not the host, not the address behind the host's name,
//! not the size, and not the time. Redirects are not followed.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body as HttpBody;
use axum::http::{Request, StatusCode, Uri, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use http_body::Body;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::Error;
use crate::beside_streams::beside_streams;
use crate::tls;

/// The most images of a request that are downloaded.
const MAX_DOWNLOADS: usize = 16;
/// The most that are downloaded at a time, of all requests.
const MAX_AT_ONCE: usize = 16;
/// How long the images of a request may take.
const MAX_TIME: Duration = Duration::from_secs(20);

/// A host whose images are downloaded, `HOST` or `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageHost {
    host: String,
    /// `None`: the port of the URL's scheme.
    port: Option<u16>,
}

/// Downloads images. Copies share their limits.
#[derive(Clone)]
pub struct Downloads {
    hosts: Arc<[ImageHost]>,
    tls: TlsConnector,
    at_once: Arc<Semaphore>,
}

/// An image to be downloaded.
struct Target {
    url: String,
    uri: Uri,
    host: String,
    port: u16,
    is_encrypted: bool,
}

impl FromStr for ImageHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let authority: Option<axum::http::uri::Authority> = text.parse().ok();
        let known = authority.filter(|it| !it.as_str().contains('@') && !it.host().is_empty());
        let known = known.ok_or_else(|| {
            format!("'{text}' is no host; give one such as images.example or 10.0.0.7:8080")
        })?;
        Ok(Self {
            host: known.host().to_ascii_lowercase(),
            port: known.port_u16(),
        })
    }
}

impl fmt::Debug for Downloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Downloads");
        shown.field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

impl Downloads {
    /// Downloads from these hosts. With TLS, a host has a certificate that the system trusts.
    ///
    /// # Errors
    /// The system's certificates cannot be read.
    pub fn new(hosts: Vec<ImageHost>) -> Result<Self, String> {
        Ok(Self {
            hosts: hosts.into(),
            tls: tls::connector()?,
            at_once: Arc::new(Semaphore::new(MAX_AT_ONCE)),
        })
    }

    /// A body with the images of its messages as data. All of it has at most `max_bytes` then. `None` if it has no
    /// image at a URL.
    ///
    /// # Errors
    /// A URL is not of one of the hosts, or what is there is not downloaded within the limits.
    pub async fn fill(&self, bytes: &[u8], max_bytes: usize) -> Result<Option<Vec<u8>>, Error> {
        let read = beside_streams(bytes.len(), || body_with_urls(bytes));
        let Some(mut body) = read.await else {
            return Ok(None);
        };
        let mut images = images_of(&mut body);
        if images.is_empty() {
            return Ok(None);
        }
        if images.len() > MAX_DOWNLOADS {
            return Err(Error::invalid(format!(
                "{} images are at URLs, and at most {MAX_DOWNLOADS} are downloaded for a request; send the others as data URLs",
                images.len()
            )));
        }
        let targets = images.iter().map(|image| self.target(image.url()));
        let targets: Vec<_> = targets.collect::<Result<_, _>>()?;
        let mut max_left = max_bytes.saturating_sub(bytes.len());
        let all = try_join_all(targets.iter().map(|it| self.download(it, max_left / 4 * 3)));
        let data = tokio::time::timeout(MAX_TIME, all).await;
        let data = data.map_err(|_| {
            let seconds = MAX_TIME.as_secs();
            Error::invalid(format!(
                "the images at URLs were not there after {seconds} s; send data URLs"
            ))
        })??;
        for ((image, target), (kind, bytes)) in images.iter_mut().zip(&targets).zip(&data) {
            let data = STANDARD.encode(bytes);
            max_left = max_left.checked_sub(data.len()).ok_or_else(|| {
                target.error(&format!(
                    "the body would have more than {max_bytes} bytes with the images"
                ))
            })?;
            image.set(kind, &data);
        }
        Ok(Some(body.to_string().into_bytes()))
    }

    fn target(&self, url: &str) -> Result<Target, Error> {
        let shown: String = url.chars().take(200).collect();
        let invalid = |problem: &str| Error::invalid(format!("the image at '{shown}': {problem}"));
        let uri: Uri = url.parse().map_err(|_| invalid("this is no URL"))?;
        let is_encrypted = uri.scheme_str() == Some("https");
        let authority = uri.authority().filter(|it| !it.as_str().contains('@'));
        let authority =
            authority.ok_or_else(|| invalid("the URL has no host, or a user's name"))?;
        let host = authority.host().to_ascii_lowercase();
        let default_port = if is_encrypted { 443 } else { 80 };
        let port = authority.port_u16().unwrap_or(default_port);
        let is_allowed = |allowed: &ImageHost| {
            allowed.host == host && allowed.port.unwrap_or(default_port) == port
        };
        if !self.hosts.iter().any(is_allowed) {
            return Err(invalid(
                "the server downloads nothing from this host; send a data URL, or have the operator name the host in \
                 --allow-image-host",
            ));
        }
        Ok(Target {
            url: shown,
            uri,
            host,
            port,
            is_encrypted,
        })
    }

    /// The type and the bytes of an image.
    async fn download(
        &self,
        target: &Target,
        max_bytes: usize,
    ) -> Result<(String, Vec<u8>), Error> {
        let permit = self.at_once.acquire().await;
        let address = target.address().await?;
        let failed = |error: std::io::Error| target.error(&error.to_string());
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        let image = match target.is_encrypted {
            false => target.get(stream, max_bytes).await,
            true => {
                let name = ServerName::try_from(target.host.clone());
                let name = name.map_err(|error| target.error(&error.to_string()))?;
                let stream = self.tls.connect(name, stream).await.map_err(failed)?;
                target.get(stream, max_bytes).await
            }
        };
        drop(permit);
        image
    }
}

impl Target {
    fn error(&self, problem: &str) -> Error {
        Error::invalid(format!("the image at '{}': {problem}", self.url))
    }

    /// The address of the host: one that everybody can reach, unless the operator has named the address itself.
    async fn address(&self) -> Result<SocketAddr, Error> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(SocketAddr::new(ip, self.port));
        }
        let found = tokio::net::lookup_host((host, self.port)).await;
        let found = found.map_err(|error| self.error(&error.to_string()))?;
        let mut public = found.filter(|address| is_public(address.ip()));
        public.next().ok_or_else(|| {
            self.error("the host's address is private; have the operator name the address itself")
        })
    }

    async fn get(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        max_bytes: usize,
    ) -> Result<(String, Vec<u8>), Error> {
        let failed = |error: hyper::Error| self.error(&error.to_string());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        let connection = tokio::spawn(connection);
        let path = self.uri.path_and_query().map_or("/", |it| it.as_str());
        let authority = self.uri.authority().map_or("", |it| it.as_str());
        let request = Request::get(path)
            .header(header::HOST, authority)
            .header(header::ACCEPT, "image/*")
            .header(header::USER_AGENT, "inflight-openai")
            .header(header::CONNECTION, "close")
            .body(HttpBody::empty())
            .map_err(|error| self.error(&error.to_string()))?;
        let response = sender.send_request(request).await.map_err(failed)?;
        let image = self.body(response, max_bytes).await;
        connection.abort();
        image
    }

    async fn body(
        &self,
        response: hyper::Response<hyper::body::Incoming>,
        max_bytes: usize,
    ) -> Result<(String, Vec<u8>), Error> {
        if response.status() != StatusCode::OK {
            return Err(self.error(&format!(
                "the host answers with status {}, and redirects are not followed",
                response.status().as_u16()
            )));
        }
        let kind = response.headers().get(header::CONTENT_TYPE);
        let kind = kind.and_then(|it| it.to_str().ok()).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim().to_owned();
        let is_known = kind.starts_with("image/") && !kind.contains([',', ' ']);
        let kind = if is_known {
            kind
        } else {
            "image/png".to_owned()
        };
        let too_large = || {
            self.error(&format!(
                "it has more than {max_bytes} bytes, which are left of the body"
            ))
        };
        let body = response.into_body();
        if body.size_hint().lower() > max_bytes as u64 {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        let mut parts = HttpBody::new(body).into_data_stream();
        while let Some(part) = parts.next().await {
            let part = part.map_err(|error| self.error(&error.to_string()))?;
            if part.len() > max_bytes - bytes.len() {
                return Err(too_large());
            }
            bytes.extend_from_slice(&part);
        }
        Ok((kind, bytes))
    }
}

/// A place of a body that has an image at a URL.
enum ImagePlace<'a> {
    /// A text with the URL.
    Text(&'a mut Value),
    /// A source of Anthropic's API.
    Source(&'a mut Value),
}

impl ImagePlace<'_> {
    fn url(&self) -> &str {
        let url = match self {
            Self::Text(url) => url.as_str(),
            Self::Source(source) => source["url"].as_str(),
        };
        url.unwrap_or_default()
    }

    fn set(&mut self, kind: &str, data: &str) {
        match self {
            Self::Text(url) => **url = format!("data:{kind};base64,{data}").into(),
            Self::Source(source) => {
                **source = json!({"type": "base64", "media_type": kind, "data": data});
            }
        }
    }
}

/// A body that may have images at URLs. What is wrong with another one is said when its fields are read.
fn body_with_urls(bytes: &[u8]) -> Option<Value> {
    let has = |word: &[u8]| bytes.windows(word.len()).any(|it| it == word);
    match has(b"http") && has(b"image") {
        true => serde_json::from_slice(bytes).ok(),
        false => None,
    }
}

/// The images at URLs in the messages or the items of a body.
fn images_of(body: &mut Value) -> Vec<ImagePlace<'_>> {
    let Some(fields) = body.as_object_mut() else {
        return Vec::new();
    };
    let lists = fields
        .iter_mut()
        .filter(|(name, _)| *name == "messages" || *name == "input");
    let items = lists.filter_map(|(_, list)| list.as_array_mut()).flatten();
    let contents = items.filter_map(|item| item.get_mut("content")?.as_array_mut());
    contents.flatten().filter_map(image_of).collect()
}

fn image_of(part: &mut Value) -> Option<ImagePlace<'_>> {
    let is_url = |value: &Value| {
        let url = value.as_str();
        url.is_some_and(|url| url.starts_with("http://") || url.starts_with("https://"))
    };
    if part["source"]["type"] == "url" && is_url(&part["source"]["url"]) {
        return Some(ImagePlace::Source(&mut part["source"]));
    }
    let image = part.get_mut("image_url")?;
    let url = match image.is_object() {
        true => image.get_mut("url")?,
        false => image,
    };
    is_url(url).then_some(ImagePlace::Text(url))
}

/// Whether an address is one of the internet, and none of this machine or of a network around it (RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [first, second, third, _] = address.octets();
            let is_shared = first == 100 && (64..128).contains(&second);
            let is_reserved =
                first == 0 || first >= 240 || (first == 192 && second == 0 && third == 0);
            let is_benchmark = first == 198 && (18..20).contains(&second);
            !(address.is_private()
                || address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_documentation()
                || is_shared
                || is_reserved
                || is_benchmark)
        }
        IpAddr::V6(address) => {
            if let Some(address) = address.to_ipv4_mapped() {
                return is_public(IpAddr::V4(address));
            }
            // Global unicast, without documentation, and without prefixes that carry IPv4 addresses.
            let [first, second, ..] = address.segments();
            let is_tunnel = first == 0x2002 || (first == 0x2001 && second == 0);
            let is_documentation = first == 0x2001 && second == 0x0db8;
            (0x2000..0x4000).contains(&first) && !is_tunnel && !is_documentation
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_networks_around_the_server_are_private() {
        for (address, expected) in [
            ("93.184.216.34", true),
            ("127.0.0.1", false),
            ("10.1.2.3", false),
            ("172.20.0.1", false),
            ("192.168.1.1", false),
            ("169.254.169.254", false),
            ("100.64.0.1", false),
            ("0.0.0.0", false),
            ("255.255.255.255", false),
            ("224.0.0.1", false),
            ("2606:2800:220:1:248:1893:25c8:1946", true),
            ("::1", false),
            ("::ffff:10.0.0.1", false),
            ("fc00::1", false),
            ("fe80::1", false),
            ("64:ff9b::a00:1", false),
            ("2002:a00:1::", false),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(is_public(address), expected, "{address}");
        }
    }

    #[test]
    fn only_urls_of_the_named_hosts_are_targets() {
        let hosts = ["images.example", "10.0.0.7:8080"].map(|host| host.parse().expect("a host"));
        let downloads = Downloads {
            hosts: hosts.into(),
            tls: tls::connector().expect("certificates"),
            at_once: Arc::new(Semaphore::new(1)),
        };
        for (url, is_allowed) in [
            ("https://images.example/a.png?b=c", true),
            ("http://IMAGES.example/a.png", true),
            ("https://images.example:444/a.png", false),
            ("https://images.example.evil/a.png", false),
            ("https://evil@images.example/a.png", false),
            ("https://images.example@evil/a.png", false),
            ("http://10.0.0.7:8080/", true),
            ("http://10.0.0.7/", false),
            ("http:///a.png", false),
            ("http://[::1]/a.png", false),
        ] {
            assert_eq!(downloads.target(url).is_ok(), is_allowed, "{url}");
        }
        for host in ["", "http://a", "a/b", "user@a", "a b"] {
            assert!(host.parse::<ImageHost>().is_err(), "{host}");
        }
    }

    #[test]
    fn images_at_urls_are_found_in_every_api() {
        let mut body = json!({
            "messages": [
                {"role": "user", "content": "http://host/no-part.png"},
                {"role": "user", "content": [
                    {"type": "image_url", "image_url": {"url": "http://host/1.png"}},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                    {"type": "image", "source": {"type": "url", "url": "https://host/2.png"}},
                    {"type": "text", "text": "http://host/text.png"},
                ]},
            ],
            "input": [{"content": [{"type": "input_image", "image_url": "https://host/3.png"}]}],
        });
        let mut images = images_of(&mut body);
        let urls = images.iter().map(|image| image.url().to_owned());
        let expected = [
            "http://host/1.png",
            "https://host/2.png",
            "https://host/3.png",
        ];
        assert_eq!(urls.collect::<Vec<_>>(), expected);
        for image in &mut images {
            image.set("image/png", "AA==");
        }
        let parts = &body["messages"][1]["content"];
        assert_eq!(parts[0]["image_url"]["url"], "data:image/png;base64,AA==");
        let source = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
        assert_eq!(parts[2]["source"], source);
        assert_eq!(
            body["input"][0]["content"][0]["image_url"],
            "data:image/png;base64,AA=="
        );
    }
}
