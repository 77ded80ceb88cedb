//! The frame of an answer: what a whole answer and each chunk of a stream have around the choices.

use serde::Serialize;

use crate::ids;
use crate::usage::Usage;

/// What an answer, and each chunk of it, begins with.
#[derive(Debug, Serialize)]
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    /// The head of an answer that begins now. `object` is OpenAI's name for what it is.
    pub fn new(id: String, object: &'static str, model: &str) -> Self {
        Self {
            id,
            object,
            created: ids::now(),
            model: model.to_owned(),
        }
    }
}

/// A chunk of a stream, or a whole answer.
#[derive(Serialize)]
pub struct Chunk<'a, C> {
    /// What it begins with.
    #[serde(flatten)]
    pub head: &'a Head,
    /// The choices, or what is new of them.
    pub choices: &'a [C],
    /// `Some(None)` is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}
