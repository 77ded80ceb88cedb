//! A JSON object of a checkpoint: every accessor checks type and range, and errors name the file, the key and what
//! was expected.

use std::fmt::Display;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use inflight_base::{LoadError, parse_json, read_text};

/// The largest JSON file that is read. The index of a model with a trillion parameters takes a few MiB.
const MAX_BYTES: u64 = 64 << 20;

/// A JSON object, and the file it comes from.
#[derive(Clone, Debug)]
pub struct JsonFile {
    path: PathBuf,
    /// The dotted path of the object inside the file; empty for the whole file.
    prefix: String,
    object: Map<String, Value>,
}

impl JsonFile {
    /// Reads a file that must hold one JSON object.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or is not a JSON object.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        match read_json(path)? {
            Value::Object(object) => Ok(Self::new(path, "", object)),
            _ => Err(LoadError::File {
                path: path.to_owned(),
                reason: "is not a JSON object".to_owned(),
            }),
        }
    }

    /// Reads a file that must hold a list of JSON objects. Errors name an object by its index.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or is not such a list.
    pub fn read_list(path: &Path) -> Result<Vec<Self>, LoadError> {
        let Value::Array(values) = read_json(path)? else {
            return Err(not_a_list(path));
        };
        let objects = values.into_iter().enumerate();
        let objects = objects.map(|(index, value)| match value {
            Value::Object(object) => Ok(Self::new(path, &format!("{index}."), object)),
            _ => Err(not_a_list(path)),
        });
        objects.collect()
    }

    /// An object that was not read from a JSON file: errors name `path`, and `prefix` before each key.
    pub fn new(path: &Path, prefix: &str, object: Map<String, Value>) -> Self {
        Self {
            path: path.to_owned(),
            prefix: prefix.to_owned(),
            object,
        }
    }

    /// A copy with another value of a key.
    #[must_use]
    pub fn with(&self, key: &str, value: Value) -> Self {
        let mut other = self.clone();
        other.object.insert(key.to_owned(), value);
        other
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `key`. `null` counts as absent, which is what Python's writers mean by it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is present, even as `null`.
    pub fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// The object under `key`.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
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

    /// Keys and values in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.object.iter()
    }

    /// The string under `key`.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn string(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unexpected(key, other, "a string")),
        }
    }

    /// The boolean under `key`, or `default`.
    ///
    /// # Errors
    /// The value is not a boolean.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, LoadError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(self.unexpected(key, other, "true or false")),
        }
    }

    /// The integer under `key`.
    ///
    /// # Errors
    /// The value is not an integer in `range`.
    pub fn size(
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

    /// The integer under `key`, or `default` if the key is missing. An explicit `null` is none.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn size_or(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
        default: Option<usize>,
    ) -> Result<Option<usize>, LoadError> {
        let given = self.size(key, range)?;
        Ok(if self.has(key) { given } else { default })
    }

    /// The integer under `key`, which must be present.
    ///
    /// # Errors
    /// As [`size`](Self::size), and for a missing key.
    pub fn required_size(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, LoadError> {
        self.size(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// The number under `key`.
    ///
    /// # Errors
    /// The value is not a number in `range`.
    pub fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, LoadError> {
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

    /// The number under `key`, which must be present.
    ///
    /// # Errors
    /// As [`number`](Self::number), and for a missing key.
    pub fn required_number(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, LoadError> {
        self.number(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// An error for a value that is not what was expected.
    pub fn unexpected(&self, key: &str, value: impl Display, expected: impl Display) -> LoadError {
        self.error(format!("{}{key}: {value} is not {expected}", self.prefix))
    }

    /// An error about this file.
    pub fn error(&self, reason: String) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason,
        }
    }

    /// An error about a key that must be there.
    pub fn missing(&self, key: &str) -> LoadError {
        self.error(format!("{}{key} is missing", self.prefix))
    }
}

fn not_a_list(path: &Path) -> LoadError {
    LoadError::File {
        path: path.to_owned(),
        reason: "is not a list of JSON objects".to_owned(),
    }
}

fn read_json(path: &Path) -> Result<Value, LoadError> {
    let fail = |reason: String| LoadError::File {
        path: path.to_owned(),
        reason,
    };
    let metadata = fs::metadata(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return Err(fail(format!(
            "is not a regular file of at most {MAX_BYTES} bytes"
        )));
    }
    let text = read_text(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
    parse_json(&text).map_err(|error| fail(format!("is not JSON: {error}")))
}
