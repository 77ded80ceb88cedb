//! The frame of an answer: what a whole answer and each chunk of a stream have around the choices.

use serde::Serialize;

use crate::ids;
use crate::sse::json;
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

/// A whole answer.
#[derive(Serialize)]
pub struct Whole<'a, C> {
    /// What it begins with.
    #[serde(flatten)]
    pub head: &'a Head,
    /// The choices.
    pub choices: &'a [C],
    /// The tokens.
    pub usage: Usage,
}

/// Writes the chunks of a stream. What they all begin with is written once.
pub struct Frame {
    start: Vec<u8>,
}

impl Frame {
    /// The frame of chunks with a head.
    pub fn new(head: &Head) -> Self {
        let mut start = b"data: ".to_vec();
        json(head, &mut start);
        start.pop();
        start.extend_from_slice(b",\"choices\":");
        Self { start }
    }

    /// Writes the event with what is new of the choices. `Some(None)` is a usage of null.
    pub fn event(
        &self,
        choices: &[impl Serialize],
        usage: Option<Option<Usage>>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(&self.start);
        json(choices, out);
        if let Some(usage) = usage {
            out.extend_from_slice(b",\"usage\":");
            json(&usage, out);
        }
        out.extend_from_slice(b"}\n\n");
    }
}
