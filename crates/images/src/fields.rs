//! The fields of a checkpoint's JSON files. Each field is taken once, and one that nobody has taken is refused by name.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use inflight_base::{LoadError, parse_json, read_text};
use serde_json::{Map, Value};

use crate::pixels::NUM_CHANNELS;

/// The largest whole number that a size may be: any larger one would be a mistake, and costs memory.
const MAX_SIZE: usize = 1 << 13;
/// The largest side of a patch.
pub const MAX_PATCH_SIDE: usize = 256;

/// A JSON object of a file.
#[derive(Debug)]
pub struct Fields {
    path: PathBuf,
    /// The names of the objects around this one, each with a dot.
    prefix: String,
    fields: Map<String, Value>,
}

impl Fields {
    /// The object of a file; none if there is no file.
    pub fn read(path: PathBuf) -> Result<Option<Self>, LoadError> {
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let reason = error.to_string();
                return Err(LoadError::File { path, reason });
            }
        };
        match parse_json(&text) {
            Ok(Value::Object(fields)) => Ok(Some(Self {
                path,
                prefix: String::new(),
                fields,
            })),
            Ok(_) => Err(LoadError::File {
                path,
                reason: "this is no JSON object".to_owned(),
            }),
            Err(error) => Err(LoadError::File {
                path,
                reason: format!("this is no JSON: {error}"),
            }),
        }
    }

    /// No fields, for a file that is missing.
    pub fn missing(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            prefix: String::new(),
            fields: Map::new(),
        }
    }

    /// Takes a field; `null` is like a field that is missing.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// A field that stays.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// Sets a field that is missing.
    pub fn set_default(&mut self, name: &str, value: Value) {
        let field = self.fields.entry(name).or_insert(Value::Null);
        if field.is_null() {
            *field = value;
        }
    }

    /// Returns the rest of an object that was taken.
    pub fn put_back(&mut self, name: &str, object: Self) {
        self.fields
            .insert(name.to_owned(), Value::Object(object.fields));
    }

    /// Takes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Self>, LoadError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Self {
                path: self.path.clone(),
                prefix: format!("{}{name}.", self.prefix),
                fields,
            })),
            Some(other) => Err(self.wrong(name, &other, "a JSON object")),
        }
    }

    /// Takes a whole number from 1 to a bound.
    fn whole_number(&mut self, name: &str, max: usize) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let number = value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok());
        match number.filter(|number| (1..=max).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, &value, &format!("a whole number from 1 to {max}"))),
        }
    }

    /// Takes a size or a count.
    pub fn size(&mut self, name: &str) -> Result<Option<usize>, LoadError> {
        self.whole_number(name, MAX_SIZE)
    }

    /// Takes the side of a patch in pixels.
    pub fn patch_size(&mut self) -> Result<Option<usize>, LoadError> {
        self.whole_number("patch_size", MAX_PATCH_SIDE)
    }

    /// Takes a number of patches that are merged, or of copies of an image.
    pub fn factor(&mut self, name: &str) -> Result<Option<usize>, LoadError> {
        self.whole_number(name, 16)
    }

    /// Takes a number of pixels.
    pub fn num_pixels(&mut self, name: &str) -> Result<Option<usize>, LoadError> {
        self.whole_number(name, 1 << 26)
    }

    /// Takes a size that may be written as a list or an object of two equal ones.
    pub fn square(&mut self, name: &str) -> Result<Option<usize>, LoadError> {
        let sides = match self.fields.get(name) {
            Some(Value::Array(sides)) => sides.clone(),
            Some(Value::Object(sides)) => {
                let names = ["height", "width"];
                names
                    .map(|name| sides.get(name).cloned().unwrap_or_default())
                    .to_vec()
            }
            _ => return self.size(name),
        };
        match &sides[..] {
            [height, width] if height == width => {
                self.fields.insert(name.to_owned(), height.clone());
                self.size(name)
            }
            _ => Err(self.wrong(name, &Value::from(sides), "a size of two equal sides")),
        }
    }

    /// Takes a size that is an object with a single field.
    pub fn edge(&mut self, name: &str, edge: &str) -> Result<Option<usize>, LoadError> {
        let Some(mut object) = self.object(name)? else {
            return Ok(None);
        };
        let Some(size) = object.size(edge)? else {
            return Err(object.lacks(edge));
        };
        object.finish(&[])?;
        Ok(Some(size))
    }

    /// Takes a height and a width; a single number is both.
    pub fn rectangle(&mut self, name: &str) -> Result<Option<(usize, usize)>, LoadError> {
        if self.fields.get(name).is_some_and(Value::is_number) {
            return Ok(self.size(name)?.map(|side| (side, side)));
        }
        let Some(mut object) = self.object(name)? else {
            return Ok(None);
        };
        let height = object.size("height")?;
        let height = height.ok_or_else(|| object.lacks("height"))?;
        let width = object.size("width")?;
        let width = width.ok_or_else(|| object.lacks("width"))?;
        object.finish(&[])?;
        Ok(Some((height, width)))
    }

    /// Takes a switch.
    pub fn switch(&mut self, name: &str) -> Result<Option<bool>, LoadError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(switch)) => Ok(Some(switch)),
            Some(other) => Err(self.wrong(name, &other, "true or false")),
        }
    }

    /// Takes a number.
    pub fn number(&mut self, name: &str) -> Result<Option<f64>, LoadError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(name, &value, "a number")),
            },
        }
    }

    /// Takes a number for each channel; a single one is for all.
    pub fn channels(&mut self, name: &str) -> Result<Option<[f64; NUM_CHANNELS]>, LoadError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let numbers: Option<Vec<f64>> = match &value {
            Value::Array(values) => values.iter().map(Value::as_f64).collect(),
            value => value.as_f64().map(|number| vec![number; NUM_CHANNELS]),
        };
        match numbers.and_then(|numbers| numbers.try_into().ok()) {
            Some(channels) => Ok(Some(channels)),
            None => Err(self.wrong(name, &value, "a number for each of 3 channels")),
        }
    }

    /// Takes a text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, LoadError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, &other, "a text")),
        }
    }

    /// Refuses a switch that is off and has to be on.
    pub fn demand_switch(&mut self, name: &str) -> Result<(), LoadError> {
        match self.switch(name)? {
            Some(false) => Err(self.wrong(name, &Value::Bool(false), "supported; only true is")),
            _ => Ok(()),
        }
    }

    /// Refuses a switch that is on and has no effect here.
    pub fn refuse_switch(&mut self, name: &str) -> Result<(), LoadError> {
        match self.switch(name)? {
            Some(true) => Err(self.wrong(name, &Value::Bool(true), "supported; only false is")),
            _ => Ok(()),
        }
    }

    /// Refuses the fields that are left, besides those with no effect on the result and those that are off.
    pub fn finish(self, without_effect: &[&str]) -> Result<(), LoadError> {
        let left = self.fields.iter().find(|(name, value)| {
            let is_off = matches!(value, Value::Null | Value::Bool(false));
            !is_off && !without_effect.contains(&name.as_str())
        });
        match left {
            None => Ok(()),
            Some((name, value)) => Err(self.error(&format!(
                "field '{}{name}' with {value} is unknown to this processor; serve the model without images",
                self.prefix
            ))),
        }
    }

    /// The error for a field with a wrong value.
    pub fn wrong(&self, name: &str, value: &Value, expected: &str) -> LoadError {
        self.error(&format!(
            "field '{}{name}': {value} is not {expected}",
            self.prefix
        ))
    }

    /// The error for a field that has to be there.
    pub fn lacks(&self, name: &str) -> LoadError {
        self.error(&format!("field '{}{name}' is missing", self.prefix))
    }

    /// An error about the file.
    pub fn error(&self, reason: &str) -> LoadError {
        LoadError::File {
            path: self.path.clone(),
            reason: reason.to_owned(),
        }
    }
}
