//! A step's decision as plain data: the only contract between engine and runner.
//!
//! What the engine decides is a [`Step`](super::Step), which owns all that a runner needs and can be
//! given to another thread; what a runner sees of it is a [`StepPlan`] for each model call.

use std::ops::Range;

use crate::base::{BlockId, BlockSize, SeqSlot, SequenceId, TokenId, Tokens};
use crate::engine::OutputOptions;
use crate::engine::sequence::SequenceText;
use crate::sampling::SamplingInput;

/// What a sequence does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tokens known beforehand are computed: the prompt, or all tokens again after a pause.
    Context,
    /// The one token that was sampled last is computed, and the drafts after it.
    Generation,
}

/// One sequence's share of a step, or one beam's.
///
/// ```text
/// tokens of the sequence   |----- computed -----|---- chunk ----|---- later ----|
/// KV after the step        |------------- kv_len ---------------|
/// packed arrays                                 |    tokens     |
///
/// with drafts              |----- computed -----| last | drafts |
/// rows that sample                              |   1 + drafts  |
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Its id.
    pub id: SequenceId,
    /// Its row, stable from admission to the end: a runner may keep per-row state.
    pub slot: SeqSlot,
    /// Which of its beams; 0 unless it searches with several. They follow one another.
    pub beam: u32,
    /// Context or generation.
    pub phase: Phase,
    /// Where its chunk lies in `token_ids` and `positions`.
    pub tokens: Range<u32>,
    /// Positions in the KV cache after the step: computed before + chunk.
    pub kv_len: u32,
    /// Where its block table lies in `block_tables`: enough blocks for `kv_len` positions.
    pub block_table: Range<u32>,
    /// Whether the chunk ends with the last known token and the drafts after it, so that its logits give
    /// the next one.
    pub samples: bool,
    /// How many tokens at the end of the chunk are drafts. The logits of the last known token and those
    /// of each draft choose a token, in order, as long as the draft is the one that was chosen before.
    pub num_drafts: u32,
}

/// Keys and values that a sequence takes over from a block of which it only shares the beginning.
///
/// ```text
/// source   | shared | others |        target   | shared | own, later |
///          |--------|             ---->        |--------|
///          num_positions
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Where they are.
    pub source: BlockId,
    /// Where they go: a block that only this sequence holds.
    pub target: BlockId,
    /// How many positions, from the block's first; not zero.
    pub num_positions: u32,
}

/// One model call of a step: which tokens of which sequences to compute, and where their keys and
/// values go.
///
/// Sequences in context phase come before those in generation phase; tokens are packed, no padding.
#[derive(Clone, Copy)]
pub struct StepPlan<'a> {
    /// To be done one after the other before anything is computed: a later one may overwrite what an
    /// earlier one has read.
    pub copies: &'a [BlockCopy],
    /// The packed tokens, `[num_tokens]`.
    pub token_ids: &'a [TokenId],
    /// Each token's position in its sequence, `[num_tokens]`.
    pub positions: &'a [u32],
    /// The sequences in the order of their tokens.
    pub sequences: &'a [PlannedSequence],
    /// Block tables, each where its sequence says. They stay where they are from step to step, and what lies
    /// between them means nothing. [`BlockId::NONE`] stands for a block that was given back because it
    /// is outside of every layer's attention window: nothing reads it.
    pub block_tables: &'a [BlockId],
    /// Positions per block.
    pub block_size: BlockSize,
    /// Tokens that a model call in lockstep (V1) computes besides, for nothing: it is a rectangle, as
    /// wide as its longest member. They are not in `token_ids`; a cost model counts them.
    pub num_padding_tokens: Tokens,
    /// What the sequences may show of themselves.
    pub(super) texts: &'a [Box<SequenceText>],
}

impl<'a> StepPlan<'a> {
    /// The blocks of `sequence`, in order of position.
    pub fn block_table(&self, sequence: &PlannedSequence) -> &'a [BlockId] {
        &self.block_tables[sequence.block_table.start as usize..sequence.block_table.end as usize]
    }

    /// The tokens of `sequence` in this step.
    pub fn chunk(&self, sequence: &PlannedSequence) -> &'a [TokenId] {
        &self.token_ids[sequence.tokens.start as usize..sequence.tokens.end as usize]
    }

    /// The extra outputs that the sequence at `index` wants.
    pub fn outputs(&self, index: usize) -> OutputOptions {
        self.texts[index].outputs
    }

    /// The prompt tokens in this chunk of the sequence at `index` whose logits are wanted and have not been
    /// returned yet, as a range of `token_ids`. Empty if there are none.
    pub fn context_logits(&self, index: usize) -> Range<u32> {
        let (planned, text) = (&self.sequences[index], &self.texts[index]);
        let chunk_start = planned.kv_len - planned.tokens.len() as u32;
        let rows = text.context_logits(chunk_start, planned.kv_len);
        let in_call = |position: u32| planned.tokens.start + (position - chunk_start);
        in_call(rows.start)..in_call(rows.end)
    }

    /// How many candidates the sequence at `index` wants to be named in the place of its next token;
    /// `None` if it searches with no beams.
    pub fn num_candidates(&self, index: usize) -> Option<usize> {
        let params = self.sampling_input(index).params;
        let search = params.beam_search.as_ref()?;
        Some(params.num_candidates(search))
    }

    /// What decides the next token of the sequence at `index`: its options and its tokens so far.
    pub fn sampling_input(&self, index: usize) -> SamplingInput<'a> {
        self.sampling_input_after(index, 0)
    }

    /// The same when the first `num_accepted` of its drafts are tokens.
    pub fn sampling_input_after(&self, index: usize, num_accepted: usize) -> SamplingInput<'a> {
        SamplingInput {
            beam: self.sequences[index].beam,
            ..self.texts[index].sampling_input(num_accepted)
        }
    }

    /// The drafts of `sequence` in this step.
    pub fn drafts(&self, sequence: &PlannedSequence) -> &'a [TokenId] {
        let chunk = self.chunk(sequence);
        &chunk[chunk.len() - sequence.num_drafts as usize..]
    }
}
