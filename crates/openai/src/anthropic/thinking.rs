//! The configuration of thinking, and the signatures of thoughts.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::errors::check_extra;
use crate::Error;
use crate::body::{Body, wrong};

/// The beginning of a signature. If the client does not want to see the thought, it follows in base64: nothing is kept
/// between requests, and the next one brings the signature back.
const SIGNATURE: &str = "inflight";

/// How the model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thinking {
    /// Whether it thinks before it answers; `None` leaves that to the chat template.
    pub is_enabled: Option<bool>,
    /// The most tokens of the thought.
    pub budget: Option<u32>,
    /// Whether the client sees what it thought.
    pub is_shown: bool,
}

impl Thinking {
    /// The configuration in a field `thinking`.
    ///
    /// # Errors
    /// It is none, or has a field that is wrong.
    pub fn read(value: Option<Value>) -> Result<Self, Error> {
        let Some(value) = value else {
            return Ok(Self {
                is_enabled: None,
                budget: None,
                is_shown: true,
            });
        };
        let mut fields = Body::within("thinking", value)?;
        let kind = fields.required_text("type")?;
        let mut budget = None;
        let is_enabled = match &kind[..] {
            "enabled" => {
                budget = fields.count("budget_tokens", 1..=i32::MAX as u32)?;
                if budget.is_none() {
                    let problem =
                        "'thinking.budget_tokens' is missing: give a whole number above 0";
                    return Err(Error::field("thinking", problem));
                }
                Some(true)
            }
            "disabled" | "between_tools" => Some(false),
            "adaptive" => None,
            _ => {
                let expected = "'enabled', 'adaptive', 'disabled' or 'between_tools'";
                return Err(wrong("thinking.type", &json!(kind), expected));
            }
        };
        let is_shown = match fields.text("display")?.as_deref() {
            None | Some("summarized") => true,
            Some("omitted") => false,
            Some(other) => {
                let expected = "'summarized' or 'omitted'";
                return Err(wrong("thinking.display", &json!(other), expected));
            }
        };
        check_extra(&fields)?;
        Ok(Self {
            is_enabled,
            budget,
            is_shown,
        })
    }

    /// The variables of chat templates that say it: each family has its own.
    pub fn variables(&self) -> Vec<(&'static str, bool)> {
        let variables = |is_enabled| ["enable_thinking", "thinking"].map(|name| (name, is_enabled));
        self.is_enabled.into_iter().flat_map(variables).collect()
    }

    /// The signature of a thought.
    pub fn signature(&self, thought: &str) -> String {
        match self.is_shown {
            true => SIGNATURE.to_owned(),
            false => format!("{SIGNATURE}.{}", STANDARD.encode(thought)),
        }
    }
}

/// The thought of a block: its text, or else the one in its signature. Empty if other servers have signed it.
pub fn thought(text: String, signature: &str) -> String {
    if !text.is_empty() {
        return text;
    }
    let hidden = signature.strip_prefix(SIGNATURE);
    let hidden = hidden.and_then(|rest| STANDARD.decode(rest.strip_prefix('.')?).ok());
    let hidden = hidden.and_then(|bytes| String::from_utf8(bytes).ok());
    hidden.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thought_that_is_not_shown_comes_back_in_its_signature() {
        let hidden = Thinking::read(Some(json!({"type": "adaptive", "display": "omitted"})));
        let hidden = hidden.expect("sound");
        assert_eq!(
            thought(String::new(), &hidden.signature("häuser?")),
            "häuser?"
        );
        let shown = Thinking::read(None).expect("sound");
        assert_eq!(thought("Hm".to_owned(), &shown.signature("Hm")), "Hm");
        for foreign in ["", "inflight", "inflight.?", "EqQBCgIYAhIM"] {
            assert_eq!(thought(String::new(), foreign), "");
        }
    }

    #[test]
    fn thinking_is_a_variable_of_templates() {
        let variables = |value: Value| Thinking::read(Some(value)).expect("sound").variables();
        let both = |is_enabled| vec![("enable_thinking", is_enabled), ("thinking", is_enabled)];
        assert_eq!(
            variables(json!({"type": "enabled", "budget_tokens": 2048})),
            both(true)
        );
        assert_eq!(variables(json!({"type": "disabled"})), both(false));
        assert_eq!(variables(json!({"type": "between_tools"})), both(false));
        assert_eq!(variables(json!({"type": "adaptive"})), []);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (value, words) in [
            (
                json!({"type": "enabled"}),
                "'thinking.budget_tokens' is missing",
            ),
            (
                json!({"type": "enabled", "budget_tokens": 0}),
                "'thinking.budget_tokens': 0",
            ),
            (json!({"type": "on"}), "'thinking.type': \"on\""),
            (
                json!({"type": "adaptive", "display": "full"}),
                "'thinking.display'",
            ),
            (
                json!({"type": "adaptive", "budget_tokens": 9}),
                "thinking.budget_tokens: Extra",
            ),
            (json!(true), "'thinking'"),
        ] {
            let error = Thinking::read(Some(value)).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }
}
