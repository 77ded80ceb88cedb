//! The options of a conversation, by the names of OpenAI's interface, of vLLM and of transformers.

use serde_json::{Map, Value};

use crate::request::options::{flag, parsed};
use crate::request::tool_guides::{self, Function, ToolChoice};
use inflight_base::RequestError;
use inflight_config::ToolCallFormat;
use inflight_guidance::Structure;
use inflight_text::{
    Conversation, MessageField, ParameterTypes, PromptEnding, Thinking, can_be_read_back,
};

/// Variables of templates that options of their own set.
const RESERVED: [&str; 5] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
];

/// The most tools of a request, as in OpenAI's interface.
const MAX_TOOLS: usize = 128;

/// The most characters of a function's name in a message.
const MAX_SHOWN_CHARS: usize = 64;

/// The longest name of a template.
const MAX_NAME_BYTES: usize = 256;

/// A request's conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    messages: Option<Vec<Value>>,
    tools: Option<Value>,
    documents: Option<Value>,
    variables: Option<Map<String, Value>>,
    template: Option<String>,
    add_generation_prompt: Option<bool>,
    continued: Option<MessageField>,
    tool_choice: Option<ToolChoice>,
    parallel_tool_calls: Option<bool>,
}

impl ChatOptions {
    /// The conversation that the prompt is made of; `None` if the prompt is given in another way.
    ///
    /// # Errors
    /// Options of a conversation without `messages`; options that contradict each other.
    pub fn conversation(&self) -> Result<Option<Conversation>, RequestError> {
        let Some(messages) = &self.messages else {
            return match self.first_given() {
                None => Ok(None),
                Some(name) => Err(RequestError::Invalid(format!(
                    "option '{name}' is for a conversation, and the request has no 'messages'; give them, or leave it out"
                ))),
            };
        };
        let ending = match (self.continued, self.add_generation_prompt) {
            (Some(_), Some(true)) => {
                return Err(RequestError::Invalid(
                    "option 'continue_final_message' ends the prompt within the last message, and 'add_generation_prompt' \
                     behind it; give one of them"
                        .to_owned(),
                ));
            }
            (Some(field), _) => PromptEnding::Within(field),
            (None, Some(false)) => PromptEnding::LastMessage,
            (None, _) => PromptEnding::NewMessage,
        };
        Ok(Some(Conversation {
            messages: messages.clone(),
            tools: self.callable_tools().map(Value::Array),
            documents: self.documents.clone(),
            variables: self.variables.clone().unwrap_or_default(),
            template: self.template.clone(),
            ending,
        }))
    }

    /// Whether the prompt is made of a conversation.
    pub fn is_given(&self) -> bool {
        self.messages.is_some()
    }

    /// Whether the conversation has tools that the reply may call.
    pub fn has_tools(&self) -> bool {
        self.callable_tools().is_some()
    }

    /// The tools that the reply may call, which are those that the template sees. `None` if there are none.
    fn callable_tools(&self) -> Option<Vec<Value>> {
        let mut tools = self.tools.as_ref()?.as_array()?.clone();
        match &self.tool_choice {
            Some(ToolChoice::None) => return None,
            Some(ToolChoice::Allowed { names, .. }) => tools.retain(|tool| {
                let function = Function::of_tool(tool);
                function.is_some_and(|it| names.iter().any(|name| name == it.name()))
            }),
            _ => {}
        }
        (!tools.is_empty()).then_some(tools)
    }

    /// The types of the arguments of its tools.
    pub fn parameter_types(&self) -> ParameterTypes {
        let tools = self.tools.as_ref().filter(|_| self.has_tools());
        tools.map(ParameterTypes::of_tools).unwrap_or_default()
    }

    /// The form of the reply that its calls of tools ask for, in a model with this format of calls.
    ///
    /// # Errors
    /// Calls are required, and there are no tools, or no format, or no tool of the name.
    pub fn tool_guide(
        &self,
        format: Option<ToolCallFormat>,
        thinking: Thinking,
    ) -> Result<Option<Structure>, RequestError> {
        let choice = self.tool_choice.clone().unwrap_or_default();
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        let is_required = matches!(
            choice,
            ToolChoice::Required
                | ToolChoice::Named(_)
                | ToolChoice::Allowed {
                    is_required: true,
                    ..
                }
        );
        let invalid = |problem: &str| {
            Err(RequestError::Invalid(format!(
                "option 'tool_choice': {problem}"
            )))
        };
        let Some(tools) = self.tools.as_ref().and_then(Value::as_array) else {
            return match is_required {
                true => invalid(
                    "a call is required, and the request has no 'tools'; give them, or leave it out",
                ),
                false => Ok(None),
            };
        };
        let mut functions: Vec<_> = tools.iter().filter_map(Function::of_tool).collect();
        match &choice {
            ToolChoice::Named(name) => functions.retain(|function| function.name() == name),
            ToolChoice::Allowed { names, .. } => {
                let is_there = |name: &&String| functions.iter().any(|it| it.name() == *name);
                if let Some(name) = names.iter().find(|name| !is_there(name)) {
                    return invalid(&format!(
                        "'{name}' is allowed, and the request has no tool of this name"
                    ));
                }
                functions.retain(|function| names.iter().any(|name| name == function.name()));
            }
            _ => {}
        }
        let Some(format) = format else {
            return match is_required {
                true => invalid(
                    "a call is required, and the format of calls is not known; name it in tool_call_parser in the model's \
                     config.pbtxt",
                ),
                false => Ok(None),
            };
        };
        if choice == ToolChoice::None {
            return Ok(None);
        }
        let mut names = functions.iter().map(Function::name);
        if let Some(name) = names.find(|name| !can_be_read_back(format, name)) {
            let name: String = name.chars().take(MAX_SHOWN_CHARS).collect();
            return Err(RequestError::Invalid(format!(
                "option 'tools': a call of the function '{name}' cannot be read back in this model's format of calls; give it \
                 a name of letters, digits and '_'"
            )));
        }
        Ok(match choice {
            _ if !is_required && functions.is_empty() => None,
            _ if !is_required => tool_guides::automatic(format, &functions, parallel, thinking),
            _ if functions.is_empty() => {
                return invalid("none of the request's tools has this name, or any");
            }
            ToolChoice::Named(_) => {
                Some(tool_guides::required(format, &functions, false, thinking))
            }
            _ => Some(tool_guides::required(
                format, &functions, parallel, thinking,
            )),
        })
    }

    /// The field of the last message that the answer continues, and its text.
    pub fn continued(&self) -> Option<(MessageField, &str)> {
        let field = self.continued?;
        let content = self.messages.as_ref()?.last()?.get("content");
        let part = content.and_then(Value::as_array).and_then(|parts| {
            let mut texts = parts.iter().rev().filter_map(|part| part.get("text"));
            texts.next()
        });
        let text = part.or(content).and_then(Value::as_str);
        Some((field, text.unwrap_or_default()))
    }

    /// The first of the options that need messages.
    fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("tools", self.tools.is_some()),
            ("documents", self.documents.is_some()),
            ("chat_template_kwargs", self.variables.is_some()),
            ("chat_template", self.template.is_some()),
            (
                "add_generation_prompt",
                self.add_generation_prompt.is_some(),
            ),
            ("continue_final_message", self.continued.is_some()),
            ("tool_choice", self.tool_choice.is_some()),
            ("parallel_tool_calls", self.parallel_tool_calls.is_some()),
        ];
        given
            .iter()
            .find(|(_, given)| *given)
            .map(|(name, _)| *name)
    }

    pub(super) fn set_messages(&mut self, value: &Value) -> Option<()> {
        let messages = objects(value)?;
        self.messages = (!messages.is_empty()).then_some(messages);
        self.messages.is_some().then_some(())
    }

    pub(super) fn set_tools(&mut self, value: &Value) -> Option<()> {
        let tools = objects(value).filter(|tools| tools.len() <= MAX_TOOLS)?;
        // An empty list says that there are none.
        self.tools = (!tools.is_empty()).then_some(Value::Array(tools));
        Some(())
    }

    pub(super) fn set_tool_choice(&mut self, value: &Value) -> Option<()> {
        self.tool_choice = Some(match value.as_str() {
            Some("none") => ToolChoice::None,
            Some("auto") => ToolChoice::Auto,
            Some("required") => ToolChoice::Required,
            _ => choice_of_functions(&parsed(value)?)?,
        });
        Some(())
    }

    pub(super) fn set_parallel_tool_calls(&mut self, value: &Value) -> Option<()> {
        self.parallel_tool_calls = Some(flag(value)?);
        Some(())
    }

    pub(super) fn set_documents(&mut self, value: &Value) -> Option<()> {
        self.documents = Some(Value::Array(objects(value)?));
        Some(())
    }

    pub(super) fn set_variables(&mut self, value: &Value) -> Option<()> {
        let Value::Object(variables) = parsed(value)? else {
            return None;
        };
        let is_free = |name: &String| !RESERVED.contains(&name.as_str());
        self.variables = variables.keys().all(is_free).then_some(variables);
        self.variables.is_some().then_some(())
    }

    pub(super) fn set_template(&mut self, value: &Value) -> Option<()> {
        let name = value.as_str()?;
        let fits = (1..=MAX_NAME_BYTES).contains(&name.len());
        self.template = fits.then(|| name.to_owned());
        fits.then_some(())
    }

    pub(super) fn set_generation_prompt(&mut self, value: &Value) -> Option<()> {
        self.add_generation_prompt = Some(flag(value)?);
        Some(())
    }

    pub(super) fn set_continued(&mut self, value: &Value) -> Option<()> {
        self.continued = match value.as_str() {
            Some("content") => Some(MessageField::Content),
            Some("reasoning_content") => Some(MessageField::Reasoning),
            _ => flag(value)?.then_some(MessageField::Content),
        };
        Some(())
    }
}

/// A choice that is an object: a function, or those that may be called. The Responses API has the fields of both one
/// level higher.
fn choice_of_functions(choice: &Value) -> Option<ToolChoice> {
    let name = |tool: &Value| {
        let name = tool.pointer("/function/name").or_else(|| tool.get("name"));
        Some(name?.as_str()?.to_owned())
    };
    if choice
        .get("type")
        .is_none_or(|kind| kind != "allowed_tools")
    {
        return name(choice).map(ToolChoice::Named);
    }
    let allowed = choice.get("allowed_tools").unwrap_or(choice);
    let tools = allowed.get("tools")?.as_array()?;
    Some(ToolChoice::Allowed {
        names: tools.iter().map(name).collect::<Option<_>>()?,
        is_required: match allowed.get("mode") {
            None => false,
            Some(mode) => match mode.as_str()? {
                "auto" => false,
                "required" => true,
                _ => return None,
            },
        },
    })
}

/// A list of objects, itself or as JSON.
fn objects(value: &Value) -> Option<Vec<Value>> {
    let Value::Array(list) = parsed(value)? else {
        return None;
    };
    list.iter().all(Value::is_object).then_some(list)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::options::RequestOptions;

    fn conversation(options: &[(&str, Value)]) -> Result<Option<Conversation>, RequestError> {
        let options = options.iter().map(|(name, value)| (*name, value.clone()));
        RequestOptions::parse(options)?.chat.conversation()
    }

    fn with_messages(option: (&'static str, Value)) -> Conversation {
        let messages = ("messages", json!(r#"[{"role": "user", "content": "Hi"}]"#));
        let found = conversation(&[messages, option.clone()]);
        found
            .expect("accepted")
            .unwrap_or_else(|| panic!("{option:?}"))
    }

    #[test]
    fn options_in_json_and_in_strings_mean_the_same() {
        let tool = json!([{"type": "function", "function": {"name": "weather"}}]);
        for value in [tool.clone(), json!(tool.to_string())] {
            assert_eq!(with_messages(("tools", value)).tools, Some(tool.clone()));
        }
        assert_eq!(with_messages(("tools", json!("[]"))).tools, None);
        let document = json!([{"title": "T", "text": "x"}]);
        assert_eq!(
            with_messages(("documents", document.clone())).documents,
            Some(document)
        );
        let kwargs = json!(r#"{"enable_thinking": false}"#);
        let variables = with_messages(("chat_template_kwargs", kwargs)).variables;
        assert_eq!(Value::Object(variables), json!({"enable_thinking": false}));
        let template = with_messages(("chat_template", json!("rag"))).template;
        assert_eq!(template.as_deref(), Some("rag"));
    }

    fn guide(
        format: Option<ToolCallFormat>,
        choice: Value,
        tools: Value,
    ) -> Result<Option<Structure>, String> {
        let options = [
            ("messages", json!([{"role": "user"}])),
            ("tool_choice", choice),
            ("tools", tools),
        ];
        let chat = RequestOptions::parse(options).expect("accepted").chat;
        let guide = chat.tool_guide(format, Thinking::Never);
        guide.map_err(|error| error.to_string())
    }

    /// A choice among functions, as in conversations.
    fn allowed(mode: &str, names: &[&str]) -> Value {
        let tool = |name: &&str| json!({"type": "function", "function": {"name": name}});
        let tools: Vec<_> = names.iter().map(tool).collect();
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    }

    #[test]
    fn only_tools_that_are_allowed_are_seen_and_called() {
        let tools = json!([{"name": "f"}, {"type": "function", "function": {"name": "g"}}]);
        let of_responses = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]});
        for choice in [
            allowed("auto", &["f"]),
            allowed("required", &["f"]),
            of_responses,
        ] {
            let options = [
                ("messages", json!([{"role": "user"}])),
                ("tools", tools.clone()),
                ("tool_choice", choice.clone()),
            ];
            let found = conversation(&options).expect("accepted").expect("one");
            assert_eq!(found.tools, Some(json!([{"name": "f"}])), "{choice}");
        }
        let hermes = Some(ToolCallFormat::Hermes);
        let named = json!({"type": "function", "function": {"name": "f"}});
        let only = guide(hermes, json!("required"), json!([{"name": "f"}]));
        assert_eq!(
            guide(hermes, allowed("required", &["f"]), tools.clone()),
            only
        );
        assert_ne!(guide(hermes, named, tools), only, "which is a single call");
        for wrong in [
            json!({"type": "allowed_tools"}),
            json!({"type": "allowed_tools", "mode": "none", "tools": []}),
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{}]}),
        ] {
            let options = [
                ("messages", json!([{"role": "user"}])),
                ("tool_choice", wrong.clone()),
            ];
            assert!(conversation(&options).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_guide_is_made_for_calls_that_must_be_or_are_strict() {
        let hermes = Some(ToolCallFormat::Hermes);
        let tool =
            |strict: bool| json!({"type": "function", "function": {"name": "f", "strict": strict}});
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let tools = json!([tool(false)]);
        for (choice, tools, is_guided) in [
            (json!("none"), &tools, false),
            (json!("auto"), &tools, false),
            (json!("auto"), &json!([tool(false), tool(true)]), true),
            (json!("required"), &tools, true),
            (named("f"), &tools, true),
            (json!(named("f").to_string()), &tools, true),
            (json!({"type": "function", "name": "f"}), &tools, true),
            (allowed("auto", &["f"]), &tools, false),
            (allowed("auto", &[]), &tools, false),
            (allowed("required", &["f"]), &tools, true),
        ] {
            let found = guide(hermes, choice.clone(), tools.clone()).expect("possible");
            assert_eq!(found.is_some(), is_guided, "{choice}");
        }
        for (format, choice, tools, words) in [
            (hermes, json!("required"), json!([]), "no 'tools'"),
            (None, json!("required"), tools.clone(), "tool_call_parser"),
            (hermes, named("g"), tools.clone(), "has this name"),
            (
                hermes,
                allowed("auto", &["f", "g"]),
                tools.clone(),
                "'g' is allowed",
            ),
            (
                hermes,
                allowed("required", &[]),
                tools.clone(),
                "has this name",
            ),
            (
                Some(ToolCallFormat::QwenCoder),
                json!("auto"),
                json!([{"name": "f>"}]),
                "'f>' cannot be read back",
            ),
        ] {
            let error = guide(format, choice, tools).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn without_a_choice_of_tools_the_template_sees_none() {
        let options = [
            ("messages", json!([{"role": "user"}])),
            ("tools", json!([{"name": "f"}])),
            ("tool_choice", json!("none")),
        ];
        let found = conversation(&options).expect("accepted").expect("one");
        assert_eq!(found.tools, None);
    }

    #[test]
    fn a_prompt_ends_where_the_options_say() {
        use PromptEnding::{LastMessage, NewMessage, Within};
        for (name, value, expected) in [
            ("add_generation_prompt", json!(true), NewMessage),
            ("add_generation_prompt", json!("false"), LastMessage),
            (
                "continue_final_message",
                json!(true),
                Within(MessageField::Content),
            ),
            (
                "continue_final_message",
                json!("content"),
                Within(MessageField::Content),
            ),
            (
                "continue_final_message",
                json!("reasoning_content"),
                Within(MessageField::Reasoning),
            ),
            ("continue_final_message", json!(false), NewMessage),
        ] {
            assert_eq!(with_messages((name, value)).ending, expected, "{name}");
        }
        let both = [
            ("messages", json!([{"role": "assistant"}])),
            ("continue_final_message", json!(true)),
            ("add_generation_prompt", json!(true)),
        ];
        let error = conversation(&both).expect_err("refused").to_string();
        assert!(error.contains("give one of them"), "{error}");
    }

    #[test]
    fn options_of_a_conversation_need_its_messages() {
        for (name, value) in [
            ("tools", json!([{}])),
            ("documents", json!([])),
            ("chat_template_kwargs", json!({})),
            ("chat_template", json!("rag")),
            ("add_generation_prompt", json!(true)),
            ("continue_final_message", json!(true)),
            ("tool_choice", json!("auto")),
            ("parallel_tool_calls", json!(true)),
        ] {
            let error = conversation(&[(name, value)]).expect_err(name).to_string();
            assert!(
                error.contains(&format!("'{name}' is for a conversation")),
                "{error}"
            );
        }
        assert_eq!(conversation(&[]), Ok(None));
    }
}
