//! `/v1/responses`: the request, a conversation in other words.

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::chat::Chat;
use crate::endpoint::Endpoint;
use crate::fields::{self, Field, RESPONSES};
use crate::generation::Generation;
use crate::items;
use crate::names::Words;
use crate::response_store::{StoreFields, StoreTarget};
use crate::sampling::MAX_CANDIDATES;

/// What may be included.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Options that `/v1/chat/completions` calls alike.
const SHARED: [&str; 2] = ["seed", "stop"];

/// A request for a response.
#[derive(Clone, Debug)]
pub struct Responses {
    /// The same request as a conversation.
    pub chat: Chat,
    /// The fields of the request that a response repeats.
    pub repeated: Map<String, Value>,
    /// Where the response will be stored, if it will.
    pub target: Option<StoreTarget>,
}

impl Responses {
    /// The request, as far as stored responses concern it.
    pub fn stored(mut self, fields: &StoreFields, target: Option<StoreTarget>) -> Self {
        let repeated = [
            ("background", json!(fields.is_background)),
            (
                "conversation",
                json!(fields.conversation.as_ref().map(|id| json!({"id": id}))),
            ),
            ("previous_response_id", json!(fields.previous)),
            ("store", json!(target.is_some())),
        ];
        for (name, value) in repeated {
            self.repeated.insert(name.to_owned(), value);
        }
        self.target = target;
        self
    }

    /// The request in a body, behind the stored items that it continues.
    ///
    /// # Errors
    /// As [`Endpoint::read`].
    pub fn continued(stored: Vec<Value>, mut body: Body, seed: u64) -> Result<Self, Error> {
        let model = body.model()?;
        let instructions = body.text("instructions")?;
        let messages = items::messages(stored, body.take("input"), instructions.as_deref())?;
        let max_tokens = body.count("max_output_tokens", 1..=i32::MAX as u32)?;
        let top_logprobs = body.count("top_logprobs", 0..=MAX_CANDIDATES)?.unwrap_or(0);
        let has_logprobs = includes_logprobs(body.take("include"))? || top_logprobs > 0;
        let stream = body.flag("stream")?;
        let format = format(body.take("text"))?;
        let effort = effort(body.take("reasoning"))?;
        let tools = body.take("tools").unwrap_or_else(|| json!([]));
        let choice = body.take("tool_choice").unwrap_or_else(|| json!("auto"));
        let metadata = body.take("metadata").unwrap_or_else(|| json!({}));
        let options = body.into_options(RESPONSES)?;
        check(&options)?;

        let given = |name: &str| options.get(name).cloned().unwrap_or_default();
        let is_parallel = options.get("parallel_tool_calls") != Some(&json!(false));
        let repeated = json!({
            "background": false,
            "instructions": instructions,
            "max_output_tokens": max_tokens,
            "max_tool_calls": null,
            "metadata": metadata,
            "model": model,
            "parallel_tool_calls": is_parallel,
            "previous_response_id": null,
            "reasoning": {"effort": effort, "summary": null},
            "service_tier": "default",
            "store": false,
            "temperature": given("temperature"),
            "text": {"format": format},
            "tool_choice": choice,
            "tools": tools,
            "top_logprobs": top_logprobs,
            "top_p": given("top_p"),
            "truncation": "disabled",
        });
        let tools = functions(tools)?;
        let has_tools = tools.as_array().is_some_and(|tools| !tools.is_empty());
        let mut fields = options;
        let own = [
            ("model", Some(json!(model))),
            ("messages", Some(Value::Array(messages))),
            ("max_completion_tokens", max_tokens.map(|num| json!(num))),
            ("stream", Some(json!(stream))),
            ("logprobs", has_logprobs.then(|| json!(true))),
            ("top_logprobs", has_logprobs.then(|| json!(top_logprobs))),
            ("response_format", Some(response_format(format))),
            ("reasoning_effort", effort.map(|effort| json!(effort))),
            ("tools", Some(tools)),
            ("tool_choice", has_tools.then(|| tool_choice(choice))),
        ];
        let own = own
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        fields.extend(own);
        let mut chat = Chat::read(Body::of(fields), seed).map_err(|error| WORDS.error(error))?;
        chat.names = chat.names.renamed(WORDS);
        let repeated = match repeated {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        Ok(Self {
            chat,
            repeated,
            target: None,
        })
    }
}

impl Endpoint for Responses {
    const FIELDS: &[Field] = RESPONSES;
    const ID: &str = "resp-";

    fn read(body: Body, seed: u64) -> Result<Self, Error> {
        Self::continued(Vec::new(), body, seed)
    }

    fn is_stream(&self) -> bool {
        self.chat.is_stream()
    }

    fn generation(&self, id: &str) -> Generation {
        self.chat.generation(id)
    }
}

/// Fields of conversations, and their names in this endpoint.
const WORDS: Words = Words(&[
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text"),
    ("reasoning_effort", "reasoning"),
]);

/// Refuses the fields of conversations that have another name here, or none.
fn check(options: &Map<String, Value>) -> Result<(), Error> {
    match fields::first_of_chat(options, &SHARED) {
        None => Ok(()),
        Some(name) => Err(Error::field(
            name,
            format!(
                "'{name}' is no field of /v1/responses; leave it out, or use /v1/chat/completions"
            ),
        )),
    }
}

/// Whether a field `include` asks for log-probabilities.
fn includes_logprobs(include: Option<Value>) -> Result<bool, Error> {
    let Some(include) = include else {
        return Ok(false);
    };
    let list = include.as_array();
    match list {
        Some(list) if list.iter().all(|item| item == LOGPROBS) => Ok(!list.is_empty()),
        _ => Err(wrong(
            "include",
            &include,
            &format!("a list of nothing but '{LOGPROBS}'; nothing else is left out of responses"),
        )),
    }
}

/// The format in a field `text`.
fn format(text: Option<Value>) -> Result<Value, Error> {
    let default = json!({"type": "text"});
    match text {
        None => Ok(default),
        Some(Value::Object(mut fields)) => {
            let format = fields.remove("format").filter(|format| !format.is_null());
            let verbosity = fields.remove("verbosity").unwrap_or_default();
            match verbosity.is_null() || verbosity == "medium" {
                true => Ok(format.unwrap_or(default)),
                false => Err(Error::field(
                    "text",
                    "'text.verbosity' is not supported; leave it out, or tell the model in the instructions",
                )),
            }
        }
        Some(other) => Err(wrong("text", &other, "an object with a 'format'")),
    }
}

/// A format as conversations have it: with the schema one level deeper.
fn response_format(mut format: Value) -> Value {
    match format["type"].as_str() {
        Some("json_schema") => {
            if let Value::Object(fields) = &mut format {
                fields.remove("type");
            }
            json!({"type": "json_schema", "json_schema": format})
        }
        _ => format,
    }
}

/// The effort in a field `reasoning`.
fn effort(reasoning: Option<Value>) -> Result<Option<String>, Error> {
    match &reasoning {
        None => Ok(None),
        Some(Value::Object(fields)) => match fields.get("effort") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(effort)) => Ok(Some(effort.clone())),
            Some(other) => Err(wrong("reasoning.effort", other, "a text")),
        },
        Some(other) => Err(wrong("reasoning", other, "an object with an 'effort'")),
    }
}

/// Tools as conversations have them: with the function one level deeper, which is accepted here, too: OpenAI's own
/// helpers (`pydantic_function_tool`) write it so for both endpoints.
fn functions(tools: Value) -> Result<Value, Error> {
    let Value::Array(tools) = tools else {
        return Err(wrong("tools", &tools, "a list of functions"));
    };
    let function = |(index, tool): (usize, Value)| {
        let refused = |place: &str, value: &Value, expected: &str| {
            let wrong = wrong(&format!("tools[{index}]{place}"), value, expected);
            Err(Error::field("tools", wrong.message))
        };
        match tool {
            Value::Object(mut fields) if fields.get("type") == Some(&json!("function")) => {
                if fields.get("function").is_some_and(Value::is_object) {
                    return Ok(Value::Object(fields));
                }
                let name = fields.get("name").unwrap_or(&Value::Null);
                if name.as_str().is_none_or(str::is_empty) {
                    return refused(".name", name, "the name of a function");
                }
                fields.remove("type");
                Ok(json!({"type": "function", "function": fields}))
            }
            other => {
                let expected = "an object of type 'function', which is what models here call";
                refused("", &other, expected)
            }
        }
    };
    tools.into_iter().enumerate().map(function).collect()
}

fn tool_choice(choice: Value) -> Value {
    if choice["type"] == "allowed_tools" {
        return json!({"type": "allowed_tools", "allowed_tools": choice});
    }
    match (&choice["type"], &choice["name"]) {
        (Value::String(kind), Value::String(name)) if kind == "function" => {
            json!({"type": "function", "function": {"name": name}})
        }
        _ => choice,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(more: Value) -> Result<Responses, Error> {
        let mut fields = json!({"model": "m", "input": "Hi"});
        let more = more.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        Responses::read(Body::parse(fields.to_string().as_bytes())?, 42)
    }

    fn chat(fields: Value) -> Chat {
        let body = Body::parse(fields.to_string().as_bytes()).expect("an object");
        Chat::read(body, 42).expect("sound")
    }

    #[test]
    fn a_request_is_that_of_a_conversation() {
        let schema = json!({"type": "object"});
        let found = read(json!({
            "instructions": "Be brief.", "max_output_tokens": 9, "top_k": 3, "temperature": 0.5, "seed": 7,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
            "reasoning": {"effort": "low"},
            "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": true}],
            "tool_choice": {"type": "function", "name": "f"},
        }));
        let mut expected = chat(json!({
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_completion_tokens": 9, "top_k": 3, "temperature": 0.5, "seed": 7,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            "reasoning_effort": "low",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }));
        expected.names = expected.names.renamed(WORDS);
        assert_eq!(found.expect("sound").chat, expected);
    }

    #[test]
    fn functions_may_be_written_as_in_a_conversation() {
        let flat = json!({"type": "function", "name": "f", "strict": true});
        let deep = json!({"type": "function", "function": {"name": "f", "strict": true}});
        let options = |tool: &Value| {
            let found = read(json!({"tools": [tool]})).expect("sound");
            found.chat.generation("id").prompt.options
        };
        assert_eq!(options(&deep), options(&flat));
        let nameless = json!({"tools": [{"type": "function", "name": ""}]});
        let error = read(nameless).expect_err("a function without a name");
        assert!(
            error.message.contains("'tools[0].name'"),
            "{}",
            error.message
        );
    }

    #[test]
    fn functions_that_may_be_called_are_chosen_as_in_a_conversation() {
        let tool = json!({"type": "function", "name": "f"});
        let choice = json!({"type": "allowed_tools", "mode": "required", "tools": [tool]});
        let found = read(json!({"tools": [tool], "tool_choice": choice})).expect("sound");
        let options = found.chat.generation("id").prompt.options;
        let allowed = &options["tool_choice"]["allowed_tools"];
        assert_eq!(
            (&allowed["mode"], &allowed["tools"]),
            (&json!("required"), &json!([tool]))
        );
        assert_eq!(
            found.chat.finish_reason(Some("tool_calls")),
            Some("tool_calls")
        );
    }

    #[test]
    fn log_probabilities_are_included_or_asked_for_by_their_number() {
        let num = |fields: Value| read(fields).expect("sound").chat.logprobs;
        let included = json!(["message.output_text.logprobs"]);
        assert_eq!(num(json!({})), None);
        assert_eq!(num(json!({"include": [], "top_logprobs": 0})), None);
        assert_eq!(num(json!({"include": included})), Some(0));
        assert_eq!(
            num(json!({"include": included, "top_logprobs": 3})),
            Some(3)
        );
        assert_eq!(num(json!({"top_logprobs": 3})), Some(3));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (field, value) in [
            ("store", json!(true)),
            ("previous_response_id", json!("resp-1")),
            ("conversation", json!("conv-1")),
            ("background", json!(true)),
            ("prompt", json!({"id": "p"})),
            ("include", json!(["reasoning.encrypted_content"])),
            ("include", json!("message.output_text.logprobs")),
            ("top_logprobs", json!(21)),
            ("logprobs", json!(true)),
            ("truncation", json!("auto")),
            ("text", json!({"verbosity": "low"})),
            ("text", json!({"format": {"type": "yaml"}})),
            ("tools", json!([{"type": "web_search"}])),
            ("tools", json!("f")),
            ("messages", json!([])),
            ("max_tokens", json!(3)),
            ("n", json!(2)),
            ("max_output_tokens", json!(0)),
            ("input", json!([])),
        ] {
            let error = read(json!({field: value})).expect_err(field);
            assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
            for (name, _) in WORDS.0 {
                let is_named = error.message.contains(&format!("'{name}'"));
                assert_eq!(is_named, field == *name, "{}", error.message);
            }
        }
        let nothing = json!({"store": false, "previous_response_id": null, "truncation": "disabled", "include": []});
        let fields = |request: Result<Responses, Error>| {
            let request = request.expect("sound");
            (request.chat, request.repeated)
        };
        assert_eq!(fields(read(nothing)), fields(read(json!({}))));
    }
}
