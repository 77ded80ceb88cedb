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

#[cfg(test)]
mod tests {
    use inflight_base::{SequenceId, Tokens};

    use super::*;

    fn turn() -> Turn {
        let flags = RequestFlags::default();
        Turn::new(CorrelationKey::Number(7), [1, 2].into(), flags)
    }

    #[test]
    fn a_turn_has_said_its_prompt_and_its_answer() {
        let mut turn = turn();
        let mut request = NewRequest::new(SequenceId(0), vec![1, 2, 3], Tokens(8));
        request.reuse.salt = Some("salt".into());
        turn.joins(&request);
        let ended = turn.end(&[4, 5]);
        assert_eq!(ended.conversation, CorrelationKey::Number(7));
        let said = ended.said.expect("an answer");
        assert_eq!(*said.tokens, [1, 2, 3, 4, 5]);
        assert_eq!(said.salt.as_deref(), Some("salt"));
    }

    #[test]
    fn a_turn_that_the_engine_has_not_seen_or_that_is_abandoned_has_said_nothing() {
        assert!(turn().end(&[4]).said.is_none());
        let mut turn = turn();
        turn.joins(&NewRequest::new(SequenceId(0), vec![1], Tokens(8)));
        assert!(turn.abandon().said.is_none());
    }
}
