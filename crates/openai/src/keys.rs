//! The keys of clients: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::Error;

/// The header of Anthropic's clients.
const API_KEY: &str = "x-api-key";
/// The largest file of keys.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Whose request it is: the hash of its key. All zeros where no client needs one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner(pub [u8; 32]);

/// The keys that clients may have. Without any, no client needs one.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<String>);

impl Keys {
    /// The keys in a file, one a line. Empty lines, and those that begin with `#`, count for nothing.
    ///
    /// # Errors
    /// The file cannot be read, is larger than 1 MiB, or has no key.
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
        let keys = Self::of(&text);
        match keys.0.is_empty() {
            true => Err(format!("{} has no key; write one a line", path.display())),
            false => Ok(keys),
        }
    }

    fn of(text: &str) -> Self {
        let lines = text.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self(keys.map(str::to_owned).collect())
    }

    /// Whose request has these headers.
    ///
    /// # Errors
    /// It has no key, or one that is none of these.
    pub fn owner(&self, headers: &HeaderMap) -> Result<Owner, Error> {
        if self.0.is_empty() {
            return Ok(Owner::default());
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
        let known = given.fold(None, |known, key| match self.has(key) {
            true => Some(key),
            false => known,
        });
        let key =
            known.ok_or_else(|| Error::unauthorized("the key of the request is not known"))?;
        Ok(Owner(Sha256::digest(key).into()))
    }

    fn has(&self, given: &[u8]) -> bool {
        // All are compared, so that the time tells nothing.
        self.0
            .iter()
            .fold(false, |found, key| found | equal(key.as_bytes(), given))
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
        let keys = Keys::of("# team a\nsk-one\n\n sk-two \n");
        let owner = |key: &str| Ok(Owner(Sha256::digest(key).into()));
        for (good, key) in [
            ("Bearer sk-one", "sk-one"),
            ("Bearer sk-two", "sk-two"),
            ("bearer sk-one", "sk-one"),
            ("BEARER  sk-one ", "sk-one"),
        ] {
            assert_eq!(keys.owner(&headers(good)), owner(key));
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
                keys.owner(&headers(bad)).expect_err(bad).status.as_u16(),
                401
            );
        }
        assert!(keys.owner(&HeaderMap::new()).is_err());
        let with = |mut headers: HeaderMap, key| {
            headers.insert(API_KEY, HeaderValue::from_static(key));
            headers
        };
        let alone = with(HeaderMap::new(), "sk-two");
        assert_eq!(keys.owner(&alone), owner("sk-two"));
        let second = with(headers("Bearer other"), "sk-two");
        assert_eq!(keys.owner(&second), owner("sk-two"));
        let first = with(headers("Bearer sk-one"), "other");
        assert_eq!(keys.owner(&first), owner("sk-one"));
        assert!(keys.owner(&with(headers("Bearer other"), "sk-")).is_err());
        let nobody = Keys::default().owner(&HeaderMap::new());
        assert_eq!(nobody, Ok(Owner::default()));
    }
}
