//! A prompt as a client writes it: a text, or tokens.

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};

/// The most tokens of a prompt, as the backend takes them.
const MAX_TOKENS: usize = 65536;
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
    fn tokens_are_an_option_of_their_own() {
        let options = Input::Tokens(vec![7]).options(&Map::new());
        assert_eq!(Value::Object(options), json!({"prompt_token_ids": [7]}));
    }
}
