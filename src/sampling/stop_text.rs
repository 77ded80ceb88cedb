//! Where the text of a beam ends by its own words.
//!
//! Stop words are text, and text is made of tokens elsewhere. Who generates one text for a request reads it
//! outside of the engine, and says so when it has ended. Of beams the next step depends on which of them have
//! ended, so that the search has them read itself.

use std::fmt;
use std::sync::Arc;

use crate::base::TokenId;

/// One text, read token by token.
///
/// What it says depends on nothing but its tokens.
pub trait ReadText: Send + Sync {
    /// Adds the next token. Returns whether the text ends with it.
    fn push(&mut self, token: TokenId) -> bool;

    /// The same text so far, to go on in another way.
    fn fork(&self) -> Box<dyn ReadText>;
}

impl Clone for Box<dyn ReadText> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

/// A text of which nothing is generated yet: each beam of a request begins with a fork of it. Two are equal if
/// they are the same one.
#[derive(Clone)]
pub struct StopText(pub Arc<dyn ReadText>);

impl fmt::Debug for StopText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StopText")
    }
}

impl PartialEq for StopText {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
