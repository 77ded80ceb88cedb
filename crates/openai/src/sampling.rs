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
    /// Takes the fields out of a body. `seed` is for a request that gives none.
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
            seed: self::seed(body.take("seed"), seed)?,
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

/// The seed of a request: `drawn` if it gives none, or -1, which other servers take for none. Other numbers below 0
/// count from the end of those that the backend knows.
fn seed(value: Option<Value>, drawn: u64) -> Result<Value, Error> {
    let Some(value) = value else {
        return Ok(json!(drawn));
    };
    match (value.as_i64(), value.as_u64()) {
        (Some(-1), _) => Ok(json!(drawn)),
        (Some(number), _) => Ok(json!(number.cast_unsigned())),
        (None, Some(number)) => Ok(json!(number)),
        (None, None) => {
            let expected = format!(
                "a whole number from {} to {}, or -1 for any",
                i64::MIN,
                u64::MAX
            );
            Err(wrong("seed", &value, &expected))
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_below_0_is_one_and_minus_1_is_none() {
        let of = |value: Value| seed(Some(value), 42);
        assert_eq!(seed(None, 42), Ok(json!(42)));
        assert_eq!(of(json!(-1)), Ok(json!(42)));
        assert_eq!(of(json!(0)), Ok(json!(0)));
        assert_eq!(of(json!(u64::MAX)), Ok(json!(u64::MAX)));
        assert_eq!(of(json!(-2)), Ok(json!(u64::MAX - 1)));
        assert_eq!(of(json!(i64::MIN)), Ok(json!(1_u64 << 63)));
        for wrong in [json!(1.5), json!("7"), json!(true), json!(1e30)] {
            let error = of(wrong).expect_err("no seed");
            assert_eq!(error.param.as_deref(), Some("seed"));
        }
    }
}
