//! The options of a conversation, by the names of OpenAI's interface, of vLLM and of transformers.

use serde_json::{Map, Value};

use crate::backend::request::options::{flag, parsed};
use crate::base::RequestError;
use crate::text::{Conversation, MessageField, PromptEnding};

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
            tools: self.tools.clone(),
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

    /// Whether the conversation has tools.
    pub fn has_tools(&self) -> bool {
        self.tools.is_some()
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
    use crate::backend::request::options::RequestOptions;

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
