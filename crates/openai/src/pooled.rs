//! Endpoints of pooling models: each text of a request, or pair of texts, is a request to Triton.

use serde_json::{Map, Value, json};

use crate::body::Body;
use crate::fields::Field;
use crate::generation::{Prompt, numbers, tensor};
use crate::input::{Input, check_copies};
use crate::names::Names;
use crate::prompts::PromptChoice;
use crate::protocol::{ModelInferRequest, ModelInferResponse};
use crate::{Error, adapters};

/// The most texts, or pairs of texts, of a request.
pub const MAX_TEXTS: usize = 2048;

/// The backend's option for the second text of a pair.
const PAIR_OPTION: &str = "text_pair";

/// An endpoint of a model that embeds, classifies or scores.
pub trait Pooled: Sized {
    /// The fields of its requests.
    const FIELDS: &'static [Field];
    /// Whether its other fields are options of the backend. Otherwise they have no effect.
    const HAS_OPTIONS: bool = true;
    /// The beginning of the ids of its requests.
    const ID: &'static str;
    /// The output of the model for a text.
    type Output: Output;

    /// The request in a body.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    fn read(body: Body) -> Result<Self, Error>;

    /// The texts, each of which is a request to Triton.
    fn texts(&self) -> &Texts;

    /// The answer of a request with `id`, computed by `model`, with one output for each text.
    fn answer(&self, id: &str, model: &str, outputs: Vec<Self::Output>) -> Value;
}

/// The output of a pooling model for a text.
pub trait Output: Sized {
    /// The `task` of a model that gives it.
    const TASK: &'static str;
    /// The outputs of the model that are read.
    const NAMES: &'static [&'static str];

    /// The output in a response.
    ///
    /// # Errors
    /// The response has none.
    fn read(response: &ModelInferResponse) -> Result<Self, Error>;

    /// Tokens of the text.
    fn num_tokens(&self) -> u32;
}

/// Texts, or pairs of texts. A list of one text stands beside each text of the other list.
#[derive(Clone, Debug, PartialEq)]
pub struct Texts {
    model: Option<String>,
    firsts: Vec<Input>,
    /// The second texts of pairs; empty if there are no pairs.
    seconds: Vec<Option<String>>,
    options: Map<String, Value>,
    names: Names,
    prompt: Option<PromptChoice>,
}

impl Texts {
    /// These texts for a model, with these options; `None` is the only model that gives the output.
    ///
    /// # Errors
    /// The part that all requests to Triton share is too large to be copied for each.
    pub fn new(
        model: Option<String>,
        firsts: Vec<Input>,
        options: Map<String, Value>,
        mut names: Names,
    ) -> Result<Self, Error> {
        if let Some(model) = &model
            && adapters::split(model).1.is_some()
        {
            names.add("lora_name", "model");
        }
        check_copies(&options, firsts.len())?;
        Ok(Self {
            model,
            firsts,
            seconds: Vec::new(),
            options,
            names,
            prompt: None,
        })
    }

    /// The texts behind a prompt of the model.
    pub fn with_prompt(self, prompt: Option<PromptChoice>) -> Self {
        Self { prompt, ..self }
    }

    /// The prompt that the request chooses.
    pub fn prompt(&self) -> Option<&PromptChoice> {
        self.prompt.as_ref()
    }

    /// The texts as the first ones of pairs, whose second ones are in a field of this name. A text may have none.
    ///
    /// # Errors
    /// The part that all pairs share is too large to be copied for each.
    pub fn with_seconds(
        mut self,
        seconds: Vec<Option<String>>,
        field: &'static str,
    ) -> Result<Self, Error> {
        let mut copied = self.options.clone();
        if let [first] = &self.firsts[..] {
            copied.insert("text_input".to_owned(), first.text().into());
        }
        if let [Some(second)] = &seconds[..] {
            copied.insert(PAIR_OPTION.to_owned(), second.as_str().into());
        }
        check_copies(&copied, self.firsts.len().max(seconds.len()))?;
        self.names.add(PAIR_OPTION, field);
        self.seconds = seconds;
        Ok(self)
    }

    /// The model; `None` for the only one that gives the output.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// The names of the request's fields.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// The number of texts, or of pairs.
    pub fn num(&self) -> usize {
        self.firsts.len().max(self.seconds.len())
    }

    /// The request to Triton for a text behind `before`, or for a pair, that asks for these outputs.
    pub fn message(
        &self,
        index: usize,
        id: &str,
        model: &str,
        before: &str,
        outputs: &[&str],
    ) -> ModelInferRequest {
        let first = self.firsts.get(index).unwrap_or(&self.firsts[0]);
        let mut options = first.options(&self.options);
        let second = self.seconds.get(index).or(self.seconds.last());
        if let Some(Some(second)) = second {
            options.insert(PAIR_OPTION.to_owned(), second.as_str().into());
        }
        let prompt = Prompt {
            model: model.to_owned(),
            id: format!("{id}-{index}"),
            text: match first {
                Input::Text(text) => [before, text].concat(),
                Input::Tokens(_) => String::new(),
            },
            options,
        };
        prompt.into_message(outputs)
    }
}

/// The indices of numbers, the highest first, and of equal ones the earliest.
pub fn descending(numbers: &[f32]) -> Vec<usize> {
    let mut indices: Vec<_> = (0..numbers.len()).collect();
    indices.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a]));
    indices
}

/// The usage of a request in OpenAI's form: the tokens of all texts.
pub fn usage<O: Output>(outputs: &[O]) -> Value {
    let num_tokens = outputs.iter().map(|output| u64::from(output.num_tokens()));
    let num_tokens: u64 = num_tokens.sum();
    json!({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
}

/// An output of a response, read by `read`.
///
/// # Errors
/// The response has no such output, or it is not sound.
pub fn sound<'a, T>(
    response: &'a ModelInferResponse,
    name: &str,
    read: impl FnOnce(&'a prost::bytes::Bytes) -> Option<T>,
) -> Result<T, Error> {
    let value = tensor(response, name).and_then(read);
    value.ok_or_else(|| Error::bad_response(&format!("no sound output '{name}'")))
}

/// The number of tokens of a text, in a response.
///
/// # Errors
/// The response has none.
pub fn num_tokens(response: &ModelInferResponse) -> Result<u32, Error> {
    sound(response, "num_input_tokens", |tensor| {
        numbers(tensor)?.first().copied()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Input {
        Input::Text(text.to_owned())
    }

    fn texts(firsts: &[&str], seconds: &[&str]) -> Result<Texts, Error> {
        let firsts = firsts.iter().copied().map(text).collect();
        let seconds = seconds.iter().map(|&second| Some(second.to_owned()));
        let seconds = seconds.collect();
        let texts = Texts::new(None, firsts, Map::new(), Names::of("query"))?;
        texts.with_seconds(seconds, "documents")
    }

    #[test]
    fn one_text_stands_beside_each_of_the_others() {
        for (firsts, seconds) in [
            (&["a"][..], &["x", "y"][..]),
            (&["a", "b"], &["x"]),
            (&["a", "b"], &["x", "y"]),
        ] {
            let texts = texts(firsts, seconds).expect("small");
            assert_eq!(texts.num(), 2);
            for index in 0..2 {
                let expected = Prompt {
                    model: "m".to_owned(),
                    id: format!("s-{index}"),
                    text: firsts[index.min(firsts.len() - 1)].to_owned(),
                    options: [(
                        "text_pair".to_owned(),
                        json!(seconds[index.min(seconds.len() - 1)]),
                    )]
                    .into_iter()
                    .collect(),
                };
                let message = texts.message(index, "s", "m", "", &["score"]);
                assert_eq!(message, expected.into_message(&["score"]));
            }
        }
    }

    #[test]
    fn a_prompt_stands_before_texts_and_not_before_tokens() {
        let firsts = vec![text("a"), Input::Tokens(vec![7])];
        let texts = Texts::new(None, firsts, Map::new(), Names::of("input")).expect("small");
        let messages = [0, 1].map(|index| texts.message(index, "e", "m", "query: ", &[]));
        let expected = |id: &str, input: Input, text: &str| {
            let prompt = Prompt {
                model: "m".to_owned(),
                id: id.to_owned(),
                text: text.to_owned(),
                options: input.options(&Map::new()),
            };
            prompt.into_message(&[])
        };
        assert_eq!(messages[0], expected("e-0", text("a"), "query: a"));
        assert_eq!(messages[1], expected("e-1", Input::Tokens(vec![7]), ""));
    }

    #[test]
    fn a_long_text_is_not_copied_for_very_many_others() {
        let long = "x".repeat(1 << 20);
        let many = vec!["y"; MAX_TEXTS];
        assert!(texts(&[&long], &many[..4]).is_ok());
        for error in [texts(&[&long], &many), texts(&many, &[&long])] {
            let error = error.expect_err("2 GiB");
            assert!(error.message.contains("fewer"), "{}", error.message);
        }
    }
}
