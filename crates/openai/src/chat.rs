//! `/v1/chat/completions`: the request.

use serde_json::{Map, Value, json};

use crate::body::{Body, wrong};
use crate::endpoint::Endpoint;
use crate::fields::{CHAT, Field};
use crate::generation::{Generation, LOGPROBS, Prompt, REASONING, TOOL_CALLS};
use crate::messages::messages;
use crate::names::Names;
use crate::sampling::{MAX_CANDIDATES, Sampling};
use crate::{Error, adapters};

/// A request for the next message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    /// How choices are drawn and sent.
    pub sampling: Sampling,
    /// The model.
    pub model: String,
    /// How many candidates each position has.
    pub logprobs: Option<u32>,
    has_tools: bool,
    /// Whether `tool_choice` names a function.
    names_function: bool,
    options: Map<String, Value>,
    /// The names of its fields.
    pub names: Names,
}

impl Endpoint for Chat {
    const FIELDS: &[Field] = CHAT;
    const ID: &str = "chatcmpl-";

    fn read(mut body: Body, seed: u64) -> Result<Self, Error> {
        let model = body.model()?;
        let messages = messages(body.take("messages"))?;
        let sampling = Sampling::take(&mut body, seed)?;
        let logprobs = logprobs(&mut body)?;
        let tokens = 1..=i32::MAX as u32;
        let mut names = Names::of("messages");
        if adapters::split(&model).1.is_some() {
            names.add("lora_name", "model");
        }
        let max_tokens = body.count("max_tokens", tokens.clone())?;
        let max_completion_tokens = body.count("max_completion_tokens", tokens)?;
        if max_completion_tokens.is_some() {
            names.add("max_tokens", "max_completion_tokens");
        }
        let max_tokens = max_completion_tokens.or(max_tokens);
        let guide = guide(body.take("response_format"))?;
        if let Some((option, _)) = &guide {
            names.add(option, "response_format");
        }
        let prediction = prediction(body.take("prediction"))?;
        if prediction.is_some() {
            names.add("draft_text", "prediction");
        }
        let variables = variables(&mut body)?;
        let tools = tools(body.take("tools"))?;

        let mut options = sampling.options(body, CHAT)?;
        // Without a limit an answer may be as long as the model's context, as in OpenAI's API.
        let max_tokens = max_tokens.unwrap_or(i32::MAX as u32);
        let own = [
            ("messages", json!(messages)),
            ("max_tokens", json!(max_tokens)),
        ];
        options.extend(own.map(|(name, value)| (name.to_owned(), value)));
        options.extend(logprobs.map(|num| (LOGPROBS.to_owned(), json!(num))));
        options.extend(guide.map(|(name, value)| (name.to_owned(), value)));
        options.extend(prediction.map(|text| ("draft_text".to_owned(), json!(text))));
        let has_tools = tools.is_some();
        options.extend(tools.map(|tools| ("tools".to_owned(), tools)));
        options.extend(variables.map(|all| ("chat_template_kwargs".to_owned(), all)));
        let names_function = options.get("tool_choice").is_some_and(names_function);
        Ok(Self {
            sampling,
            model,
            logprobs,
            has_tools,
            names_function,
            options,
            names,
        })
    }

    fn is_stream(&self) -> bool {
        self.sampling.stream
    }

    fn generation(&self, id: &str) -> Generation {
        let tool_calls = self.has_tools.then_some(TOOL_CALLS);
        let logprobs = self.logprobs.map(|_| LOGPROBS);
        Generation {
            prompt: Prompt {
                model: self.model.clone(),
                id: id.to_owned(),
                text: String::new(),
                options: self.options.clone(),
            },
            outputs: [Some(REASONING), tool_calls, logprobs]
                .into_iter()
                .flatten()
                .collect(),
            names: self.names.clone(),
        }
    }
}

impl Chat {
    /// The `finish_reason` of a choice. A call of the function that the request names ends with `stop`, as with
    /// OpenAI's server and vLLM's.
    pub fn finish_reason(&self, of_reply: Option<&'static str>) -> Option<&'static str> {
        match of_reply {
            Some("tool_calls") if self.names_function => Some("stop"),
            other => other,
        }
    }
}

/// The text of `prediction`.
fn prediction(value: Option<Value>) -> Result<Option<String>, Error> {
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let text_of = |part: &Value| match part["type"] == "text" {
        true => part["text"].as_str().map(str::to_owned),
        false => None,
    };
    let text = match &value["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(text_of).collect(),
        _ => None,
    };
    match text.filter(|_| value["type"] == "content") {
        Some(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        None => {
            let expected = "an object with the 'type' \"content\" and, as 'content', a text or a list of parts of text";
            Err(wrong("prediction", &value, expected))
        }
    }
}

/// How many candidates each position has.
fn logprobs(body: &mut Body) -> Result<Option<u32>, Error> {
    let is_asked = body.flag("logprobs")?;
    let num = body.count("top_logprobs", 0..=MAX_CANDIDATES)?;
    match (is_asked, num) {
        (false, Some(1..)) => Err(Error::field(
            "top_logprobs",
            "'top_logprobs' needs 'logprobs': true; give it, or leave 'top_logprobs' out",
        )),
        (false, _) => Ok(None),
        (true, num) => Ok(Some(num.unwrap_or(0))),
    }
}

/// The functions that the model may call; `None` if there are none.
fn tools(tools: Option<Value>) -> Result<Option<Value>, Error> {
    let tools = match tools {
        None => return Ok(None),
        Some(Value::Array(tools)) => tools,
        Some(other) => return Err(wrong("tools", &other, "a list of functions")),
    };
    for (index, tool) in tools.iter().enumerate() {
        let refused = |place: &str, value: &Value, expected: &str| {
            let wrong = wrong(&format!("tools[{index}]{place}"), value, expected);
            Err(Error::field("tools", wrong.message))
        };
        if tool["type"] != "function" {
            let expected = "'function', which is what models here call";
            return refused(".type", &tool["type"], expected);
        }
        let name = &tool["function"]["name"];
        if name.as_str().is_none_or(str::is_empty) {
            return refused(".function.name", name, "the name of a function");
        }
    }
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}

/// Whether a `tool_choice` names a function.
fn names_function(choice: &Value) -> bool {
    !choice.is_string() && choice["type"] != "allowed_tools"
}

/// The option that makes the answer conform to a `response_format`.
fn guide(format: Option<Value>) -> Result<Option<(&'static str, Value)>, Error> {
    let Some(format) = format else {
        return Ok(None);
    };
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => {
            let any_object = json!({"json_object": true});
            Ok(Some(("structured_outputs", any_object)))
        }
        // Without `strict` a schema is no more than advice there. Here it holds as far as it can be enforced.
        Some("json_schema") => match &format["json_schema"]["schema"] {
            Value::Null => Err(Error::field(
                "response_format",
                "'response_format' has no 'json_schema.schema'; give one, or the type 'json_object'",
            )),
            schema => {
                let is_strict = format["json_schema"]["strict"] == true;
                let schema = if is_strict {
                    strict(schema)
                } else {
                    schema.clone()
                };
                Ok(Some(("guided_json", schema)))
            }
        },
        Some("structural_tag") => Ok(Some(("structural_tag", format))),
        _ => Err(wrong(
            "response_format",
            &format,
            "an object of type 'text', 'json_object', 'json_schema' or 'structural_tag'",
        )),
    }
}

/// A schema of which every part is to be enforced, or the request refused.
fn strict(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(members) = schema.as_object_mut() {
        let layout = members.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(layout) = layout.as_object_mut() {
            layout.insert("lenient".to_owned(), json!(false));
        }
    }
    schema
}

/// The variables of the chat template: `chat_template_kwargs`, and the request's `reasoning_effort`.
fn variables(body: &mut Body) -> Result<Option<Value>, Error> {
    const NAME: &str = "chat_template_kwargs";
    let effort = body.text("reasoning_effort")?;
    let mut variables = match body.take(NAME) {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(other) => return Err(wrong(NAME, &other, "an object")),
    };
    if let Some(effort) = effort {
        variables.entry("reasoning_effort").or_insert(json!(effort));
    }
    Ok((!variables.is_empty()).then_some(Value::Object(variables)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(more: Value) -> Result<Chat, Error> {
        let mut fields = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
        let more = more.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        Chat::read(Body::parse(fields.to_string().as_bytes())?, 42)
    }

    fn option(more: Value, name: &str) -> Option<Value> {
        read(more)
            .expect("a sound request")
            .options
            .get(name)
            .cloned()
    }

    #[test]
    fn an_answer_may_be_as_long_as_the_context_unless_the_request_says_otherwise() {
        assert_eq!(option(json!({}), "max_tokens"), Some(json!(i32::MAX)));
        assert_eq!(
            option(json!({"max_tokens": 3}), "max_tokens"),
            Some(json!(3))
        );
        let both = json!({"max_tokens": 3, "max_completion_tokens": 4});
        assert_eq!(option(both, "max_tokens"), Some(json!(4)));
    }

    #[test]
    fn formats_become_guides() {
        let format = |format: Value| json!({"response_format": format});
        let object = option(format(json!({"type": "json_object"})), "structured_outputs");
        assert_eq!(object, Some(json!({"json_object": true})));
        let strict = json!({"type": "object", "x-guidance": {"lenient": false}});
        for (is_strict, expected) in [(false, json!({"type": "object"})), (true, strict)] {
            let schema = json!({"name": "a", "strict": is_strict, "schema": {"type": "object"}});
            let schema = json!({"type": "json_schema", "json_schema": schema});
            assert_eq!(option(format(schema), "guided_json"), Some(expected));
        }
        assert_eq!(read(format(json!({"type": "text"}))), read(json!({})));
        for wrong in [
            json!({"type": "xml"}),
            json!("json"),
            json!({"type": "json_schema", "json_schema": {"name": "a"}}),
        ] {
            let error = read(format(wrong)).expect_err("no format");
            assert_eq!(error.param.as_deref(), Some("response_format"));
        }
    }

    #[test]
    fn the_effort_is_a_variable_of_the_template() {
        let fields = json!({"reasoning_effort": "low", "chat_template_kwargs": {"mood": "sad"}});
        let expected = json!({"mood": "sad", "reasoning_effort": "low"});
        assert_eq!(option(fields, "chat_template_kwargs"), Some(expected));
        assert_eq!(option(json!({}), "chat_template_kwargs"), None);
    }

    #[test]
    fn a_prediction_is_a_draft() {
        let draft = |content: Value| {
            let prediction = json!({"type": "content", "content": content});
            option(json!({"prediction": prediction}), "draft_text")
        };
        assert_eq!(draft(json!("A fox")), Some(json!("A fox")));
        let parts = json!([{"type": "text", "text": "A "}, {"type": "text", "text": "fox"}]);
        assert_eq!(draft(parts), Some(json!("A fox")));
        assert_eq!(draft(json!("")), None);
        assert_eq!(option(json!({"prediction": null}), "draft_text"), None);
    }

    #[test]
    fn the_outputs_are_those_that_the_request_needs() {
        let outputs = |more: Value| {
            read(more)
                .expect("a sound request")
                .generation("id")
                .outputs
        };
        assert_eq!(outputs(json!({})), [REASONING]);
        let all = json!({"tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": true, "top_logprobs": 2});
        assert_eq!(outputs(all), [REASONING, TOOL_CALLS, LOGPROBS]);
    }

    #[test]
    fn a_call_of_a_named_function_ends_as_any_other_answer() {
        let weather = json!({"type": "function", "function": {"name": "weather"}});
        for (choice, expected) in [
            (json!(null), "tool_calls"),
            (json!("auto"), "tool_calls"),
            (json!("required"), "tool_calls"),
            (json!({"type": "allowed_tools"}), "tool_calls"),
            (weather, "stop"),
        ] {
            let request = read(json!({"tool_choice": choice})).expect("a sound request");
            let reason = |of_reply| request.finish_reason(of_reply);
            assert_eq!(reason(Some("tool_calls")), Some(expected), "{choice}");
            assert_eq!(reason(Some("length")), Some("length"));
            assert_eq!(reason(None), None);
        }
    }

    #[test]
    fn what_is_refused_is_named() {
        for (field, value) in [
            ("functions", json!([])),
            ("function_call", json!("auto")),
            ("audio", json!({"voice": "alloy"})),
            ("modalities", json!(["audio"])),
            ("web_search_options", json!({})),
            ("top_logprobs", json!(2)),
            ("logprobs", json!(3)),
            ("messages", json!([])),
            ("tools", json!([{"type": "custom"}])),
            ("tools", json!([{"type": "function", "name": "f"}])),
            (
                "tools",
                json!([{"type": "function", "function": {"name": ""}}]),
            ),
            ("tools", json!("weather")),
            ("prediction", json!("A fox")),
            ("prediction", json!({"type": "text", "content": "A fox"})),
            (
                "prediction",
                json!({"type": "content", "content": [{"type": "image_url"}]}),
            ),
        ] {
            let mut fields = json!({});
            fields[field] = value;
            assert_eq!(read(fields).expect_err(field).param.as_deref(), Some(field));
        }
        assert!(
            read(
                json!({"modalities": ["text"], "store": true, "user": "u", "verbosity": "medium"})
            )
            .is_ok()
        );
    }
}
