//! `/v1/embeddings`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::body::{Body, wrong};
use crate::fields::EMBEDDINGS;
use crate::generation::{Prompt, floats, numbers, tensor};
use crate::input::{Input, inputs};
use crate::names::Names;
use crate::protocol::{ModelInferRequest, ModelInferResponse};
use crate::{Error, adapters};

/// The most texts of a request, as in OpenAI's API.
const MAX_TEXTS: usize = 2048;
/// The outputs of a model that embeds.
const OUTPUTS: [&str; 2] = ["embedding", "num_input_tokens"];

/// A request for the vectors of some texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Embeddings {
    model: String,
    inputs: Vec<Input>,
    is_base64: bool,
    options: Map<String, Value>,
}

/// The vector of a text, and its number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    vector: Vec<f32>,
    num_tokens: u32,
}

impl Embeddings {
    /// The request in a body.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    pub fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let inputs = inputs(&mut body, "input", MAX_TEXTS)?;
        let is_base64 = match body.text("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                return Err(wrong(
                    "encoding_format",
                    &json!(other),
                    "'float' or 'base64'",
                ));
            }
        };
        Ok(Self {
            model,
            inputs,
            is_base64,
            options: body.into_options(EMBEDDINGS)?,
        })
    }

    /// The names of its fields.
    pub fn names(&self) -> Names {
        let mut names = Names::of("input");
        if adapters::split(&self.model).1.is_some() {
            names.add("lora_name", "model");
        }
        names
    }

    /// The requests to Triton, one for each text.
    pub fn messages(&self, id: &str) -> Vec<ModelInferRequest> {
        let message = |(index, input): (usize, &Input)| {
            let prompt = Prompt {
                model: self.model.clone(),
                id: format!("{id}-{index}"),
                text: input.text().to_owned(),
                options: input.options(&self.options),
            };
            prompt.into_message(&OUTPUTS)
        };
        self.inputs.iter().enumerate().map(message).collect()
    }

    /// The answer.
    pub fn answer(&self, embeddings: &[Embedding]) -> Value {
        let vectors = embeddings
            .iter()
            .enumerate()
            .map(|(index, embedding)| Entry {
                object: "embedding",
                index,
                embedding: match self.is_base64 {
                    true => Numbers::Base64(base64(&embedding.vector)),
                    false => Numbers::Floats(&embedding.vector),
                },
            });
        let num_tokens: u64 = embeddings.iter().map(|one| u64::from(one.num_tokens)).sum();
        json!({
            "object": "list",
            "data": vectors.collect::<Vec<_>>(),
            "model": self.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        })
    }
}

impl Embedding {
    /// The vector in a response.
    ///
    /// # Errors
    /// The response has none.
    pub fn read(response: &ModelInferResponse) -> Result<Self, Error> {
        let missing = |name: &str| Error::bad_response(&format!("no sound output '{name}'"));
        let vector = tensor(response, "embedding").and_then(floats);
        let num_tokens = tensor(response, "num_input_tokens").and_then(numbers);
        Ok(Self {
            vector: vector.ok_or_else(|| missing("embedding"))?,
            num_tokens: num_tokens
                .and_then(|numbers| numbers.first().copied())
                .ok_or_else(|| missing("num_input_tokens"))?,
        })
    }
}

#[derive(Serialize)]
struct Entry<'a> {
    object: &'static str,
    index: usize,
    embedding: Numbers<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Numbers<'a> {
    Floats(&'a [f32]),
    Base64(String),
}

/// Numbers of four bytes each, little-endian, as OpenAI's own client reads them.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Embeddings, Error> {
        Embeddings::read(Body::parse(value.to_string().as_bytes())?)
    }

    fn embedding(vector: &[f32], num_tokens: u32) -> Embedding {
        Embedding {
            vector: vector.to_vec(),
            num_tokens,
        }
    }

    #[test]
    fn each_text_has_a_vector() {
        let request =
            read(json!({"model": "m", "input": ["a", "b"], "dimensions": 2})).expect("sound");
        assert_eq!(request.messages("e")[1].id, "e-1");
        assert_eq!(request.options["dimensions"], 2);
        let answer = request.answer(&[embedding(&[0.5, 1.0], 2), embedding(&[2.0, 3.0], 3)]);
        let second = json!({"object": "embedding", "index": 1, "embedding": [2.0, 3.0]});
        assert_eq!(answer["data"][1], second);
        assert_eq!(
            answer["usage"],
            json!({"prompt_tokens": 5, "total_tokens": 5})
        );
    }

    #[test]
    fn base64_has_the_bytes_of_the_numbers() {
        let request =
            read(json!({"model": "m", "input": "a", "encoding_format": "base64"})).expect("sound");
        let answer = request.answer(&[embedding(&[1.0], 2)]);
        assert_eq!(answer["data"][0]["embedding"], "AACAPw==");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (field, value) in [
            ("input", json!([1, "a"])),
            ("input", json!([])),
            ("encoding_format", json!("hex")),
        ] {
            let mut fields = json!({"model": "m", "input": "a"});
            fields[field] = value;
            assert_eq!(read(fields).expect_err(field).param.as_deref(), Some(field));
        }
    }
}
