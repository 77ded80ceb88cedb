//! The keys of clients: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::Error;
use crate::rights::Rights;

/// The header of Anthropic's clients.
const API_KEY: &str = "x-api-key";
/// The largest file of keys.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Whose request it is: the hash of its key. All zeros where no client needs one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner(pub [u8; 32]);

/// A client, as its key tells.
#[derive(Clone, Debug, Default)]
pub struct Client {
    /// Whose requests it sends.
    pub owner: Owner,
    /// The rights of its key.
    pub rights: Arc<Rights>,
}

impl Owner {
    /// The owner of what a key asks for.
    fn of(key: &str) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl Client {
    /// The client that a request comes from.
    pub fn of(request: &Request) -> Self {
        let client = request.extensions().get::<Self>();
        client.cloned().unwrap_or_default()
    }
}

/// The keys that clients may have. Without any, no client needs one.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<Key>);

#[derive(Clone, Debug)]
struct Key {
    text: String,
    rights: Arc<Rights>,
}

impl Keys {
    /// The keys in a file, one a line, with its rights behind it ([`Rights::parse`]). Empty lines, and those that begin
    /// with `#`, count for nothing.
    ///
    /// # Errors
    /// The file cannot be read, is larger than 1 MiB, has no key, or an invalid right.
    pub fn read(path: &Path) -> Result<Self, String> {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(format!(
                "{} is larger than {MAX_FILE_BYTES} bytes",
                path.display()
            ));
        }
        let keys = Self::of(&text).map_err(|problem| format!("{}: {problem}", path.display()))?;
        match keys.0.is_empty() {
            true => Err(format!("{} has no key; write one a line", path.display())),
            false => Ok(keys),
        }
    }

    fn of(text: &str) -> Result<Self, String> {
        let now = Instant::now();
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let mut words = line.split_whitespace();
            if let Some(key) = words.next().filter(|key| !key.starts_with('#')) {
                let rights = Rights::parse(words, now)
                    .map_err(|problem| format!("line {number}: {problem}"))?;
                keys.push(Key {
                    text: key.to_owned(),
                    rights: Arc::new(rights),
                });
            }
        }
        Ok(Self(keys))
    }

    /// The client with this key; `None` if the key is not known any more.
    pub fn client_of(&self, owner: Owner) -> Option<Client> {
        if self.0.is_empty() {
            return (owner == Owner::default()).then(Client::default);
        }
        let mut keys = self.0.iter();
        let key = keys.find(|key| Owner::of(&key.text) == owner)?;
        Some(Client {
            owner,
            rights: key.rights.clone(),
        })
    }

    /// The client whose request has these headers.
    ///
    /// # Errors
    /// It has no key, or one that is none of these.
    pub fn client(&self, headers: &HeaderMap) -> Result<Client, Error> {
        if self.0.is_empty() {
            return Ok(Client::default());
        }
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| bearer(value.as_bytes()));
        let api_key = headers.get(API_KEY).map(|value| value.as_bytes());
        let mut given = bearer.into_iter().chain(api_key).peekable();
        if given.peek().is_none() {
            return Err(Error::unauthorized(
                "the request has no key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            ));
        }
        let known = given.fold(None, |known, key| self.find(key).or(known));
        let key =
            known.ok_or_else(|| Error::unauthorized("the key of the request is not known"))?;
        Ok(Client {
            owner: Owner::of(&key.text),
            rights: key.rights.clone(),
        })
    }

    fn find(&self, given: &[u8]) -> Option<&Key> {
        // All are compared, so that the time tells nothing.
        let keys = self.0.iter();
        keys.fold(None, |found, key| match equal(key.text.as_bytes(), given) {
            true => Some(key),
            false => found,
        })
    }
}

/// The key behind the name of the scheme, which may be in any case (RFC 9110, 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"Bearer ";
    let (scheme, key) = value.split_at_checked(SCHEME.len())?;
    scheme
        .eq_ignore_ascii_case(SCHEME)
        .then(|| key.trim_ascii())
}

/// Whether two texts are equal, in a time that depends on nothing but their lengths.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let difference = a
        .iter()
        .zip(b)
        .fold(0, |difference, (a, b)| difference | (a ^ b));
    a.len() == b.len() && std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(authorization: &'static str) -> HeaderMap {
        let value = HeaderValue::from_static(authorization);
        [(header::AUTHORIZATION, value)].into_iter().collect()
    }

    #[test]
    fn a_request_needs_one_of_the_keys() {
        let keys = Keys::of("# team a\nsk-one\n\n sk-two requests=1 \n").expect("sound");
        let owner = |key: &str| Owner(Sha256::digest(key).into());
        let of = |headers: &HeaderMap| keys.client(headers).expect("known").owner;
        for (good, key) in [
            ("Bearer sk-one", "sk-one"),
            ("Bearer sk-two", "sk-two"),
            ("bearer sk-one", "sk-one"),
            ("BEARER  sk-one ", "sk-one"),
        ] {
            assert_eq!(of(&headers(good)), owner(key));
        }
        for bad in [
            "Bearer sk-on",
            "Bearer sk-onf",
            "Bearer # team a",
            "Bearer ",
            "sk-one",
            "Basic sk-one",
        ] {
            assert_eq!(
                keys.client(&headers(bad)).expect_err(bad).status.as_u16(),
                401
            );
        }
        assert!(keys.client(&HeaderMap::new()).is_err());
        let again = keys.client_of(owner("sk-two")).expect("known");
        assert_eq!(again.owner, owner("sk-two"));
        assert!(again.rights.admit(Instant::now()).is_ok());
        assert!(
            again.rights.admit(Instant::now()).is_err(),
            "it has one request"
        );
        assert!(keys.client_of(owner("sk-three")).is_none());
        assert!(keys.client_of(Owner::default()).is_none());
        assert!(Keys::default().client_of(Owner::default()).is_some());
        assert!(Keys::default().client_of(owner("sk-one")).is_none());
        let with = |mut headers: HeaderMap, key| {
            headers.insert(API_KEY, HeaderValue::from_static(key));
            headers
        };
        let alone = with(HeaderMap::new(), "sk-two");
        assert_eq!(of(&alone), owner("sk-two"));
        let second = with(headers("Bearer other"), "sk-two");
        assert_eq!(of(&second), owner("sk-two"));
        let first = with(headers("Bearer sk-one"), "other");
        assert_eq!(of(&first), owner("sk-one"));
        assert!(keys.client(&with(headers("Bearer other"), "sk-")).is_err());
        let nobody = Keys::default().client(&HeaderMap::new());
        assert_eq!(nobody.expect("no key is needed").owner, Owner::default());
    }
    #[test]
    fn a_line_with_wrong_rights_is_named() {
        let error = Keys::of("sk-one\nsk-two speed=9").expect_err("no such right");
        assert!(error.starts_with("line 2: 'speed=9'"), "{error}");
    }
}
