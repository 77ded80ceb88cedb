//! What the engine is asked to generate.

use std::sync::Arc;

use crate::base::{ClientId, SequenceId, TokenId, Tokens};
use crate::engine::{DraftOptions, OutputOptions, ReuseOptions};
use crate::sampling::{SamplingParams, StopRule};

/// A request for one sequence: its prompt, its limits, and how its tokens are chosen.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The id of the sequence. No active sequence may have it.
    pub id: SequenceId,
    /// Who has sent it, for its logits processor. Not unique.
    pub client_id: Option<ClientId>,
    /// The prompt, not empty. Requests for the same prompt share it until they start.
    pub prompt: Arc<[TokenId]>,
    /// When it ends.
    pub stop: StopRule,
    /// How its tokens are chosen.
    pub sampling: Arc<SamplingParams>,
    /// Who comes first: the smaller number, and of equal ones the earlier request. It orders the
    /// queue, and what has the largest number is paused first.
    pub priority: i32,
    /// What it may share with others.
    pub reuse: ReuseOptions,
    /// What it wants besides its tokens.
    pub outputs: OutputOptions,
    /// Which of its tokens are guessed, where the engine speculates.
    pub drafts: DraftOptions,
}

impl NewRequest {
    /// A request for the most likely tokens, up to `max_new_tokens`, no end id among them.
    pub fn new(id: SequenceId, prompt: Vec<TokenId>, max_new_tokens: Tokens) -> Self {
        Self {
            id,
            client_id: None,
            prompt: prompt.into(),
            stop: StopRule { max_new_tokens },
            sampling: Arc::default(),
            priority: 0,
            reuse: ReuseOptions::default(),
            outputs: OutputOptions::default(),
            drafts: DraftOptions::default(),
        }
    }
}
