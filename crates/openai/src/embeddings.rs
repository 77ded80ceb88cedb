//! `/v1/embeddings`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use serde_json::{Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::fields::{EMBEDDINGS, Field};
use crate::generation::floats;
use crate::input::inputs;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Output, Pooled, Texts, num_tokens, sound, usage};
use crate::prompts::PromptChoice;
use crate::protocol::ModelInferResponse;

/// A request for the vectors of some texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Embeddings {
    texts: Texts,
    is_base64: bool,
}

/// The vector of a text, and its number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The numbers.
    pub vector: Vec<f32>,
    num_tokens: u32,
}

impl Pooled for Embeddings {
    const FIELDS: &'static [Field] = EMBEDDINGS;
    const ID: &'static str = "embd-";
    type Output = Embedding;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let inputs = inputs(&mut body, "input", MAX_TEXTS)?;
        let is_base64 = is_base64(&mut body)?;
        let prompt = PromptChoice::read(&mut body)?;
        let options = body.into_options(EMBEDDINGS)?;
        Ok(Self {
            texts: Texts::new(Some(model), inputs, options, Names::of("input"))?
                .with_prompt(prompt),
            is_base64,
        })
    }

    fn texts(&self) -> &Texts {
        &self.texts
    }

    fn answer(&self, _: &str, model: &str, embeddings: Vec<Embedding>) -> Value {
        let vectors = embeddings
            .iter()
            .enumerate()
            .map(|(index, embedding)| Entry {
                object: "embedding",
                index,
                embedding: Numbers::new(&embedding.vector, self.is_base64),
            });
        json!({
            "object": "list",
            "data": vectors.collect::<Vec<_>>(),
            "model": model,
            "usage": usage(&embeddings),
        })
    }
}

impl Output for Embedding {
    const TASK: &'static str = "embed";
    const NAMES: &'static [&'static str] = &["embedding", "num_input_tokens"];

    fn read(response: &ModelInferResponse) -> Result<Self, Error> {
        Ok(Self {
            vector: sound(response, "embedding", floats)?,
            num_tokens: num_tokens(response)?,
        })
    }

    fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

#[derive(Serialize)]
struct Entry<'a> {
    object: &'static str,
    index: usize,
    embedding: Numbers<'a>,
}

/// Numbers in an answer.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Numbers<'a> {
    /// A list.
    Floats(&'a [f32]),
    /// The bytes of the numbers.
    Base64(String),
}

impl<'a> Numbers<'a> {
    /// These numbers in the encoding that a request asks for.
    pub fn new(numbers: &'a [f32], is_base64: bool) -> Self {
        match is_base64 {
            true => Self::Base64(base64(numbers)),
            false => Self::Floats(numbers),
        }
    }
}

/// Whether a field `encoding_format` asks for base64.
///
/// # Errors
/// It is another encoding.
pub fn is_base64(body: &mut Body) -> Result<bool, Error> {
    match body.text("encoding_format")?.as_deref() {
        None | Some("float") => Ok(false),
        Some("base64") => Ok(true),
        Some(other) => Err(wrong(
            "encoding_format",
            &json!(other),
            "'float' or 'base64'",
        )),
    }
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
        let request = read(json!({"model": "m", "input": ["a", "b"]})).expect("sound");
        assert_eq!(request.texts.num(), 2);
        let outputs = vec![embedding(&[0.5, 1.0], 2), embedding(&[2.0, 3.0], 3)];
        let answer = request.answer("e", "m", outputs);
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
        let answer = request.answer("e", "m", vec![embedding(&[1.0], 2)]);
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
