//! A JSON object read from a file that nobody vouches for: every look-up names the file, the key and
//! what was expected there.

use std::fmt::Display;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::base::{LoadError, check_byte_order_mark};

/// The largest JSON file of a checkpoint that is read. The index of a model of a trillion
/// parameters has a few MiB.
const MAX_BYTES: u64 = 64 << 20;

/// A JSON object and where it stands.
#[derive(Debug)]
pub(super) struct JsonFile {
    path: PathBuf,
    /// The dotted path of the object inside the file, empty for the whole file.
    prefix: String,
    object: Map<String, Value>,
}

impl JsonFile {
    /// Reads a file that must hold one JSON object.
    pub(super) fn read(path: &Path) -> Result<Self, LoadError> {
        let fail = |reason: String| LoadError::File {
            path: path.to_owned(),
            reason,
        };
        let metadata =
            fs::metadata(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            return Err(fail(format!(
                "is not a regular file of at most {MAX_BYTES} bytes"
            )));
        }
        let text =
            fs::read_to_string(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
        check_byte_order_mark(text.as_bytes()).map_err(&fail)?;
        match serde_json::from_str(&text) {
            Ok(Value::Object(object)) => Ok(Self {
                path: path.to_owned(),
                prefix: String::new(),
                object,
            }),
            Ok(_) => Err(fail("is not a JSON object".to_owned())),
            Err(error) => Err(fail(format!("is not JSON: {error}"))),
        }
    }

    /// An object that was not a file of its own: errors name `path`, and then `prefix` before a key.
    pub(super) fn new(path: &Path, prefix: &str, object: Map<String, Value>) -> Self {
        Self {
            path: path.to_owned(),
            prefix: prefix.to_owned(),
            object,
        }
    }

    /// The value of `key`; `null` counts as absent, as Python's writers mean it.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there, be it null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// The object under `key`.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self {
                path: self.path.clone(),
                prefix: format!("{}{key}.", self.prefix),
                object: object.clone(),
            })),
            Some(other) => Err(self.unexpected(key, other, "an object")),
        }
    }

    /// The keys and values in the file's order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.object.iter()
    }

    /// The string under `key`.
    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unexpected(key, other, "a string")),
        }
    }

    /// The boolean under `key`, or `default`.
    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool, LoadError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(self.unexpected(key, other, "true or false")),
        }
    }

    /// The whole number under `key`, which must be in `range`.
    pub(super) fn size(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                self.unexpected(key, value, expected)
            })
    }

    /// As [`size`](Self::size), for a key that must be there.
    pub(super) fn required_size(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, LoadError> {
        self.size(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// The number under `key`, which must be in `range`.
    pub(super) fn number(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| {
                let expected = format!("a number from {} to {}", range.start(), range.end());
                self.unexpected(key, value, expected)
            })
    }

    /// As [`number`](Self::number), for a key that must be there.
    pub(super) fn required_number(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
    ) -> Result<f64, LoadError> {
        self.number(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// The error of a value that is not what it must be.
    pub(super) fn unexpected(
        &self,
        key: &str,
        value: impl Display,
        expected: impl Display,
    ) -> LoadError {
        self.error(format!("{}{key}: {value} is not {expected}", self.prefix))
    }

    /// An error of this file.
    pub(super) fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }

    fn missing(&self, key: &str) -> LoadError {
        self.error(format!("{}{key} is missing", self.prefix))
    }
}
