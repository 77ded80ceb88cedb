//! The interface of an endpoint of conversations.

use serde_json::Value;

use crate::Error;
use crate::answer::Answer;
use crate::body::Body;
use crate::fields::Field;
use crate::generation::Generation;
use crate::sse::Chunks;

/// The request of an endpoint: a conversation, in the words of an API.
pub trait Endpoint: EndpointAnswer {
    /// Its fields.
    const FIELDS: &[Field];
    /// The beginning of the ids of its answers.
    const ID: &str;

    /// The request in a body. `seed` is for a request that gives none.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    fn read(body: Body, seed: u64) -> Result<Self, Error>;

    /// Whether the answer is a stream.
    fn is_stream(&self) -> bool;

    /// The request to Triton.
    fn generation(&self, id: &str) -> Generation;
}

/// The answer of an endpoint, in the words of an API.
pub trait EndpointAnswer: Sized {
    /// The whole answer.
    fn answer(self, id: String, answers: Vec<Answer>) -> Value;

    /// Turns the answers of a stream into events.
    fn chunks(self, id: String) -> impl Chunks;
}

/// The events of a stream after all answers. They have built the whole answer.
pub fn ended<E: Chunks>(mut events: E, answers: Vec<Answer>) -> E {
    let mut out = Vec::new();
    for answer in answers {
        events.write(answer, &mut out);
        out.clear();
    }
    events.finish(&mut out);
    events
}
