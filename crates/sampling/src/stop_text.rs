//! The interface by which stop words end beams.
//!
//! Stop words are text, and sequences without beams are detokenised outside of the engine, which is then notified when
//! the text has ended. The next step of a beam search depends on which beams have ended, so the search reads their
//! texts itself.

use std::fmt;
use std::sync::Arc;

use inflight_base::TokenId;

/// Reads a text token by token. The result depends only on the tokens.
pub trait ReadText: Send + Sync {
    /// Adds the next token. Returns whether the text ends with it.
    fn push(&mut self, token: TokenId) -> bool;

    /// A copy that continues in another way.
    fn fork(&self) -> Box<dyn ReadText>;
}

impl Clone for Box<dyn ReadText> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

/// The reader of an empty text, which each beam of a request forks. Two are equal if they are one object.
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
