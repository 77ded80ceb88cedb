//! The constraint that a guide puts on a request's output.

use std::collections::HashMap;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::base::RequestError;
use crate::guidance::ebnf;
use crate::guidance::grammar_error::GrammarError;
use crate::guidance::regex::escaped;

/// Maximum size of a schema, or of all choices together.
pub const MAX_SCHEMA_BYTES: usize = 64 << 10;

/// Maximum size of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 16 << 10;

/// Maximum size of a regular expression, also within a schema. One of the form `a?b?c?...` costs the square of its length
/// for every character.
pub const MAX_REGEX_BYTES: usize = 2 << 10;

/// White space between two parts of JSON: a space, or a line break with indentation. (If any amount were allowed, a model
/// might generate white space forever.)
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,20}";

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

    /// Maximum cost of building the lexer's terminals, in nodes of regular expressions. Lower for Lark grammars: only they
    /// can describe large terminals in a short text that has not been checked.
    pub(super) fn max_lexer_fuel(&self) -> u64 {
        match self {
            Self::Grammar(text) if !ebnf::is_ebnf(text) => 20_000,
            _ => 1_000_000,
        }
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
        }
    }

    /// The guide as a grammar of `llguidance`.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        let grammar = match self {
            Self::Json => of_schema(&json!({"type": ["object", "array"]})),
            Self::JsonObject => of_schema(&json!({"type": "object"})),
            Self::JsonSchema(schema) => match circular_reference(schema) {
                None => of_schema(schema),
                Some(reference) => {
                    return Err(format!(
                        "its '$ref' to '{reference}' leads back to itself without any output in between"
                    ));
                }
            },
            Self::Regex(regex) => GrammarWithLexer::from_regex(complete(regex)?),
            Self::Grammar(text) if ebnf::is_ebnf(text) => {
                GrammarWithLexer::from_lark(ebnf::to_lark(text)?)
            }
            Self::Grammar(text) => GrammarWithLexer::from_lark(text.clone()),
            Self::Choice(texts) => GrammarWithLexer::from_regex(&choice(texts)),
        };
        Ok(TopLevelGrammar::from_grammar(grammar))
    }
}

/// A schema's grammar. Limits white space unless the schema specifies it (`x-guidance`).
fn of_schema(schema: &Value) -> GrammarWithLexer {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Some(members) = schema.as_object_mut() {
        let layout = members.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(layout) = layout.as_object_mut()
            && !layout.contains_key("whitespace_flexible")
        {
            let pattern = layout.entry("whitespace_pattern");
            pattern.or_insert_with(|| json!(WHITE_SPACE));
        }
    }
    GrammarWithLexer::from_json_schema(schema)
}

/// A reference in `schema` that leads back to itself through nothing but references and `allOf`s.
fn circular_reference(schema: &Value) -> Option<&str> {
    let mut seen = HashMap::new();
    let mut values = vec![schema];
    while let Some(value) = values.pop() {
        if let Some(reference) = find_circle(schema, value, &mut seen) {
            return Some(reference);
        }
        match value {
            Value::Object(members) => values.extend(members.values()),
            Value::Array(list) => values.extend(list),
            _ => {}
        }
    }
    None
}

/// Follows the references of `value`, a part of `schema`. `seen` maps each visited part, by its address, to whether
/// all of its references have been followed.
fn find_circle<'a>(
    schema: &'a Value,
    value: &'a Value,
    seen: &mut HashMap<*const Value, bool>,
) -> Option<&'a str> {
    let members = value.as_object()?;
    if seen.contains_key(&std::ptr::from_ref(value)) {
        return None;
    }
    seen.insert(value, false);
    let reference = members.get("$ref").and_then(Value::as_str);
    let target = reference.and_then(|it| Some((it, schema.pointer(it.strip_prefix('#')?)?)));
    if let Some((reference, target)) = target {
        if seen.get(&std::ptr::from_ref(target)) == Some(&false) {
            return Some(reference);
        }
        if let found @ Some(_) = find_circle(schema, target, seen) {
            return found;
        }
    }
    let all_of = members.get("allOf").and_then(Value::as_array);
    for part in all_of.into_iter().flatten() {
        if let found @ Some(_) = find_circle(schema, part, seen) {
            return found;
        }
    }
    seen.insert(value, true);
    None
}

/// Size of the longest regular expression in a schema, or of a value that may contain one.
fn longest_regex(schema: &Value) -> usize {
    let of_member = |(name, value): (&String, &Value)| match (name.as_str(), value) {
        ("pattern", Value::String(regex)) => regex.len(),
        ("patternProperties", Value::Object(members)) => {
            let names = members.keys().map(String::len).max();
            names.unwrap_or(0).max(longest_regex(value))
        }
        ("x-guidance", value) => value.to_string().len(),
        (_, value) => longest_regex(value),
    };
    match schema {
        Value::Object(members) => members.iter().map(of_member).max().unwrap_or(0),
        Value::Array(list) => list.iter().map(longest_regex).max().unwrap_or(0),
        _ => 0,
    }
}

/// Checks that `regex` does not end with a lone backslash, which would escape the end of the expression.
fn complete(regex: &str) -> Result<&str, GrammarError> {
    let num_backslashes = regex.len() - regex.trim_end_matches('\\').len();
    match num_backslashes % 2 {
        0 => Ok(regex),
        _ => Err("the regular expression ends with a lone backslash".to_owned()),
    }
}

/// A single regular expression for all texts. It avoids ambiguity between texts of which one is a prefix of another.
fn choice(texts: &[String]) -> String {
    let literal = |text: &String| text.chars().map(escaped).collect::<String>();
    let texts: Vec<String> = texts.iter().map(literal).collect();
    format!("({})", texts.join("|"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_a_trailing_backslash() {
        for (regex, is_complete) in [
            (r"a\\", true),
            (r"a\$", true),
            (r"a\", false),
            (r"\\\", false),
        ] {
            assert_eq!(complete(regex).is_ok(), is_complete, "{regex}");
        }
    }

    #[test]
    fn choices_are_escaped() {
        let texts = ["a|b".to_owned(), "é/\n".to_owned()];
        assert_eq!(choice(&texts), r"(a\x{7C}b|\x{E9}\x{2F}\x{A})");
    }

    #[test]
    fn finds_circular_references() {
        let deep = (0..3_000).map(|n| {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            (format!("d{n}"), next)
        });
        let deep: serde_json::Map<_, _> = deep.collect();
        for (schema, circular) in [
            (json!({"$ref": "#"}), Some("#")),
            (
                json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"},
                       "b": {"description": "a's", "$ref": "#/$defs/a"}}}),
                Some("#/$defs/"),
            ),
            (
                json!({"allOf": [{"type": "object"}, {"allOf": [{"$ref": "#"}]}]}),
                Some("#"),
            ),
            (json!({"$ref": "#/$defs/d0", "$defs": deep.clone()}), None),
            (json!({"properties": {"next": {"$ref": "#"}}}), None),
            (json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}), None),
            (
                json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}),
                None,
            ),
            (json!({"$ref": "#/$defs/none"}), None),
            (json!({"$ref": "http://localhost/x.json"}), None),
        ] {
            let found = circular_reference(&schema);
            assert_eq!(found.is_some(), circular.is_some(), "{schema}: {found:?}");
            assert!(
                found
                    .unwrap_or_default()
                    .starts_with(circular.unwrap_or_default())
            );
        }
        let mut closed = deep;
        closed.insert("d3000".to_owned(), json!({"$ref": "#/$defs/d0"}));
        let closed = json!({ "$defs": closed });
        assert!(circular_reference(&closed).is_some());
    }

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
