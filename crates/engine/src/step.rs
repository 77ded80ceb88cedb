//! A planned step: packed arrays that own everything, so that a runner on another thread can compute it while the
//! engine plans the next one.

use std::ops::Range;

use crate::EngineConfig;
use crate::drafts_to_make::DraftsToMake;
use crate::image::{Image, PromptImages};
use crate::image_plan::{ImageMove, ImageRows, ImageSlot, PositionShift};
use crate::plan::{BlockMove, PlannedSequence, StateCopy, StateMove, StateSave, StepPlan};
use crate::sequence::Sequence;
use crate::sequence_tokens::SequenceTokens;
use crate::table_rows::TableRows;
use inflight_base::{BlockId, BlockSize, Blocks, SeqSlot, SnapshotId, TokenId, Tokens};
use inflight_sampling::PlainSampling;

/// A planned step. It holds the tokens of its sequences until it goes back to the engine with its results, see
/// [`Engine::apply`](super::Engine::apply).
///
/// ```text
///                  |---- first model call ----|---- second ----|     a fused step has one call
/// sequences        | context, context, ...    | generation ... |
/// token_ids        |...                       |...             |     ranges are relative to the call
/// block_tables     one row for each sequence, for both calls
/// ```
#[must_use = "the engine waits for its steps"]
pub struct Step {
    moves: Vec<BlockMove>,
    state_moves: Vec<StateMove>,
    state_copies: Vec<StateCopy>,
    state_saves: Vec<StateSave>,
    image_moves: Vec<ImageMove>,
    image_rows: Vec<ImageRows>,
    position_shifts: Vec<PositionShift>,
    token_ids: Vec<TokenId>,
    sequences: Vec<PlannedSequence>,
    tables: TableRows,
    sequence_tokens: Vec<Option<Box<SequenceTokens>>>,
    /// How the tokens of sequences that are planned ahead are sampled, each with its index.
    sampling_ahead: Vec<(usize, PlainSampling)>,
    calls: Vec<Call>,
    /// Where the call begins that is being packed.
    open_call: Bounds,
    block_size: BlockSize,
    /// Groups of layers, each with a block at every place of a table.
    num_groups: u32,
    /// Whether a sequence may be in a step that is planned before this one has landed.
    plan_ahead: bool,
    micro_batch: usize,
    /// Beams that are not the first of their sequence.
    num_other_beams: usize,
}

/// The parts of a model call.
struct Call {
    sequences: Range<usize>,
    tokens: Range<usize>,
    state_saves: Range<usize>,
    image_rows: Range<usize>,
    position_shifts: Range<usize>,
    num_padding_tokens: Tokens,
}

/// A place in each of the arrays.
#[derive(Clone, Copy, Default)]
struct Bounds {
    sequences: usize,
    tokens: usize,
    state_saves: usize,
    image_rows: usize,
    position_shifts: usize,
}

impl Step {
    /// An empty step with room for all tokens and drafts of a step in which every sequence generates.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let max_rows = config.max_rows() as usize;
        let max_generation = config.max_sampled_rows().index();
        Self {
            moves: Vec::new(),
            state_moves: Vec::new(),
            state_copies: Vec::with_capacity(match config.max_beam_width {
                0..=1 => 0,
                _ => config.max_sequences() as usize,
            }),
            state_saves: Vec::with_capacity(if config.num_state_snapshots > 0 {
                max_rows
            } else {
                0
            }),
            image_moves: Vec::new(),
            image_rows: Vec::new(),
            position_shifts: Vec::new(),
            token_ids: Vec::with_capacity(max_generation),
            sequences: Vec::with_capacity(max_rows),
            tables: TableRows::new(config),
            sequence_tokens: Vec::with_capacity(max_rows),
            sampling_ahead: Vec::with_capacity(if config.plan_ahead { max_rows } else { 0 }),
            calls: Vec::with_capacity(2),
            open_call: Bounds::default(),
            block_size: config.block_size,
            num_groups: config.groups.num_groups() as u32,
            plan_ahead: config.plan_ahead,
            micro_batch: 0,
            num_other_beams: 0,
        }
    }

    /// The model calls, to be made one after the other. Empty if there is nothing to compute.
    pub fn plans(&self) -> impl ExactSizeIterator<Item = StepPlan<'_>> {
        // All moves come before the first call.
        let first = |call: &Call| call.sequences.start == 0;
        self.calls.iter().map(move |call| StepPlan {
            moves: if first(call) { &self.moves } else { &[] },
            state_moves: if first(call) { &self.state_moves } else { &[] },
            state_copies: if first(call) { &self.state_copies } else { &[] },
            state_saves: &self.state_saves[call.state_saves.clone()],
            image_moves: if first(call) { &self.image_moves } else { &[] },
            image_rows: &self.image_rows[call.image_rows.clone()],
            position_shifts: &self.position_shifts[call.position_shifts.clone()],
            token_ids: &self.token_ids[call.tokens.clone()],
            sequences: &self.sequences[call.sequences.clone()],
            block_tables: self.tables.blocks(),
            block_size: self.block_size,
            num_groups: self.num_groups as usize,
            num_padding_tokens: call.num_padding_tokens,
            sequence_tokens: &self.sequence_tokens[call.sequences.clone()],
            // Steps that are planned ahead have one call.
            sampling_ahead: &self.sampling_ahead,
        })
    }

    /// Block moves before anything is computed, by the first model call.
    pub fn moves(&self) -> &[BlockMove] {
        &self.moves
    }

    /// The drafts that the runner's draft model has to make before the first model call, in order.
    pub fn drafts_to_make(&self) -> impl Iterator<Item = DraftsToMake<'_>> {
        let sequences = self.sequences.iter().zip(&self.sequence_tokens);
        sequences.filter_map(|(planned, tokens)| {
            let start = planned.drafts_made_from?;
            let tokens = tokens.as_ref().expect("its tokens are known");
            Some(DraftsToMake::new(planned, start, tokens))
        })
    }

    /// All block tables, see [`StepPlan::block_tables`].
    pub fn block_tables(&self) -> &[BlockId] {
        self.tables.blocks()
    }

    /// Fills in these drafts, one after the other.
    ///
    /// # Panics
    /// If there are more or fewer of them.
    pub fn set_drafts(&mut self, mut drafts: &[TokenId]) {
        for call in &self.calls {
            for index in call.sequences.clone() {
                let planned = &self.sequences[index];
                if planned.drafts_made_from.is_none() {
                    continue;
                }
                let (own, rest) = drafts.split_at(planned.num_drafts as usize);
                drafts = rest;
                let end = call.tokens.start + planned.tokens.end as usize;
                self.token_ids[end - own.len()..end].copy_from_slice(own);
                let tokens = self.sequence_tokens[index].as_mut();
                tokens.expect("its tokens are known").set_drafts(own);
            }
        }
        assert!(drafts.is_empty(), "more drafts than the step has");
    }

    /// All planned sequences, contexts first; a sequence with several beams has one entry for each.
    pub fn sequences(&self) -> &[PlannedSequence] {
        &self.sequences
    }

    /// The number of sequences in the step, however many beams they have.
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

    /// The micro-batch that it belongs to.
    pub fn micro_batch(&self) -> usize {
        self.micro_batch
    }

    /// Makes it the empty step of a micro-batch.
    pub(super) fn begin(&mut self, micro_batch: usize) {
        debug_assert!(self.sequence_tokens.is_empty(), "the engine has them back");
        self.micro_batch = micro_batch;
        self.num_other_beams = 0;
        self.moves.clear();
        self.state_moves.clear();
        self.state_copies.clear();
        self.state_saves.clear();
        self.image_moves.clear();
        self.image_rows.clear();
        self.position_shifts.clear();
        self.token_ids.clear();
        self.sequences.clear();
        self.sampling_ahead.clear();
        self.calls.clear();
        self.open_call = Bounds::default();
    }

    /// Appends moves to be made before anything is computed.
    pub(super) fn push_moves(&mut self, moves: &[BlockMove]) {
        self.moves.extend_from_slice(moves);
    }

    /// Appends moves of states to be made before anything is computed.
    pub(super) fn push_state_moves(&mut self, moves: &[StateMove]) {
        self.state_moves.extend_from_slice(moves);
    }

    /// Appends snapshots of the states of the sequence that is appended next, each with the number of its tokens in the
    /// step that the snapshot sums up.
    pub(super) fn save_states(&mut self, saves: impl Iterator<Item = (Tokens, SnapshotId)>) {
        let first = (self.token_ids.len() - self.open_call.tokens) as u32;
        self.state_saves
            .extend(saves.map(|(num_tokens, snapshot)| StateSave {
                token: first + num_tokens.0 - 1,
                snapshot,
            }));
    }

    /// Appends what the runner does with images before anything is computed.
    pub(super) fn push_image_moves(&mut self, moves: &[ImageMove]) {
        self.image_moves.extend_from_slice(moves);
    }

    /// Appends the rows of images at the positions `chunk` of the context that is appended next, and its shift.
    pub(super) fn push_images(
        &mut self,
        images: &PromptImages,
        chunk: Range<Tokens>,
        slot_of: impl Fn(&Image) -> ImageSlot,
    ) {
        let first = (self.token_ids.len() - self.open_call.tokens) as u32;
        for span in images.within(chunk.clone()) {
            let start = span.position.max(chunk.start);
            let end = span.end().min(chunk.end);
            let in_call = |position: Tokens| first + (position - chunk.start).0;
            self.image_rows.push(ImageRows {
                tokens: in_call(start)..in_call(end),
                slot: slot_of(&span.image),
                first_row: (span.first_row + (start - span.position)).0,
            });
        }
        self.position_shifts.push(PositionShift {
            sequence: (self.sequences.len() - self.open_call.sequences) as u32,
            num_tokens: images.position_shift(chunk.start).0,
        });
    }

    /// Appends the next `len` tokens of the context in `slot`, of each of its beams, and takes its tokens along.
    ///
    /// ```text
    /// tokens of the sequence   |----- computed -----|---- chunk ----|---- later ----|
    ///                                               ^ start         ^ kv_len
    /// ```
    pub(super) fn push_context(&mut self, slot: SeqSlot, sequence: &mut Sequence, len: Tokens) {
        let start = sequence.computed();
        let end = start + len;
        let tokens = &sequence.tokens().as_slice()[start.index()..end.index()];
        self.token_ids.extend_from_slice(tokens);
        let num_places = end.blocks_ceil(self.block_size);
        let samples = end == sequence.len();
        self.push(slot, sequence, start..end, num_places, samples);
        if sequence.num_beams() > 1 {
            self.push_other_beams(sequence, start..end);
        }
    }

    /// Appends the last token of the sequence in `slot`, which generates, and takes its tokens along.
    #[inline]
    pub(super) fn push_generation(&mut self, slot: SeqSlot, sequence: &mut Sequence) {
        let start = sequence.computed();
        self.token_ids.push(sequence.last_token());
        // All that it holds: it has taken the last of them for this token.
        let num_places = sequence.blocks().len();
        let chunk = start..start + Tokens(1);
        self.push(slot, sequence, chunk.clone(), num_places, true);
        if sequence.has_beams() {
            self.push_other_beams(sequence, chunk);
        }
    }

    /// Appends the tokens in `chunk` of all beams but the first, whose were just appended.
    fn push_other_beams(&mut self, sequence: &mut Sequence, chunk: Range<Tokens>) {
        let first = self.sequences.last().expect("the first beam").clone();
        let num_blocks = chunk.end.blocks_ceil(self.block_size).0 * self.num_groups;
        let tables = &self.tables;
        let copies = sequence.take_state_copies();
        self.state_copies
            .extend(copies.map(|[source, target]| StateCopy {
                source: tables.state_row(first.slot, source),
                target: tables.state_row(first.slot, target),
            }));
        for (beam, (tokens, blocks, state)) in (1..).zip(sequence.take_tokens_of_other_beams()) {
            let start = (self.token_ids.len() - self.open_call.tokens) as u32;
            let chunk = &tokens.as_slice()[chunk.start.index()..chunk.end.index()];
            self.token_ids.extend_from_slice(chunk);
            let block_table = self.tables.put(first.slot, beam, blocks).start;
            self.sequences.push(PlannedSequence {
                beam,
                states: self.tables.state_row(first.slot, state),
                tokens: start..start + chunk.len() as u32,
                block_table: block_table..block_table + num_blocks,
                ..first.clone()
            });
            self.sequence_tokens.push(Some(tokens));
            self.num_other_beams += 1;
        }
    }

    /// Appends the last token of a sequence that may have drafts, and these after it.
    pub(super) fn push_drafted(&mut self, slot: SeqSlot, sequence: &mut Sequence) {
        let start = sequence.computed();
        let tokens = sequence.tokens();
        let num_drafts = tokens.num_drafts() as u32;
        let tokens = tokens.as_slice();
        let end = Tokens(tokens.len() as u32);
        self.token_ids.extend_from_slice(&tokens[start.index()..]);
        // It may hold more than it needs, from drafts that were rejected.
        let num_places = end.blocks_ceil(self.block_size);
        let made_from = sequence.drafts_made_from();
        let planned = self.push(slot, sequence, start..end, num_places, true);
        planned.num_drafts = num_drafts;
        planned.drafts_made_from = made_from.map(|it| it.0);
    }

    /// Appends the sequence in `slot`, which generates, with the token that the step before samples.
    pub(super) fn push_ahead(
        &mut self,
        slot: SeqSlot,
        sequence: &mut Sequence,
        sampling: PlainSampling,
    ) {
        let start = sequence.computed();
        self.token_ids.push(0);
        self.sampling_ahead.push((self.sequences.len(), sampling));
        let num_places = sequence.blocks().len();
        sequence.go_out();
        let chunk = start..start + Tokens(1);
        let planned = self.push_with(slot, sequence, None, chunk, num_places, true);
        planned.is_ahead = true;
    }

    /// Appends the sequence whose tokens at the positions in `chunk` were just appended, with its first `num_places`
    /// places.
    #[inline]
    fn push(
        &mut self,
        slot: SeqSlot,
        sequence: &mut Sequence,
        chunk: Range<Tokens>,
        num_places: Blocks,
        samples: bool,
    ) -> &mut PlannedSequence {
        let tokens = Some(sequence.take_tokens());
        self.push_with(slot, sequence, tokens, chunk, num_places, samples)
    }

    /// The same, with its tokens, which were moved out, if they are known.
    #[inline]
    fn push_with(
        &mut self,
        slot: SeqSlot,
        sequence: &mut Sequence,
        tokens: Option<Box<SequenceTokens>>,
        chunk: Range<Tokens>,
        num_places: Blocks,
        samples: bool,
    ) -> &mut PlannedSequence {
        if self.plan_ahead {
            sequence.advance_to(chunk.end);
        }
        self.sequence_tokens.push(tokens);
        let end_token = (self.token_ids.len() - self.open_call.tokens) as u32;
        let num_tokens = chunk.end - chunk.start;
        let block_table = self.tables.put(slot, 0, sequence.blocks()).start;
        self.sequences.push(PlannedSequence {
            id: sequence.id(),
            slot,
            beam: 0,
            states: self.tables.state_row(slot, sequence.state()),
            tokens: end_token - num_tokens.0..end_token,
            kv_len: chunk.end.0,
            block_table: block_table..block_table + num_places.0 * self.num_groups,
            samples,
            num_drafts: 0,
            drafts_made_from: None,
            is_ahead: false,
            adapter: sequence.adapter().cloned(),
        });
        self.sequences.last_mut().expect("just now")
    }

    /// Makes what was appended since the last call a model call, if there is anything.
    pub(super) fn end_call(&mut self, num_padding_tokens: Tokens) {
        let start = self.open_call;
        let end = Bounds {
            sequences: self.sequences.len(),
            tokens: self.token_ids.len(),
            state_saves: self.state_saves.len(),
            image_rows: self.image_rows.len(),
            position_shifts: self.position_shifts.len(),
        };
        if start.sequences < end.sequences {
            self.calls.push(Call {
                sequences: start.sequences..end.sequences,
                tokens: start.tokens..end.tokens,
                state_saves: start.state_saves..end.state_saves,
                image_rows: start.image_rows..end.image_rows,
                position_shifts: start.position_shifts..end.position_shifts,
                num_padding_tokens,
            });
            self.open_call = end;
        }
    }

    /// Forgets the sequences and the images of a step that has landed, whose adapters others may use now.
    pub(super) fn forget_sequences(&mut self) {
        self.sequences.clear();
        self.image_moves.clear();
    }

    /// The planned sequences, each with its tokens, to be taken back, unless it was planned ahead.
    pub(super) fn drain(
        &mut self,
    ) -> impl Iterator<Item = (&PlannedSequence, Option<Box<SequenceTokens>>)> {
        self.sequences.iter().zip(self.sequence_tokens.drain(..))
    }
}
