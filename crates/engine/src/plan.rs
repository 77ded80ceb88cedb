//! A step's plan as plain data: the only contract between engine and runner.
//!
//! The engine plans a [`Step`](super::Step), which owns all that a runner needs and can go to another thread. A
//! runner sees of it a [`StepPlan`] for each model call.

use std::ops::Range;

use crate::image_plan::{ImageMove, ImageRows, PositionShift};
use crate::sequence_tokens::SequenceTokens;
use crate::{Adapter, OutputOptions};
use inflight_base::{
    BlockId, BlockSize, HostBlockId, HostSnapshotId, SeqSlot, SequenceId, SnapshotId, StateRow,
    TokenId, Tokens,
};
use inflight_sampling::{PlainSampling, SamplingInput};

/// The part of a step that belongs to one sequence, or to one of its beams.
///
/// ```text
/// tokens of the sequence   |----- computed -----|---- chunk ----|---- later ----|
/// KV after the step        |------------- kv_len ---------------|
/// packed arrays                                 |    tokens     |
///
/// with drafts              |----- computed -----| last | drafts |
/// sampled rows                                  |   1 + drafts  |
/// ```
///
/// A position in the sequence is `kv_len - tokens.len()` for the first token of the chunk, and so on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedSequence {
    /// The sequence.
    pub id: SequenceId,
    /// Its row, from admission to the end: a runner may keep state by row.
    pub slot: SeqSlot,
    /// The beam; 0 without beam search. The beams of a sequence follow one another.
    pub beam: u32,
    /// The row of its recurrent states: `max_beam_width` for each slot, in any order among its beams.
    pub states: StateRow,
    /// The chunk, as a range of `token_ids`.
    pub tokens: Range<u32>,
    /// Positions in the KV cache after the step: computed before, and the chunk.
    pub kv_len: u32,
    /// Its block table, as a range of `block_tables`: enough blocks for `kv_len` positions, in order of position, and
    /// at each place a block for each group of layers.
    pub block_table: Range<u32>,
    /// Whether the chunk ends with the last token (and the drafts after it), so that its logits give the next one.
    pub samples: bool,
    /// Number of tokens at the end of the chunk that are drafts. The rows of the last token and of the drafts are
    /// sampled in order, as long as the draft is the token that was sampled before it.
    pub num_drafts: u32,
    /// If the runner's draft model makes them: how many positions of the sequence that has computed, or may have. 0 is
    /// in their place in `token_ids` until then, see [`Step::drafts_to_make`](super::Step::drafts_to_make).
    pub drafts_made_from: Option<u32>,
    /// Whether its only token is the one that the step before this one samples for the sequence in `slot`, so that
    /// `token_ids` does not have it: 0 is in its place.
    pub is_ahead: bool,
    /// The adapter that it is computed with.
    pub adapter: Option<Adapter>,
}

/// Keys and values to be copied to a block of one sequence from a block of which it shares only the beginning.
///
/// ```text
/// source   | shared | others |        target   | shared | own, later |
///          |--------|             ---->        |--------|
///          num_positions
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to copy from.
    pub source: BlockId,
    /// The block to copy to, which only this sequence holds.
    pub target: BlockId,
    /// The number of positions, from the first of the block; not zero.
    pub num_positions: u32,
}

/// Keys and values to be moved before a step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMove {
    /// The beginning of a block, from block to block.
    Copy(BlockCopy),
    /// A whole block, to host memory, because another content takes its place.
    Offload {
        /// The block to copy from.
        source: BlockId,
        /// The host block to copy to.
        target: HostBlockId,
    },
    /// A whole block, from host memory, because a sequence begins with its tokens.
    Onboard {
        /// The host block to copy from.
        source: HostBlockId,
        /// The block to copy to.
        target: BlockId,
    },
}

/// Recurrent states to be copied from a snapshot to a sequence before a step is computed: it begins behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRestore {
    /// The snapshot to copy from.
    pub snapshot: StateSnapshot,
    /// The row of the states of the sequence, or of its first beam.
    pub row: StateRow,
    /// The tokens that the states sum up.
    pub num_tokens: Tokens,
}

/// A snapshot of recurrent states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSnapshot {
    /// On the device.
    Device(SnapshotId),
    /// In host memory.
    Host(HostSnapshotId),
}

/// Recurrent states to be moved before a step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMove {
    /// A snapshot, to a sequence.
    Restore(StateRestore),
    /// A snapshot, to host memory, because another one takes its place.
    Offload {
        /// The snapshot to copy from.
        source: SnapshotId,
        /// The snapshot in host memory to copy to.
        target: HostSnapshotId,
    },
    /// A snapshot, from host memory, because a sequence begins with it.
    Onboard {
        /// The snapshot in host memory to copy from.
        source: HostSnapshotId,
        /// The snapshot to copy to.
        target: SnapshotId,
    },
}

/// Recurrent states of a beam to be copied to another one of its sequence before a step is computed: both go on from
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// The row to copy from.
    pub source: StateRow,
    /// The row to copy to.
    pub target: StateRow,
}

/// Recurrent states of a sequence to be copied to a snapshot while a step is computed, behind one of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSave {
    /// The last token that the states sum up, as an index into `token_ids`.
    pub token: u32,
    /// The snapshot to copy to.
    pub snapshot: SnapshotId,
}

/// One model call of a step: the tokens to compute, and where their keys and values go.
///
/// Sequences in context phase come before those in generation phase. Tokens are packed, without padding.
#[derive(Clone, Copy)]
pub struct StepPlan<'a> {
    /// Moves to be made one after the other before anything is computed: a later one may overwrite what an earlier one
    /// has read, and read what it has written.
    pub moves: &'a [BlockMove],
    /// Moves of states to be made one after the other before any state is saved: a later one may overwrite what an
    /// earlier one has read.
    pub state_moves: &'a [StateMove],
    /// States to be copied from beam to beam, after that. No target is a source.
    pub state_copies: &'a [StateCopy],
    /// States to be saved, in order of their tokens.
    pub state_saves: &'a [StateSave],
    /// Changes of the rows of images, to be made one after the other before anything is computed.
    pub image_moves: &'a [ImageMove],
    /// The tokens whose embeddings are rows of images, in order.
    pub image_rows: &'a [ImageRows],
    /// The shift of each context, in order, for all of its beams. Empty if prompts have no images.
    pub position_shifts: &'a [PositionShift],
    /// The packed tokens, `[num_tokens]`.
    pub token_ids: &'a [TokenId],
    /// The sequences, in the order of their tokens.
    pub sequences: &'a [PlannedSequence],
    /// All block tables. They stay at their places from step to step, and the entries between them are undefined.
    /// [`BlockId::NONE`] stands for a block that was freed because it is outside of the attention window of all layers
    /// of its group: it is never read.
    pub block_tables: &'a [BlockId],
    /// Groups of layers, each with a block at every place of a table.
    pub num_groups: usize,
    /// Positions per block.
    pub block_size: BlockSize,
    /// Padding tokens that a model call in lockstep (V1) computes in addition: it is a rectangle, as wide as its
    /// longest sequence. They are not in `token_ids`; cost models count them.
    pub num_padding_tokens: Tokens,
    /// The tokens of each sequence; `None` if it is planned ahead.
    pub(super) sequence_tokens: &'a [Option<Box<SequenceTokens>>],
    /// How the tokens of sequences that are planned ahead are sampled, each with its index.
    pub(super) sampling_ahead: &'a [(usize, PlainSampling)],
}

impl<'a> StepPlan<'a> {
    /// The blocks of `sequence`, in order of position, and at each place in order of group.
    pub fn block_table(&self, sequence: &PlannedSequence) -> &'a [BlockId] {
        &self.block_tables[sequence.block_table.start as usize..sequence.block_table.end as usize]
    }

    /// The tokens of `sequence` in this step.
    pub fn chunk(&self, sequence: &PlannedSequence) -> &'a [TokenId] {
        &self.token_ids[sequence.tokens.start as usize..sequence.tokens.end as usize]
    }

    /// Where the second text of the sequence at `index` begins, in a prompt of two.
    pub fn second_text(&self, index: usize) -> Option<Tokens> {
        self.sequence_tokens[index].as_ref()?.second_text()
    }

    /// The extra outputs requested for the sequence at `index`.
    pub fn outputs(&self, index: usize) -> OutputOptions {
        let tokens = self.sequence_tokens[index].as_ref();
        tokens.map_or_else(OutputOptions::default, |tokens| tokens.outputs())
    }

    /// The prompt tokens in this chunk of the sequence at `index` whose logits are needed for extra outputs that have
    /// not been returned yet, as a range of `token_ids`. Empty if there are none.
    pub fn context_logits(&self, index: usize) -> Range<u32> {
        let planned = &self.sequences[index];
        let Some(tokens) = &self.sequence_tokens[index] else {
            return planned.tokens.start..planned.tokens.start;
        };
        let chunk_start = planned.kv_len - planned.tokens.len() as u32;
        let rows = tokens.context_logits(chunk_start, planned.kv_len);
        let in_call = |position: u32| planned.tokens.start + (position - chunk_start);
        in_call(rows.start)..in_call(rows.end)
    }

    /// The targets of [`StepPlan::context_logits`]: for each row the next token of the prompt, none for the prompt's
    /// last token. Empty unless prompt log-probabilities are requested.
    pub fn prompt_after(&self, index: usize) -> &'a [TokenId] {
        let planned = &self.sequences[index];
        match &self.sequence_tokens[index] {
            Some(tokens) if tokens.outputs().prompt_log_probs.is_some() => {
                let chunk_start = planned.kv_len - planned.tokens.len() as u32;
                tokens.prompt_after(tokens.context_logits(chunk_start, planned.kv_len))
            }
            _ => &[],
        }
    }

    /// How many candidates the sequence at `index` needs instead of a token; `None` without beam search.
    pub fn num_candidates(&self, index: usize) -> Option<usize> {
        if self.sequences[index].is_ahead {
            return None;
        }
        let params = self.sampling_input(index).params;
        let search = params.beam_search.as_ref()?;
        Some(params.num_candidates(search))
    }

    /// What, apart from the logits, determines the next token of the sequence at `index`: its options and its tokens.
    ///
    /// # Panics
    /// If the sequence is planned ahead. The same holds for `sampling_input_after`.
    pub fn sampling_input(&self, index: usize) -> SamplingInput<'a> {
        self.sampling_input_after(index, 0)
    }

    /// The same, if the first `num_accepted` of its drafts are accepted.
    pub fn sampling_input_after(&self, index: usize, num_accepted: usize) -> SamplingInput<'a> {
        let tokens = self.sequence_tokens[index].as_ref();
        let tokens = tokens.expect("its tokens are known");
        SamplingInput {
            beam: self.sequences[index].beam,
            ..tokens.sampling_input(num_accepted)
        }
    }

    /// How the next token of the sequence at `index` is sampled, if it is planned ahead.
    pub fn sampling_ahead(&self, index: usize) -> Option<PlainSampling> {
        let ahead = self.sampling_ahead;
        let place = ahead.binary_search_by_key(&index, |(owner, _)| *owner);
        place.ok().map(|place| ahead[place].1)
    }

    /// The drafts of `sequence` in this step.
    pub fn drafts(&self, sequence: &PlannedSequence) -> &'a [TokenId] {
        let chunk = self.chunk(sequence);
        &chunk[chunk.len() - sequence.num_drafts as usize..]
    }
}
