//! A prompt as a client writes it: a text, or tokens.

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};

/// The most tokens of a prompt, as the backend takes them.
const MAX_TOKENS: usize = 65536;
/// The most bytes of the options that the prompts of a request share, over all prompts: each prompt is sent with a
/// copy.
const MAX_COPIED_BYTES: usize = 64 << 20;
/// The backend's option for a prompt that is tokens.
const TOKENS_OPTION: &str = "prompt_token_ids";

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl Input {
    /// The text; empty if it is tokens.
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Tokens(_) => "",
        }
    }

    /// The options of a request with this prompt: `options`, and the tokens.
    pub fn options(&self, options: &Map<String, Value>) -> Map<String, Value> {
        let mut options = options.clone();
        if let Self::Tokens(ids) = self {
            options.insert(TOKENS_OPTION.to_owned(), json!(ids));
        }
        options
    }
}

/// A prompt, or a list of 1 to `max`, in a field.
///
/// # Errors
/// It is something else, or missing.
pub fn inputs(body: &mut Body, name: &str, max: usize) -> Result<Vec<Input>, Error> {
    let expected =
        format!("a text, a list of 1 to {MAX_TOKENS} token ids, or a list of 1 to {max} of those");
    let missing = || Error::field(name, format!("'{name}' is missing: give {expected}"));
    let value = body.take(name).ok_or_else(missing)?;
    let inputs = match &value {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => {
            let inputs = || list.iter().map(input).collect();
            (list.len() <= max).then(inputs).flatten()
        }
        one => input(one).map(|input| vec![input]),
    };
    inputs.ok_or_else(|| wrong(name, &value, &expected))
}

/// A text, or a list of 1 to `max`, in a field.
///
/// # Errors
/// It is something else, or missing.
pub fn texts(body: &mut Body, name: &str, max: usize) -> Result<Vec<String>, Error> {
    let expected = format!("a text, or a list of 1 to {max} texts");
    let missing = || Error::field(name, format!("'{name}' is missing: give {expected}"));
    let value = body.take(name).ok_or_else(missing)?;
    let texts: Option<Vec<String>> = match &value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) if (1..=max).contains(&list.len()) => list
            .iter()
            .map(|text| text.as_str().map(str::to_owned))
            .collect(),
        _ => None,
    };
    texts.ok_or_else(|| wrong(name, &value, &expected))
}

/// Checks that options can be copied for each of so many prompts: a body may have a few large options, and thousands of
/// small prompts.
///
/// # Errors
/// The copies would have more than 64 MiB.
pub fn check_copies(options: &Map<String, Value>, num_prompts: usize) -> Result<(), Error> {
    if num_prompts < 2 {
        return Ok(());
    }
    let mut num_bytes = 0;
    for (name, value) in options {
        num_bytes += name.len() + num_bytes_of(value);
    }
    match num_bytes.saturating_mul(num_prompts) <= MAX_COPIED_BYTES {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{num_bytes} bytes that all {num_prompts} inputs share are sent with each, more than {MAX_COPIED_BYTES} in all; \
             send fewer inputs in a request, or shorter options"
        ))),
    }
}

/// About the bytes of a value as JSON.
fn num_bytes_of(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + 2,
        Value::Array(list) => list.iter().map(|value| num_bytes_of(value) + 1).sum(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| name.len() + num_bytes_of(value) + 4)
            .sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}

/// The token ids in a field, of which there may be none.
///
/// # Errors
/// It is something else, or missing.
pub fn tokens(body: &mut Body, name: &str) -> Result<Vec<u32>, Error> {
    let expected = format!("a list of at most {MAX_TOKENS} token ids");
    let missing = || Error::field(name, format!("'{name}' is missing: give {expected}"));
    let value = body.take(name).ok_or_else(missing)?;
    ids(&value).ok_or_else(|| wrong(name, &value, &expected))
}

fn input(value: &Value) -> Option<Input> {
    match value {
        Value::String(text) => Some(Input::Text(text.clone())),
        other => ids(other).filter(|ids| !ids.is_empty()).map(Input::Tokens),
    }
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    let list = value.as_array().filter(|list| list.len() <= MAX_TOKENS)?;
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    list.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Vec<Input>, Error> {
        let body = json!({"prompt": value}).to_string();
        inputs(&mut Body::parse(body.as_bytes())?, "prompt", 2)
    }

    #[test]
    fn prompts_are_texts_or_tokens_or_lists_of_them() {
        let text = |text: &str| Input::Text(text.to_owned());
        for (value, expected) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![Input::Tokens(vec![1, 2])]),
            (json!([[1], "b"]), vec![Input::Tokens(vec![1]), text("b")]),
        ] {
            assert_eq!(read(value.clone()), Ok(expected), "{value}");
        }
        for value in [
            json!([]),
            json!([[]]),
            json!(["a", "b", "c"]),
            json!([1, "a"]),
            json!([-1]),
            json!([1.5]),
            json!({}),
        ] {
            assert!(read(value.clone()).is_err(), "{value}");
        }
    }

    #[test]
    fn options_are_copied_for_as_many_prompts_as_memory_allows() {
        let options = |value: Value| match json!({"stop": value}) {
            Value::Object(options) => options,
            _ => unreachable!("an object"),
        };
        let text = json!("x".repeat(1 << 20));
        for large in [
            text.clone(),
            json!([text]),
            json!({"a": text}),
            json!(vec![7; 1 << 18]),
        ] {
            let large = options(large);
            assert_eq!(check_copies(&large, 1), Ok(()));
            assert_eq!(check_copies(&large, 16), Ok(()));
            let error = check_copies(&large, 128).expect_err("128 MiB");
            assert!(error.message.contains("128 inputs"), "{}", error.message);
        }
        assert_eq!(check_copies(&options(json!("x")), 2048), Ok(()));
    }

    #[test]
    fn tokens_are_an_option_of_their_own() {
        let options = Input::Tokens(vec![7]).options(&Map::new());
        assert_eq!(Value::Object(options), json!({"prompt_token_ids": [7]}));
    }
}
