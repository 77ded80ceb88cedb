//! A call of a function.

use serde::de::IgnoredAny;
use serde_json::Deserializer;

/// A call of a function, or what is new of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name; empty if this continues the call before.
    pub name: String,
    /// A JSON object, as the model wrote it, or the new part of it.
    pub arguments: String,
    /// Its id, in formats in which models write one that later prompts repeat.
    pub id: Option<String>,
    /// Whether nothing more of it follows.
    pub is_whole: bool,
}

impl ToolCall {
    /// Whether this is the beginning of a call, or all of it.
    pub fn begins(&self) -> bool {
        !self.name.is_empty()
    }

    /// A call, if the name is one and the arguments are a JSON object, or one in a string.
    pub(super) fn new(name: &str, arguments: &str) -> Option<Self> {
        let arguments = object(arguments.trim())?;
        is_name(name).then(|| Self {
            name: name.to_owned(),
            arguments,
            id: None,
            is_whole: true,
        })
    }

    /// The call in a JSON object with `name` and `arguments`, which Cohere calls `tool_name`, and Llama and Cohere
    /// `parameters`.
    pub(super) fn of_json(json: &str) -> Option<Self> {
        let (mut name, mut arguments) = (None, None);
        for (key, value) in members(json)? {
            let place = match key.as_str() {
                "name" | "tool_name" => &mut name,
                "arguments" | "parameters" => &mut arguments,
                _ => continue,
            };
            if place.replace(value).is_some() {
                return None;
            }
        }
        let name: String = serde_json::from_str(name?).ok()?;
        Self::new(&name, arguments.filter(|it| *it != "null").unwrap_or("{}"))
    }

    /// The calls in a JSON list of objects, each with the arguments of a function as the member of its name.
    pub(super) fn list_of_named(json: &str) -> Option<Vec<Self>> {
        let mut calls = Vec::new();
        for object in elements(json)? {
            for (name, arguments) in members(object)? {
                calls.push(Self::new(&name, arguments)?);
            }
        }
        Some(calls).filter(|calls| !calls.is_empty())
    }

    /// The calls in JSON objects, one behind the other.
    pub(super) fn lines_of_json(text: &str) -> Option<Vec<Self>> {
        let mut rest = text.trim();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let (object, behind) = split_value(rest)?;
            calls.push(Self::of_json(object)?);
            rest = behind.trim_start();
        }
        Some(calls).filter(|calls| !calls.is_empty())
    }

    /// The calls in a JSON list, or in one object.
    pub(super) fn list_of_json(json: &str) -> Option<Vec<Self>> {
        if json.starts_with('{') {
            return Some(vec![Self::of_json(json)?]);
        }
        elements(json)?.into_iter().map(Self::of_json).collect()
    }
}

/// The name of a function, and what follows it to the end of its arguments, in the beginning of a JSON object of which
/// they may be incomplete. `None` if the arguments do not follow, or are no object.
pub(super) fn name_and_arguments(json: &str) -> Option<(String, &str)> {
    let mut rest = json.strip_prefix('{')?.trim_start();
    let mut name = None;
    loop {
        let (key, behind) = split_value(rest)?;
        let value = behind.trim_start().strip_prefix(':')?.trim_start();
        if ["\"arguments\"", "\"parameters\""].contains(&key) {
            return Some((name?, value)).filter(|_| value.starts_with('{'));
        }
        let (value, behind) = split_value(value)?;
        if ["\"name\"", "\"tool_name\""].contains(&key)
            && name.replace(serde_json::from_str(value).ok()?).is_some()
        {
            return None;
        }
        rest = behind.trim_start().strip_prefix(',')?.trim_start();
    }
}

/// Whether a function may have this name.
pub(super) fn is_name(name: &str) -> bool {
    let is_part = |char: char| char.is_alphanumeric() || "_-.:/".contains(char);
    !name.is_empty() && name.chars().all(is_part)
}

/// The text of a JSON object, or of the one in a JSON string.
fn object(json: &str) -> Option<String> {
    let text = match json.starts_with('"') {
        true => serde_json::from_str::<String>(json).ok()?,
        false => json.to_owned(),
    };
    let is_object = text.starts_with('{') && is_valid(&text);
    is_object.then_some(text)
}

pub(super) fn is_valid(json: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(json).is_ok()
}

/// The keys of a JSON object, and the texts of their values.
fn members(json: &str) -> Option<Vec<(String, &str)>> {
    let mut rest = json
        .strip_prefix('{')
        .filter(|_| is_valid(json))?
        .trim_start();
    let mut members = Vec::new();
    while !rest.starts_with('}') {
        let (key, behind) = split_value(rest)?;
        let (value, behind) = split_value(behind.trim_start().strip_prefix(':')?.trim_start())?;
        members.push((serde_json::from_str(key).ok()?, value));
        let behind = behind.trim_start();
        rest = behind.strip_prefix(',').unwrap_or(behind).trim_start();
    }
    Some(members)
}

/// The texts of the values in a JSON list.
fn elements(json: &str) -> Option<Vec<&str>> {
    let mut rest = json
        .strip_prefix('[')
        .filter(|_| is_valid(json))?
        .trim_start();
    let mut elements = Vec::new();
    while !rest.starts_with(']') {
        let (value, behind) = split_value(rest)?;
        elements.push(value);
        let behind = behind.trim_start();
        rest = behind.strip_prefix(',').unwrap_or(behind).trim_start();
    }
    Some(elements)
}

/// The value at the beginning of `json`, and what follows it.
fn split_value(json: &str) -> Option<(&str, &str)> {
    let mut values = Deserializer::from_str(json).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    json.split_at_checked(values.byte_offset())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_call_and_keeps_its_arguments_as_they_are() {
        let call = |name: &str, arguments: &str| {
            Some(ToolCall {
                name: name.to_owned(),
                arguments: arguments.to_owned(),
                id: None,
                is_whole: true,
            })
        };
        for (json, expected) in [
            (
                r#"{"name": "f", "arguments": {"a":  1.0}}"#,
                call("f", r#"{"a":  1.0}"#),
            ),
            (r#"{"parameters": {}, "name": "f"}"#, call("f", "{}")),
            (
                r#"{"name": "f", "arguments": "{\"a\": 1}"}"#,
                call("f", r#"{"a": 1}"#),
            ),
            (
                r#"{"name": "f", "arguments": null, "id": "x"}"#,
                call("f", "{}"),
            ),
            (r#"{"name": "f"}"#, call("f", "{}")),
            (r#"{"name": "f", "arguments": [1]}"#, None),
            (r#"{"name": "f", "arguments": "x"}"#, None),
            (r#"{"name": "f", "arguments": {"a": nul}}"#, None),
            (r#"{"name": "f", "arguments": {}, "parameters": {}}"#, None),
            (r#"{"name": "", "arguments": {}}"#, None),
            (r#"{"name": "a b", "arguments": {}}"#, None),
            (r#"{"arguments": {}}"#, None),
            ("[]", None),
        ] {
            assert_eq!(ToolCall::of_json(json), expected, "{json}");
        }
        assert_eq!(
            ToolCall::list_of_json(r#"[{"name": "f"}, {"name": "g"}]"#).map(|it| it.len()),
            Some(2)
        );
        assert_eq!(ToolCall::list_of_json(r#"[{"name": "f"}, 1]"#), None);
    }

    #[test]
    fn arguments_that_have_begun_follow_their_name() {
        for (json, expected) in [
            (r#"{"name": "f", "arguments": {"a"#, Some(("f", r#"{"a"#))),
            (r#"{"id": [1], "name":"f","parameters":{"#, Some(("f", "{"))),
            (r#"{"name": "f", "arguments": "#, None),
            (r#"{"name": "f", "arguments": "{"#, None),
            (r#"{"name": "f", "arguments": null, "parameters": {"#, None),
            (r#"{"name": "f", "name": "g", "arguments": {"#, None),
            (r#"{"name": 1, "arguments": {"#, None),
            (r#"{"arguments": {"name": "f"}, "name": "f"}"#, None),
            (r#"{"name": "f", "arg"#, None),
            (r#"{"name": "f"}"#, None),
            ("[", None),
        ] {
            let found = name_and_arguments(json);
            let found = found.as_ref().map(|(name, rest)| (&name[..], *rest));
            assert_eq!(found, expected, "{json}");
        }
    }
}
