//! Extra outputs: what a request can ask for in addition to tokens, and the extra outputs of one step.
//!
//! ```text
//! tokens              |-------- prompt --------|-- generated --|
//! context logits       one row for each
//! prompt log-probs       one for each but the first, from the row before it
//! generation logits                           one row for each, from which the token was chosen
//! ```
//!
//! A row of context logits is returned once, and so are log-probabilities of the prompt. Logits need a forward pass, so
//! a context whose rows are still due reuses no cached blocks for their positions. Rows that are computed again after a
//! pause are not returned again.

use std::num::NonZeroU32;

use crate::DraftTotals;
use inflight_base::{Blocks, Tokens};
use inflight_sampling::TokenLogProbs;

/// The extra outputs that a request asks for. Each costs time and memory, so the default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    /// The log-probability of each chosen token, and of this many of the most likely ones; `None`: no
    /// log-probabilities. Beams return them with their hypotheses.
    pub log_probs: Option<u32>,
    /// The model's logits at every token of the prompt.
    pub context_logits: bool,
    /// The log-probability of each token of the prompt but the first, and of this many of the most likely ones in its
    /// place; `None`: no log-probabilities of the prompt.
    pub prompt_log_probs: Option<u32>,
    /// The model's logits from which each token is chosen, before the request's options changed them. Beams
    /// return them with their hypotheses.
    pub generation_logits: bool,
    /// The state that stands for the prompt, instead of tokens. The engine sets it, as
    /// [`EngineConfig::pools`](crate::EngineConfig::pools) says.
    pub pooled: bool,
    /// The number of KV cache blocks that it has used.
    pub kv_blocks: bool,
    /// The number of its draft tokens, and of those that were accepted.
    pub drafts: bool,
    /// Its current beams, after the first token and then every this many tokens; `None`: only the final
    /// hypotheses.
    pub beams: Option<NonZeroU32>,
}

/// The extra outputs of one sequence in one step; with drafts, of one of its new tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraOutputs {
    /// The log-probabilities at its new token, if there is one and they are requested.
    pub log_probs: Option<TokenLogProbs>,
    /// `[num_rows, vocab_size]`: the next rows after the last step's. Empty if there are none.
    pub context_logits: Vec<f32>,
    /// Log-probabilities of the prompt's next tokens. Empty if there are none.
    pub prompt_log_probs: Vec<TokenLogProbs>,
    /// `[vocab_size]`, or empty if they are not requested.
    pub generation_logits: Vec<f32>,
    /// The state that stands for the prompt, or the logits of the classification head, in the step that ends the
    /// prompt. Empty if tokens are generated.
    pub pooled: Vec<f32>,
    /// The blocks up to this step, if they are requested and the count has changed.
    pub kv_blocks: Option<KvBlocks>,
    /// The drafts up to this step, if they are requested and the count has changed.
    pub drafts: Option<DraftTotals>,
}

/// The KV cache blocks that a request has used since it started. A block that is allocated again after a
/// pause counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvBlocks {
    /// Blocks whose content it computed itself.
    pub num_new: Blocks,
    /// Blocks found in the cache, whole or in part.
    pub num_reused: Blocks,
}

impl OutputOptions {
    /// Whether any extra output is wanted.
    pub fn any(&self) -> bool {
        self.needs_logits() || self.pooled || self.kv_blocks || self.drafts
    }

    /// Whether any of them is made from logits.
    pub fn needs_logits(&self) -> bool {
        self.context_logits || self.prompt_log_probs.is_some() || self.is_any_per_token()
    }

    /// Whether any of them comes with each generated token.
    pub fn is_any_per_token(&self) -> bool {
        self.log_probs.is_some() || self.generation_logits
    }

    /// At how many of a prompt's first tokens logits are needed.
    pub(super) fn num_context_rows(&self, num_prompt_tokens: Tokens) -> Tokens {
        match self.prompt_log_probs {
            _ if self.context_logits => num_prompt_tokens,
            // What follows the last one is not of the prompt.
            Some(_) => num_prompt_tokens - Tokens(1),
            None => Tokens(0),
        }
    }

    /// How many of a sequence's first tokens may be reused from the cache, when what needs the logits of the first
    /// `num_returned` of its `num_prompt_tokens` has been returned.
    pub(super) fn max_reusable(&self, num_returned: Tokens, num_prompt_tokens: Tokens) -> Tokens {
        match num_returned < self.num_context_rows(num_prompt_tokens) {
            true => num_returned,
            false => Tokens(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_of_the_prompt_are_needed_as_far_as_something_follows() {
        let with = |context_logits, prompt_log_probs| OutputOptions {
            context_logits,
            prompt_log_probs,
            ..OutputOptions::default()
        };
        for (options, num_rows) in [
            (with(false, None), 0),
            (with(false, Some(0)), 4),
            (with(true, None), 5),
            (with(true, Some(0)), 5),
        ] {
            assert_eq!(options.num_context_rows(Tokens(5)), Tokens(num_rows));
        }
    }
}
