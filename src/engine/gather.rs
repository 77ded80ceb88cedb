//! What a request wants to know besides its tokens, and what a step brings of it.
//!
//! ```text
//! tokens              |-------- prompt --------|-- generated --|
//! context logits       one row for each of these
//! generation logits                           one row for each -| of these: what it was chosen from
//! ```
//!
//! A row is gathered once. So a context of which rows are missing takes over no keys and values for
//! their positions: without computing them there are no logits. What is computed again after a pause is
//! not gathered again.

use std::num::NonZeroU32;

use crate::base::{Blocks, Tokens};
use crate::engine::{DraftTotals, NewRequest};
use crate::sampling::TokenLogProbs;

/// What a request wants besides its tokens. Each costs time and memory, so the default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gather {
    /// The log-probability of each token that is chosen, and those of so many of the most likely ones;
    /// `None`: not even that. Those of beams come with what they find.
    pub log_probs: Option<u32>,
    /// The model's logits of every token of the prompt.
    pub context_logits: bool,
    /// The model's logits that every token is chosen from, as they were before the request's options
    /// changed them. Those of beams come with what they find.
    pub generation_logits: bool,
    /// How many blocks of the KV cache it has had.
    pub kv_blocks: bool,
    /// What its drafts have come to.
    pub drafts: bool,
    /// Its beams as they are, after the first token and then after every so many, not 0; `None`: it only wants
    /// what it finds.
    pub beams: Option<NonZeroU32>,
}

/// What a step brings of what a request wants besides its tokens; with drafts, what one of several tokens
/// brings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gathered {
    /// Of its token, if it has one and they are wanted.
    pub log_probs: Option<TokenLogProbs>,
    /// `[num_rows, vocab_size]`: those of the next tokens of the prompt, after the ones of earlier steps.
    /// Empty if there are none.
    pub context_logits: Vec<f32>,
    /// `[vocab_size]`, or empty.
    pub generation_logits: Vec<f32>,
    /// Up to this step, if they are wanted and there are more than before.
    pub kv_blocks: Option<KvBlocks>,
    /// Up to this step, if they are wanted and it had any in it.
    pub drafts: Option<DraftTotals>,
}

/// The blocks of the KV cache that a request has had since it started. One that was paused has had those
/// of both times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvBlocks {
    /// Taken blank: it has computed all that is in them.
    pub num_new: Blocks,
    /// Found in the cache, or begun with what was found there.
    pub num_reused: Blocks,
}

impl Gather {
    /// Whether it wants anything.
    pub fn is_any(&self) -> bool {
        self.needs_logits() || self.kv_blocks || self.drafts
    }

    /// Whether any of it is made of logits.
    pub fn needs_logits(&self) -> bool {
        self.context_logits || self.samples_more()
    }

    /// Whether a sampled token has something beside it.
    pub fn samples_more(&self) -> bool {
        self.log_probs.is_some() || self.generation_logits
    }

    /// How many of a sequence's first tokens may be taken over from the cache, when the context logits of
    /// `num_gathered` of its `num_prompt_tokens` have been gathered.
    pub(super) fn max_reused(&self, num_gathered: Tokens, num_prompt_tokens: Tokens) -> Tokens {
        match self.context_logits && num_gathered < num_prompt_tokens {
            true => num_gathered,
            false => Tokens(u32::MAX),
        }
    }
}

impl NewRequest {
    /// The same of a request that has not started.
    pub(super) fn max_reused(&self) -> Tokens {
        let num_prompt_tokens = Tokens(self.prompt.len() as u32);
        self.gather.max_reused(Tokens::ZERO, num_prompt_tokens)
    }
}
