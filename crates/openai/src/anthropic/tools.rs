//! Tools, and which of them the model calls, as functions in OpenAI's form.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::errors::check_extra;
use crate::Error;
use crate::body::{Body, wrong};

/// The beginning of the ids of calls, which the backend's ids are without.
const ID: &str = "toolu_";

/// The id of a call in Anthropic's form.
pub fn id(of_backend: &str) -> String {
    format!("{ID}{of_backend}")
}

/// The id by which the backend knows a call. Templates of some models take none but their own.
pub fn backend_id(id: &str) -> &str {
    id.strip_prefix(ID).unwrap_or(id)
}

/// The functions of a field `tools`. One with `defer_loading` is left out unless it is among those that were `found`.
///
/// # Errors
/// A tool that is none of the client's own, or has a field that is wrong.
pub fn functions(tools: Option<Value>, found: &BTreeSet<String>) -> Result<Vec<Value>, Error> {
    let tools = match tools {
        None => return Ok(Vec::new()),
        Some(Value::Array(tools)) => tools,
        Some(other) => return Err(wrong("tools", &other, "a list of tools")),
    };
    let mut functions = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let mut tool = Body::within(&format!("tools.{index}"), tool)?;
        let is_deferred = tool.flag("defer_loading")?;
        let function = function(tool)?;
        let is_found = || {
            function["name"]
                .as_str()
                .is_some_and(|it| found.contains(it))
        };
        if !is_deferred || is_found() {
            functions.push(json!({"type": "function", "function": function}));
        }
    }
    Ok(functions)
}

fn function(mut tool: Body) -> Result<Value, Error> {
    let kind = tool.text("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let place = tool.place("type");
        return Err(Error::field(
            &place,
            format!(
                "'{place}': tools of the type '{kind}' are not supported here; describe the tool with 'name' and 'input_schema'"
            ),
        ));
    }
    let name = tool.required_text("name")?;
    let schema = tool.take("input_schema").unwrap_or_default();
    if !schema.is_object() {
        let expected = "a JSON schema, which is an object";
        return Err(wrong(&tool.place("input_schema"), &schema, expected));
    }
    let mut function = json!({"name": name, "parameters": schema});
    for field in ["description", "input_examples"] {
        if let Some(value) = tool.take(field) {
            function[field] = value;
        }
    }
    if tool.flag("strict")? {
        function["strict"] = json!(true);
    }
    let callers = tool.take("allowed_callers");
    if let Some(callers) = callers.filter(|callers| *callers != json!(["direct"])) {
        let expected = "[\"direct\"]: only the model itself calls tools here";
        return Err(wrong(&tool.place("allowed_callers"), &callers, expected));
    }
    // Prefixes are reused, and arguments are streamed, without being told to.
    tool.take("cache_control");
    tool.take("eager_input_streaming");
    check_extra(&tool)?;
    Ok(function)
}

/// Which tools the model calls.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// OpenAI's `tool_choice`.
    pub choice: Value,
    /// Whether it may call several.
    pub is_parallel: bool,
}

/// The choice in a field `tool_choice`.
///
/// # Errors
/// It is none, or has a field that is wrong.
pub fn choice(value: Value) -> Result<Choice, Error> {
    let mut fields = Body::within("tool_choice", value)?;
    let kind = fields.required_text("type")?;
    let choice = match &kind[..] {
        "auto" | "none" => json!(kind),
        "any" => json!("required"),
        "tool" => {
            let name = fields.required_text("name")?;
            json!({"type": "function", "function": {"name": name}})
        }
        _ => {
            let expected = "'auto', 'any', 'tool' or 'none'";
            return Err(wrong("tool_choice.type", &json!(kind), expected));
        }
    };
    let is_parallel = !fields.flag("disable_parallel_tool_use")?;
    check_extra(&fields)?;
    Ok(Choice {
        choice,
        is_parallel,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(tool: Value) -> Result<Vec<Value>, Error> {
        functions(Some(json!([tool])), &["found".to_owned()].into())
    }

    #[test]
    fn a_tool_is_a_function() {
        let schema = json!({"type": "object"});
        let found = read(json!({
            "type": "custom", "name": "weather", "description": "Rain?", "input_schema": schema, "strict": true,
            "cache_control": {"type": "ephemeral"}, "eager_input_streaming": true, "allowed_callers": ["direct"],
            "input_examples": [{"city": "Oslo"}],
        }));
        let function = json!({
            "name": "weather", "description": "Rain?", "parameters": schema, "strict": true,
            "input_examples": [{"city": "Oslo"}],
        });
        let expected = json!({"type": "function", "function": function});
        assert_eq!(found, Ok(vec![expected]));
    }

    #[test]
    fn a_deferred_tool_is_there_once_it_was_found() {
        let tool = |name: &str| json!({"name": name, "input_schema": {}, "defer_loading": true});
        assert_eq!(read(tool("other")), Ok(vec![]));
        assert_eq!(read(tool("found")).map(|tools| tools.len()), Ok(1));
    }

    #[test]
    fn choices_have_openais_words() {
        for (value, expected) in [
            (json!({"type": "auto"}), json!("auto")),
            (json!({"type": "any"}), json!("required")),
            (json!({"type": "none"}), json!("none")),
            (
                json!({"type": "tool", "name": "f"}),
                json!({"type": "function", "function": {"name": "f"}}),
            ),
        ] {
            let found = choice(value).expect("sound");
            assert_eq!((found.choice, found.is_parallel), (expected, true));
        }
        let one = choice(json!({"type": "any", "disable_parallel_tool_use": true}));
        assert!(!one.expect("sound").is_parallel);
    }

    #[test]
    fn what_is_no_tool_is_named() {
        for (tool, words) in [
            (
                json!({"type": "bash_20250124", "name": "bash"}),
                "'tools.0.type'",
            ),
            (
                json!({"type": "web_search_20260318"}),
                "'web_search_20260318'",
            ),
            (json!({"name": "f"}), "'tools.0.input_schema'"),
            (json!({"input_schema": {}}), "'tools.0.name' is missing"),
            (
                json!({"name": "f", "input_schema": {}, "parameters": {}}),
                "tools.0.parameters: Extra inputs are not permitted",
            ),
            (
                json!({"name": "f", "input_schema": {}, "allowed_callers": ["code_execution_20260120"]}),
                "'tools.0.allowed_callers'",
            ),
            (json!("f"), "'tools.0'"),
        ] {
            let error = read(tool).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
        for (value, words) in [
            (json!({"type": "required"}), "'tool_choice.type'"),
            (json!({"type": "tool"}), "'tool_choice.name'"),
            (
                json!({"type": "auto", "name": "f"}),
                "tool_choice.name: Extra",
            ),
            (json!("auto"), "'tool_choice'"),
        ] {
            let error = choice(value).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }
}
