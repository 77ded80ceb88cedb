//! Renders a conversation into a prompt with the checkpoint's Jinja template.
//!
//! The template sees the same environment as in Hugging Face transformers (`apply_chat_template`), so the same
//! messages give the same prompt. The `minijinja` library does the rendering; this file defines the environment and its
//! limits. The template comes with the weights and is trusted to keep its own variables small; input from a client
//! cannot make it run or write without end.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::{Map, Value};

use crate::base::{LoadError, RequestError, check_byte_order_mark};
use crate::text::python_json;

/// Maximum number of template instructions per rendering: about one second. A long conversation needs tens of thousands.
const MAX_INSTRUCTIONS: u64 = 10_000_000;
/// Maximum depth of nested macro calls and the like. Templates need a handful of levels, and each uses stack.
const MAX_RECURSION: usize = 100;
/// Maximum size of a rendered prompt: millions of tokens.
const MAX_PROMPT_BYTES: usize = 64 << 20;
/// The template's name in the environment.
const NAME: &str = "chat_template";

/// A checkpoint's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Loads the template from `dir`: `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`, which
    /// is a template or a list of named templates including `default`. None if there is no template.
    ///
    /// # Errors
    /// A file cannot be read, or the template does not compile.
    pub fn load(dir: &Path) -> Result<Option<Self>, LoadError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_object(&config_path)?;
        let jinja_path = dir.join("chat_template.jinja");
        let (path, source) = match read(&jinja_path)? {
            Some(source) => (jinja_path, Some(source)),
            None => match default_template(&config) {
                Ok(source) => (config_path, source),
                Err(reason) => {
                    return Err(LoadError::File {
                        path: config_path,
                        reason,
                    });
                }
            },
        };
        let Some(source) = source else {
            return Ok(None);
        };
        let mut special_tokens =
            special_tokens(&read_object(&dir.join("special_tokens_map.json"))?);
        special_tokens.extend(self::special_tokens(&config));
        Self::compile(&source, special_tokens)
            .map(Some)
            .map_err(|error| LoadError::File {
                path,
                reason: format!("chat_template: {error}"),
            })
    }

    /// The template with this source, which finds special tokens by name (`bos_token`).
    ///
    /// # Errors
    /// It does not compile.
    pub fn with_source(
        source: &str,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self, String> {
        Self::compile(source, special_tokens).map_err(|error| error.to_string())
    }

    fn compile(source: &str, special_tokens: Vec<(String, String)>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_recursion_limit(MAX_RECURSION);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", python_json::filter);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        for (name, token) in special_tokens {
            environment.add_global(name, token);
        }
        environment.add_template_owned(NAME, without_generation_tags(source))?;
        Ok(Self { environment })
    }

    /// Renders `messages`, a list of objects with `role` and `content`, and `tools`, a list of JSON schemas, into a
    /// prompt. With `add_generation_prompt`, the prompt ends where the assistant's answer starts.
    ///
    /// # Errors
    /// The template rejects the messages, misses something in them, or exceeds a limit.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, RequestError> {
        let context = context! {
            messages => Serde(messages),
            tools => tools.map(Serde),
            documents => (),
            add_generation_prompt => add_generation_prompt,
        };
        let mut prompt = Prompt(Vec::new());
        self.environment
            .get_template(NAME)
            .and_then(|template| {
                template
                    .render_captured_to(context, &mut prompt)
                    .map(|_| ())
            })
            .map_err(|error| invalid(&error))?;
        String::from_utf8(prompt.0)
            .map_err(|_| RequestError::Internal("the chat template wrote invalid UTF-8".to_owned()))
    }
}

/// A prompt of bounded size.
struct Prompt(Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_PROMPT_BYTES - self.0.len() {
            return Err(io::Error::other("the prompt is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn invalid(error: &Error) -> RequestError {
    let problem = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "the conversation takes too long to render; shorten it".into(),
        (ErrorKind::WriteFailure, _) => {
            format!("the prompt has more than {MAX_PROMPT_BYTES} bytes; shorten the conversation")
        }
        // A message from the template (`raise_exception`).
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    };
    RequestError::Invalid(format!("option 'messages': chat template: {problem}"))
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: '{format}' is not a time format"),
        )
    })?;
    Ok(text)
}

/// Replaces the tags `generation` and `endgeneration`, with which transformers marks the assistant's part for training,
/// by tags without effect.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // The `%` of `{%}` does not end the tag that it begins.
        let Some((inside, after)) = tag["{%".len()..].split_once("%}") else {
            rest = tag;
            break;
        };
        let tag = &tag[..tag.len() - after.len()];
        let name = inside.trim_matches(|char: char| char.is_whitespace() || "-+".contains(char));
        match name {
            "generation" => out.push_str(&tag.replacen(name, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(name, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn default_template(config: &Map<String, Value>) -> Result<Option<String>, String> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => Ok(named
            .iter()
            .find(|template| template["name"] == "default")
            .and_then(|template| template["template"].as_str())
            .map(str::to_owned)),
        Some(_) => {
            Err("chat_template is neither a string nor a list of {name, template}".to_owned())
        }
    }
}

/// Special tokens such as `bos_token` and `eos_token`: each a string, or an object with the string as `content`.
fn special_tokens(config: &Map<String, Value>) -> Vec<(String, String)> {
    let names = config.iter().filter(|(name, _)| name.ends_with("_token"));
    names
        .filter_map(|(name, value)| {
            let token = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((name.clone(), token.to_owned()))
        })
        .collect()
}

/// Reads the JSON object in the file at `path`. Empty if the file does not exist.
fn read_object(path: &Path) -> Result<Map<String, Value>, LoadError> {
    let Some(text) = read(path)? else {
        return Ok(Map::new());
    };
    serde_json::from_str(&text).map_err(|error| LoadError::File {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

/// Reads the text file at `path`. None if the file does not exist.
fn read(path: &Path) -> Result<Option<String>, LoadError> {
    let fail = |reason| LoadError::File {
        path: path.to_owned(),
        reason,
    };
    match std::fs::read_to_string(path) {
        Ok(text) => {
            check_byte_order_mark(text.as_bytes()).map_err(fail)?;
            Ok(Some(text))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fail(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(source: &str) -> ChatTemplate {
        let token = |name: &str, token: &str| (name.to_owned(), token.to_owned());
        let tokens = vec![token("bos_token", "<s>"), token("eos_token", "</s>")];
        ChatTemplate::compile(source, tokens).expect("compiles")
    }

    fn rendered(source: &str) -> Result<String, String> {
        let messages = json!([{"role": "user", "content": "<hi>"}]);
        template(source)
            .render(&messages, None, true)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_match_transformers() {
        let fixture: Value = serde_json::from_str(include_str!("../../tests/fixtures/chat.json"))
            .expect("well formed");
        let mut num_rendered = 0;
        for case in fixture["cases"].as_array().expect("cases") {
            let source = &fixture["templates"][case["template"].as_str().expect("a name")];
            let template = template(source.as_str().expect("a template"));
            let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
            let add_generation_prompt = case["add_generation_prompt"].as_bool().expect("a bool");
            let prompt = template.render(&case["messages"], tools, add_generation_prompt);
            match (prompt, case["text"].as_str()) {
                (Ok(prompt), Some(text)) => assert_eq!(prompt, text, "{case:#}"),
                (Err(error), None) => {
                    let raised = case["raised"].as_str().expect("a text");
                    let error = error.to_string();
                    assert!(error.starts_with("option 'messages': "), "{error}");
                    assert!(error.ends_with(raised), "{error}");
                }
                (prompt, _) => panic!("{prompt:?}\n{case:#}"),
            }
            num_rendered += 1;
        }
        assert!(num_rendered > 50);
    }

    #[test]
    fn template_errors_reach_the_client() {
        let error = rendered("{{ raise_exception('no ' + messages[0].role) }}");
        assert_eq!(
            error.expect_err("raised"),
            "option 'messages': chat template: no user"
        );
        let error = rendered("{{ messages[0].name.first }}").expect_err("undefined");
        assert!(error.contains("undefined"), "{error}");
    }

    #[test]
    fn rejects_a_tag_that_ends_where_it_begins() {
        for source in ["{%}", "{% if true %}{%}{% endif %}", "{%%}"] {
            assert!(
                ChatTemplate::compile(source, Vec::new()).is_err(),
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
        assert!(rendered("{{ 'x' * 10000000000 }}").is_err());
    }

    #[test]
    fn renders_deeply_nested_messages() {
        let deep = format!("{}{}", "[".repeat(120), "]".repeat(120));
        let messages = json!([{"role": "user", "content": serde_json::from_str::<Value>(&deep)
            .expect("well formed")}]);
        let template = template("{{ messages[0].content | tojson }}|{{ messages[0].content }}");
        let prompt = template.render(&messages, None, true).expect("rendered");
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
            let template = ChatTemplate::load(&dir).map_err(|error| error.to_string())?;
            let render = |template: ChatTemplate| template.render(&json!([]), None, false);
            Ok::<_, String>(template.map(|template| render(template).expect("rendered")))
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

        write("chat_template.jinja", "the file {{ bos_token }}\n");
        assert_eq!(prompt(), Ok(Some("the file <s>".to_owned())));

        write("chat_template.jinja", "{% if %}");
        assert!(
            prompt()
                .expect_err("no template")
                .contains("chat_template.jinja: ")
        );
        std::fs::remove_file(dir.join("chat_template.jinja")).expect("removed");
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
