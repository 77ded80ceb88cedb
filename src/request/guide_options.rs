//! The options of guided decoding: TensorRT-LLM's type and guide, and vLLM's one for each kind of guide.

use serde_json::Value;

use crate::request::options::{json_of, parsed};
use inflight_base::RequestError;
use inflight_guidance::{GuideSpec, Structure};

/// The most choices of one request.
const MAX_CHOICES: usize = 1024;

/// A request's options for guided decoding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuideOptions {
    kind: Option<Kind>,
    guide: Option<String>,
    specs: Vec<GuideSpec>,
    structures: Vec<Value>,
}

/// `guided_decoding_guide_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Json,
    JsonSchema,
    Regex,
    Grammar,
    StructuralTag,
}

impl GuideOptions {
    /// The guide of the output; `None` if the request has none.
    ///
    /// # Errors
    /// More than one guide, or only its type, or only its text.
    pub fn spec(&self) -> Result<Option<GuideSpec>, RequestError> {
        let mut specs = self.specs.clone();
        match (self.kind, &self.guide) {
            (None, None) => {}
            (Some(Kind::Json), _) => specs.push(GuideSpec::Json),
            (Some(kind), Some(guide)) => specs.push(kind.spec(guide)?),
            (Some(_), None) => {
                return Err(invalid(
                    "option 'guided_decoding_guide_type' is given without 'guided_decoding_guide'; give both",
                ));
            }
            (None, Some(_)) => {
                return Err(invalid(
                    "option 'guided_decoding_guide' is given without 'guided_decoding_guide_type'; give both",
                ));
            }
        }
        for structure in &self.structures {
            let structure = Structure::of_json(structure)
                .map_err(|problem| invalid(&format!("option 'structural_tag': {problem}")))?;
            specs.push(GuideSpec::Structure(structure));
        }
        if specs.len() > 1 {
            return Err(invalid(
                "more than one guide is given; a request has one of 'guided_decoding_guide', \
                 'structured_outputs', 'guided_json', 'guided_regex', 'guided_choice', 'guided_grammar' and 'structural_tag'",
            ));
        }
        Ok(specs.pop())
    }

    pub(super) fn set_type(&mut self, value: &Value) -> Option<()> {
        self.kind = Some(match value.as_str()?.trim() {
            "json" => Kind::Json,
            "json_schema" => Kind::JsonSchema,
            "regex" => Kind::Regex,
            "ebnf_grammar" => Kind::Grammar,
            "structural_tag" => Kind::StructuralTag,
            _ => return None,
        });
        Some(())
    }

    pub(super) fn set_guide(&mut self, value: &Value) -> Option<()> {
        self.guide = Some(match value {
            Value::String(text) => text.clone(),
            Value::Object(_) => value.to_string(),
            _ => return None,
        });
        Some(())
    }

    pub(super) fn add_json(&mut self, value: &Value) -> Option<()> {
        let schema = parsed(value)?;
        let is_schema = schema.is_object() || schema.is_boolean();
        is_schema.then(|| self.specs.push(GuideSpec::JsonSchema(schema)))
    }

    pub(super) fn add_regex(&mut self, value: &Value) -> Option<()> {
        let text = text(value)?;
        self.specs.push(GuideSpec::Regex(text));
        Some(())
    }

    pub(super) fn add_grammar(&mut self, value: &Value) -> Option<()> {
        let text = text(value)?;
        self.specs.push(GuideSpec::Grammar(text));
        Some(())
    }

    pub(super) fn add_structure(&mut self, value: &Value) -> Option<()> {
        let structure = parsed(value).filter(Value::is_object)?;
        self.structures.push(structure);
        Some(())
    }

    pub(super) fn add_choice(&mut self, value: &Value) -> Option<()> {
        let list = parsed(value)?;
        let texts = list.as_array()?.iter();
        let texts: Vec<String> = texts
            .map(|text| text.as_str().map(str::to_owned))
            .collect::<Option<_>>()?;
        let fits = (1..=MAX_CHOICES).contains(&texts.len());
        fits.then(|| self.specs.push(GuideSpec::Choice(texts)))
    }

    /// vLLM's object, which has one guide. Clients also send the other members, as null.
    pub(super) fn add_structured_outputs(&mut self, value: &Value) -> Option<()> {
        let value = parsed(value)?;
        let mut num_given = 0;
        for (name, value) in value.as_object()? {
            if matches!(value, Value::Null | Value::Bool(false)) {
                continue;
            }
            match name.as_str() {
                "json" => self.add_json(value)?,
                "regex" => self.add_regex(value)?,
                "choice" => self.add_choice(value)?,
                "grammar" => self.add_grammar(value)?,
                "structural_tag" => self.add_structure(value)?,
                "json_object" if *value == Value::Bool(true) => {
                    self.specs.push(GuideSpec::JsonObject);
                }
                _ => return None,
            }
            num_given += 1;
        }
        (num_given == 1).then_some(())
    }
}

impl Kind {
    fn spec(self, guide: &str) -> Result<GuideSpec, RequestError> {
        Ok(match self {
            Self::Json => GuideSpec::Json,
            Self::Regex => GuideSpec::Regex(guide.to_owned()),
            Self::Grammar => GuideSpec::Grammar(guide.to_owned()),
            Self::StructuralTag => match json_of(guide).and_then(|it| Structure::of_json(&it)) {
                Ok(structure) => GuideSpec::Structure(structure),
                Err(problem) => {
                    return Err(invalid(&format!(
                        "option 'guided_decoding_guide': {problem}"
                    )));
                }
            },
            Self::JsonSchema => match json_of(guide) {
                Ok(schema @ (Value::Object(_) | Value::Bool(_))) => GuideSpec::JsonSchema(schema),
                Ok(_) => {
                    return Err(invalid(
                        "option 'guided_decoding_guide': a JSON schema is an object",
                    ));
                }
                Err(problem) => {
                    return Err(invalid(&format!(
                        "option 'guided_decoding_guide': {problem}"
                    )));
                }
            },
        })
    }
}

fn text(value: &Value) -> Option<String> {
    let text = value.as_str().filter(|text| !text.is_empty())?;
    Some(text.to_owned())
}

fn invalid(text: &str) -> RequestError {
    RequestError::Invalid(text.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::options::RequestOptions;

    fn spec(options: &[(&str, Value)]) -> Result<Option<GuideSpec>, RequestError> {
        let options = options.iter().map(|(name, value)| (*name, value.clone()));
        RequestOptions::parse(options)?.guide.spec()
    }

    #[test]
    fn every_name_of_a_guide_means_the_same() {
        let schema = GuideSpec::JsonSchema(json!({"type": "object"}));
        let written = r#"{"type": "object"}"#;
        let regex = GuideSpec::Regex("a+".to_owned());
        let grammar = GuideSpec::Grammar("root ::= \"a\"".to_owned());
        let choice = GuideSpec::Choice(vec!["a".to_owned(), "[b".to_owned()]);
        let trt = |kind: &str, guide: Value| {
            vec![
                ("guided_decoding_guide_type", json!(kind)),
                ("guided_decoding_guide", guide),
            ]
        };
        let vllm = |members: Value| vec![("structured_outputs", members)];
        let inside = |name: &str, value: Value| {
            let nested = json!({ name: value });
            vec![("sampling_parameters", json!(nested.to_string()))]
        };
        for (options, expected) in [
            (trt("json_schema", json!(written)), &schema),
            (trt("regex", json!("a+")), &regex),
            (trt("ebnf_grammar", json!("root ::= \"a\"")), &grammar),
            (trt("json", json!("")), &GuideSpec::Json),
            (
                vec![("guided_decoding_guide_type", json!("json"))],
                &GuideSpec::Json,
            ),
            (vec![("guided_json", json!(written))], &schema),
            (inside("guided_json", json!({"type": "object"})), &schema),
            (vec![("guided_regex", json!("a+"))], &regex),
            (vec![("guided_grammar", json!("root ::= \"a\""))], &grammar),
            (vec![("guided_choice", json!(r#"["a", "[b"]"#))], &choice),
            (vllm(json!(r#"{"json": {"type": "object"}}"#)), &schema),
            (
                inside("structured_outputs", json!({"json": written})),
                &schema,
            ),
            (
                inside("guided_decoding", json!({"regex": "a+", "json": null})),
                &regex,
            ),
            (vllm(json!({"choice": ["a", "[b"]})), &choice),
            (vllm(json!({"grammar": "root ::= \"a\""})), &grammar),
            (
                vllm(json!({"json_object": true, "choice": null})),
                &GuideSpec::JsonObject,
            ),
        ] {
            assert_eq!(spec(&options), Ok(Some(expected.clone())), "{options:?}");
        }
        assert_eq!(spec(&[]), Ok(None));
    }

    #[test]
    fn half_a_guide_and_two_guides_are_refused() {
        for (options, words) in [
            (vec![("guided_decoding_guide", json!("a"))], "give both"),
            (
                vec![("guided_decoding_guide_type", json!("regex"))],
                "give both",
            ),
            (
                vec![
                    ("guided_regex", json!("a")),
                    ("guided_choice", json!(["a"])),
                ],
                "more than one guide",
            ),
            (
                vec![
                    ("guided_decoding_guide_type", json!("json_schema")),
                    ("guided_decoding_guide", json!("{")),
                ],
                "is not JSON",
            ),
            (
                vec![
                    ("guided_decoding_guide_type", json!("json_schema")),
                    ("guided_decoding_guide", json!("[]")),
                ],
                "is an object",
            ),
        ] {
            let error = spec(&options).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_schema_that_nests_too_deep_is_told_so() {
        let nested = |depth: usize| {
            let open = r#"{"items":"#.repeat(depth);
            format!("{open}true{}", "}".repeat(depth))
        };
        let trt = |guide: &str| {
            let kind = ("guided_decoding_guide_type", json!("json_schema"));
            vec![kind, ("guided_decoding_guide", json!(guide))]
        };
        let inside = |guide: &str| json!(format!(r#"{{"guided_json": {guide}}}"#));
        for (options, words) in [
            (
                trt(&nested(200)),
                "'guided_decoding_guide': it nests more than 127 deep at line 1",
            ),
            (
                vec![("guided_json", json!(nested(200)))],
                "not a JSON schema: an object, true or false: it nests more than 127 deep",
            ),
            (
                vec![("sampling_parameters", inside(&nested(200)))],
                "not a JSON object of options: it nests more than 127 deep",
            ),
            (
                vec![("guided_json", json!(r#"{"type": "object""#))],
                "it is not JSON: EOF while parsing an object",
            ),
        ] {
            let error = spec(&options).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
            assert!(error.len() < 400, "{error}");
        }
        for options in [trt(&nested(100)), vec![("guided_json", json!(nested(100)))]] {
            assert!(matches!(spec(&options), Ok(Some(_))), "{options:?}");
        }
    }
}
