//! The items of a request for a response, as the messages of a conversation.

use serde_json::{Value, json};

use crate::body::wrong;
use crate::{Error, ids, message_content};

/// The most items of a request.
const MAX_ITEMS: usize = 16384;

/// The messages that a field `input` is, behind the instructions and the stored items that the request continues.
///
/// # Errors
/// It is no text and no list of items, or has an item that is none of a conversation.
pub fn messages(
    stored: Vec<Value>,
    input: Option<Value>,
    instructions: Option<&str>,
) -> Result<Vec<Value>, Error> {
    let min_items = usize::from(stored.is_empty());
    let max_items = MAX_ITEMS.saturating_sub(stored.len());
    let expected = format!("a text or a list of {min_items} to {max_items} items");
    let system = instructions.map(|text| json!({"role": "system", "content": text}));
    let mut messages: Vec<_> = system.into_iter().collect();
    for item in stored {
        add(&mut messages, item)
            .map_err(|problem| Error::field("input", format!("a stored item: {problem}")))?;
    }
    match input {
        None => {
            let problem = format!("'input' is missing: give {expected}");
            return Err(Error::field("input", problem));
        }
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if (min_items..=max_items).contains(&items.len()) => {
            for (index, item) in items.into_iter().enumerate() {
                add(&mut messages, item).map_err(|problem| {
                    Error::field("input", format!("'input[{index}]': {problem}"))
                })?;
            }
        }
        Some(other) => return Err(wrong("input", &other, &expected)),
    }
    Ok(messages)
}

/// The items of a field, as a conversation has them.
///
/// # Errors
/// It is no list of items, or has an item that is none of a conversation.
pub fn new_items(name: &str, value: Value) -> Result<Vec<Value>, Error> {
    let expected = format!("a list of at most {MAX_ITEMS} items");
    let Value::Array(items) = value else {
        return Err(wrong(name, &value, &expected));
    };
    if items.len() > MAX_ITEMS {
        let problem = format!("'{name}' has {} items, and is no {expected}", items.len());
        return Err(Error::field(name, problem));
    }
    let mut messages = Vec::new();
    for (index, item) in items.iter().enumerate() {
        add(&mut messages, item.clone())
            .map_err(|problem| Error::field(name, format!("'{name}[{index}]': {problem}")))?;
    }
    Ok(items.into_iter().map(stored).collect())
}

/// An item of a request as a conversation has it: with an id, a type, and a list as the content of a message.
pub fn stored(mut item: Value) -> Value {
    if item["type"].is_null() {
        item["type"] = json!("message");
    }
    let beginning = match item["type"].as_str() {
        Some("message") => "msg-",
        Some("reasoning") => "rs-",
        Some("function_call") => "fc-",
        _ => "item-",
    };
    item["id"] = json!(ids::id(beginning));
    if item["status"].is_null() {
        item["status"] = json!("completed");
    }
    if let Value::String(text) = &item["content"] {
        let kind = match item["role"] == "assistant" {
            true => "output_text",
            false => "input_text",
        };
        item["content"] = json!([{"type": kind, "text": text}]);
    }
    item
}

/// Adds an item to a conversation. What the model has thought, said and called in one turn is one message.
fn add(messages: &mut Vec<Value>, item: Value) -> Result<(), String> {
    let word = |name: &str| match &item[name] {
        Value::String(word) => Ok(word.clone()),
        _ => Err(format!("'{name}' is missing, or no text")),
    };
    let kind = match &item["type"] {
        Value::Null => "message",
        Value::String(kind) => kind.as_str(),
        _ => return Err("'type' is no text".to_owned()),
    };
    match kind {
        "message" => {
            let role = word("role")?;
            let content = match (&*role, &item["content"]) {
                ("user", Value::Array(parts)) => {
                    parts_of("content", message_content::content(parts))?
                }
                (_, content) => text(content, "content")?.into(),
            };
            let last = messages.last_mut().filter(|last| {
                role == "assistant"
                    && last["role"] == "assistant"
                    && last["content"].is_null()
                    && last["tool_calls"].is_null()
            });
            match last {
                Some(thought) => thought["content"] = content,
                None => messages.push(json!({"role": role, "content": content})),
            }
        }
        "reasoning" => {
            let thought = text(&item["content"], "content")?;
            if !thought.is_empty() {
                messages.push(json!({"role": "assistant", "reasoning_content": thought}));
            }
        }
        "function_call" => {
            let call = json!({
                "id": word("call_id")?,
                "type": "function",
                "function": {"name": word("name")?, "arguments": arguments(&item["arguments"])},
            });
            match messages.last_mut() {
                Some(last) if last["role"] == "assistant" => match &mut last["tool_calls"] {
                    Value::Array(calls) => calls.push(call),
                    none => *none = json!([call]),
                },
                _ => messages.push(json!({"role": "assistant", "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let output = text(&item["output"], "output")?;
            messages
                .push(json!({"role": "tool", "tool_call_id": word("call_id")?, "content": output}));
        }
        other => {
            return Err(format!(
                "an item of type '{other}' is not supported; give messages, functions that were called, and their results"
            ));
        }
    }
    Ok(())
}

/// The arguments of a call, as a text. Clients send back what they made of them.
fn arguments(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A text, or a list of parts that are texts.
fn text(value: &Value, name: &str) -> Result<String, String> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts_of(name, message_content::text(parts)),
        _ => Err(format!("'{name}' is no text and no list of parts")),
    }
}

/// The content of a list of parts, with the place of a part that is wrong.
fn parts_of<T>(name: &str, content: Result<T, (usize, String)>) -> Result<T, String> {
    content.map_err(|(index, problem)| format!("'{name}[{index}]': {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_of_the_model_is_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let items = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "A "}, {"type": "input_text", "text": "fox?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            call("1"),
            call("2"),
            {"type": "function_call_output", "call_id": "1", "output": "yes"},
            call("3"),
            {"role": "assistant", "content": "So."},
        ]);
        let function = json!({"name": "f", "arguments": "{}"});
        let called = |id: &str| json!({"id": id, "type": "function", "function": function});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A fox?"},
            {"role": "assistant", "reasoning_content": "Hm", "content": "Well.", "tool_calls": [called("1"), called("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "yes"},
            {"role": "assistant", "tool_calls": [called("3")]},
            {"role": "assistant", "content": "So."},
        ]);
        let found = messages(Vec::new(), Some(items), Some("Be brief.")).expect("sound");
        assert_eq!(Value::Array(found), expected);
    }

    #[test]
    fn an_item_of_a_conversation_has_an_id_and_a_list_as_content() {
        let items = json!([{"role": "user", "content": "Hi"}, {"type": "message", "role": "assistant", "content": [], "id": 5}]);
        let items = new_items("items", items).expect("sound");
        let content = json!([{"type": "input_text", "text": "Hi"}]);
        let id = &items[0]["id"];
        let expected = json!({"role": "user", "content": content, "type": "message", "id": id, "status": "completed"});
        assert_eq!(items[0], expected);
        assert!(items.iter().all(|item| item["id"].is_string()));
        for wrong in [
            json!({}),
            json!([{"role": "user"}, {"type": "web_search_call"}]),
        ] {
            let error = new_items("items", wrong).expect_err("no items");
            assert!(error.message.starts_with("'items"), "{}", error.message);
        }
    }

    #[test]
    fn what_is_no_item_of_a_conversation_is_named() {
        let stored = json!({"role": "user", "content": "Hi"});
        for (item, words) in [
            (
                json!({"type": "item_reference", "id": "a"}),
                "item_reference",
            ),
            (
                json!({"role": "user", "content": [{"type": "input_image"}]}),
                "content[0]",
            ),
            (json!({"content": "a"}), "'role'"),
            (json!({"type": "function_call", "name": "f"}), "'call_id'"),
            (json!({"role": "user", "content": 1}), "'content'"),
        ] {
            let error = messages(vec![stored.clone()], Some(json!([item])), None).expect_err(words);
            assert!(
                error.message.starts_with("'input[0]'") && error.message.contains(words),
                "{}",
                error.message
            );
        }
    }
}
