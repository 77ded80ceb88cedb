//! JSON schemas as grammars of `llguidance`.

use std::collections::HashMap;

use llguidance::api::GrammarWithLexer;
use serde_json::{Value, json};

use crate::guidance::grammar_error::GrammarError;

/// White space between two parts of JSON: a space, or a line break with indentation. (If any amount were allowed, a model
/// might generate white space forever.)
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,20}";

/// A schema's grammar, if the schema leads anywhere.
pub(super) fn of_checked_schema(schema: &Value) -> Result<GrammarWithLexer, GrammarError> {
    match circular_reference(schema) {
        None => Ok(of_schema(schema)),
        Some(reference) => Err(format!(
            "its '$ref' to '{reference}' leads back to itself without any output in between"
        )),
    }
}

/// A schema's grammar. Limits white space unless the schema specifies it (`x-guidance`).
pub(super) fn of_schema(schema: &Value) -> GrammarWithLexer {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
