//! Where a Hugging Face folder has its chat templates and the special tokens that they name.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use inflight_base::{LoadError, parse_json, read_text};

/// The most templates of a folder. Checkpoints have one to three.
const MAX_TEMPLATES: usize = 64;

/// A template's source.
pub(super) struct NamedTemplate {
    /// `default` if it has no name of its own.
    pub name: String,
    /// Its Jinja text.
    pub source: String,
    /// The file that it is in.
    pub path: PathBuf,
}

/// What a folder says about chat templates.
pub(super) struct ChatTemplateFiles {
    /// Its templates, at most 64.
    pub templates: Vec<NamedTemplate>,
    /// Special tokens with their names, such as `bos_token`; of equal names the last counts.
    pub special_tokens: Vec<(String, String)>,
}

/// Reads the templates of `dir`. Files of their own come before those in `tokenizer_config.json`, as in transformers:
///
/// ```text
/// chat_template.jinja                        default
/// additional_chat_templates/<name>.jinja     <name>
/// tokenizer_config.json: "chat_template"     "..." | [{"name": "default", "template": "..."}, ...] | {"default": "...", ...}
/// ```
///
/// # Errors
/// A file cannot be read, or is not of this form.
pub(super) fn read(dir: &Path) -> Result<ChatTemplateFiles, LoadError> {
    let config_path = dir.join("tokenizer_config.json");
    let config = read_object(&config_path)?;
    let mut templates = template_files(dir)?;
    if templates.is_empty() {
        let named = templates_of(&config).map_err(|reason| LoadError::File {
            path: config_path.clone(),
            reason,
        })?;
        templates = named
            .into_iter()
            .map(|(name, source)| NamedTemplate {
                name,
                source,
                path: config_path.clone(),
            })
            .collect();
    }
    if templates.len() > MAX_TEMPLATES {
        return Err(LoadError::File {
            path: dir.to_owned(),
            reason: format!(
                "it has {} chat templates, and may have {MAX_TEMPLATES}",
                templates.len()
            ),
        });
    }
    let mut special_tokens = special_tokens(&read_object(&dir.join("special_tokens_map.json"))?);
    special_tokens.extend(self::special_tokens(&config));
    Ok(ChatTemplateFiles {
        templates,
        special_tokens,
    })
}

/// The templates in files of their own, the default one first.
fn template_files(dir: &Path) -> Result<Vec<NamedTemplate>, LoadError> {
    let mut templates = Vec::new();
    let path = dir.join("chat_template.jinja");
    if let Some(source) = text_if_there(&path)? {
        templates.push(NamedTemplate {
            name: "default".to_owned(),
            source,
            path,
        });
    }
    for path in jinja_files(&dir.join("additional_chat_templates"))? {
        let name = path.file_stem().and_then(|stem| stem.to_str());
        if let Some(name) = name
            && let Some(source) = text_if_there(&path)?
        {
            templates.push(NamedTemplate {
                name: name.to_owned(),
                source,
                path: path.clone(),
            });
        }
    }
    Ok(templates)
}

/// The files `*.jinja` of a folder, by name. None if there is no such folder.
fn jinja_files(dir: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let fail = |error: io::Error| LoadError::File {
        path: dir.to_owned(),
        reason: error.to_string(),
    };
    let entries = match fs::read_dir(dir) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        entries => entries.map_err(fail)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(fail)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "jinja")
        {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The templates of a `tokenizer_config.json`, by name.
fn templates_of(config: &Map<String, Value>) -> Result<Vec<(String, String)>, String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let named = match config.get("chat_template") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::String(source)) => return Ok(vec![("default".to_owned(), source.clone())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|it| Some((text(&it["name"])?, text(&it["template"])?)))
            .collect(),
        Some(Value::Object(members)) => members
            .iter()
            .map(|(name, source)| Some((name.clone(), text(source)?)))
            .collect(),
        Some(_) => None,
    };
    named.ok_or_else(|| {
        "chat_template is neither a string, nor a list of {name, template}, nor an object of templates".to_owned()
    })
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
    let Some(text) = text_if_there(path)? else {
        return Ok(Map::new());
    };
    let fail = |reason: String| LoadError::File {
        path: path.to_owned(),
        reason,
    };
    match parse_json(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(fail("is not a JSON object".to_owned())),
        Err(error) => Err(fail(error.to_string())),
    }
}

/// Reads the text file at `path`. None if the file does not exist.
fn text_if_there(path: &Path) -> Result<Option<String>, LoadError> {
    match read_text(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LoadError::File {
            path: path.to_owned(),
            reason: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A folder that is removed with its value.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let id = std::process::id();
            let path = std::env::temp_dir().join(format!("inflight-templates-{id}-{test}"));
            fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.join(name), text).expect("written");
        }

        fn create(&self, name: &str) {
            fs::create_dir(self.0.join(name)).expect("a folder");
        }

        fn read(&self) -> Result<ChatTemplateFiles, String> {
            read(&self.0).map_err(|error| error.to_string())
        }

        /// The names and sources of its templates.
        fn templates(&self) -> Result<Vec<(String, String)>, String> {
            let templates = self.read()?.templates.into_iter();
            Ok(templates
                .map(|template| (template.name, template.source))
                .collect())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn named(templates: &[(&str, &str)]) -> Vec<(String, String)> {
        let templates = templates.iter();
        templates
            .map(|(name, source)| ((*name).to_owned(), (*source).to_owned()))
            .collect()
    }

    #[test]
    fn files_of_templates_are_named_and_sorted() {
        let folder = Folder::new("files");
        assert_eq!(folder.templates(), Ok(Vec::new()));
        folder.write("additional_chat_templates", "no folder");
        assert_eq!(folder.templates(), Ok(Vec::new()));
        fs::remove_file(folder.0.join("additional_chat_templates")).expect("removed");
        folder.create("additional_chat_templates");
        folder.write("additional_chat_templates/tool_use.jinja", "tools");
        folder.write("additional_chat_templates/rag.jinja", "documents");
        folder.write("additional_chat_templates/README.md", "text");
        folder.write("tokenizer_config.json", r#"{"chat_template": "not read"}"#);
        let others = [("rag", "documents"), ("tool_use", "tools")];
        assert_eq!(folder.templates(), Ok(named(&others)));
        folder.write("chat_template.jinja", "");
        let all = [&[("default", "")], &others[..]].concat();
        assert_eq!(folder.templates(), Ok(named(&all)));
    }

    #[test]
    fn a_configuration_has_templates_in_one_of_its_forms() {
        let folder = Folder::new("forms");
        let named = named(&[("tool_use", "a"), ("default", "b")]);
        for (value, expected) in [
            (json!(null), Some(Vec::new())),
            (json!("b"), Some(named[1..].to_vec())),
            (
                json!([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]),
                Some(named.clone()),
            ),
            (
                json!({"tool_use": "a", "default": "b"}),
                Some(named.clone()),
            ),
            (json!([{"name": "default"}]), None),
            (json!([{"template": "a"}]), None),
            (json!({"default": 1}), None),
            (json!(true), None),
        ] {
            let config = json!({"chat_template": value});
            folder.write("tokenizer_config.json", &config.to_string());
            let found = folder.templates();
            assert_eq!(found.as_ref().ok(), expected.as_ref(), "{value}");
            let is_named =
                |error: &String| error.contains("tokenizer_config.json: chat_template is");
            assert!(found.as_ref().err().is_none_or(is_named), "{found:?}");
        }
    }

    #[test]
    fn a_folder_has_so_many_templates() {
        let folder = Folder::new("many");
        let templates = |num: usize| {
            let templates = (0..num).map(|i| json!({"name": i.to_string(), "template": ""}));
            let config = json!({"chat_template": templates.collect::<Vec<_>>()});
            folder.write("tokenizer_config.json", &config.to_string());
            folder.templates().map(|templates| templates.len())
        };
        assert_eq!(templates(64), Ok(64));
        let problem = templates(65).expect_err("refused");
        assert!(
            problem.ends_with("it has 65 chat templates, and may have 64"),
            "{problem}"
        );
    }

    #[test]
    fn special_tokens_are_texts_with_names() {
        let folder = Folder::new("tokens");
        folder.write(
            "special_tokens_map.json",
            r#"{"bos_token": "old", "pad_token": {"content": "<p>"}, "additional_special_tokens": ["<x>"]}"#,
        );
        let config =
            json!({"bos_token": "<s>", "add_eos_token": true, "unk_token": null, "model": "text"});
        folder.write("tokenizer_config.json", &config.to_string());
        let expected = [
            ("bos_token", "old"),
            ("pad_token", "<p>"),
            ("bos_token", "<s>"),
        ];
        assert_eq!(
            folder.read().expect("files").special_tokens,
            named(&expected)
        );
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_name() {
        let folder = Folder::new("unreadable");
        for (text, problem) in [("[]", "is not a JSON object"), ("{", "line 1")] {
            folder.write("special_tokens_map.json", text);
            let found = folder.templates().expect_err("refused");
            assert!(
                found.contains("special_tokens_map.json: ") && found.contains(problem),
                "{found}"
            );
        }
        folder.write("special_tokens_map.json", "{}");
        folder.create("chat_template.jinja");
        let found = folder.templates().expect_err("a folder");
        assert!(found.contains("chat_template.jinja: "), "{found}");
        fs::remove_dir(folder.0.join("chat_template.jinja")).expect("removed");
        let link = folder.0.join("additional_chat_templates");
        std::os::unix::fs::symlink(&link, &link).expect("a link to itself");
        let found = folder.templates().expect_err("a link to itself");
        assert!(found.contains("additional_chat_templates: "), "{found}");
    }
}
