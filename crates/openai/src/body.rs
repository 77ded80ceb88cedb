//! A JSON object of which fields are taken one by one.

use std::ops::RangeInclusive;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::fields::{Fate, Field};
use crate::rights::Rights;
use crate::{Error, adapters};

/// The options that name an adapter.
const ADAPTER_OPTIONS: [&str; 2] = ["lora_name", "lora_task_id"];

/// The fields of a request, or of an object in it, that nothing has taken yet. A field that is null counts as not
/// given, as in OpenAI's API.
#[derive(Debug)]
pub struct Body {
    fields: Map<String, Value>,
    /// The place of an object within the request, such as `tools.0.`; empty for the request itself.
    place: String,
}

impl Body {
    /// The fields of a JSON object.
    ///
    /// # Errors
    /// The bytes are not JSON, or not an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(fields)) => Ok(Self::of(without_nulls(fields))),
            Ok(_) => Err(Error::invalid("the body is JSON, but not an object")),
            Err(error) => Err(Error::invalid(format!("the body is not JSON: {error}"))),
        }
    }

    /// These fields.
    pub fn of(fields: Map<String, Value>) -> Self {
        let place = String::new();
        Self { fields, place }
    }

    /// The fields of an object within a request, at a place such as `tools.0`.
    ///
    /// # Errors
    /// The value is no object.
    pub fn within(place: &str, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(fields) => Ok(Self {
                fields: without_nulls(fields),
                place: format!("{place}."),
            }),
            other => Err(wrong(place, &other, "an object")),
        }
    }

    /// The place of a field in the request.
    pub fn place(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    /// The place of the first field that nothing has taken.
    pub fn first_left(&self) -> Option<String> {
        self.fields.keys().next().map(|name| self.place(name))
    }

    /// Checks that clients may send these fields: the fields of the endpoint, and the options that the operator allows.
    /// Without a list of options, all are allowed.
    ///
    /// # Errors
    /// An option that is not in the list.
    pub fn permitted(self, fields: &[Field], options: Option<&[String]>) -> Result<Self, Error> {
        let is_permitted = |name: &String| {
            fields.iter().any(|field| field.name == name)
                || options.is_none_or(|options| options.contains(name))
        };
        match self.fields.keys().find(|name| !is_permitted(name)) {
            None => Ok(self),
            Some(name) => Err(Error::field(
                name,
                format!("'{name}' is not among the options that this server takes; leave it out"),
            )),
        }
    }

    /// Checks that a client may use the model, and the adapter.
    ///
    /// # Errors
    /// The client has models of its own, and the request names none of them.
    pub fn of_models(self, rights: &Rights) -> Result<Self, Error> {
        if rights.has_all_models() {
            return Ok(self);
        }
        let model = self.text_of("model").unwrap_or_default();
        let name = match self.text_of("lora_name") {
            Some(adapter) => format!("{model}:{adapter}"),
            None => model.to_owned(),
        };
        // Weights, or numbers, of adapters that only the model's name permits.
        let has_other = self.has("lora_task_id") || self.has("lora_weights");
        let name = if has_other { model } else { &name };
        match rights.has_model(name) {
            true => Ok(self),
            false if model.is_empty() => {
                let problem =
                    "the key has models of its own, and the request names none; give 'model'";
                Err(Error::field("model", problem))
            }
            false => Err(Error {
                status: StatusCode::FORBIDDEN,
                ..Error::field(
                    "model",
                    format!("the key may not use the model '{name}'; name one of its own"),
                )
            }),
        }
    }

    /// Whether a field is given and nothing has taken it.
    pub fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// A text that stays in the body; `None` if it is something else.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(Value::as_str)
    }

    /// Gives a field a value.
    pub fn put(&mut self, name: &str, value: Value) {
        self.fields.insert(name.to_owned(), value);
    }

    /// Any value.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        // The order of what is left decides what is handed on, and an object's order means nothing.
        self.fields.swap_remove(name)
    }

    /// A text.
    ///
    /// # Errors
    /// It is something else.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.place(name), &other, "a text")),
        }
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// It is something else, or missing.
    pub fn required_text(&mut self, name: &str) -> Result<String, Error> {
        let text = self.text(name)?;
        text.ok_or_else(|| {
            let place = self.place(name);
            Error::field(&place, format!("'{place}' is missing: give a text"))
        })
    }

    /// The name of the model, with or without an adapter's.
    ///
    /// # Errors
    /// There is none, or the request names an adapter in two ways.
    pub fn model(&mut self) -> Result<String, Error> {
        let missing = || Error::field("model", "the request names no model; give 'model'");
        self.optional_model()?.ok_or_else(missing)
    }

    /// The same, if the request names one.
    ///
    /// # Errors
    /// It names an adapter in two ways.
    pub fn optional_model(&mut self) -> Result<Option<String>, Error> {
        let Some(name) = self.text("model")? else {
            return Ok(None);
        };
        let problem = match adapters::split(&name) {
            (_, Some("")) => "has no adapter behind the colon; give MODEL:ADAPTER, or MODEL",
            (_, Some(_))
                if ADAPTER_OPTIONS
                    .iter()
                    .any(|option| self.fields.contains_key(*option)) =>
            {
                "names an adapter, and so does 'lora_name' or 'lora_task_id'; leave one of them out"
            }
            _ => return Ok(Some(name)),
        };
        Err(Error::field(
            "model",
            format!("'model': '{name}' {problem}"),
        ))
    }

    /// A truth value; false if it is not given.
    ///
    /// # Errors
    /// It is something else.
    pub fn flag(&mut self, name: &str) -> Result<bool, Error> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(wrong(&self.place(name), &other, "true or false")),
        }
    }

    /// A truth value; `default` if it is not given.
    ///
    /// # Errors
    /// It is something else.
    pub fn flag_or(&mut self, name: &str, default: bool) -> Result<bool, Error> {
        match self.has(name) {
            true => self.flag(name),
            false => Ok(default),
        }
    }

    /// A whole number of a range.
    ///
    /// # Errors
    /// It is something else.
    pub fn count(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, Error> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number.filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let (first, last) = range.into_inner();
                let expected = format!("a whole number from {first} to {last}");
                Err(wrong(&self.place(name), &value, &expected))
            }
        }
    }

    /// The options of Triton's request that the remaining fields are: those that `fields` says are handed on, under the
    /// names there, and those that it does not know, which the backend itself knows or refuses.
    ///
    /// # Errors
    /// A field that is refused.
    pub fn into_options(self, fields: &[Field]) -> Result<Map<String, Value>, Error> {
        let mut options = Map::new();
        for (name, value) in self.fields {
            let known = fields.iter().find(|field| field.name == name);
            match known.map(|field| &field.fate) {
                None => {
                    options.insert(name, value);
                }
                Some(Fate::Option(option)) => {
                    options.insert((*option).to_owned(), value);
                }
                Some(Fate::Read | Fate::Ignored) => {}
                Some(Fate::Refused { instead, unless }) => {
                    if !unless(&value) {
                        return Err(Error::field(
                            &name,
                            format!("'{name}' is not supported; {instead}"),
                        ));
                    }
                }
            }
        }
        Ok(options)
    }
}

/// The fields that are not null.
pub fn without_nulls(mut fields: Map<String, Value>) -> Map<String, Value> {
    fields.retain(|_, value| !value.is_null());
    fields
}

/// A field with a value of another type or range than `expected`.
pub fn wrong(name: &str, value: &Value, expected: &str) -> Error {
    Error::field(
        name,
        format!("'{name}': {} is not {expected}", short(value)),
    )
}

/// A value as it may stand in a message.
pub fn short(value: &Value) -> String {
    const MAX_CHARS: usize = 100;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(value: Value) -> Body {
        Body::parse(value.to_string().as_bytes()).expect("an object")
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        for bytes in [&b"{"[..], b"", b"[]", b"\xff"] {
            assert!(Body::parse(bytes).is_err());
        }
    }

    #[test]
    fn null_counts_as_not_given() {
        let mut fields = body(json!({"n": null, "stream": null}));
        assert_eq!(fields.count("n", 1..=2), Ok(None));
        assert_eq!(fields.flag("stream"), Ok(false));
    }

    #[test]
    fn a_wrong_type_names_the_field_and_the_value() {
        let error = body(json!({"n": 1.5}))
            .count("n", 1..=8)
            .expect_err("a fraction");
        assert_eq!(error.message, "'n': 1.5 is not a whole number from 1 to 8");
        assert_eq!(error.param.as_deref(), Some("n"));
        assert!(body(json!({"n": 9})).count("n", 1..=8).is_err());
        assert!(body(json!({"n": -1})).count("n", 0..=8).is_err());
        assert!(body(json!({"stream": "yes"})).flag("stream").is_err());
        assert!(body(json!({"model": 1})).model().is_err());
        assert!(body(json!({})).model().is_err());
    }

    #[test]
    fn an_operator_names_the_options_that_clients_may_send() {
        let given = || body(json!({"prompt": "a", "top_k": 5, "min_p": 0.5}));
        let permitted = |options| given().permitted(crate::fields::COMPLETIONS, options);
        assert!(permitted(None).is_ok());
        let both = ["min_p", "top_k"].map(str::to_owned);
        assert!(permitted(Some(&both)).is_ok());
        for (options, refused) in [(&both[..1], "top_k"), (&both[1..], "min_p")] {
            let error = permitted(Some(options)).expect_err(refused);
            assert_eq!(error.param.as_deref(), Some(refused));
        }
        assert!(permitted(Some(&[])).is_err());
    }

    #[test]
    fn an_adapter_is_named_once() {
        assert_eq!(body(json!({"model": "m:a"})).model(), Ok("m:a".to_owned()));
        for (fields, words) in [
            (
                json!({"model": "m:a", "lora_name": "b"}),
                "leave one of them out",
            ),
            (
                json!({"model": "m:a", "lora_task_id": 1}),
                "leave one of them out",
            ),
            (json!({"model": "m:"}), "behind the colon"),
        ] {
            let error = body(fields).model().expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }

    #[test]
    fn long_values_are_cut_off_between_characters() {
        let error = wrong("stop", &json!("ä".repeat(1000)), "a list");
        assert!(error.message.len() < 300);
    }
}
