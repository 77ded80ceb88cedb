//! The tokens of a sequence, and what decides the next one.
//!
//! They travel with the step: the runner reads them while the engine plans the next step.

use std::ops::Range;
use std::sync::Arc;

use crate::draft::{DraftRoom, Drafter};
use crate::{NewRequest, OutputOptions, PromptImages};
use inflight_base::{TokenId, Tokens};
use inflight_sampling::{Endings, FinishReason, Owner, SamplingInput, SamplingParams, StopRule};

/// The tokens and the options of a sequence, or of one of its beams.
///
/// The fields that every new token needs come first, in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct SequenceTokens {
    /// Prompt and generated tokens, and the drafts of the step that is out.
    tokens: Vec<TokenId>,
    num_prompt_tokens: usize,
    second_text: Option<Tokens>,
    /// Whether there are `keys`.
    has_images: bool,
    endings: Endings,
    stop: StopRule,
    /// How many of `tokens`, at the end, are drafts.
    num_drafts: usize,
    sampling: Arc<SamplingParams>,
    outputs: OutputOptions,
    /// The number of prompt tokens at which all has been returned that needs their logits.
    num_returned_logits: u32,
    owner: Owner,
    images: PromptImages,
    /// Reuse keys, one for each of `tokens`; empty without images.
    keys: Vec<TokenId>,
}

impl SequenceTokens {
    /// The prompt of `request`, with room for all tokens that it may generate.
    pub(super) fn new(request: &NewRequest) -> Self {
        let num_prompt_tokens = request.prompt.len();
        // One contiguous copy, because samplers, drafts and logits processors read it as one slice.
        let num_tokens = num_prompt_tokens + request.stop.max_new_tokens.index();
        let mut tokens = Vec::with_capacity(num_tokens);
        tokens.extend_from_slice(&request.prompt);
        let mut keys = Vec::new();
        if !request.images.is_empty() {
            keys.reserve_exact(num_tokens);
            keys.extend_from_slice(request.images.keys(&request.prompt));
        }
        Self {
            tokens,
            num_prompt_tokens,
            second_text: request.second_text,
            has_images: !request.images.is_empty(),
            endings: Endings::of(&request.sampling, &request.stop),
            stop: request.stop.clone(),
            num_drafts: 0,
            sampling: Arc::clone(&request.sampling),
            outputs: request.outputs,
            num_returned_logits: 0,
            owner: Owner {
                sequence: request.id,
                client: request.client_id,
            },
            images: request.images.clone(),
            keys,
        }
    }

    /// All tokens, and the drafts after them.
    #[inline]
    pub(super) fn as_slice(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Reuse keys of the tokens and of the drafts behind them. A key of an image token tells the image.
    #[inline]
    pub(super) fn keys(&self) -> &[TokenId] {
        match self.has_images {
            true => &self.keys,
            false => &self.tokens,
        }
    }

    /// The images of its prompt.
    pub(super) fn images(&self) -> &PromptImages {
        &self.images
    }

    /// The last token, which may be a draft.
    #[inline]
    pub(super) fn last(&self) -> TokenId {
        *self.tokens.last().expect("a prompt has a token")
    }

    /// The number of generated tokens.
    #[inline]
    pub(super) fn num_generated(&self) -> Tokens {
        Tokens((self.tokens.len() - self.num_prompt_tokens) as u32)
    }

    /// The generated tokens.
    pub(super) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.num_prompt_tokens..]
    }

    /// The first token of the second text, in a prompt of two.
    pub(super) fn second_text(&self) -> Option<Tokens> {
        self.second_text
    }

    /// The extra outputs that are wanted.
    pub(super) fn outputs(&self) -> OutputOptions {
        self.outputs
    }

    /// Appends a token. Returns why the sequence ends with it, if it does.
    #[inline]
    pub(super) fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        let is_last = self.num_generated() + Tokens(1) >= self.stop.max_new_tokens;
        let reason = match is_last || self.endings.may_have(token) {
            true => self.finish_reason(token),
            false => None,
        };
        self.push_unchecked(token);
        reason
    }

    /// Appends a token that does not end the sequence.
    #[inline]
    pub(super) fn push_unchecked(&mut self, token: TokenId) {
        self.tokens.push(token);
        if self.has_images {
            self.keys.push(token);
        }
    }

    /// Why the sequence would end with `token` as its next token, if it would.
    pub(super) fn finish_reason(&self, token: TokenId) -> Option<FinishReason> {
        self.stop.after(&self.sampling, self.generated(), token)
    }

    /// The number of drafts behind the tokens.
    pub(super) fn num_drafts(&self) -> usize {
        self.num_drafts
    }

    /// Appends as many drafts as there is room for, and as are worth it. Returns how many there are.
    pub(super) fn draft(&mut self, drafter: &mut Drafter, room: &DraftRoom<'_>) -> usize {
        debug_assert_eq!(self.num_drafts, 0, "drafts are dropped with their step");
        self.num_drafts = drafter.append(
            &mut self.tokens,
            self.num_prompt_tokens,
            room,
            &self.sampling,
        );
        if self.has_images {
            let drafts = &self.tokens[self.keys.len()..];
            self.keys.extend_from_slice(drafts);
        }
        self.num_drafts
    }

    /// Replaces the drafts by as many others.
    pub(super) fn set_drafts(&mut self, drafts: &[TokenId]) {
        debug_assert_eq!(self.num_drafts, drafts.len());
        let first = self.tokens.len() - self.num_drafts;
        self.tokens[first..].copy_from_slice(drafts);
        if self.has_images {
            self.keys[first..].copy_from_slice(drafts);
        }
    }

    /// The tokens without drafts.
    pub(super) fn without_drafts(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len() - self.num_drafts]
    }

    /// How tokens are chosen.
    pub(super) fn sampling(&self) -> &SamplingParams {
        &self.sampling
    }

    /// Removes the drafts. Returns how many there were.
    pub(super) fn drop_drafts(&mut self) -> usize {
        let num_drafts = std::mem::take(&mut self.num_drafts);
        self.tokens.truncate(self.tokens.len() - num_drafts);
        self.keys.truncate(self.tokens.len());
        num_drafts
    }

    /// The positions in `start..end` whose context logits are needed, for what has not been returned yet. If there are
    /// none, an empty range at `start`.
    pub(super) fn context_logits(&self, start: u32, end: u32) -> Range<u32> {
        let first = start.max(self.num_returned_logits);
        let last = end.min(self.num_context_rows());
        match first < last {
            true => first..last,
            false => start..start,
        }
    }

    /// The tokens of the prompt that follow these positions.
    pub(super) fn prompt_after(&self, positions: Range<u32>) -> &[TokenId] {
        let end = (positions.end as usize + 1).min(self.num_prompt_tokens);
        &self.tokens[end.min(positions.start as usize + 1)..end]
    }

    /// Records that what needs the context logits of the positions below `end` has been returned.
    pub(super) fn returned_logits_to(&mut self, end: Tokens) {
        let end = end.0.min(self.num_context_rows());
        self.num_returned_logits = self.num_returned_logits.max(end);
    }

    /// At how many of the first tokens logits are needed.
    fn num_context_rows(&self) -> u32 {
        let num_prompt_tokens = Tokens(self.num_prompt_tokens as u32);
        self.outputs.num_context_rows(num_prompt_tokens).0
    }

    /// How many of the first tokens may be reused from the cache.
    pub(super) fn max_reusable(&self) -> Tokens {
        let num_prompt_tokens = Tokens(self.num_prompt_tokens as u32);
        self.outputs
            .max_reusable(Tokens(self.num_returned_logits), num_prompt_tokens)
    }

    /// A copy for another beam, with room for as many tokens.
    pub(super) fn fork(&self) -> Self {
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        Self {
            tokens,
            sampling: Arc::clone(&self.sampling),
            stop: self.stop.clone(),
            images: self.images.clone(),
            keys: self.keys.clone(),
            ..*self
        }
    }

    /// What, apart from the logits, determines the next token, if the first `num_accepted` drafts are accepted.
    pub(super) fn sampling_input(&self, num_accepted: usize) -> SamplingInput<'_> {
        SamplingInput {
            params: &self.sampling,
            tokens: &self.tokens[..self.tokens.len() - self.num_drafts + num_accepted],
            num_prompt_tokens: self.num_prompt_tokens,
            beam: 0,
            owner: self.owner,
        }
    }
}

#[cfg(test)]
mod tests {
    use inflight_base::SequenceId;

    use super::*;

    #[test]
    fn context_logits_are_returned_once() {
        let mut request = NewRequest::new(SequenceId(1), vec![1; 6], Tokens(4));
        request.outputs.context_logits = true;
        let mut tokens = SequenceTokens::new(&request);
        assert_eq!(tokens.context_logits(0, 4), 0..4);
        tokens.returned_logits_to(Tokens(4));
        assert_eq!(tokens.context_logits(0, 6), 4..6);
        for (start, end) in [(0, 4), (2, 4), (4, 4), (0, 3), (6, 8)] {
            assert_eq!(tokens.context_logits(start, end), start..start);
        }
        tokens.returned_logits_to(Tokens(2));
        assert_eq!(tokens.context_logits(0, 6), 4..6, "they stay returned");
        tokens.returned_logits_to(Tokens(9));
        assert_eq!(tokens.context_logits(0, 9), 0..0);
    }
}
