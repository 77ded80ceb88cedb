//! `/embed`: the vectors of texts.

use serde_json::{Value, json};

use super::fields::EMBED;
use super::options;
use crate::Error;
use crate::body::Body;
use crate::embeddings::Embedding;
use crate::fields::Field;
use crate::input::inputs;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Pooled, Texts};
use crate::prompts::PromptChoice;

/// A request for the vectors of some texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Embed(Texts);

impl Pooled for Embed {
    const FIELDS: &'static [Field] = EMBED;
    const HAS_OPTIONS: bool = false;
    const ID: &'static str = "embed-";
    type Output = Embedding;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.optional_model()?;
        let inputs = inputs(&mut body, "inputs", MAX_TEXTS)?;
        let prompt = PromptChoice::read(&mut body)?;
        let mut options = options(body, EMBED)?;
        options.entry("normalize").or_insert(json!(true));
        let texts = Texts::new(model, inputs, options, Names::of("inputs"))?;
        Ok(Self(texts.with_prompt(prompt)))
    }

    fn texts(&self) -> &Texts {
        &self.0
    }

    fn answer(&self, _: &str, _: &str, embeddings: Vec<Embedding>) -> Value {
        let vectors = embeddings.iter().map(|it| &it.vector[..]);
        json!(vectors.collect::<Vec<_>>())
    }
}
