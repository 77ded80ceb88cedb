//! The replies to the prompts of a request.

use std::pin::Pin;

use futures_util::Stream;

use crate::Error;
use crate::generation::Reply;

/// A reply to one of the prompts of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Which prompt.
    pub prompt: usize,
    /// The reply.
    pub reply: Reply,
}

/// The replies to all prompts of a request, as they come. Whoever drops the stream cancels what is in flight.
pub type Answers = Pin<Box<dyn Stream<Item = Result<Answer, Error>> + Send>>;
