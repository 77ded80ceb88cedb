//! A prefix whose blocks are evicted last.

use std::sync::Arc;

use inflight_base::TokenId;

/// Tokens whose cached blocks are retained, until [`Engine::release_retained`](crate::Engine::release_retained).
#[derive(Debug)]
pub struct RetainedPrefix {
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) salt: Option<Arc<str>>,
    /// Ids of the cached prefix entries, last first.
    pub(super) contents: Vec<u64>,
}

impl RetainedPrefix {
    /// The tokens.
    pub fn tokens(&self) -> &Arc<[TokenId]> {
        &self.tokens
    }
}
