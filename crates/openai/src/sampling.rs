//! The fields that completions and conversations have in common.

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::fields::Field;
use crate::usage::{Counts, Usage};

/// The most choices of a prompt.
const MAX_CHOICES: u32 = 128;
/// The most candidates at a position of the log-probabilities.
pub const MAX_CANDIDATES: u32 = 20;

/// How choices are drawn and sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Choices of each prompt.
    pub num_choices: u32,
    /// Whether the answer is a stream.
    pub stream: bool,
    /// Whether the last chunk of a stream has the usage.
    pub include_usage: bool,
    /// Whether the other chunks have it, too, as far as it goes.
    continuous_usage: bool,
    seed: Value,
    stop: Option<Value>,
}

impl Sampling {
    /// Takes the fields out of a body. `seed` is that of a request which gives none.
    ///
    /// # Errors
    /// A field of another type or range.
    pub fn take(body: &mut Body, seed: u64) -> Result<Self, Error> {
        let stream_options = stream_options(body.take("stream_options"))?;
        let asked = |name| asked(&stream_options, name);
        Ok(Self {
            num_choices: body.count("n", 1..=MAX_CHOICES)?.unwrap_or(1),
            stream: body.flag("stream")?,
            include_usage: asked("include_usage")?,
            continuous_usage: asked("continuous_usage_stats")?,
            seed: body.take("seed").unwrap_or(json!(seed)),
            stop: stop(body.take("stop"))?,
        })
    }

    /// The usage in a chunk before the last, where there is one: null, or the numbers so far.
    pub fn usage_so_far(&self, counts: &Counts) -> Option<Option<Usage>> {
        let usage = || self.continuous_usage.then(|| counts.usage());
        self.include_usage.then(usage)
    }

    /// The options of Triton's request: these, and what is left of the body.
    ///
    /// # Errors
    /// A field that is refused.
    pub fn options(&self, body: Body, fields: &[Field]) -> Result<Map<String, Value>, Error> {
        let mut options = body.into_options(fields)?;
        let draws = options.contains_key("temperature") || options.contains_key("top_p");
        if self.num_choices > 1 && !draws {
            options.insert("temperature".to_owned(), json!(1));
        }
        let own = [
            ("n", json!(self.num_choices)),
            ("seed", self.seed.clone()),
            ("stream", json!(self.stream)),
            ("exclude_input_in_output", json!(true)),
        ];
        options.extend(own.map(|(name, value)| (name.to_owned(), value)));
        let stop = self.stop.clone();
        options.extend(stop.map(|stop| ("stop".to_owned(), stop)));
        Ok(options)
    }
}

/// A list of texts, for the option `stop`.
fn stop(value: Option<Value>) -> Result<Option<Value>, Error> {
    match value {
        None => Ok(None),
        // A text by itself that begins with [ would be read as a list.
        Some(Value::String(text)) => Ok(Some(json!([text]))),
        Some(Value::Array(texts)) if texts.iter().all(Value::is_string) => {
            Ok((!texts.is_empty()).then_some(Value::Array(texts)))
        }
        Some(other) => Err(wrong("stop", &other, "a text or a list of texts")),
    }
}

/// The fields of `stream_options`.
fn stream_options(options: Option<Value>) -> Result<Map<String, Value>, Error> {
    match options {
        None => Ok(Map::new()),
        Some(Value::Object(fields)) => Ok(fields),
        Some(other) => Err(wrong("stream_options", &other, "an object")),
    }
}

/// Whether this field of `stream_options` is true.
fn asked(options: &Map<String, Value>, name: &str) -> Result<bool, Error> {
    match options.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(wrong(
            &format!("stream_options.{name}"),
            other,
            "true or false",
        )),
    }
}
