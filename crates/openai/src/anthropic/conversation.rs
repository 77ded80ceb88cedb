//! The messages of a conversation and their blocks, as the messages that chat templates know.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::errors::check_extra;
use super::{thinking, tools};
use crate::Error;
use crate::body::{Body, wrong};
use crate::message_content::image_part;

/// The beginning of a text in which Claude Code tells the service its version. Some versions change it with each
/// request, so that a prompt with it would share no blocks with the one before.
const BILLING: &str = "x-anthropic-billing-header:";

/// A conversation.
#[derive(Debug, Default)]
pub struct Conversation {
    /// The messages in OpenAI's form.
    pub messages: Vec<Value>,
    /// Tools that results have named with a `tool_reference`.
    pub found_tools: BTreeSet<String>,
}

impl Conversation {
    /// The conversation in the fields `system` and `messages` of a request. Messages of one role behind each other are
    /// one message.
    ///
    /// # Errors
    /// A message or a block that is none, or of a type that models here do not read.
    pub fn take(body: &mut Body) -> Result<Self, Error> {
        let mut conversation = Self::default();
        let system = body.take("system").unwrap_or_else(|| json!([]));
        conversation.add("system", "system", system)?;
        let messages = match body.take("messages") {
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            other => {
                let expected = "a list of at least one message";
                return Err(wrong("messages", &other.unwrap_or_default(), expected));
            }
        };
        for (index, message) in messages.into_iter().enumerate() {
            let place = format!("messages.{index}");
            let mut message = Body::within(&place, message)?;
            let role = message.required_text("role")?;
            if !["user", "assistant", "system"].contains(&&*role) {
                let expected = "'user', 'assistant' or 'system'";
                return Err(wrong(&message.place("role"), &json!(role), expected));
            }
            let content = message.take("content").unwrap_or_default();
            conversation.add(&role, &message.place("content"), content)?;
            check_extra(&message)?;
        }
        Ok(conversation)
    }

    /// Whether the answer is to continue the last message.
    ///
    /// # Errors
    /// The last message calls tools, whose results are missing.
    pub fn is_begun(&self) -> Result<bool, Error> {
        match self.messages.last() {
            Some(last) if last["role"] == "assistant" => match last["tool_calls"].is_null() {
                true => Ok(true),
                false => Err(Error::field(
                    "messages",
                    "'messages' end with 'tool_use'; add a message of the role 'user' with the 'tool_result' of each",
                )),
            },
            _ => Ok(false),
        }
    }

    /// Adds the content of a message: a text, or a list of blocks.
    fn add(&mut self, role: &str, place: &str, content: Value) -> Result<(), Error> {
        match content {
            Value::String(text) => self.say(role, &text),
            Value::Array(blocks) => {
                for (index, block) in blocks.into_iter().enumerate() {
                    let block = Body::within(&format!("{place}.{index}"), block)?;
                    self.add_block(role, block)?;
                }
            }
            other => return Err(wrong(place, &other, "a text or a list of blocks")),
        }
        Ok(())
    }

    fn add_block(&mut self, role: &str, mut block: Body) -> Result<(), Error> {
        let kind = block.required_text("type")?;
        // A prefix is reused without being told to.
        block.take("cache_control");
        match (role, &kind[..]) {
            (_, "text") => {
                let text = block.required_text("text")?;
                block.take("citations");
                self.say(role, &text);
            }
            ("assistant", "thinking") => {
                let text = block.required_text("thinking")?;
                let signature = block.text("signature")?.unwrap_or_default();
                self.think(&thinking::thought(text, &signature));
            }
            // A thought that only Anthropic's models can read.
            ("assistant", "redacted_thinking") => {
                block.take("data");
            }
            ("assistant", "tool_use") => self.call(&mut block)?,
            ("user", "tool_result") => self.add_result(&mut block)?,
            ("user", "image") => self.show(&mut block)?,
            _ => {
                let expected = match role {
                    "assistant" => "'text', 'thinking', 'redacted_thinking' or 'tool_use'",
                    "user" => "'text', 'image' or 'tool_result'",
                    _ => "'text'",
                };
                return Err(unsupported(&block, &kind, expected));
            }
        }
        check_extra(&block)
    }

    /// Adds to the content of the last message, or begins another one. The blocks of an answer are pieces of one text;
    /// others are texts by themselves.
    fn say(&mut self, role: &str, text: &str) {
        if role == "system" && text.starts_with(BILLING) {
            return;
        }
        // Many chat templates take a message of the system at the beginning only.
        let is_behind = self
            .messages
            .last()
            .is_some_and(|it| it["role"] != "system");
        let role = match role {
            "system" if is_behind => "user",
            other => other,
        };
        match &mut self.last(role)["content"] {
            Value::String(content) => {
                if role != "assistant" {
                    content.push('\n');
                }
                content.push_str(text);
            }
            Value::Array(parts) => parts.push(json!({"type": "text", "text": text})),
            none => *none = json!(text),
        }
    }

    /// Adds an image to the content of the last message.
    fn show(&mut self, block: &mut Body) -> Result<(), Error> {
        let source = block.take("source").unwrap_or_default();
        let mut source = Body::within(&block.place("source"), source)?;
        let kind = source.required_text("type")?;
        let url = match &kind[..] {
            "base64" => {
                let media_type = source.required_text("media_type")?;
                format!("data:{media_type};base64,{}", source.required_text("data")?)
            }
            _ => {
                let expected = "'base64': images at URLs are read from hosts in --allow-image-host, and files are not";
                return Err(wrong(&source.place("type"), &json!(kind), expected));
            }
        };
        check_extra(&source)?;
        let content = &mut self.last("user")["content"];
        let mut parts = match content.take() {
            Value::Array(parts) => parts,
            Value::String(text) => vec![json!({"type": "text", "text": text})],
            _ => Vec::new(),
        };
        parts.push(image_part(&url));
        *content = Value::Array(parts);
        Ok(())
    }

    fn think(&mut self, thought: &str) {
        if thought.is_empty() {
            return;
        }
        match &mut self.last("assistant")["reasoning_content"] {
            Value::String(all) => all.push_str(thought),
            none => *none = json!(thought),
        }
    }

    fn call(&mut self, block: &mut Body) -> Result<(), Error> {
        let id = tools::backend_id(&block.required_text("id")?).to_owned();
        let name = block.required_text("name")?;
        let input = block.take("input").unwrap_or_default();
        if !input.is_object() {
            return Err(wrong(&block.place("input"), &input, "an object"));
        }
        let caller = block.take("caller");
        if let Some(caller) = caller.filter(|caller| caller["type"] != "direct") {
            let expected = "{\"type\": \"direct\"}: only the model itself calls tools here";
            return Err(wrong(&block.place("caller"), &caller, expected));
        }
        let function = json!({"name": name, "arguments": input.to_string()});
        let call = json!({"id": id, "type": "function", "function": function});
        match &mut self.last("assistant")["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            none => *none = json!([call]),
        }
        Ok(())
    }

    fn add_result(&mut self, block: &mut Body) -> Result<(), Error> {
        let id = block.required_text("tool_use_id")?;
        let text = match block.take("content").unwrap_or_else(|| json!("")) {
            Value::String(text) => text,
            Value::Array(parts) => {
                let place = block.place("content");
                let part = |(index, part)| self.result_part(&format!("{place}.{index}"), part);
                let parts: Result<Vec<_>, _> = parts.into_iter().enumerate().map(part).collect();
                parts?.join("\n")
            }
            other => {
                let expected = "a text or a list of blocks";
                return Err(wrong(&block.place("content"), &other, expected));
            }
        };
        let id = tools::backend_id(&id);
        let mut message = json!({"role": "tool", "tool_call_id": id, "content": text});
        if block.flag("is_error")? {
            message["is_error"] = json!(true);
        }
        self.messages.push(message);
        Ok(())
    }

    /// The text of a block of a result.
    fn result_part(&mut self, place: &str, part: Value) -> Result<String, Error> {
        let mut part = Body::within(place, part)?;
        let kind = part.required_text("type")?;
        part.take("cache_control");
        let text = match &kind[..] {
            "text" => {
                part.take("citations");
                part.required_text("text")?
            }
            "tool_reference" => {
                let name = part.required_text("tool_name")?;
                self.found_tools.insert(name.clone());
                name
            }
            _ => return Err(unsupported(&part, &kind, "'text' or 'tool_reference'")),
        };
        check_extra(&part)?;
        Ok(text)
    }

    /// The last message, if it is of this role; otherwise a new one behind it.
    fn last(&mut self, role: &str) -> &mut Value {
        if self.messages.last().is_none_or(|last| last["role"] != role) {
            self.messages.push(json!({"role": role}));
        }
        self.messages.last_mut().expect("there is one now")
    }
}

/// A block of a type that models here do not read.
fn unsupported(block: &Body, kind: &str, expected: &str) -> Error {
    let place = block.place("type");
    Error::field(
        &place,
        format!("'{place}': blocks of the type '{kind}' are not supported here; give {expected}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Result<Conversation, Error> {
        let Value::Object(fields) = fields else {
            panic!("no object");
        };
        Conversation::take(&mut Body::of(fields))
    }

    #[test]
    fn blocks_are_messages_of_chat_templates() {
        let found = read(json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Rain?"},
                {"role": "user", "content": [{"type": "text", "text": "In Oslo."}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Oslo?", "signature": "s"},
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "text", "text": "Let me "},
                    {"type": "text", "text": "see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "id": "2", "name": "search", "input": {}, "caller": {"type": "direct"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no connection", "is_error": true},
                    {"type": "tool_result", "tool_use_id": "2", "content": [
                        {"type": "text", "text": "found:"}, {"type": "tool_reference", "tool_name": "snow"},
                    ]},
                    {"type": "text", "text": "And now?"},
                ]},
                {"role": "system", "content": "It is Monday."},
            ],
        }));
        let found = found.expect("sound");
        let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls = [
            call("1", "weather", "{\"city\":\"Oslo\"}"),
            call("2", "search", "{}"),
        ];
        let expected = [
            json!({"role": "system", "content": "Be brief.\nBe kind."}),
            json!({"role": "user", "content": "Rain?\nIn Oslo."}),
            json!({"role": "assistant", "reasoning_content": "Oslo?", "content": "Let me see.", "tool_calls": calls}),
            json!({"role": "tool", "tool_call_id": "1", "content": "no connection", "is_error": true}),
            json!({"role": "tool", "tool_call_id": "2", "content": "found:\nsnow"}),
            json!({"role": "user", "content": "And now?\nIt is Monday."}),
        ];
        assert_eq!(found.messages, expected);
        assert_eq!(found.found_tools, ["snow".to_owned()].into());
        assert_eq!(found.is_begun(), Ok(false));
    }

    #[test]
    fn images_are_parts_between_texts() {
        let source = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
        let text = |text: &str| json!({"type": "text", "text": text});
        let content =
            json!([text("Look:"), {"type": "image", "source": source}, text("What is it?")]);
        let found = read(json!({"messages": [{"role": "user", "content": content}]}));
        let image = json!({"type": "image", "image": "data:image/png;base64,AA=="});
        let expected = json!([text("Look:"), image, text("What is it?")]);
        assert_eq!(found.expect("sound").messages[0]["content"], expected);
    }

    #[test]
    fn an_answer_continues_the_last_message_of_the_model_unless_it_calls_tools() {
        let begun = |content: Value| {
            let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]);
            read(json!({"messages": messages}))
                .expect("sound")
                .is_begun()
        };
        assert_eq!(begun(json!("The fox")), Ok(true));
        let call = json!([{"type": "tool_use", "id": "1", "name": "f", "input": {}}]);
        let error = begun(call).expect_err("a call without a result");
        assert!(error.message.contains("'tool_result'"));
    }

    #[test]
    fn what_is_no_block_of_its_message_is_named() {
        let image = json!({"type": "image", "source": {"type": "base64"}});
        let result = |content: Value| json!([{"type": "tool_result", "tool_use_id": "1", "content": content}]);
        for (role, content, words) in [
            (
                "user",
                json!([image]),
                "'messages.0.content.0.source.media_type' is missing",
            ),
            (
                "user",
                json!([{"type": "image", "source": {"type": "url", "url": "https://host"}}]),
                "'messages.0.content.0.source.type'",
            ),
            ("assistant", json!([image]), "'image' are not supported"),
            ("user", json!([{"type": "document"}]), "'document'"),
            ("user", json!([{"type": "tool_use"}]), "'tool_use'"),
            ("assistant", result(json!("")), "'tool_result'"),
            ("system", json!([{"type": "tool_addition"}]), "give 'text'"),
            ("user", json!(1), "'messages.0.content': 1"),
            ("user", json!(["a"]), "'messages.0.content.0': \"a\""),
            (
                "user",
                json!([{"type": "text"}]),
                "content.0.text' is missing",
            ),
            ("user", json!([{"text": "a"}]), "content.0.type' is missing"),
            (
                "user",
                json!([{"type": "text", "text": "a", "bold": true}]),
                "messages.0.content.0.bold: Extra inputs are not permitted",
            ),
            (
                "user",
                result(json!([image])),
                "'messages.0.content.0.content.0.type'",
            ),
            (
                "assistant",
                json!([{"type": "tool_use", "id": "1", "name": "f", "input": "{}"}]),
                "content.0.input': \"{}\" is not an object",
            ),
            ("tool", json!("a"), "'messages.0.role': \"tool\""),
        ] {
            let messages = json!([{"role": role, "content": content}]);
            let error = read(json!({"messages": messages})).expect_err(words);
            assert!(error.message.contains(words), "{}", error.message);
        }
        for messages in [json!([]), json!("Hi"), json!(["Hi"]), json!([{}])] {
            assert!(read(json!({"messages": messages})).is_err());
        }
    }
}
