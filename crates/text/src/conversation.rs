//! A conversation, in the form in which chat templates read it.
//!
//! Messages are as in OpenAI's interface and in Hugging Face transformers. Three things are changed before a template
//! sees them: reasoning is given under each name that templates read, and members that are null are left out (both as
//! in transformers 5); the arguments of a tool call that are JSON in a string become the JSON itself (as in vLLM),
//! because most templates write them with `tojson`. Others, such as DeepSeek's, need the string and the null: what a
//! template cannot render with these changes is rendered as it is given.

use serde_json::{Map, Value, json};

use inflight_base::RequestError;

/// The names of a message's reasoning: most templates read the first, GPT-OSS's reads `thinking`.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What marks the end of the message that is continued. The same text as in transformers, so that templates which trim
/// a message treat it alike.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A conversation, and what else a chat template sees.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// A list of objects with `role` and `content`.
    pub messages: Vec<Value>,
    /// Functions that the model may call: a list of objects.
    pub tools: Option<Value>,
    /// Texts that the answer is to be based on: a list of objects.
    pub documents: Option<Value>,
    /// Other variables, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The name of the template; `None` for `tool_use` if there are tools and such a template, else `default`.
    pub template: Option<String>,
    /// Where the prompt ends.
    pub ending: PromptEnding,
}

/// Where the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnding {
    /// Where the assistant's answer begins.
    #[default]
    NewMessage,
    /// Behind the last message.
    LastMessage,
    /// Within the last message, behind this field's text.
    Within(MessageField),
}

/// A text of a message that an answer can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageField {
    /// `content`
    Content,
    /// `reasoning_content`
    Reasoning,
}

/// How messages are shown to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageForm {
    /// Without nulls, and with the arguments of calls as objects, where they are some.
    Parsed,
    /// As the request has them: with nulls, and arguments in strings.
    AsGiven,
    /// As parsed; and arguments that are no objects, such as the broken JSON of an earlier answer, are in one.
    Repaired,
}

/// The end of a prompt that continues a message.
pub(super) struct Continuation {
    names: Vec<&'static str>,
    text: String,
}

impl Conversation {
    /// The messages for a template, with a mark behind the text that is continued.
    ///
    /// # Errors
    /// The last message has no text to continue.
    pub(super) fn shown(
        &self,
        form: MessageForm,
    ) -> Result<(Vec<Value>, Option<Continuation>), RequestError> {
        let mut messages = self.messages.clone();
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            name_reasoning(message);
            if form != MessageForm::AsGiven {
                message.retain(|_, value| !value.is_null());
                parse_arguments(message, form);
            }
        }
        let PromptEnding::Within(field) = self.ending else {
            return Ok((messages, None));
        };
        let last = messages.last_mut().and_then(Value::as_object_mut);
        let continuation = last.and_then(|last| mark(last, field)).ok_or_else(|| {
            let name = field.name();
            invalid(&format!(
                "the last message has no text in '{name}' to continue; give it one, or leave out continue_final_message"
            ))
        })?;
        Ok((messages, Some(continuation)))
    }
}

impl MessageField {
    fn name(self) -> &'static str {
        match self {
            Self::Content => "content",
            Self::Reasoning => REASONING[0],
        }
    }
}

impl Continuation {
    /// Whether a template reads the field at all.
    pub(super) fn is_read_by(&self, source: &str) -> bool {
        self.names.iter().any(|name| source.contains(name))
    }

    /// Cuts a prompt off behind the text that is continued (transformers' `continue_final_message`).
    ///
    /// # Errors
    /// The template did not write the text, or changed it.
    pub(super) fn cut(&self, mut prompt: String) -> Result<String, RequestError> {
        let end = prompt
            .rfind(MARK.trim_end())
            .filter(|_| prompt.contains(self.text.trim()));
        let Some(end) = end else {
            return Err(invalid(
                "the chat template does not write the last message as it is, so that it cannot be continued; leave out \
                 continue_final_message",
            ));
        };
        let is_trimmed = !prompt[end..].starts_with(MARK);
        prompt.truncate(end);
        if is_trimmed {
            prompt.truncate(prompt.trim_end().len());
        }
        Ok(prompt)
    }
}

/// Writes contents that are texts as lists of one part, for templates that read nothing else.
pub(super) fn texts_as_parts(messages: &mut [Value]) {
    for message in messages {
        if let Some(content @ Value::String(_)) = message.get_mut("content") {
            *content = json!([{"type": "text", "text": content.take()}]);
        }
    }
}

/// Gives a message's reasoning the names that templates read.
fn name_reasoning(message: &mut Map<String, Value>) {
    if let Some(text) = REASONING
        .iter()
        .find_map(|name| message.get(*name))
        .cloned()
    {
        message.entry("thinking").or_insert_with(|| text.clone());
        message.insert(REASONING[0].to_owned(), text);
    }
}

/// Replaces arguments of tool calls that are JSON objects in strings by the objects. No arguments are an empty object,
/// as which clients also write an empty text, null or, in PHP, a list.
fn parse_arguments(message: &mut Map<String, Value>, form: MessageForm) {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    let functions = calls.into_iter().flatten().filter_map(|call| {
        let function = call.get_mut("function")?;
        function.as_object_mut()
    });
    for function in functions {
        let arguments = function.entry("arguments").or_insert(Value::Null);
        let parsed = match &arguments {
            Value::String(text) if text.trim().is_empty() => Value::Null,
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| arguments.clone()),
            other => (*other).clone(),
        };
        match parsed {
            Value::Null => *arguments = Value::Object(Map::new()),
            Value::Array(list) if list.is_empty() => *arguments = Value::Object(Map::new()),
            Value::Object(_) => *arguments = parsed,
            _ if form == MessageForm::Repaired => {
                let text = arguments.take();
                *arguments = Value::Object(Map::from_iter([("arguments".to_owned(), text)]));
            }
            _ => {}
        }
    }
}

/// Marks the end of a message's text. `None` if it has none.
fn mark(message: &mut Map<String, Value>, field: MessageField) -> Option<Continuation> {
    let value = message.get(field.name())?;
    let names = match field {
        MessageField::Content => vec![field.name()],
        // Copies of the same text: whichever the template reads.
        MessageField::Reasoning => {
            let is_copy = |name: &&str| message.get(*name) == Some(value);
            REASONING.into_iter().filter(is_copy).collect()
        }
    };
    let mut text = None;
    for name in &names {
        let place = match message.get_mut(*name)? {
            Value::Array(parts) => {
                let mut parts = parts.iter_mut().rev();
                parts.find_map(|part| part.get_mut("text"))?
            }
            place => place,
        };
        let Value::String(place) = place else {
            return None;
        };
        text = Some(place.clone());
        place.push_str(MARK);
    }
    Some(Continuation { names, text: text? })
}

fn invalid(problem: &str) -> RequestError {
    RequestError::Invalid(format!("option 'messages': {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(messages: Value) -> Value {
        shown_as(MessageForm::Parsed, messages)
    }

    fn shown_as(form: MessageForm, messages: Value) -> Value {
        let conversation = Conversation {
            messages: messages.as_array().expect("a list").clone(),
            ..Conversation::default()
        };
        Value::Array(conversation.shown(form).expect("shown").0)
    }

    #[test]
    fn reasoning_has_every_name_that_templates_read() {
        for name in REASONING {
            let message = &shown(json!([{ "role": "assistant", name: "hm" }]))[0];
            assert_eq!(message["reasoning_content"], "hm");
            assert_eq!(message["thinking"], "hm");
        }
        let both = shown(json!([{"thinking": "a", "reasoning_content": "b"}]));
        assert_eq!(both, json!([{"thinking": "a", "reasoning_content": "b"}]));
        let null = json!([{"role": "user", "content": null, "reasoning": null}]);
        assert_eq!(shown(null), json!([{"role": "user"}]));
    }

    #[test]
    fn arguments_in_strings_become_objects_and_others_stay() {
        let calls = |arguments: [Value; 4]| {
            let calls = arguments
                .map(|arguments| json!({"function": {"name": "f", "arguments": arguments}}));
            json!([{"role": "assistant", "tool_calls": calls}])
        };
        let given = [
            json!(r#"{"b": 1, "a": [2]}"#),
            json!({"c": 3}),
            json!("[1]"),
            json!("{"),
        ];
        let expected = [
            json!({"b": 1, "a": [2]}),
            json!({"c": 3}),
            json!("[1]"),
            json!("{"),
        ];
        assert_eq!(shown(calls(given)), calls(expected));
        for nothing in [
            json!(""),
            json!(" "),
            json!("null"),
            json!(null),
            json!("[]"),
            json!([]),
            json!({}),
        ] {
            let call = json!([{"tool_calls": [{"function": {"name": "f", "arguments": nothing}}]}]);
            let expected = json!([{"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]);
            assert_eq!(shown(call.clone()), expected, "{nothing}");
            assert_eq!(shown_as(MessageForm::AsGiven, call.clone()), call);
        }
        let missing = shown(json!([{"tool_calls": [{"function": {"name": "f"}}]}]));
        assert_eq!(
            missing[0]["tool_calls"][0]["function"]["arguments"],
            json!({})
        );
        let odd = json!([{"tool_calls": [1, {"function": 2}]}, {"tool_calls": "none"}]);
        assert_eq!(shown(odd.clone()), odd);
    }

    #[test]
    fn arguments_that_are_no_object_can_be_put_into_one() {
        for text in [json!("{bad"), json!("[1]"), json!("7"), json!(7)] {
            let call = |arguments: Value| json!([{"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]);
            let expected = call(json!({"arguments": text}));
            assert_eq!(shown_as(MessageForm::Repaired, call(text)), expected);
        }
    }

    #[test]
    fn a_message_without_text_cannot_be_continued() {
        for last in [
            json!({"role": "assistant"}),
            json!({"content": null}),
            json!({"content": [{"type": "image"}]}),
            json!({"content": 5}),
        ] {
            let conversation = Conversation {
                messages: vec![last],
                ending: PromptEnding::Within(MessageField::Content),
                ..Conversation::default()
            };
            let error = conversation
                .shown(MessageForm::Parsed)
                .err()
                .expect("refused")
                .to_string();
            assert!(error.contains("no text in 'content'"), "{error}");
        }
    }
}
