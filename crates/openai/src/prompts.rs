//! Prompts that embedding models were trained with, such as `query: `, which stand before the texts of a request. They
//! are in config_sentence_transformers.json:
//!
//! ```text
//! { "prompts": { "query": "query: ", "document": "passage: " }, "default_prompt_name": null }
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::body::Body;
use crate::place::Place;
use crate::{Error, adapters};

const FILE: &str = "config_sentence_transformers.json";
/// The largest file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The longest prompt, of which each text of a request has a copy.
const MAX_PROMPT_BYTES: usize = 16 << 10;
/// Words of a field `input_type`, and the prompts that they may mean, the first that the model has.
const INPUT_TYPES: &[(&str, &[&str])] = &[
    ("search_query", &["query"]),
    ("search_document", &["document", "passage"]),
    ("passage", &["document"]),
    ("document", &["passage"]),
];

/// The prompts of models, by the models' names.
#[derive(Clone, Debug, Default)]
pub struct Prompts(HashMap<String, ModelPrompts>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ModelPrompts {
    by_name: BTreeMap<String, String>,
    default: Option<String>,
}

/// The prompt that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptChoice {
    field: &'static str,
    name: String,
}

impl Prompts {
    /// The prompts at these places, each a model's folder or its config_sentence_transformers.json.
    ///
    /// # Errors
    /// A file cannot be read, or is not sound.
    pub fn of(places: &[Place]) -> Result<Self, String> {
        let mut prompts = Self::default();
        for Place { model, path } in places {
            let path = match path.is_dir() {
                true => path.join(FILE),
                false => path.clone(),
            };
            let read = read(&path).map_err(|problem| format!("{}: {problem}", path.display()))?;
            prompts.0.insert(model.clone(), read);
        }
        Ok(prompts)
    }

    /// The text before each text of a request for a model: the prompt that it chooses, or the model's default.
    ///
    /// # Errors
    /// The model has no such prompt.
    pub fn before(&self, model: &str, choice: Option<&PromptChoice>) -> Result<&str, Error> {
        let prompts = self.0.get(adapters::split(model).0);
        let Some(PromptChoice { field, name }) = choice else {
            let default = prompts.and_then(|prompts| prompts.default.as_deref());
            return Ok(default.unwrap_or_default());
        };
        let prompts = prompts.ok_or_else(|| {
            let problem = format!(
                "'{field}': the prompts of '{model}' are not known; start the server with --prompts {model}=PATH, or \
                 write the prompt before each text"
            );
            Error::field(field, problem)
        })?;
        let found = prompts.by_name.get(name).or_else(|| {
            let (_, others) = INPUT_TYPES.iter().find(|(word, _)| word == name)?;
            let is_type = *field == INPUT_TYPE;
            let mut others = others.iter().filter(|_| is_type);
            others.find_map(|other| prompts.by_name.get(*other))
        });
        found.map(String::as_str).ok_or_else(|| {
            let names: Vec<_> = prompts
                .by_name
                .keys()
                .map(|name| format!("'{name}'"))
                .collect();
            let problem = format!(
                "'{field}': '{name}' is no prompt of '{model}'; give {}",
                names.join(" or ")
            );
            Error::field(field, problem)
        })
    }
}

const PROMPT_NAME: &str = "prompt_name";
const INPUT_TYPE: &str = "input_type";

impl PromptChoice {
    /// The choice in a body, if it has one.
    ///
    /// # Errors
    /// It has two, or a field is no text.
    pub fn read(body: &mut Body) -> Result<Option<Self>, Error> {
        let of = |field| move |name| Self { field, name };
        let by_name = body.text(PROMPT_NAME)?.map(of(PROMPT_NAME));
        let by_type = body.text(INPUT_TYPE)?.map(of(INPUT_TYPE));
        match (by_name, by_type) {
            (Some(_), Some(_)) => {
                let problem = "'input_type' and 'prompt_name' both choose a prompt; leave one out";
                Err(Error::field(INPUT_TYPE, problem))
            }
            (by_name, by_type) => Ok(by_name.or(by_type)),
        }
    }
}

fn read(path: &Path) -> Result<ModelPrompts, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("it is larger than {MAX_FILE_BYTES} bytes"));
    }
    parse(&text)
}

fn parse(text: &str) -> Result<ModelPrompts, String> {
    let config: Value =
        serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let no_text =
        |name: &str| format!("the prompt '{name}' is no text of at most {MAX_PROMPT_BYTES} bytes");
    let mut by_name = BTreeMap::new();
    for (name, prompt) in config["prompts"].as_object().into_iter().flatten() {
        let prompt = prompt
            .as_str()
            .filter(|prompt| prompt.len() <= MAX_PROMPT_BYTES);
        let prompt = prompt.ok_or_else(|| no_text(name))?;
        by_name.insert(name.clone(), prompt.to_owned());
    }
    let default = match &config["default_prompt_name"] {
        Value::Null => None,
        name => {
            let named = name.as_str().and_then(|name| by_name.get(name));
            Some(named.ok_or_else(|| format!("there is no prompt {name}, 'default_prompt_name'"))?)
        }
    };
    let default = default.cloned();
    Ok(ModelPrompts { by_name, default })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn prompts(config: Value) -> Prompts {
        let read = parse(&config.to_string()).expect("sound");
        Prompts([("m".to_owned(), read)].into_iter().collect())
    }

    fn choice(fields: Value) -> Result<Option<PromptChoice>, Error> {
        PromptChoice::read(&mut Body::parse(fields.to_string().as_bytes())?)
    }

    #[test]
    fn a_prompt_is_chosen_by_its_name_or_by_the_type_of_the_input() {
        let prompts = prompts(
            json!({"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": "passage"}),
        );
        for (fields, expected) in [
            (json!({"prompt_name": "query"}), Some("q: ")),
            (json!({"input_type": "query"}), Some("q: ")),
            (json!({"input_type": "search_query"}), Some("q: ")),
            (json!({"input_type": "search_document"}), Some("p: ")),
            (json!({"input_type": "document"}), Some("p: ")),
            (json!({}), Some("p: ")),
            (json!({"prompt_name": "document"}), None),
            (json!({"input_type": "clustering"}), None),
        ] {
            let choice = choice(fields.clone()).expect("sound");
            let found = prompts.before("m", choice.as_ref());
            assert_eq!(found.clone().ok(), expected, "{fields}");
            if let Err(error) = found {
                assert!(
                    error.message.ends_with("give 'passage' or 'query'"),
                    "{}",
                    error.message
                );
            }
            let adapted = prompts.before("m:a", choice.as_ref());
            assert_eq!(
                adapted.ok(),
                expected,
                "an adapter has the prompts of its model"
            );
        }
        assert_eq!(prompts.before("other", None), Ok(""));
        let query = choice(json!({"input_type": "query"})).expect("sound");
        let error = prompts
            .before("other", query.as_ref())
            .expect_err("its prompts are not known");
        assert!(
            error.message.contains("--prompts other=PATH"),
            "{}",
            error.message
        );
        assert!(choice(json!({"prompt_name": "query", "input_type": "query"})).is_err());
    }

    #[test]
    fn files_that_are_not_sound_are_refused() {
        let long = "x".repeat(MAX_PROMPT_BYTES + 1);
        for config in [
            json!({"prompts": {"query": 1}}),
            json!({"prompts": {"query": long}}),
            json!({"prompts": {}, "default_prompt_name": "query"}),
            json!({"default_prompt_name": 1}),
        ] {
            assert!(parse(&config.to_string()).is_err());
        }
        assert!(parse("{").is_err());
        let none = parse("{\"prompts\": null, \"default_prompt_name\": null}");
        assert_eq!(none, Ok(ModelPrompts::default()));
    }
}
