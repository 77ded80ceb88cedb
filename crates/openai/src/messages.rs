//! The messages of a conversation, as chat templates know them.

use serde_json::{Value, json};

use crate::Error;
use crate::body::{without_nulls, wrong};

/// The most messages of a conversation.
const MAX_MESSAGES: usize = 16384;

/// The messages of a request. Templates know texts, and no lists of parts; and they know no `developer`, which is
/// OpenAI's newer word for `system`.
///
/// # Errors
/// They are no messages, or have parts that are not text.
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
            let text = text(parts).map_err(|(part, problem)| {
                Error::field(
                    "messages",
                    format!("'{}': {problem}", name(&format!(".content[{part}]"))),
                )
            })?;
            fields.insert("content".to_owned(), Value::String(text));
        }
        Some(other) => return Err(wrong(&name(".content"), other, "a text or a list of parts")),
    }
    Ok(Value::Object(without_nulls(fields)))
}

/// The texts of a list of parts behind each other; or the index of a part that is none, and what is wrong with it.
pub fn text(parts: &[Value]) -> Result<String, (usize, String)> {
    let part = |(index, part): (usize, &Value)| match part["type"].as_str() {
        Some("text" | "input_text" | "output_text" | "reasoning_text") => part["text"]
            .as_str()
            .map(str::to_owned)
            .ok_or((index, "the part has no 'text'".to_owned())),
        Some(kind) => Err((
            index,
            format!("a part of type '{kind}' is not supported: models here read text"),
        )),
        None => Err((index, "the part has no 'type'".to_owned())),
    };
    parts.iter().enumerate().map(part).collect()
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
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
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
                "messages[0].content[0]': a part of type 'image_url'",
            ),
        ] {
            let error = messages(Some(given)).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
    }
}
