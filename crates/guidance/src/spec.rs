//! The constraint that a guide puts on a request's output.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::ebnf;
use crate::grammar_error::GrammarError;
use crate::json::{left_out, may_leave_out, of_schema, overlap};
use crate::limits::{MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, longest_regex};
use crate::regex::{choice, complete};
use crate::structure::Structure;
use crate::structure_grammar::{self, SpecialToken};
use inflight_base::RequestError;

/// The form that a request's whole output must have.
#[derive(Clone, Debug, PartialEq)]
pub enum GuideSpec {
    /// Any JSON object or array.
    Json,
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid under a JSON schema.
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole (syntax of Rust's crate `regex`).
    Regex(String),
    /// Text of a grammar: EBNF with rules `name ::= ...` and the start rule `root` (as in llama.cpp and XGrammar), or
    /// Lark's syntax with rules `name: ...` and the start rule `start`.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Free text with parts of a given form.
    Structure(Structure),
}

impl GuideSpec {
    /// Checks that the guide is small enough to be compiled.
    ///
    /// # Errors
    /// The guide is too large or empty.
    pub fn check(&self) -> Result<(), RequestError> {
        let (what, num_bytes, max) = match self {
            Self::Json | Self::JsonObject => return Ok(()),
            Self::JsonSchema(schema) => {
                let longest = longest_regex(schema);
                if longest > MAX_REGEX_BYTES {
                    ("regular expression in a schema", longest, MAX_REGEX_BYTES)
                } else {
                    ("schema", schema.to_string().len(), MAX_SCHEMA_BYTES)
                }
            }
            Self::Regex(text) => ("regular expression", text.len(), MAX_REGEX_BYTES),
            Self::Grammar(text) => ("grammar", text.len(), MAX_GRAMMAR_BYTES),
            Self::Structure(structure) => {
                check_parts(structure)?;
                (
                    "structural tag's texts",
                    1 + structure.num_text_bytes(),
                    MAX_SCHEMA_BYTES,
                )
            }
            Self::Choice(texts) => {
                let num_bytes = texts.iter().map(|text| text.len() + 1).sum();
                ("list of choices", num_bytes, MAX_SCHEMA_BYTES)
            }
        };
        if (1..=max).contains(&num_bytes) {
            return Ok(());
        }
        Err(RequestError::Invalid(format!(
            "the guide has {num_bytes} bytes; a {what} may have 1 to {max}"
        )))
    }

    /// What of its schemas is not enforced: keywords with their places. Compiles them, but not into a parser's tables.
    pub fn left_out(&self) -> Vec<String> {
        match self {
            Self::JsonSchema(schema) if may_leave_out(schema) => {
                left_out(schema).unwrap_or_default()
            }
            Self::Structure(structure) => structure.left_out(),
            _ => Vec::new(),
        }
    }

    /// Whether the guide itself has this text in what it makes a model write, as far as that is written in it.
    pub fn names(&self, text: &str) -> bool {
        match self {
            Self::Json | Self::JsonObject | Self::JsonSchema(_) => false,
            Self::Regex(guide) | Self::Grammar(guide) => guide.contains(text),
            Self::Choice(texts) => texts.iter().any(|it| it.contains(text)),
            Self::Structure(structure) => structure.names(text),
        }
    }

    /// Why its output can be derived in many ways, and what to write instead, where that is certain: a sentence about
    /// the guide.
    pub(super) fn ambiguity(&self) -> Option<String> {
        match self {
            Self::JsonSchema(schema) => overlap(schema),
            Self::Grammar(text) => ebnf::ambiguity(text),
            Self::Structure(structure) => structure.ambiguity(),
            Self::Json | Self::JsonObject | Self::Regex(_) | Self::Choice(_) => None,
        }
    }

    /// The same as a part of a structure.
    pub fn into_structure(self) -> Structure {
        match self {
            Self::Json => Structure::JsonSchema(any_json()),
            Self::JsonObject => Structure::JsonSchema(any_object()),
            Self::JsonSchema(schema) => Structure::JsonSchema(schema),
            Self::Regex(regex) => Structure::Regex(regex),
            Self::Grammar(text) => Structure::Grammar(text),
            Self::Choice(texts) => Structure::Choice(texts),
            Self::Structure(structure) => structure,
        }
    }

    /// Maximum cost of building the lexer's terminals, in nodes of regular expressions. Lower for Lark grammars: only
    /// they can describe large terminals in a short text that has not been checked.
    pub(super) fn max_lexer_fuel(&self) -> u64 {
        let is_lark = match self {
            Self::Grammar(text) => !ebnf::is_ebnf(text),
            Self::Structure(structure) => structure.has_lark(),
            _ => false,
        };
        if is_lark { 20_000 } else { 1_000_000 }
    }

    /// A cache key: equal for equal guides.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Json => "json".to_owned(),
            Self::JsonObject => "json_object".to_owned(),
            Self::JsonSchema(schema) => format!("json_schema {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Grammar(text) => format!("grammar {text}"),
            Self::Choice(texts) => format!("choice {texts:?}"),
            Self::Structure(structure) => format!("structure {structure:?}"),
        }
    }

    /// The guide as a grammar of `llguidance`, for a model with these special tokens.
    pub(super) fn grammar(
        &self,
        special_tokens: &[SpecialToken],
    ) -> Result<TopLevelGrammar, GrammarError> {
        let grammar = match self {
            Self::Json => of_schema(&any_json())?,
            Self::JsonObject => of_schema(&any_object())?,
            Self::JsonSchema(schema) => of_schema(schema)?,
            Self::Regex(regex) => GrammarWithLexer::from_regex(complete(regex)?),
            Self::Grammar(text) => GrammarWithLexer::from_lark(ebnf::lark(text)?),
            Self::Choice(texts) => GrammarWithLexer::from_regex(&choice(texts)),
            Self::Structure(structure) => {
                return structure_grammar::grammar(structure, special_tokens);
            }
        };
        Ok(TopLevelGrammar::from_grammar(grammar))
    }
}

fn any_json() -> Value {
    json!({"type": ["object", "array"]})
}

fn any_object() -> Value {
    json!({"type": "object"})
}

/// Checks the sizes of the parts of a structure, each as a guide of its own, and of its schemas together.
fn check_parts(structure: &Structure) -> Result<(), RequestError> {
    let mut num_bytes = 0;
    let mut parts = vec![structure];
    while let Some(part) = parts.pop() {
        parts.extend(part.parts());
        let guide = match part {
            Structure::JsonSchema(schema) => GuideSpec::JsonSchema(schema.clone()),
            Structure::Arguments(arguments) if arguments.fallback.is_none() => {
                GuideSpec::JsonSchema(arguments.schema.clone())
            }
            Structure::Regex(regex) => GuideSpec::Regex(regex.clone()),
            Structure::Grammar(text) => GuideSpec::Grammar(text.clone()),
            Structure::Choice(texts) => GuideSpec::Choice(texts.clone()),
            _ => continue,
        };
        guide.check()?;
        num_bytes += guide.key().len();
    }
    if num_bytes > MAX_SCHEMA_BYTES {
        return Err(RequestError::Invalid(format!(
            "the schemas of a structural tag, or of tools, have {num_bytes} bytes together, and may have {MAX_SCHEMA_BYTES}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_oversized_guides_with_their_size() {
        let limit = |len| GuideSpec::Regex("a".repeat(len)).check();
        assert_eq!(limit(MAX_REGEX_BYTES), Ok(()));
        let error = limit(MAX_REGEX_BYTES + 1).expect_err("too large");
        assert!(error.to_string().contains("2049 bytes"), "{error}");
        let long = "a".repeat(MAX_REGEX_BYTES + 1);
        for (spec, fits) in [
            (GuideSpec::Regex(String::new()), false),
            (GuideSpec::Choice(vec![]), false),
            (GuideSpec::Choice(vec![String::new()]), true),
            (GuideSpec::Grammar(long.clone()), true),
            (GuideSpec::Grammar(long.repeat(8)), false),
            (
                GuideSpec::JsonSchema(json!({"enum": vec!["long enough"; 1 << 13]})),
                false,
            ),
            (
                GuideSpec::JsonSchema(json!({"items": [{"pattern": long}]})),
                false,
            ),
            (
                GuideSpec::JsonSchema(json!({"patternProperties": {long.clone(): {}}})),
                false,
            ),
            (
                GuideSpec::JsonSchema(json!({"patternProperties": {"a": {"pattern": long}}})),
                false,
            ),
            (
                GuideSpec::JsonSchema(json!({"x-guidance": {"item_separator": long}})),
                false,
            ),
            (
                GuideSpec::JsonSchema(json!({"properties": {"pattern": {"const": long}}})),
                true,
            ),
        ] {
            assert_eq!(spec.check().is_ok(), fits, "{spec:?}");
        }
    }
}
