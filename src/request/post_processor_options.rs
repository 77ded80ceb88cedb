//! The options of logits post-processing: a name, and arguments for what has it.

use serde_json::Value;

use inflight_base::RequestError;

/// Bytes of a name.
const MAX_NAME_BYTES: usize = 256;
/// Bytes of arguments: what is made of them is looked at once a token.
const MAX_ARGUMENTS_BYTES: usize = 64 << 10;

/// A request's options for its logits post-processor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PostProcessorOptions {
    name: Option<String>,
    arguments: Option<String>,
}

impl PostProcessorOptions {
    /// Whether the request names one.
    pub fn is_given(&self) -> bool {
        self.name.is_some()
    }

    /// The name and the arguments, empty by default; `None` if the request names none.
    ///
    /// # Errors
    /// Arguments without a name.
    pub fn named(&self) -> Result<Option<(&str, &str)>, RequestError> {
        match (&self.name, &self.arguments) {
            (Some(name), arguments) => Ok(Some((name, arguments.as_deref().unwrap_or_default()))),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(RequestError::Invalid(
                "option 'logits_post_processor_args' is given without 'logits_post_processor_name'; \
                 give both"
                    .to_owned(),
            )),
        }
    }

    /// Clients that write all that they know name with an empty text that they want none.
    pub(super) fn set_name(&mut self, value: &Value) -> Option<()> {
        let name = value.as_str().filter(|name| name.len() <= MAX_NAME_BYTES)?;
        self.name = (!name.is_empty()).then(|| name.to_owned());
        Some(())
    }

    pub(super) fn set_arguments(&mut self, value: &Value) -> Option<()> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Object(_) => value.to_string(),
            _ => return None,
        };
        self.arguments = Some(text).filter(|text| text.len() <= MAX_ARGUMENTS_BYTES);
        self.arguments.is_some().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::options::RequestOptions;

    fn options(members: Value) -> Result<PostProcessorOptions, RequestError> {
        let members = members.as_object().expect("options").clone();
        let members = members.iter().map(|(name, value)| (&**name, value.clone()));
        RequestOptions::parse(members).map(|options| options.post_processor)
    }

    #[test]
    fn arguments_are_a_text_or_an_object_and_go_with_a_name() {
        let nested =
            r#"{"logits_post_processor_name": "a", "logits_post_processor_args": {"b": [1]}}"#;
        for (given, expected) in [
            (json!({}), None),
            (json!({"logits_post_processor_name": ""}), None),
            (json!({"logits_post_processor_name": "a"}), Some(("a", ""))),
            (
                json!({"logits_post_processor_name": "a", "logits_post_processor_args": "b c"}),
                Some(("a", "b c")),
            ),
            (
                json!({"sampling_parameters": nested}),
                Some(("a", r#"{"b":[1]}"#)),
            ),
        ] {
            let options = options(given).expect("good options");
            assert_eq!(options.named().expect("whole"), expected);
            assert_eq!(options.is_given(), expected.is_some());
        }
        let alone = options(json!({"logits_post_processor_args": "b"})).expect("parses");
        let error = alone.named().expect_err("no name").to_string();
        assert!(error.contains("give both"), "{error}");
    }

    #[test]
    fn other_types_and_long_texts_are_refused() {
        for (name, value) in [
            ("logits_post_processor_name", json!(7)),
            ("logits_post_processor_args", json!("x".repeat(65537))),
        ] {
            let error = options(json!({ name: value })).expect_err("refused");
            assert!(matches!(error, RequestError::Option { name: n, .. } if n == name));
        }
    }
}
