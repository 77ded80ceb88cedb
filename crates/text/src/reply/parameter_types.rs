//! Which arguments of functions are texts, for formats that do not show it.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// The parameters of functions that are something else than texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterTypes(HashMap<String, HashSet<String>>);

impl ParameterTypes {
    /// The types of a list of tools in OpenAI's form.
    pub fn of_tools(tools: &Value) -> Self {
        let tools = tools.as_array().into_iter().flatten();
        let functions = tools.filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let properties = function.get("parameters")?.get("properties")?.as_object()?;
            let others = properties
                .iter()
                .filter(|(_, schema)| !is_text_schema(schema));
            let others = others.map(|(name, _)| name.clone()).collect();
            Some((function.get("name")?.as_str()?.to_owned(), others))
        });
        Self(functions.collect())
    }

    /// Whether an argument is a text: its schema says so, or says nothing of it.
    pub(super) fn is_text(&self, function: &str, parameter: &str) -> bool {
        let others = self.0.get(function);
        others.is_none_or(|others| !others.contains(parameter))
    }
}

/// Whether values by this schema are written as texts: they may be, and it names their type.
pub fn is_text_schema(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.contains(&Value::from("string")),
        _ => false,
    }
}
