//! `/tokenize` and `/detokenize`: the tokens of a prompt, and the text of tokens, as the model has them.

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::Body;
use crate::fields::{DETOKENIZE, TOKENIZE};
use crate::generation::{Generation, Prompt, numbers, tensor, texts};
use crate::input::{Input, tokens};
use crate::messages::messages;
use crate::names::Names;
use crate::protocol::{ModelInferRequest, ModelInferResponse};

/// The outputs that have a prompt.
const OUTPUTS: [&str; 2] = ["text_output", "output_ids"];

/// A request for the tokens of a prompt, or for the text of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// The model; `None` for the only one there is.
    pub model: Option<String>,
    input: Input,
    /// The names of its fields.
    pub names: Names,
    options: Map<String, Value>,
}

/// A prompt, as a model has read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Read {
    text: String,
    ids: Vec<u32>,
}

impl Tokens {
    /// The request for tokens in a body.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    pub fn of_text(mut body: Body) -> Result<Self, Error> {
        let model = body.optional_model()?;
        let text = body.text("prompt")?.or(body.text("content")?);
        let conversation = body.take("messages");
        let (input, own) = match (text, conversation) {
            (Some(text), None) => (Input::Text(text), None),
            (None, Some(list)) => (Input::Text(String::new()), Some(messages(Some(list))?)),
            _ => {
                return Err(Error::field(
                    "prompt",
                    "give either 'prompt' (or 'content'), a text, or 'messages'",
                ));
            }
        };
        let names = Names::of(match own {
            Some(_) => "messages",
            None => "prompt",
        });
        let mut options = body.into_options(TOKENIZE)?;
        options.extend(own.map(|list| ("messages".to_owned(), json!(list))));
        Ok(Self {
            model,
            input,
            names,
            options,
        })
    }

    /// The request for the text of tokens. Its model is an argument of [`Tokens::message`].
    pub fn of_prompt(ids: Vec<u32>) -> Self {
        Self {
            model: None,
            input: Input::Tokens(ids),
            names: Names::of("prompt"),
            options: Map::new(),
        }
    }

    /// The request for the tokens of a prompt that a model would continue.
    pub fn of_generation(generation: Generation) -> Self {
        let prompt = generation.prompt;
        Self {
            model: Some(prompt.model),
            input: Input::Text(prompt.text),
            names: generation.names,
            options: prompt.options,
        }
    }

    /// The request for a text in a body.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    pub fn of_ids(mut body: Body) -> Result<Self, Error> {
        Ok(Self {
            model: body.optional_model()?,
            input: Input::Tokens(tokens(&mut body, "tokens")?),
            names: Names::of("tokens"),
            options: body.into_options(DETOKENIZE)?,
        })
    }

    /// Whether there is nothing to ask a model for.
    pub fn is_empty(&self) -> bool {
        self.input == Input::Tokens(Vec::new())
    }

    /// The request to Triton, for a model of this name.
    pub fn message(self, model: String, id: &str) -> ModelInferRequest {
        let mut options = self.input.options(&self.options);
        options.insert("prompt_only".to_owned(), json!(true));
        let prompt = Prompt {
            model,
            id: id.to_owned(),
            text: self.input.text().to_owned(),
            options,
        };
        prompt.into_message(&OUTPUTS)
    }
}

impl Read {
    /// The prompt in a response.
    ///
    /// # Errors
    /// The response has none.
    pub fn of(response: &ModelInferResponse) -> Result<Self, Error> {
        let missing = |name: &str| Error::bad_response(&format!("no sound output '{name}'"));
        let text = tensor(response, "text_output").and_then(texts);
        let ids = tensor(response, "output_ids").and_then(numbers);
        Ok(Self {
            text: text
                .and_then(|texts| texts.into_iter().next())
                .ok_or_else(|| missing("text_output"))?,
            ids: ids.ok_or_else(|| missing("output_ids"))?,
        })
    }

    /// The text.
    pub fn into_text(self) -> String {
        self.text
    }

    /// The number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.ids.len()
    }

    /// The answer with the tokens, as vLLM's and llama.cpp's servers give them.
    pub fn tokens(&self) -> Value {
        json!({"count": self.ids.len(), "tokens": self.ids})
    }

    /// The answer with the text: under vLLM's name, and under llama.cpp's.
    pub fn text(&self) -> Value {
        json!({"prompt": self.text, "content": self.text})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(value: Value) -> Body {
        Body::parse(value.to_string().as_bytes()).expect("an object")
    }

    #[test]
    fn both_servers_names_are_read() {
        let of = |value: Value| Tokens::of_text(body(value)).expect("sound");
        assert_eq!(of(json!({"prompt": "a"})), of(json!({"content": "a"})));
        let message = of(json!({"messages": [{"role": "user", "content": "a"}]}));
        assert_eq!(message.options["messages"][0]["content"], "a");
        for wrong in [
            json!({}),
            json!({"prompt": "a", "messages": []}),
            json!({"prompt": "a", "add_special_tokens": false}),
            json!({"content": "a", "with_pieces": true}),
        ] {
            assert!(Tokens::of_text(body(wrong.clone())).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_tokens_have_no_text() {
        let request = Tokens::of_ids(body(json!({"tokens": []}))).expect("sound");
        assert!(request.is_empty());
        assert_eq!(Read::default().text(), json!({"prompt": "", "content": ""}));
    }
}
