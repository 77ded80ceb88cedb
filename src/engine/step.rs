//! A step that was decided: packed arrays that own everything, so that a runner on another thread can
//! compute it while the engine plans the next one.

use std::ops::Range;

use crate::base::{BlockSize, Blocks, SeqSlot, TokenId, Tokens};
use crate::engine::EngineConfig;
use crate::engine::plan::{BlockCopy, Phase, PlannedSequence, StepPlan};
use crate::engine::sequence::{Sequence, SequenceText};
use crate::engine::table_rows::TableRows;

/// A step. It goes back to the engine with its results, see [`Engine::apply`](super::Engine::apply):
/// the tokens of its sequences are in it meanwhile.
///
/// ```text
///                  |---- first model call ----|---- second ----|     a fused step has one call
/// sequences        | context, context, ...    | generation ... |
/// token_ids        |...                       |...             |     start at its call's beginning
/// block_tables     a row for each sequence: of both calls
/// ```
#[must_use = "the engine waits for its steps"]
pub struct Step {
    copies: Vec<BlockCopy>,
    token_ids: Vec<TokenId>,
    positions: Vec<u32>,
    sequences: Vec<PlannedSequence>,
    tables: TableRows,
    #[expect(
        clippy::vec_box,
        reason = "a text moves in and out every step: as a pointer"
    )]
    texts: Vec<Box<SequenceText>>,
    calls: Vec<Call>,
    /// Where the call begins that is not made yet.
    open_call: Bounds,
    block_size: BlockSize,
    micro_batch: usize,
    /// Beams in it that are not the first of their request.
    num_other_beams: usize,
}

/// Where a model call's parts are.
struct Call {
    sequences: Range<usize>,
    tokens: Range<usize>,
    num_padding_tokens: Tokens,
}

/// A place in each of the arrays.
#[derive(Clone, Copy, Default)]
struct Bounds {
    sequences: usize,
    tokens: usize,
}

impl Step {
    /// An empty step with room for all that may generate at once: their last tokens, and the drafts of those.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let max_rows = config.max_rows() as usize;
        let max_generation = config.max_sampled_rows().index();
        Self {
            copies: Vec::new(),
            token_ids: Vec::with_capacity(max_generation),
            positions: Vec::with_capacity(max_generation),
            sequences: Vec::with_capacity(max_rows),
            tables: TableRows::new(config),
            texts: Vec::with_capacity(max_rows),
            calls: Vec::with_capacity(2),
            open_call: Bounds::default(),
            block_size: config.block_size,
            micro_batch: 0,
            num_other_beams: 0,
        }
    }

    /// The model calls, to be made one after the other. Empty if there is nothing to compute.
    pub fn plans(&self) -> impl ExactSizeIterator<Item = StepPlan<'_>> {
        self.calls.iter().map(|call| StepPlan {
            // All copies come first.
            copies: if call.sequences.start == 0 {
                &self.copies
            } else {
                &[]
            },
            token_ids: &self.token_ids[call.tokens.clone()],
            positions: &self.positions[call.tokens.clone()],
            sequences: &self.sequences[call.sequences.clone()],
            block_tables: self.tables.blocks(),
            block_size: self.block_size,
            num_padding_tokens: call.num_padding_tokens,
            texts: &self.texts[call.sequences.clone()],
        })
    }

    /// All sequences of the step, contexts first; of a request with beams there are several.
    pub fn sequences(&self) -> &[PlannedSequence] {
        &self.sequences
    }

    /// Requests that it computes something of.
    pub fn num_requests(&self) -> usize {
        self.sequences.len() - self.num_other_beams
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Tokens that the step computes, padding not included.
    pub fn num_tokens(&self) -> Tokens {
        Tokens(self.token_ids.len() as u32)
    }

    /// Which of the engine's micro-batches it is of.
    pub fn micro_batch(&self) -> usize {
        self.micro_batch
    }

    /// Makes it the empty step of a micro-batch.
    pub(super) fn begin(&mut self, micro_batch: usize) {
        debug_assert!(self.texts.is_empty(), "the engine has taken them back");
        self.micro_batch = micro_batch;
        self.num_other_beams = 0;
        self.copies.clear();
        self.token_ids.clear();
        self.positions.clear();
        self.sequences.clear();
        self.calls.clear();
        self.open_call = Bounds::default();
    }

    /// Appends what is to be copied before anything is computed.
    pub(super) fn copy(&mut self, copies: &[BlockCopy]) {
        self.copies.extend_from_slice(copies);
    }

    /// Appends the next `chunk` tokens of the context in `slot`, and takes its text along.
    ///
    /// ```text
    /// tokens of the sequence   |----- computed -----|---- chunk ----|---- later ----|
    ///                                               ^ start         ^ kv_len
    /// ```
    pub(super) fn push_context(&mut self, slot: SeqSlot, sequence: &mut Sequence, chunk: Tokens) {
        let start = sequence.computed;
        let end = start + chunk;
        let tokens = &sequence.tokens()[start.index()..end.index()];
        self.token_ids.extend_from_slice(tokens);
        self.positions.extend(start.0..end.0);
        let num_blocks = end.blocks_ceil(self.block_size);
        let samples = end == sequence.len();
        self.push(
            slot,
            sequence,
            Phase::Context,
            start..end,
            num_blocks,
            samples,
        );
    }

    /// Appends the last token of the sequence in `slot`, which generates, and takes its text along.
    pub(super) fn push_generation(&mut self, slot: SeqSlot, sequence: &mut Sequence) {
        let start = sequence.computed;
        self.token_ids.push(sequence.last_token);
        self.positions.push(start.0);
        // All that it has: it took the last of them for this token.
        let num_blocks = sequence.blocks.len();
        let chunk = start..start + Tokens(1);
        self.push(slot, sequence, Phase::Generation, chunk, num_blocks, true);
        if sequence.has_beams() {
            self.push_other_beams(sequence);
        }
    }

    /// Appends the last tokens of all beams but the first, which was appended just now.
    fn push_other_beams(&mut self, sequence: &mut Sequence) {
        let first = self.sequences.last().expect("the first beam").clone();
        let beams = sequence.details.beams.as_mut().into_iter();
        for (beam, (text, blocks)) in (1..).zip(beams.flat_map(|beams| beams.lend())) {
            let token = (self.token_ids.len() - self.open_call.tokens) as u32;
            self.token_ids.extend(text.tokens.last());
            self.positions.push(sequence.computed.0);
            self.sequences.push(PlannedSequence {
                beam,
                tokens: token..token + 1,
                block_table: self.tables.put(first.slot, beam, blocks),
                ..first.clone()
            });
            self.texts.push(text);
            self.num_other_beams += 1;
        }
    }

    /// The same of a sequence that may have drafts: appends them too.
    pub(super) fn push_drafted(&mut self, slot: SeqSlot, sequence: &mut Sequence) {
        let start = sequence.computed;
        let (tokens, num_drafts) = sequence.with_drafts();
        let chunk = &tokens[start.index()..];
        let end = Tokens(tokens.len() as u32);
        self.token_ids.extend_from_slice(chunk);
        self.positions.extend(start.0..end.0);
        // Drafts that were wrong may have left it more of them.
        let num_blocks = end.blocks_ceil(self.block_size);
        let planned = self.push(
            slot,
            sequence,
            Phase::Generation,
            start..end,
            num_blocks,
            true,
        );
        planned.num_drafts = num_drafts;
    }

    /// Appends the sequence of which the tokens at the positions in `chunk` were appended just now, with its
    /// first `num_blocks`.
    #[inline]
    fn push(
        &mut self,
        slot: SeqSlot,
        sequence: &mut Sequence,
        phase: Phase,
        chunk: Range<Tokens>,
        num_blocks: Blocks,
        samples: bool,
    ) -> &mut PlannedSequence {
        let text = sequence.text.take().expect("in one step at a time");
        self.texts.push(text);
        let end_token = (self.token_ids.len() - self.open_call.tokens) as u32;
        let num_tokens = chunk.end - chunk.start;
        let block_table = self.tables.put(slot, 0, &sequence.blocks).start;
        self.sequences.push(PlannedSequence {
            id: sequence.id,
            slot,
            beam: 0,
            phase,
            tokens: end_token - num_tokens.0..end_token,
            kv_len: chunk.end.0,
            block_table: block_table..block_table + num_blocks.0,
            samples,
            num_drafts: 0,
        });
        self.sequences.last_mut().expect("just now")
    }

    /// Makes what was pushed since the last time a model call, if there is anything.
    pub(super) fn end_call(&mut self, num_padding_tokens: Tokens) {
        let start = self.open_call;
        let end = Bounds {
            sequences: self.sequences.len(),
            tokens: self.token_ids.len(),
        };
        if start.sequences < end.sequences {
            self.calls.push(Call {
                sequences: start.sequences..end.sequences,
                tokens: start.tokens..end.tokens,
                num_padding_tokens,
            });
            self.open_call = end;
        }
    }

    /// The sequences, each with its text, to be taken back.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (&PlannedSequence, Box<SequenceText>)> {
        self.sequences.iter().zip(self.texts.drain(..))
    }
}
