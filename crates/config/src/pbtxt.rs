//! Access to the fields of a config.pbtxt, which Triton passes as JSON.

use serde_json::Value;

use inflight_base::LoadError;

/// Whether Triton lets the backend fill in fields that the user left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoComplete {
    /// [`ModelConfig::complete`](crate::ModelConfig::complete) fills them in.
    Enabled,
    /// The server takes configurations as they are (`--disable-auto-complete-config`).
    Disabled,
}

impl AutoComplete {
    /// `advice`, plus the advice to leave the field out if it would be filled in.
    pub(super) fn or_leave_out(self, advice: &str) -> String {
        match self {
            AutoComplete::Enabled => format!("{advice}, or leave it out to have it filled in"),
            AutoComplete::Disabled => {
                format!("{advice}; nothing is filled in, because auto-complete is disabled")
            }
        }
    }
}

/// The name of the first optional input.
pub(super) fn optional_input(config: &Value) -> Option<&str> {
    let inputs = config.get("input").and_then(Value::as_array)?;
    let optional = inputs.iter().find(|input| is_true(input, "optional"));
    optional.map(|input| field(input, "name"))
}

pub(super) fn config_error(problem: &str, remedy: &str) -> LoadError {
    LoadError::Config {
        problem: problem.to_owned(),
        remedy: remedy.to_owned(),
    }
}

pub(super) fn field<'a>(object: &'a Value, name: &str) -> &'a str {
    object.get(name).and_then(Value::as_str).unwrap_or_default()
}

pub(super) fn dims(tensor: &Value) -> Vec<i64> {
    let dims = tensor.get("dims").and_then(Value::as_array);
    dims.into_iter().flatten().filter_map(signed).collect()
}

/// A number. Triton writes 64-bit numbers as strings in some fields.
fn signed(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

pub(super) fn unsigned(value: Option<&Value>) -> Option<u64> {
    let value = value?;
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

pub(super) fn is_empty(value: Option<&Value>) -> bool {
    value.and_then(Value::as_array).is_none_or(Vec::is_empty)
}

pub(super) fn is_true(object: &Value, name: &str) -> bool {
    object.get(name).and_then(Value::as_bool).unwrap_or(false)
}
