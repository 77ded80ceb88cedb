//! The messages of a conversation, as chat templates know them.

use serde_json::{Value, json};

use crate::Error;
use crate::body::{without_nulls, wrong};
use crate::message_content::content;

/// The most messages of a conversation.
const MAX_MESSAGES: usize = 16384;

/// The messages of a request. Most templates know texts, and no lists of parts, which remain only where images are
/// among them; and they know no `developer`, which is OpenAI's newer word for `system`.
///
/// # Errors
/// They are no messages, or have parts that are no text and no image.
pub fn messages(value: Option<Value>) -> Result<Vec<Value>, Error> {
    let expected = format!("a list of 1 to {MAX_MESSAGES} messages");
    let value = value.ok_or_else(|| {
        Error::field(
            "messages",
            format!("'messages' is missing: give {expected}"),
        )
    })?;
    match value {
        Value::Array(list) if (1..=MAX_MESSAGES).contains(&list.len()) => list
            .into_iter()
            .enumerate()
            .map(|(index, message)| self::message(index, message))
            .collect(),
        other => Err(wrong("messages", &other, &expected)),
    }
}

fn message(index: usize, value: Value) -> Result<Value, Error> {
    let name = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(mut fields) = value else {
        return Err(wrong(
            &name(""),
            &value,
            "a message, {\"role\": ..., \"content\": ...}",
        ));
    };
    match fields.get("role") {
        Some(Value::String(role)) if role == "developer" => {
            fields.insert("role".to_owned(), json!("system"));
        }
        Some(Value::String(_)) => {}
        other => {
            let role = other.cloned().unwrap_or_default();
            return Err(wrong(&name(".role"), &role, "a text such as 'user'"));
        }
    }
    match fields.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let content = content(parts).map_err(|(part, problem)| {
                Error::field(
                    "messages",
                    format!("'{}': {problem}", name(&format!(".content[{part}]"))),
                )
            })?;
            fields.insert("content".to_owned(), content);
        }
        Some(other) => return Err(wrong(&name(".content"), other, "a text or a list of parts")),
    }
    Ok(Value::Object(without_nulls(fields)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_one_text_and_developers_the_system() {
        let given = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "fox?"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
        ]);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A fox?"},
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
        ]);
        assert_eq!(messages(Some(given)).map(Value::Array), Ok(expected));
    }

    #[test]
    fn what_is_no_text_is_named() {
        let image = json!({"type": "image_url", "image_url": {"url": "http://host"}});
        for (given, words) in [
            (json!([]), "messages"),
            (json!("hello"), "messages"),
            (json!(["hello"]), "messages[0]"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (
                json!([{"role": "user", "content": 1}]),
                "messages[0].content",
            ),
            (
                json!([{"role": "user", "content": [image]}]),
                "messages[0].content[0]': images at other URLs",
            ),
        ] {
            let error = messages(Some(given)).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }
}
