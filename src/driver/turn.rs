//! A turn of a conversation, while it is in flight and when it has ended.

use std::sync::Arc;

use crate::driver::correlation::CorrelationKey;
use inflight_base::TokenId;
use inflight_engine::NewRequest;
use inflight_triton::RequestFlags;

/// A request in flight as a turn of a conversation.
pub struct Turn {
    /// Its conversation.
    pub conversation: CorrelationKey,
    /// What the turns before it have said.
    pub context: Arc<[TokenId]>,
    /// Its place in the conversation.
    pub flags: RequestFlags,
    /// Its whole prompt, once it is known.
    prompt: Option<Said>,
}

/// A turn that has ended.
pub struct EndedTurn {
    /// Its conversation.
    pub conversation: CorrelationKey,
    /// All that has been said in the conversation. `None` if the turn does not count.
    pub said: Option<Said>,
}

/// What has been said in a conversation.
pub struct Said {
    /// The prompt and the answer of the last turn. The prompt includes all turns before it.
    pub tokens: Arc<[TokenId]>,
    /// The salt of its blocks.
    pub salt: Option<Arc<str>>,
}

impl Turn {
    /// A turn that continues `context`.
    pub fn new(conversation: CorrelationKey, context: Arc<[TokenId]>, flags: RequestFlags) -> Self {
        Self {
            conversation,
            context,
            flags,
            prompt: None,
        }
    }

    /// Notes what the engine is given for it.
    pub fn joins(&mut self, request: &NewRequest) {
        self.prompt = Some(Said {
            tokens: request.prompt.clone(),
            salt: request.reuse.salt.clone(),
        });
    }

    /// Ends the turn with an answer.
    pub fn end(self, answer: &[TokenId]) -> EndedTurn {
        let said = self.prompt.map(|prompt| Said {
            tokens: prompt.tokens.iter().chain(answer).copied().collect(),
            ..prompt
        });
        EndedTurn {
            conversation: self.conversation,
            said,
        }
    }

    /// Ends the turn without an answer.
    pub fn abandon(self) -> EndedTurn {
        EndedTurn {
            conversation: self.conversation,
            said: None,
        }
    }
}
