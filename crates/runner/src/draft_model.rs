//! A smaller model that guesses the next tokens of sequences, for the model to verify.
//!
//! It has the tokens of the model, and a KV cache of its own with blocks of the same number and the same size: what a
//! block has of a sequence for the model, it has for the draft model. So both share tables, moves and frees.
//!
//! ```text
//! first pass      the tokens that it has missed, and the last one, of all sequences      a draft each
//! passes after    that draft                                                             the next one each
//! ```
//!
//! What it guesses changes how many tokens of a step count, never which: see the engine's `draft.rs`. The scheme is
//! that of Leviathan et al., "Fast inference from transformers via speculative decoding" (arXiv:2211.17192), with the
//! tokens that the model would choose anyway instead of a rejection by probabilities.

use std::ops::Range;

use super::limits::{AdapterRoom, AttentionWindows, RunnerLimits};
use inflight_base::{BlockSize, StepError, TokenId, Tokens};
use inflight_device::{KvSpan, StepInputs};
use inflight_engine::{BlockMove, DraftsToMake, Step};

/// How many logits are compared at a time.
const BLOCK: usize = 64;

/// What computes the tokens of a draft model.
pub(super) trait ComputeRows {
    /// Computes tokens that no plan has, and returns the logits of the sampled rows, `[num_sampled_rows, vocab_size]`.
    ///
    /// # Errors
    /// A token id is not in the vocabulary, or the device has failed.
    fn compute_rows(&mut self, inputs: StepInputs<'_>) -> Result<&[f32], StepError>;

    /// Makes moves of blocks, one after the other.
    fn move_blocks(&mut self, moves: &[BlockMove]);

    /// The most tokens in a step.
    fn max_num_tokens(&self) -> usize;

    /// Positions per KV block.
    fn block_size(&self) -> BlockSize;

    /// The size of the vocabulary.
    fn vocab_size(&self) -> usize;
}

/// A draft model on the device of the model.
pub(super) struct DraftModel<R> {
    runner: R,
    /// The drafts of a step, one sequence after the other.
    drafts: Vec<TokenId>,
    pass: Pass,
}

/// Tokens that are computed together.
#[derive(Default)]
struct Pass {
    token_ids: Vec<TokenId>,
    spans: Vec<KvSpan>,
    /// The tokens that drafts follow.
    kept_rows: Vec<u32>,
    /// All of these.
    sampled_rows: Vec<u32>,
    /// For each of them, its sequence, by its place in the step, and the place of the draft.
    wanted: Vec<(usize, usize)>,
}

/// The limits of a draft model for a model with these limits.
pub(super) fn limits_of_draft_model(limits: &RunnerLimits) -> RunnerLimits {
    RunnerLimits {
        // One draft of each sequence in a pass.
        max_sampled_rows: Tokens(limits.max_num_requests).min(limits.max_num_tokens),
        layer_groups: None,
        num_state_snapshots: 0,
        num_host_state_snapshots: 0,
        max_draft_tokens: 0,
        attention: AttentionWindows::default(),
        adapters: AdapterRoom::default(),
        ..limits.clone()
    }
}

impl<R: ComputeRows> DraftModel<R> {
    /// A draft model that has the [limits](limits_of_draft_model) of one.
    pub(super) fn new(runner: R) -> Self {
        Self {
            runner,
            drafts: Vec::new(),
            pass: Pass::default(),
        }
    }

    /// Makes the block moves of a step, and the drafts that it asks for.
    ///
    /// # Errors
    /// The device has failed.
    pub(super) fn make(&mut self, step: &mut Step) -> Result<(), StepError> {
        self.runner.move_blocks(step.moves());
        let all: Vec<_> = step.drafts_to_make().collect();
        if all.is_empty() {
            return Ok(());
        }
        let places: Vec<_> = places_of(&all).collect();
        self.drafts.clear();
        self.drafts.resize(places.last().map_or(0, |it| it.end), 0);
        for (index, to_make) in all.iter().enumerate() {
            let mut start = to_make.start;
            let mut tokens = to_make.tokens;
            while !tokens.is_empty() {
                let room = self.runner.max_num_tokens() - self.pass.token_ids.len();
                if room == 0 {
                    self.compute(&all, step)?;
                    continue;
                }
                let (now, later) = tokens.split_at(room.min(tokens.len()));
                let block_table = self.table_of(to_make, start + now.len() as u32);
                self.pass.push(now, start, block_table);
                start += now.len() as u32;
                tokens = later;
            }
            self.pass.want((index, places[index].start));
        }
        self.compute(&all, step)?;
        let most = all.iter().map(|it| it.num_drafts).max().unwrap_or(0);
        for pass in 1..most {
            for (index, to_make) in all.iter().enumerate() {
                if pass >= to_make.num_drafts {
                    continue;
                }
                let place = places[index].start + pass as usize;
                let position = to_make.start + to_make.tokens.len() as u32 + pass - 1;
                let block_table = self.table_of(to_make, position + 1);
                let before = self.drafts[place - 1];
                self.pass.push(&[before], position, block_table);
                self.pass.want((index, place));
            }
            self.compute(&all, step)?;
        }
        step.set_drafts(&self.drafts);
        Ok(())
    }

    /// The blocks of the first `kv_len` positions.
    fn table_of(&self, to_make: &DraftsToMake<'_>, kv_len: u32) -> Range<u32> {
        let num_blocks = Tokens(kv_len).blocks_ceil(self.runner.block_size());
        let start = to_make.block_table.start;
        start..start + num_blocks.0
    }

    /// Computes what was pushed, and takes the drafts that are wanted.
    fn compute(&mut self, all: &[DraftsToMake<'_>], step: &Step) -> Result<(), StepError> {
        let Self {
            runner,
            drafts,
            pass,
        } = self;
        let vocab_size = runner.vocab_size();
        let logits = runner.compute_rows(StepInputs {
            token_ids: &pass.token_ids,
            spans: &pass.spans,
            block_tables: step.block_tables(),
            kept_rows: &pass.kept_rows,
            sampled_rows: &pass.sampled_rows,
            ..StepInputs::default()
        })?;
        let rows = logits.chunks_exact(vocab_size);
        for (&(sequence, place), logits) in pass.wanted.iter().zip(rows) {
            drafts[place] = draft_from(logits, &all[sequence]);
        }
        pass.clear();
        Ok(())
    }
}

impl Pass {
    /// Appends tokens of one sequence, the first of which is at position `start`.
    fn push(&mut self, tokens: &[TokenId], start: u32, block_table: Range<u32>) {
        let first = self.token_ids.len() as u32;
        self.token_ids.extend_from_slice(tokens);
        self.spans.push(KvSpan {
            tokens: first..first + tokens.len() as u32,
            kv_len: start + tokens.len() as u32,
            block_table,
        });
    }

    /// The last token that was pushed is followed by this draft.
    fn want(&mut self, draft: (usize, usize)) {
        self.kept_rows.push(self.token_ids.len() as u32 - 1);
        self.sampled_rows.push(self.sampled_rows.len() as u32);
        self.wanted.push(draft);
    }

    fn clear(&mut self) {
        self.token_ids.clear();
        self.spans.clear();
        self.kept_rows.clear();
        self.sampled_rows.clear();
        self.wanted.clear();
    }
}

/// The places of the drafts of each sequence among those of all.
pub(super) fn places_of(all: &[DraftsToMake<'_>]) -> impl Iterator<Item = Range<usize>> {
    all.iter().scan(0, |end, to_make| {
        let start = *end;
        *end += to_make.num_drafts as usize;
        Some(start..*end)
    })
}

/// The most likely token that does not end the sequence, the lowest id on a tie; any, if no logit is a number.
fn draft_from(logits: &[f32], to_make: &DraftsToMake<'_>) -> TokenId {
    let best = most_likely(logits, |_| true);
    match to_make.is_end(best) {
        false => best,
        true => most_likely(logits, |token| !to_make.is_end(token)),
    }
}

/// The place of the largest logit whose place is allowed, the lowest on a tie; 0 if none is a number.
pub(super) fn most_likely(logits: &[f32], is_allowed: impl Fn(TokenId) -> bool) -> TokenId {
    let mut best = (0, f32::NEG_INFINITY);
    for (block, first) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let largest = block.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        if largest <= best.1 {
            continue;
        }
        for (&logit, token) in block.iter().zip(first..) {
            if logit > best.1 && is_allowed(token) {
                best = (token, logit);
            }
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_allowed_token_is_found_among_numbers_and_others() {
        let mut logits = vec![-1.0; 200];
        (logits[70], logits[150], logits[151]) = (2.0, 3.0, 3.0);
        assert_eq!(most_likely(&logits, |_| true), 150);
        assert_eq!(most_likely(&logits, |token| token != 150), 151);
        assert_eq!(most_likely(&logits, |token| token < 150), 70);
        logits[69] = f32::NAN;
        assert_eq!(most_likely(&logits, |token| token < 150), 70);
        assert_eq!(most_likely(&[f32::NAN; 70], |_| true), 0);
    }
}
