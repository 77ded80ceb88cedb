//! One sequence of an answer: its tokens, its text, and why it ended.

use std::sync::Arc;
use std::time::Instant;

use crate::response::text_stream::TextStream;
use inflight_base::{RequestError, TokenId};
use inflight_engine::{DraftTotals, ExtraOutputs, KvBlocks};
use inflight_sampling::{
    FinishReason, Guide, Hypothesis, LogitsProcessor, SampleError, TokenLogProbs,
};
use inflight_text::{ReplyParts, ToolCall};

/// One sequence of an answer.
pub struct Row {
    tokens: Vec<TokenId>,
    /// Its text; `None` if only token ids are wanted.
    text: Option<TextStream>,
    /// The text before its first token, for rows that hypotheses replace.
    blank_text: Option<TextStream>,
    /// Of each token that no response has carried, if requested.
    log_probs: Vec<TokenLogProbs>,
    cum_log_prob: f64,
    /// Logits that no response has carried; each piece is one row.
    generation_logits: Vec<Vec<f32>>,
    /// The state that stands for the prompt, if nothing is generated.
    pooled: Vec<f32>,
    /// The hypothesis that the row shows, without its tokens.
    found: Option<Box<Hypothesis>>,
    kv_blocks: KvBlocks,
    drafts: DraftTotals,
    /// Its logits processor, which explains its own failures.
    processor: Option<LogitsProcessor>,
    /// The request's guide, which explains its own errors.
    guide: Option<Guide>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    finish: Option<FinishReason>,
    num_decoded: usize,
    num_answered: usize,
    /// Parts of the text that no response has carried.
    parts: ReplyParts,
    /// Calls of functions that responses have carried, in part at least.
    num_calls_answered: usize,
    /// Whether one of them was complete.
    has_called: bool,
    /// Whether the text has been finished, so that nothing is held back.
    is_text_whole: bool,
}

impl Row {
    /// An empty sequence with capacity for `max_new_tokens`, so that steps allocate nothing.
    pub fn new(max_new_tokens: usize, text: Option<TextStream>) -> Self {
        Self {
            tokens: Vec::with_capacity(max_new_tokens),
            text,
            blank_text: None,
            log_probs: Vec::new(),
            cum_log_prob: 0.0,
            generation_logits: Vec::new(),
            pooled: Vec::new(),
            found: None,
            kv_blocks: KvBlocks::default(),
            drafts: DraftTotals::default(),
            processor: None,
            guide: None,
            first_token: None,
            last_token: None,
            finish: None,
            num_decoded: 0,
            num_answered: 0,
            parts: ReplyParts::default(),
            num_calls_answered: 0,
            has_called: false,
            is_text_whole: false,
        }
    }

    /// A row that shows a hypothesis of a beam search, which changes while the search continues.
    pub fn found(text: Option<TextStream>) -> Self {
        Self {
            blank_text: text.clone(),
            ..Self::new(0, text)
        }
    }

    /// Says which logits processor it has.
    pub fn set_processor(&mut self, processor: LogitsProcessor) {
        self.processor = Some(processor);
    }

    /// Says which guide it has.
    pub fn set_guide(&mut self, guide: Guide) {
        self.guide = Some(guide);
    }

    /// Adds a token. Returns whether its text now ends with a stop word; the text of sequences without stop words is
    /// left to the responder.
    pub fn push(&mut self, token: TokenId, now: Instant) -> bool {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(token);
        let has_stop_words = self.text.as_ref().is_some_and(TextStream::has_stop_words);
        has_stop_words && self.decode()
    }

    /// Adds the extra outputs of the next token.
    pub fn add_extra_outputs(&mut self, extra_outputs: ExtraOutputs) {
        if let Some(log_probs) = extra_outputs.log_probs {
            self.cum_log_prob += f64::from(log_probs.chosen.log_prob);
            self.log_probs.push(log_probs);
        }
        if !extra_outputs.generation_logits.is_empty() {
            self.generation_logits.push(extra_outputs.generation_logits);
        }
        if !extra_outputs.pooled.is_empty() {
            self.pooled = extra_outputs.pooled;
        }
        if let Some(kv_blocks) = extra_outputs.kv_blocks {
            self.kv_blocks = kv_blocks;
        }
        if let Some(drafts) = extra_outputs.drafts {
            self.drafts = drafts;
        }
    }

    /// Replaces the contents by this hypothesis. No response has contained any of it.
    pub fn take_found(&mut self, mut hypothesis: Hypothesis, now: Instant) {
        if !hypothesis.tokens.is_empty() {
            self.first_token.get_or_insert(now);
            self.last_token = Some(now);
        }
        self.tokens = std::mem::take(&mut hypothesis.tokens);
        self.cum_log_prob = f64::from(hypothesis.cum_log_prob);
        self.found = Some(Box::new(hypothesis));
        self.text = self.blank_text.clone();
        (self.num_decoded, self.num_answered) = (0, 0);
        (self.parts, self.num_calls_answered) = (ReplyParts::default(), 0);
        self.is_text_whole = false;
    }

    /// Ends the sequence. Only the first reason counts; a hypothesis that had ended before its search keeps its own
    /// unless the search fails.
    pub fn end(&mut self, reason: FinishReason) {
        let own = self.found.as_ref().and_then(|found| found.finish_reason);
        self.finish.get_or_insert(match reason {
            FinishReason::Error(_) => reason,
            _ => own.unwrap_or(reason),
        });
    }

    /// Why it ended, if it has.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Why its text ended, if it has; a hypothesis can end before its search.
    pub fn finish_of_text(&self) -> Option<FinishReason> {
        let found = self.found.as_ref().and_then(|found| found.finish_reason);
        self.finish.or(found)
    }

    /// The error that it ended with, for its client.
    pub fn error(&self) -> Option<RequestError> {
        let Some(FinishReason::Error(error)) = self.finish else {
            return None;
        };
        let text = error.to_string();
        Some(match error {
            SampleError::NotFinite | SampleError::GuideFailed => RequestError::Internal(text),
            SampleError::ProcessorFailed => {
                let processor = self.processor.as_ref();
                let failure = processor.and_then(|processor| processor.0.failure());
                RequestError::Internal(failure.unwrap_or(text))
            }
            SampleError::GuideTooComplex => {
                let guide = self.guide.as_ref();
                let explained = guide.and_then(|guide| guide.0.explain(error));
                RequestError::Invalid(explained.unwrap_or(text))
            }
            SampleError::NoneAllowed | SampleError::OnlyRepeats => RequestError::Invalid(text),
        })
    }

    /// All tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Whether it has enough tokens for a response: its first one, or `interval` new ones.
    pub fn is_due(&self, interval: usize) -> bool {
        let num_new = self.new_tokens().len();
        let is_first = self.num_answered == 0;
        num_new > 0 && (is_first || num_new >= interval)
    }

    /// The tokens that no response has carried.
    pub fn new_tokens(&self) -> &[TokenId] {
        &self.tokens[self.num_answered..]
    }

    /// Their log-probabilities, if requested.
    pub fn new_log_probs(&self) -> impl Iterator<Item = &TokenLogProbs> {
        let found = self.found.iter().flat_map(|found| &found.model_log_probs);
        self.log_probs.iter().chain(found.map(Arc::as_ref))
    }

    /// The chosen tokens' log-probabilities that no response has carried, if requested.
    pub fn new_chosen_log_probs(&self) -> impl Iterator<Item = f32> {
        let found = self.found.iter().flat_map(|found| &found.log_probs);
        let chosen = self.log_probs.iter().map(|it| it.chosen.log_prob);
        chosen.chain(found.copied())
    }

    /// The sum of all chosen tokens' log-probabilities; 0 if they were not requested.
    pub fn cum_log_prob(&self) -> f64 {
        self.cum_log_prob
    }

    /// The logits that no response has carried, `[vocab_size]` each.
    pub fn new_generation_logits(&self) -> impl Iterator<Item = &[f32]> {
        let found = self.found.iter().flat_map(|found| &found.generation_logits);
        let own = self.generation_logits.iter().map(Vec::as_slice);
        own.chain(found.map(|row| row.as_slice()))
    }

    /// The state that stands for the prompt; empty if it was not computed.
    pub fn pooled(&self) -> &[f32] {
        &self.pooled
    }

    /// Drops the logits that a response has carried.
    pub fn drop_generation_logits(&mut self) {
        self.generation_logits.clear();
        if let Some(found) = &mut self.found {
            found.generation_logits.clear();
        }
    }

    /// The KV blocks that it has used, if requested.
    pub fn kv_blocks(&self) -> KvBlocks {
        self.kv_blocks
    }

    /// How many of its drafts were accepted, if requested.
    pub fn drafts(&self) -> DraftTotals {
        self.drafts
    }

    /// When its first token was generated.
    pub fn first_token(&self) -> Option<Instant> {
        self.first_token
    }

    /// When its last token was generated.
    pub fn last_token(&self) -> Option<Instant> {
        self.last_token
    }

    /// The new text that may be sent, without the parts that other outputs have. Of a sequence that has ended, that is
    /// all.
    pub fn take_text(&mut self) -> String {
        self.read();
        std::mem::take(&mut self.parts.content)
    }

    /// The new part of the reasoning that may be sent.
    pub fn take_reasoning(&mut self) -> String {
        self.read();
        std::mem::take(&mut self.parts.reasoning)
    }

    /// How many of its tokens are reasoning, if they are counted.
    pub fn num_reasoning_tokens(&mut self) -> usize {
        self.read();
        self.text
            .as_ref()
            .map_or(0, TextStream::num_reasoning_tokens)
    }

    /// The new calls of functions, and how many were sent before, in part at least.
    pub fn new_calls(&mut self) -> (&[ToolCall], usize) {
        self.read();
        (&self.parts.calls, self.num_calls_answered)
    }

    /// Whether a call of a function in the text so far is complete.
    pub fn has_calls(&mut self) -> bool {
        self.read();
        self.has_called || self.parts.calls.iter().any(|call| call.is_whole)
    }

    /// Turns the tokens so far into parts of the reply.
    fn read(&mut self) {
        self.decode();
        let has_ended = self.finish_of_text().is_some();
        let Some(text) = &mut self.text else {
            return;
        };
        if has_ended && !std::mem::replace(&mut self.is_text_whole, true) {
            text.finish();
        }
        text.take_ready(&mut self.parts);
    }

    /// The stop word that the text has ended with, or the token that ended the sequence; else empty.
    pub fn stop_reason(&mut self) -> String {
        self.decode();
        let last = || self.tokens.last().map(TokenId::to_string);
        let stopped_by = match self.finish_of_text() {
            Some(FinishReason::EndId) => last(),
            Some(FinishReason::StopWords) => {
                let word = self.text.as_ref().and_then(TextStream::stop_word);
                // Otherwise it was token ids that stopped it.
                word.map(str::to_owned).or_else(last)
            }
            _ => None,
        };
        stopped_by.unwrap_or_default()
    }

    /// The cost of formatting its part of the next response, in the units of [`Answer`](super::Answer): text, logits,
    /// and log-probabilities if they are written as JSON.
    pub fn cost(&self, as_json: bool) -> usize {
        let text = match self.text {
            Some(_) => (self.tokens.len() - self.num_decoded) / 2,
            None => 0,
        };
        let num_new = self.new_tokens().len();
        let num_entries = self.new_log_probs().next().map_or(0, |it| 1 + it.top.len());
        let entries = if as_json { num_new * num_entries } else { 0 };
        let logits = self.new_generation_logits().map(|row| row.len() / 1024);
        text + num_new / 256 + entries + logits.sum::<usize>()
    }

    /// Marks all tokens so far as sent.
    pub fn answered(&mut self) {
        self.num_answered = self.tokens.len();
        for call in &self.parts.calls {
            self.num_calls_answered += usize::from(call.begins());
            self.has_called |= call.is_whole;
        }
        self.parts = ReplyParts::default();
        self.log_probs.clear();
    }

    /// Detokenises the tokens since the last call. Returns whether a stop word is complete.
    fn decode(&mut self) -> bool {
        let Some(text) = &mut self.text else {
            return false;
        };
        let mut stopped = false;
        for &token in &self.tokens[self.num_decoded..] {
            stopped |= text.push(token);
        }
        self.num_decoded = self.tokens.len();
        stopped
    }
}
