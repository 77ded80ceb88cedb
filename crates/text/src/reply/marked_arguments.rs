//! Arguments that become a JSON object one after the other: marked_block.rs, python.rs.

use super::call::is_valid;

/// The arguments of a call, as JSON.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkedArguments(Vec<(String, String)>);

impl MarkedArguments {
    /// Adds an argument, in place of an earlier one of this name. One that is no text is JSON, if it is well-formed.
    pub(super) fn set(&mut self, name: String, value: &str, is_text: bool) {
        let json = match is_text {
            true => in_json(value),
            false => json_of(value),
        };
        self.0.retain(|(earlier, _)| *earlier != name);
        self.0.push((name, json));
    }

    /// The JSON object of all.
    pub(super) fn in_json(&self) -> String {
        let members = self.0.iter();
        let members: Vec<_> = members
            .map(|(name, value)| format!("{}: {value}", in_json(name)))
            .collect();
        format!("{{{}}}", members.join(", "))
    }
}

/// A text in JSON.
pub(super) fn in_json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The JSON that a value is, in Python's words too; otherwise the text.
fn json_of(value: &str) -> String {
    let trimmed = value.trim();
    match trimmed {
        "True" => return "true".to_owned(),
        "False" => return "false".to_owned(),
        "None" => return "null".to_owned(),
        _ => {}
    }
    match is_valid(trimmed) {
        true => trimmed.to_owned(),
        false => in_json(value),
    }
}
