//! `/v1/messages` and `/v1/messages/count_tokens`: the request.

use serde_json::{Map, Value, json};

use super::conversation::Conversation;
use super::errors::{NO_THREADS, check_extra, extra};
use super::fields::{COUNT_TOKENS, MESSAGES};
use super::thinking::Thinking;
use super::tools;
use crate::Error;
use crate::body::{Body, wrong};
use crate::chat::Chat;
use crate::endpoint::Endpoint;
use crate::fields::{self, Field};
use crate::generation::{Generation, STOP_REASON};
use crate::names::Words;
use crate::tokens::Tokens;

/// Fields of conversations, and their names here.
const WORDS: Words = Words(&[
    ("stop", "stop_sequences"),
    ("response_format", "output_config"),
    ("reasoning_effort", "output_config"),
    ("parallel_tool_calls", "tool_choice"),
    (BUDGET, "thinking"),
]);
/// Options that `/v1/chat/completions` calls alike.
const SHARED: [&str; 1] = ["seed"];
/// The option of the backend that ends a thought.
const BUDGET: &str = "thinking_token_budget";
/// The variables of the chat template.
const VARIABLES: &str = "chat_template_kwargs";

/// A request for a message.
#[derive(Clone, Debug, PartialEq)]
pub struct Messages {
    /// The request as a conversation.
    pub chat: Chat,
    /// How the model thinks.
    pub thinking: Thinking,
    /// Texts that end the message.
    pub stop_sequences: Vec<String>,
    /// The most tokens of the message.
    pub max_tokens: u32,
    /// Whether it may end at a time limit.
    pub has_timeout: bool,
}

impl Endpoint for Messages {
    const FIELDS: &[Field] = MESSAGES;
    const ID: &str = "msg_";

    fn read(mut body: Body, seed: u64) -> Result<Self, Error> {
        let max_tokens = body.count("max_tokens", 1..=i32::MAX as u32)?;
        let max_tokens = max_tokens.ok_or_else(|| {
            let problem = "'max_tokens' is missing: give the most tokens of the answer";
            Error::field("max_tokens", problem)
        })?;
        let stop_sequences = stop_sequences(body.take("stop_sequences"))?;
        let temperature = temperature(body.take("temperature"))?;
        let stream = body.flag("stream")?;
        let (mut fields, thinking) = conversation(body, MESSAGES)?;
        let has_timeout = fields.contains_key("timeout");
        let own = [
            ("max_tokens", Some(json!(max_tokens))),
            ("stop", Some(json!(stop_sequences))),
            ("temperature", temperature),
            ("stream", Some(json!(stream))),
        ];
        add(&mut fields, own);
        Ok(Self {
            chat: chat(fields, seed)?,
            thinking,
            stop_sequences,
            max_tokens,
            has_timeout,
        })
    }

    fn is_stream(&self) -> bool {
        self.chat.is_stream()
    }

    fn generation(&self, id: &str) -> Generation {
        let mut generation = self.chat.generation(id);
        if !self.stop_sequences.is_empty() {
            generation.outputs.push(STOP_REASON);
        }
        generation
    }
}

/// The request in a body for the number of a message's tokens.
///
/// # Errors
/// A field that is missing, refused, or of another type or range.
pub fn tokens(body: Body) -> Result<Tokens, Error> {
    let (fields, _) = conversation(body, COUNT_TOKENS)?;
    Ok(Tokens::of_generation(chat(fields, 0)?.generation("")))
}

/// The conversation of a request, and its other options, as fields of a conversation in OpenAI's form.
fn conversation(mut body: Body, known: &[Field]) -> Result<(Map<String, Value>, Thinking), Error> {
    let model = body.model()?;
    let conversation = Conversation::take(&mut body)?;
    let is_begun = conversation.is_begun()?;
    let thinking = Thinking::read(body.take("thinking"))?;
    let (format, effort) = output_config(body.take("output_config"))?;
    let tools = tools::functions(body.take("tools"), &conversation.found_tools)?;
    let choice = body.take("tool_choice").map(tools::choice).transpose()?;
    let mut fields = body.into_options(known).map_err(of_thread)?;
    if let Some(name) = fields::first_of_chat(&fields, &SHARED) {
        return Err(extra(name));
    }

    let variables = fields.remove(VARIABLES).unwrap_or_else(|| json!({}));
    let variables = match variables {
        Value::Object(mut variables) => {
            for (name, value) in thinking.variables() {
                variables.entry(name).or_insert(json!(value));
            }
            variables
        }
        other => return Err(wrong(VARIABLES, &other, "an object")),
    };
    // A choice that calls nothing needs no tools.
    let choice = choice
        .filter(|it| !tools.is_empty() || !["auto", "none"].map(Value::from).contains(&it.choice));
    let is_parallel = choice.as_ref().is_none_or(|choice| choice.is_parallel);
    let own = [
        ("model", Some(json!(model))),
        ("messages", Some(Value::Array(conversation.messages))),
        ("continue_final_message", is_begun.then(|| json!(true))),
        (VARIABLES, (!variables.is_empty()).then(|| json!(variables))),
        ("response_format", format),
        ("reasoning_effort", effort),
        (BUDGET, thinking.budget.map(|budget| json!(budget))),
        ("tools", Some(Value::Array(tools))),
        ("tool_choice", choice.map(|choice| choice.choice)),
        ("parallel_tool_calls", (!is_parallel).then(|| json!(false))),
    ];
    add(&mut fields, own);
    Ok((fields, thinking))
}

/// The refusal of a field. The package for Python then sends all messages, if it is told by this code.
fn of_thread(error: Error) -> Error {
    let is_thread = error.param.as_deref() == Some("thread");
    Error {
        code: is_thread.then_some(NO_THREADS).or(error.code),
        ..error
    }
}

fn add<const N: usize>(fields: &mut Map<String, Value>, own: [(&str, Option<Value>); N]) {
    let own = own.into_iter();
    fields.extend(own.filter_map(|(name, value)| Some((name.to_owned(), value?))));
}

/// The conversation of these fields, which are called differently here.
fn chat(fields: Map<String, Value>, seed: u64) -> Result<Chat, Error> {
    let mut chat = Chat::read(Body::of(fields), seed).map_err(|error| WORDS.error(error))?;
    chat.names = chat.names.renamed(WORDS);
    Ok(chat)
}

fn stop_sequences(value: Option<Value>) -> Result<Vec<String>, Error> {
    let texts = |list: &Vec<Value>| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        list.iter().map(text).collect()
    };
    match value {
        None => Ok(Vec::new()),
        Some(value) => {
            let found: Option<Vec<_>> = value.as_array().and_then(texts);
            found.ok_or_else(|| wrong("stop_sequences", &value, "a list of texts"))
        }
    }
}

fn temperature(value: Option<Value>) -> Result<Option<Value>, Error> {
    let is_sound = |value: &Value| value.as_f64().is_some_and(|it| (0.0..=1.0).contains(&it));
    match value {
        Some(value) if !is_sound(&value) => {
            Err(wrong("temperature", &value, "a number from 0 to 1"))
        }
        other => Ok(other),
    }
}

/// The format of the answer, as a `response_format`, and the effort.
fn output_config(value: Option<Value>) -> Result<(Option<Value>, Option<Value>), Error> {
    let Some(value) = value else {
        return Ok((None, None));
    };
    let mut fields = Body::within("output_config", value)?;
    let effort = fields.text("effort")?.map(Value::String);
    let format = fields.take("format");
    check_extra(&fields)?;
    let format = format.map(response_format).transpose()?;
    Ok((format, effort))
}

fn response_format(value: Value) -> Result<Value, Error> {
    let mut fields = Body::within("output_config.format", value)?;
    let kind = fields.required_text("type")?;
    if kind != "json_schema" {
        let expected = "'json_schema'";
        return Err(wrong("output_config.format.type", &json!(kind), expected));
    }
    let schema = fields.take("schema").unwrap_or_default();
    if !schema.is_object() {
        let expected = "a JSON schema, which is an object";
        return Err(wrong("output_config.format.schema", &schema, expected));
    }
    check_extra(&fields)?;
    Ok(json!({"type": "json_schema", "json_schema": {"schema": schema, "strict": true}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(more: Value) -> Body {
        let mut fields = json!({
            "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}],
        });
        let more = more.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        Body::parse(fields.to_string().as_bytes()).expect("an object")
    }

    fn read(more: Value) -> Result<Messages, Error> {
        Messages::read(body(more), 42)
    }

    #[test]
    fn a_request_is_one_of_a_conversation() {
        let schema = json!({"type": "object"});
        let found = read(json!({
            "system": "Be brief.", "top_k": 3, "temperature": 0.5, "seed": 7, "stop_sequences": ["fox"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "chat_template_kwargs": {"thinking": "deep"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard", "mcp_servers": [],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }));
        let expected = json!({
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 9, "top_k": 3, "thinking_token_budget": 1024, "temperature": 0.5, "seed": 7, "stop": ["fox"], "stream": false,
            "chat_template_kwargs": {"thinking": "deep", "enable_thinking": true},
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": true}},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": false,
        });
        let expected = Body::parse(expected.to_string().as_bytes()).expect("an object");
        let mut expected = Chat::read(expected, 42).expect("sound");
        expected.names = expected.names.renamed(WORDS);
        let found = found.expect("sound");
        assert_eq!(found.chat, expected);
        assert!(found.generation("msg_1").outputs.contains(&STOP_REASON));
    }

    #[test]
    fn an_answer_that_has_begun_is_continued() {
        let messages =
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]);
        let found = read(json!({"messages": messages})).expect("sound");
        let options = found.generation("msg_1").prompt.options;
        assert_eq!(options["continue_final_message"], json!(true));
    }

    #[test]
    fn tokens_are_counted_of_the_same_prompt() {
        let fields = json!({"max_tokens": null, "system": "Be brief.", "tools": [{"name": "f", "input_schema": {}}]});
        let message = tokens(body(fields))
            .expect("sound")
            .message("m".to_owned(), "id");
        let options = format!("{:?}", message.parameters["sampling_parameters"]);
        for part in ["Be brief.", "prompt_only", "parameters"] {
            assert!(options.contains(part), "{options}");
        }
        let error = tokens(body(json!({"stream": true}))).expect_err("no field of it");
        assert!(error.message.contains("Extra inputs"), "{}", error.message);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (field, value) in [
            ("max_tokens", json!(0)),
            ("max_tokens", json!(null)),
            ("temperature", json!(1.1)),
            ("temperature", json!("hot")),
            ("stop_sequences", json!("fox")),
            ("stop_sequences", json!([1])),
            ("container", json!("c")),
            ("mcp_servers", json!([{"type": "url"}])),
            ("service_tier", json!("priority")),
            ("speed", json!("fast")),
            ("inference_geo", json!("us")),
            (
                "context_management",
                json!({"edits": [{"type": "clear_tool_uses_20250919"}]}),
            ),
            (
                "context_management",
                json!({"edits": [{"type": "clear_thinking_20251015"}]}),
            ),
            ("output_config", json!({"format": {"type": "json"}})),
            ("output_config", json!({"effort": 3})),
            ("messages", json!([])),
            ("model", json!(null)),
            ("n", json!(2)),
            ("stop", json!(["fox"])),
            ("response_format", json!({"type": "text"})),
            ("max_completion_tokens", json!(3)),
            ("stream_options", json!({})),
        ] {
            let error = read(json!({field: value})).expect_err(field);
            assert!(error.message.contains(field), "{field}: {}", error.message);
            assert_eq!(error.status, 400);
        }
    }
}
