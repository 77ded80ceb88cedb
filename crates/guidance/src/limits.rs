//! The sizes of guides.

use serde_json::Value;

/// Maximum size of a schema, or of all choices together.
pub const MAX_SCHEMA_BYTES: usize = 64 << 10;

/// Maximum size of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 16 << 10;

/// Maximum size of a regular expression, also within a schema. One of the form `a?b?c?...` costs the square of its
/// length for every character.
pub const MAX_REGEX_BYTES: usize = 2 << 10;

/// Size of the longest regular expression in a schema, or of a value that may contain one.
pub(super) fn longest_regex(schema: &Value) -> usize {
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
