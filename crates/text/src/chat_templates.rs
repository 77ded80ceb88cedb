//! Renders conversations into prompts with the checkpoint's Jinja templates.
//!
//! A template sees the same environment as in Hugging Face transformers (`apply_chat_template`), so the same
//! messages give the same prompt. The package `inflight-jinja` does the rendering, within limits: neither a template
//! nor input from a client can make a rendering run, or take memory, without end.

use std::path::Path;

use inflight_jinja::{Bound, Limits, RenderError, Template};
use serde_json::Value;

use crate::chat_template_files;
use crate::conversation::{Conversation, MessageForm, PromptEnding, texts_as_parts};
use crate::strftime;
use inflight_base::{LoadError, RequestError};

/// The template of conversations without tools, and the only one of most checkpoints.
const DEFAULT: &str = "default";
/// The template of conversations with tools, where there is one.
const TOOL_USE: &str = "tool_use";

/// A checkpoint's chat templates, compiled: one, or several with names.
pub struct ChatTemplates {
    /// In the order of the files.
    templates: Vec<NamedTemplate>,
    /// Special tokens with their names; of equal names the last counts.
    special_tokens: Vec<(String, Value)>,
}

struct NamedTemplate {
    name: String,
    source: String,
    /// The template, or why there is none.
    compiled: Result<Template, String>,
}

impl ChatTemplates {
    /// Loads the templates from `dir`: `chat_template.jinja` and `additional_chat_templates/<name>.jinja`, or else
    /// `chat_template` in `tokenizer_config.json`, which is a template, or several with names. None if there is none.
    /// One that does not compile is refused only where a conversation needs it ([`Self::problems`]).
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn load(dir: &Path) -> Result<Option<Self>, LoadError> {
        let files = chat_template_files::read(dir)?;
        if files.templates.is_empty() {
            return Ok(None);
        }
        let mut templates = Self::empty(files.special_tokens);
        for template in files.templates {
            let place = template.path.display().to_string();
            templates.add(&template.name, &template.source, &place);
        }
        Ok(Some(templates))
    }

    /// A single template with this source, which finds special tokens by name (`bos_token`).
    ///
    /// # Errors
    /// It does not compile.
    pub fn with_source(
        source: &str,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, String> {
        let mut templates = Self::empty(special_tokens);
        templates.add(DEFAULT, source, "chat_template");
        let problem = templates.problems().next().map(str::to_owned);
        problem.map_or(Ok(templates), Err)
    }

    /// The templates with these names and sources, which find special tokens by name. `place` says in messages where
    /// they are from.
    pub fn with_sources(
        sources: &[(String, String)],
        special_tokens: Vec<(String, String)>,
        place: &str,
    ) -> Self {
        let mut templates = Self::empty(special_tokens);
        for (name, source) in sources {
            templates.add(name, source, &format!("{place}, '{name}'"));
        }
        templates
    }

    fn empty(special_tokens: Vec<(String, String)>) -> Self {
        let tokens = special_tokens.into_iter();
        Self {
            templates: Vec::new(),
            special_tokens: tokens
                .map(|(name, token)| (name, Value::String(token)))
                .collect(),
        }
    }

    fn add(&mut self, name: &str, source: &str, place: &str) {
        self.templates.push(NamedTemplate {
            name: name.to_owned(),
            source: source.to_owned(),
            compiled: Template::compile(source).map_err(|error| format!("{place}: {error}")),
        });
    }

    /// Why templates cannot be used, for each one that does not compile.
    pub fn problems(&self) -> impl Iterator<Item = &str> {
        let compiled = self.templates.iter().map(|template| &template.compiled);
        compiled.filter_map(|compiled| compiled.as_ref().err().map(String::as_str))
    }

    /// The templates' texts.
    pub fn sources(&self) -> impl Iterator<Item = &str> + Clone {
        self.templates
            .iter()
            .map(|template| template.source.as_str())
    }

    /// Renders a conversation into a prompt.
    ///
    /// # Errors
    /// There is no template of the name that it gives, or the template rejects the messages, misses something in them,
    /// or exceeds a limit; or the message to be continued cannot be.
    pub fn render(&self, conversation: &Conversation) -> Result<String, RequestError> {
        let parsed = self.render_with(conversation, MessageForm::Parsed);
        if parsed.is_ok() {
            return parsed;
        }
        let (messages, _) = conversation.shown(MessageForm::Parsed)?;
        for form in [MessageForm::AsGiven, MessageForm::Repaired] {
            if conversation.shown(form)?.0 != messages
                && let Ok(prompt) = self.render_with(conversation, form)
            {
                return Ok(prompt);
            }
        }
        parsed
    }

    fn render_with(
        &self,
        conversation: &Conversation,
        form: MessageForm,
    ) -> Result<String, RequestError> {
        let template = self.template_for(conversation)?;
        let compiled = match &template.compiled {
            Ok(compiled) => compiled,
            Err(problem) => {
                return Err(RequestError::Invalid(format!(
                    "option 'messages': the chat template '{}' cannot be used: {problem}; write the prompt to text_input",
                    template.name
                )));
            }
        };
        let (mut messages, continuation) = conversation.shown(form)?;
        if reads_parts_only(&template.source) {
            texts_as_parts(&mut messages);
        }
        if let Some(continuation) = &continuation
            && !continuation.is_read_by(&template.source)
        {
            return Err(RequestError::Invalid(
                "option 'continue_final_message': the chat template does not read this field of a message".to_owned(),
            ));
        }
        let messages = Value::Array(messages);
        let ends_in_new_message = Value::Bool(conversation.ending == PromptEnding::NewMessage);
        let special_tokens = self
            .special_tokens
            .iter()
            .map(|(name, token)| (name, token));
        let given = special_tokens.chain(&conversation.variables);
        let variables = given.map(|(name, value)| (name.as_str(), value)).chain([
            ("messages", &messages),
            ("tools", conversation.tools.as_ref().unwrap_or(&Value::Null)),
            (
                "documents",
                conversation.documents.as_ref().unwrap_or(&Value::Null),
            ),
            ("add_generation_prompt", &ends_in_new_message),
        ]);
        let limits = Limits::default();
        let prompt = compiled
            .render(variables, &limits, &strftime::now)
            .map_err(|error| invalid(&error, &limits))?;
        match continuation {
            Some(continuation) => continuation.cut(prompt),
            None => Ok(prompt),
        }
    }

    /// The template that renders a conversation.
    ///
    /// # Errors
    /// There is none of the name that it gives, or it gives none and none of several is the default.
    fn template_for(&self, conversation: &Conversation) -> Result<&NamedTemplate, RequestError> {
        let find = |name: &str| self.templates.iter().find(|known| known.name == name);
        let refused = |problem: String| {
            let names = self.templates.iter().map(|known| known.name.as_str());
            let names = names.collect::<Vec<_>>().join("', '");
            RequestError::Invalid(format!(
                "option 'chat_template': {problem}; the checkpoint has '{names}'"
            ))
        };
        if let Some(name) = conversation.template.as_deref() {
            return find(name).ok_or_else(|| refused(format!("there is no template '{name}'")));
        }
        let of_tools = conversation.tools.as_ref().and_then(|_| find(TOOL_USE));
        let found = of_tools.or_else(|| find(DEFAULT));
        found
            .ok_or_else(|| refused("none of several templates is the default, name one".to_owned()))
    }
}

/// Whether a template of a model with images goes through the parts of every content without asking whether the content
/// is a text. It would read no text, or one letter after the other.
fn reads_parts_only(source: &str) -> bool {
    let asks = [
        "is string",
        "is not string",
        "is iterable",
        "is mapping",
        "is sequence",
    ];
    if asks.iter().any(|test| source.contains(test)) {
        return false;
    }
    let loops = source.match_indices(" in ").any(|(index, _)| {
        let list = source[index + 4..].trim_start();
        let end = list.find(['%', '|', '-']).unwrap_or(list.len());
        let list = list[..end].trim_end();
        list.ends_with(".content")
            || list.ends_with("['content']")
            || list.ends_with("[\"content\"]")
    });
    loops && source.contains("'type'") | source.contains("\"type\"") | source.contains(".type")
}

fn invalid(error: &RenderError, limits: &Limits) -> RequestError {
    let problem = match error {
        RenderError::OutOfBudget(Bound::Steps) => {
            "the conversation takes too long to render; shorten it".to_owned()
        }
        RenderError::OutOfBudget(Bound::Bytes) => format!(
            "the conversation takes more than {} bytes of memory to render; shorten it",
            limits.max_bytes
        ),
        RenderError::OutOfBudget(Bound::Output) => format!(
            "the prompt has more than {} bytes; shorten the conversation",
            limits.max_output_bytes
        ),
        // A message from the template (`raise_exception`) stands alone.
        error => error.to_string(),
    };
    RequestError::Invalid(format!("option 'messages': chat template: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MessageField;
    use serde_json::json;

    fn templates(source: &str) -> ChatTemplates {
        let token = |name: &str, token: &str| (name.to_owned(), token.to_owned());
        let tokens = vec![token("bos_token", "<s>"), token("eos_token", "</s>")];
        ChatTemplates::with_source(source, tokens).expect("compiles")
    }

    fn conversation(messages: &Value) -> Conversation {
        Conversation {
            messages: messages.as_array().expect("a list").clone(),
            ..Conversation::default()
        }
    }

    fn rendered(source: &str) -> Result<String, String> {
        let messages = json!([{"role": "user", "content": "<hi>"}]);
        templates(source)
            .render(&conversation(&messages))
            .map_err(|error| error.to_string())
    }

    /// The conversation of a case of the fixture.
    fn conversation_of(case: &Value) -> Conversation {
        let given = |name: &str| case.get(name).filter(|value| !value.is_null()).cloned();
        let is_set = |name| given(name) == Some(Value::Bool(true));
        let ending = match given("continue_final_message") {
            Some(Value::Bool(true)) => PromptEnding::Within(MessageField::Content),
            Some(Value::String(_)) => PromptEnding::Within(MessageField::Reasoning),
            _ if is_set("add_generation_prompt") => PromptEnding::NewMessage,
            _ => PromptEnding::LastMessage,
        };
        let variables = given("chat_template_kwargs").unwrap_or_else(|| json!({}));
        Conversation {
            tools: given("tools"),
            documents: given("documents"),
            variables: variables.as_object().expect("an object").clone(),
            ending,
            ..conversation(&case["messages"])
        }
    }

    #[test]
    fn templates_that_read_parts_only_get_texts_as_parts() {
        let parts = "{% for message in messages %}{{ message['role'] }}{% if message['content'][0]['type'] == 'image' %}:\
                     {% else %}: {% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}\
                     {{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}";
        assert_eq!(rendered(parts), Ok("user: <hi>".to_owned()));
        let either = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
                      {% for part in message.content %}{{ part.type }}{% endfor %}{% endif %}{% endfor %}";
        assert_eq!(rendered(either), Ok("<hi>".to_owned()));
        let letters = "{% for message in messages %}{% for letter in message.content %}{{ letter }}.{% endfor %}{% endfor %}";
        assert_eq!(rendered(letters), Ok("<.h.i.>.".to_owned()));
    }

    /// Made by tests/fixtures/make_chat_fixtures.py; another one that it made, if `CHAT_FIXTURE` names it.
    #[test]
    fn prompts_match_transformers() {
        let committed = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/chat.json"
        );
        let path = std::env::var_os("CHAT_FIXTURE").unwrap_or_else(|| committed.into());
        let fixture = std::fs::read_to_string(path).expect("a fixture");
        let fixture: Value = serde_json::from_str(&fixture).expect("well formed");
        let mut num_rendered = 0;
        let mut differing = Vec::new();
        for case in fixture["cases"].as_array().expect("cases") {
            let source = &fixture["templates"][case["template"].as_str().expect("a name")];
            let templates = templates(source.as_str().expect("a template"));
            let prompt = templates.render(&conversation_of(case));
            let is_alike = match (&prompt, case["text"].as_str()) {
                (Ok(prompt), Some(text)) => prompt == text,
                (Err(error), None) => {
                    let raised = case["raised"].as_str().expect("a text");
                    let error = error.to_string();
                    error.starts_with("option '") && error.ends_with(raised)
                }
                // An error of Python, such as adding a text and a null.
                (Ok(_), None) => case["raised"] == "",
                _ => false,
            };
            if !is_alike {
                differing.push(format!("{prompt:?}\n{case}\n"));
            }
            num_rendered += 1;
        }
        let num_differing = differing.len();
        assert_eq!(num_differing, 0, "{}", differing.concat());
        assert!(num_rendered > 150);
    }

    #[test]
    fn a_variable_of_the_request_comes_before_a_special_token() {
        let templates = templates("{{ bos_token }}{{ eos_token }}{{ thinking }}");
        let variables = json!({"bos_token": "<b>", "thinking": true});
        let conversation = Conversation {
            variables: variables.as_object().expect("an object").clone(),
            ..conversation(&json!([]))
        };
        assert_eq!(
            templates.render(&conversation),
            Ok("<b></s>True".to_owned())
        );
    }

    #[test]
    fn a_message_is_given_as_the_template_takes_it() {
        let call = json!({"function": {"name": "f", "arguments": "{\"a\": 1}"}});
        let messages = json!([{"role": "assistant", "content": null, "tool_calls": [call]}]);
        for (how, expected) in [
            ("'' ~ call.arguments.a", "1"),
            ("call.arguments | tojson", r#"{"a": 1}"#),
            ("'' + call.arguments", r#"{"a": 1}"#),
            (
                "'' + (messages[0].content or call.arguments)",
                r#"{"a": 1}"#,
            ),
            (
                "'a' + ('' if messages[0].content is none else messages[0].content)",
                "a",
            ),
            ("'a' ~ messages[0].content", "a"),
        ] {
            let source =
                format!("{{% set call = messages[0].tool_calls[0].function %}}{{{{ {how} }}}}");
            let prompt = templates(&source).render(&conversation(&messages));
            assert_eq!(prompt.as_deref(), Ok(expected), "{how}");
        }
        let error = templates("{{ raise_exception('no') }}").render(&conversation(&messages));
        assert!(error.expect_err("raised").to_string().ends_with("no"));
    }

    #[test]
    fn a_call_that_went_wrong_is_no_end_of_a_conversation() {
        // As Qwen 3 Coder's.
        let items = templates(
            "{% for name, value in messages[0].tool_calls[0].function.arguments | items %}{{ name }}={{ value }};{% endfor %}",
        );
        let rendered = |arguments: Value| {
            let call = json!({"function": {"name": "f", "arguments": arguments}});
            items.render(&conversation(
                &json!([{"role": "assistant", "tool_calls": [call]}]),
            ))
        };
        for (arguments, expected) in [
            (json!(r#"{"a": 1}"#), "a=1;"),
            (json!(""), ""),
            (json!("null"), ""),
            (json!(null), ""),
            (json!("[]"), ""),
            (json!("{}"), ""),
            (json!("{bad"), "arguments={bad;"),
            (json!("7"), "arguments=7;"),
        ] {
            assert_eq!(
                rendered(arguments.clone()).as_deref(),
                Ok(expected),
                "{arguments}"
            );
        }
    }

    #[test]
    fn a_field_that_the_template_does_not_read_cannot_be_continued() {
        let message = json!({"role": "assistant", "content": "Yes", "reasoning": "so"});
        let render = |source: &str| {
            let rendered = templates(source).render(&Conversation {
                ending: PromptEnding::Within(MessageField::Reasoning),
                ..conversation(&json!([message]))
            });
            rendered.map_err(|error| error.to_string())
        };
        let content = "{{ messages[0].content }}";
        let error = render(content).expect_err("refused");
        assert!(
            error.starts_with("option 'continue_final_message': the chat template does not read"),
            "{error}"
        );
        let reasoning = format!("{{{{ messages[0].thinking }}}}|{content}");
        assert_eq!(render(&reasoning).as_deref(), Ok("so"));
    }

    #[test]
    fn tools_and_names_choose_the_template() {
        let mut templates = templates("plain");
        templates.add(TOOL_USE, "tools", "a file");
        templates.add("rag", "documents", "a file");
        let rendered = |tools: Option<Value>, name: Option<&str>| {
            templates.render(&Conversation {
                tools,
                template: name.map(str::to_owned),
                ..conversation(&json!([]))
            })
        };
        for (tools, name, expected) in [
            (None, None, "plain"),
            (Some(json!([{}])), None, "tools"),
            (Some(json!([{}])), Some("default"), "plain"),
            (None, Some("rag"), "documents"),
        ] {
            assert_eq!(rendered(tools, name).as_deref(), Ok(expected));
        }
        let error = rendered(None, Some("chat")).expect_err("none").to_string();
        assert!(
            error.contains("'chat'; the checkpoint has 'default', 'tool_use', 'rag'"),
            "{error}"
        );
    }

    #[test]
    fn template_errors_reach_the_client() {
        let error = rendered("{{ raise_exception('no ' + messages[0].role) }}");
        assert_eq!(
            error.expect_err("raised"),
            "option 'messages': chat template: no user"
        );
        let error = rendered("{{ messages[0].name.first }}").expect_err("undefined");
        assert!(error.ends_with("has no attribute 'name'"), "{error}");
    }

    #[test]
    fn rejects_a_tag_that_ends_where_it_begins() {
        for source in ["{%}", "{% if true %}{%}{% endif %}", "{%%}"] {
            assert!(
                ChatTemplates::with_source(source, Vec::new()).is_err(),
                "{source}"
            );
        }
    }

    #[test]
    fn bounds_loops_recursion_and_output() {
        let ten_thousand = "{% for i in range(10000) %}";
        let endless = format!("{ten_thousand}{ten_thousand}{{% endfor %}}{{% endfor %}}");
        assert!(
            rendered(&endless)
                .expect_err("stopped")
                .contains("too long")
        );
        let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        let error = rendered(recursive).expect_err("stopped");
        assert!(error.contains("recursion"), "{error}");
        let wide = format!("{{% set a = 'x' * 50000 %}}{ten_thousand}{{{{ a }}}}{{% endfor %}}");
        let error = rendered(&wide).expect_err("stopped");
        assert!(error.contains("67108864 bytes"), "{error}");
        let error = rendered("{{ 'x' * 10000000000 }}").expect_err("stopped");
        assert!(error.contains("bytes of memory"), "{error}");
    }

    #[test]
    fn renders_deeply_nested_messages() {
        let deep = format!("{}{}", "[".repeat(120), "]".repeat(120));
        let messages = json!([{"role": "user", "content": serde_json::from_str::<Value>(&deep)
            .expect("well formed")}]);
        let templates = templates("{{ messages[0].content | tojson }}|{{ messages[0].content }}");
        let prompt = templates
            .render(&conversation(&messages))
            .expect("rendered");
        assert_eq!(prompt, format!("{deep}|{deep}"));
    }

    #[test]
    fn strftime_now_formats_the_time() {
        let year = rendered("{{ strftime_now('%Y') }}").expect("a year");
        assert!(year.parse::<i32>().is_ok_and(|year| year > 2000), "{year}");
        let error = rendered("{{ strftime_now('%') }}").expect_err("no format");
        assert!(error.contains("strftime_now"), "{error}");
    }

    #[test]
    fn loads_the_template_and_special_tokens_of_a_folder() {
        let dir = std::env::temp_dir().join(format!("inflight-template-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).expect("a file");
        let prompt = || {
            let templates = ChatTemplates::load(&dir).map_err(|error| error.to_string())?;
            let render = |templates: ChatTemplates| templates.render(&conversation(&json!([])));
            let prompt = templates.map(render).transpose();
            prompt.map_err(|error| error.to_string())
        };
        assert_eq!(prompt(), Ok(None));
        write("tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
        assert_eq!(prompt(), Ok(None));

        let mut config = json!({
            "bos_token": {"content": "<s>", "lstrip": false}, "add_bos_token": true,
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ add_bos_token is defined }}",
        });
        write("tokenizer_config.json", &config.to_string());
        write(
            "special_tokens_map.json",
            r#"{"bos_token": "old", "eos_token": "</s>"}"#,
        );
        assert_eq!(prompt(), Ok(Some("<s></s>False".to_owned())));

        config["chat_template"] = json!([
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"},
        ]);
        write("tokenizer_config.json", &config.to_string());
        assert_eq!(prompt(), Ok(Some("chat".to_owned())));
        config["chat_template"] = json!({"tool_use": "tools", "default": "chat by name"});
        write("tokenizer_config.json", &config.to_string());
        assert_eq!(prompt(), Ok(Some("chat by name".to_owned())));
        config["chat_template"] = json!({"tool_use": "tools", "rag": "documents"});
        write("tokenizer_config.json", &config.to_string());
        let error = prompt().expect_err("none is the default");
        assert!(
            error.contains("name one; the checkpoint has 'tool_use', 'rag'"),
            "{error}"
        );

        std::fs::create_dir(dir.join("additional_chat_templates")).expect("a folder");
        write("additional_chat_templates/rag.jinja", "a file");
        write("additional_chat_templates/README.md", "{% not a template");
        let error = prompt().expect_err("files come before the configuration");
        assert!(error.ends_with("the checkpoint has 'rag'"), "{error}");
        write("chat_template.jinja", "the file {{ bos_token }}\n");
        assert_eq!(prompt(), Ok(Some("the file <s>".to_owned())));

        write("chat_template.jinja", "{% if %}");
        let error = prompt().expect_err("no template");
        assert!(
            error.contains("cannot be used") && error.contains("chat_template.jinja: line 1: "),
            "{error}"
        );
        // Others of the folder can.
        let templates = ChatTemplates::load(&dir).expect("loads").expect("some");
        assert_eq!(templates.problems().count(), 1);
        let rag = Conversation {
            template: Some("rag".to_owned()),
            ..conversation(&json!([]))
        };
        assert_eq!(templates.render(&rag).as_deref(), Ok("a file"));
        std::fs::remove_file(dir.join("chat_template.jinja")).expect("removed");
        std::fs::remove_dir_all(dir.join("additional_chat_templates")).expect("removed");
        write("tokenizer_config.json", r#"{"chat_template": 1}"#);
        assert!(
            prompt()
                .expect_err("no template")
                .contains("neither a string")
        );
        write("tokenizer_config.json", "{");
        assert!(
            prompt()
                .expect_err("no JSON")
                .contains("tokenizer_config.json: ")
        );
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
