//! Requests to the engine.

use std::sync::Arc;

use crate::{Adapter, DraftOptions, OutputOptions, PromptImages, ReuseOptions};
use inflight_base::{ClientId, SequenceId, TokenId, Tokens};
use inflight_sampling::{SamplingParams, StopRule};

/// A request for one sequence: its prompt, its limits, and how its tokens are chosen.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The id of the sequence. No active sequence may have it.
    pub id: SequenceId,
    /// The client, for logits processors. Not unique.
    pub client_id: Option<ClientId>,
    /// The prompt, not empty. Requests with the same prompt share it until they start.
    pub prompt: Arc<[TokenId]>,
    /// Its images.
    pub images: PromptImages,
    /// The first token of the second text, in a prompt of two.
    pub second_text: Option<Tokens>,
    /// When the sequence ends.
    pub stop: StopRule,
    /// How its tokens are chosen.
    pub sampling: Arc<SamplingParams>,
    /// Smaller numbers go first, and equal ones in order of arrival. The queue is in this order, and the
    /// sequence with the largest number is paused first.
    pub priority: i32,
    /// The adapter that it is computed with.
    pub adapter: Option<Adapter>,
    /// Which blocks it shares with other sequences.
    pub reuse: ReuseOptions,
    /// The requested extra outputs.
    pub outputs: OutputOptions,
    /// Its drafts, where the engine speculates.
    pub drafts: DraftOptions,
}

impl NewRequest {
    /// A request for up to `max_new_tokens` tokens, each the most likely one, without end ids.
    pub fn new(id: SequenceId, prompt: Vec<TokenId>, max_new_tokens: Tokens) -> Self {
        Self {
            id,
            client_id: None,
            prompt: prompt.into(),
            images: PromptImages::default(),
            second_text: None,
            stop: StopRule::at_length(max_new_tokens),
            sampling: Arc::default(),
            priority: 0,
            adapter: None,
            reuse: ReuseOptions::default(),
            outputs: OutputOptions::default(),
            drafts: DraftOptions::default(),
        }
    }

    pub(super) fn num_prompt_tokens(&self) -> Tokens {
        Tokens(self.prompt.len() as u32)
    }

    /// The most positions that the sequence ever has in the KV cache: all tokens but the last, which is never
    /// computed.
    pub(super) fn max_kv_len(&self) -> Tokens {
        self.num_prompt_tokens() + self.stop.max_new_tokens - Tokens(1)
    }

    /// How many of its first tokens it may reuse from the cache when it starts.
    pub(super) fn max_reusable(&self) -> Tokens {
        self.outputs
            .max_reusable(Tokens::ZERO, self.num_prompt_tokens())
    }
}
