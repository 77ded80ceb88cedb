//! The sequences that the engine holds.
//!
//! A sequence is tokens and a count of how many of them have their keys and values in the cache. A
//! step moves `computed` towards the end of the tokens; the phase follows from the two.
//!
//! ```text
//!             admit            last chunk             stop / length / cancel / error
//! waiting -----------> context ----------> generation -----------------------------> gone
//!                       |   ^                  |             (cancel / error: from any state)
//!                 pause |   | resume           | pause
//!                       v   |                  |       a pause gives the blocks back and sets
//!                       paused <---------------+       computed to 0; the tokens are kept
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::base::{Blocks, SeqSlot, SequenceId, TokenId, Tokens};
use crate::engine::beams::Beams;
use crate::engine::draft::Drafter;
use crate::engine::kv::BlockTable;
use crate::engine::{
    ExtraOutputs, KvBlocks, NewRequest, OutputOptions, Phase, ReuseOptions, Speculation,
};
use crate::sampling::{Endings, FinishReason, Owner, SamplingInput, SamplingParams, StopRule};

/// What a runner may look at while a step is out: the sequence's own tokens and options.
///
/// First comes what every new token needs, in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct SequenceText {
    /// Prompt and generated tokens, and the drafts of the step that is out.
    pub(super) tokens: Vec<TokenId>,
    /// How many of `tokens` are the prompt.
    num_prompt_tokens: usize,
    endings: Endings,
    pub(super) stop: StopRule,
    /// How many of `tokens` are drafts.
    pub(super) num_drafts: usize,
    sampling: Arc<SamplingParams>,
    /// What it wants to know besides its tokens.
    pub(super) outputs: OutputOptions,
    /// The number of prompt tokens whose logits have been returned.
    num_returned_logits: u32,
    /// Whose tokens they are.
    owner: Owner,
}

impl SequenceText {
    /// The positions in `start..end` whose context logits are wanted and have not been returned yet. If there
    /// are none, an empty range within them.
    pub(super) fn context_logits(&self, start: u32, end: u32) -> Range<u32> {
        let first = start.max(self.num_returned_logits);
        let last = end.min(self.num_prompt_tokens as u32);
        match self.outputs.context_logits && first < last {
            true => first..last,
            false => start..start,
        }
    }

    /// Records that the context logits of the tokens below `end` have been returned, if they are wanted.
    fn returned_logits_to(&mut self, end: Tokens) {
        if self.outputs.context_logits {
            let end = end.0.min(self.num_prompt_tokens as u32);
            self.num_returned_logits = self.num_returned_logits.max(end);
        }
    }

    /// How many tokens came after the prompt.
    pub(super) fn num_generated(&self) -> Tokens {
        Tokens((self.tokens.len() - self.num_prompt_tokens) as u32)
    }

    /// The same text, to go on in another way.
    pub(super) fn fork(&self) -> Self {
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        Self {
            tokens,
            sampling: self.sampling.clone(),
            ..*self
        }
    }

    /// What decides the next token besides the logits, when the first `num_accepted` drafts are tokens.
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

/// An admitted request.
///
/// ```text
/// tokens          |---------- prompt ----------|---- generated ----|
/// never paused    |---------- context ---------|
/// paused here     |---------- context -------------------|
/// in the cache    |------ computed ------|
/// ```
///
/// It is what a generation step looks at, and no more: one cache line. A step of hundreds of sequences takes
/// as long as it takes to fetch those.
#[repr(align(64))]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Its tokens; `None` while they are out with a step.
    pub(super) text: Option<Box<SequenceText>>,
    /// The last of them: here too, so that a step need not look for it in the text.
    pub(super) last_token: TokenId,
    /// How many of them were known when it started, or was paused last.
    context: Tokens,
    /// How many of them have their keys and values in the cache.
    pub(super) computed: Tokens,
    /// Where those are, with room for the rest of the context while it runs.
    pub(super) blocks: BlockTable,
    /// In whose steps it is.
    pub(super) micro_batch: u8,
    /// Why it has ended; set only while it waits for the rest of its lockstep batch.
    pub(super) ended: Option<FinishReason>,
    /// Whether it has one token a step and wants nothing else: no beams, no drafts, no extra outputs.
    pub(super) is_plain: bool,
    pub(super) details: Box<Details>,
}

const _: () = assert!(size_of::<Option<Sequence>>() == 64);

/// The rest of what is known of a sequence.
pub(super) struct Details {
    pub(super) rank: Rank,
    pub(super) num_prompt_tokens: Tokens,
    /// The most positions that it will ever have in the cache.
    pub(super) max_kv_len: Tokens,
    /// What it may share with others.
    pub(super) reuse: ReuseOptions,
    /// Blocks that it had before it was paused last.
    kv_before: KvBlocks,
    /// Of those that it has now, the ones that were found in the cache.
    num_reused: Blocks,
    /// What was told last of its blocks.
    kv_told: KvBlocks,
    /// Whether it wants to know anything besides its tokens.
    pub(super) has_extra_outputs: bool,
    /// `None` if nothing of it is ever drafted.
    drafter: Option<Box<Drafter>>,
    /// If it searches with several beams: all but the first, which is itself.
    pub(super) beams: Option<Box<Beams>>,
}

/// The order in which sequences get what there is: the smaller first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) priority: i32,
    /// Counts the sequences that started; it stays when one is paused.
    pub(super) start: u64,
}

impl Sequence {
    /// A sequence that has nothing in the cache yet. `blocks` has room for all it may ever need.
    pub(super) fn new(
        request: NewRequest,
        rank: Rank,
        blocks: BlockTable,
        speculation: Option<&Speculation>,
    ) -> Self {
        let drafter =
            speculation.and_then(|it| Drafter::new(it, request.drafts, &request.sampling));
        // Drafts are of one text.
        let drafter = drafter.filter(|_| request.sampling.beam_search.is_none());
        let num_prompt_tokens = request.prompt.len();
        // One piece of its own, because samplers, drafts and users' processors read it as one.
        let num_tokens = num_prompt_tokens + request.stop.max_new_tokens.index();
        let mut tokens = Vec::with_capacity(num_tokens);
        tokens.extend_from_slice(&request.prompt);
        let context = Tokens(num_prompt_tokens as u32);
        let search = request.sampling.beam_search;
        let stop_text = request.sampling.stop_text.as_ref();
        let beams = search.map(|search| Beams::new(search, request.stop.max_new_tokens, stop_text));
        Self {
            id: request.id,
            last_token: *tokens.last().expect("a prompt has a token"),
            text: Some(Box::new(SequenceText {
                tokens,
                num_prompt_tokens,
                endings: Endings::of(&request.sampling),
                stop: request.stop,
                num_drafts: 0,
                sampling: request.sampling,
                outputs: request.outputs,
                num_returned_logits: 0,
                owner: Owner {
                    sequence: request.id,
                    client: request.client_id,
                },
            })),
            context,
            computed: Tokens::ZERO,
            blocks,
            micro_batch: 0,
            ended: None,
            is_plain: beams.is_none() && drafter.is_none() && !request.outputs.any(),
            details: Box::new(Details {
                rank,
                num_prompt_tokens: context,
                max_kv_len: max_kv_len(context, &request.stop),
                reuse: request.reuse,
                kv_before: KvBlocks::default(),
                num_reused: Blocks::ZERO,
                kv_told: KvBlocks::default(),
                has_extra_outputs: request.outputs.any(),
                drafter: drafter.map(Box::new),
                beams: beams.map(Box::new),
            }),
        }
    }

    /// Whether it searches with several beams.
    #[inline]
    pub(super) fn has_beams(&self) -> bool {
        // What is plain says so without its details.
        !self.is_plain && self.details.beams.is_some()
    }

    /// How many texts it generates side by side.
    pub(super) fn num_beams(&self) -> usize {
        self.details.beams.as_ref().map_or(1, |beams| beams.len())
    }

    /// How many texts it may generate side by side.
    pub(super) fn width(&self) -> u32 {
        self.details.beams.as_ref().map_or(1, |beams| beams.width())
    }

    /// How many tokens there are, while no results of a step are being taken in: the context as long as it is
    /// not computed, and then one more than is computed.
    pub(super) fn len(&self) -> Tokens {
        match self.phase() {
            Phase::Context => self.context,
            Phase::Generation => self.computed + Tokens(1),
        }
    }

    /// The tokens, which must not be out with a step.
    pub(super) fn tokens(&self) -> &[TokenId] {
        &self.text.as_ref().expect("no step with it is out").tokens
    }

    /// What is left to compute of the tokens that there are.
    pub(super) fn rest(&self) -> Tokens {
        self.len() - self.computed
    }

    /// How far a step could compute it at most, with chunks of at most `max_chunk`.
    pub(super) fn next_end(&self, max_chunk: Tokens) -> Tokens {
        self.computed + self.rest().min(max_chunk)
    }

    /// Whether it computes in the steps of `micro_batch`.
    pub(super) fn runs_in(&self, micro_batch: usize) -> bool {
        usize::from(self.micro_batch) == micro_batch && self.ended.is_none()
    }

    pub(super) fn phase(&self) -> Phase {
        if self.computed < self.context {
            Phase::Context
        } else {
            Phase::Generation
        }
    }

    /// How many of its first tokens it may take over from the cache.
    pub(super) fn max_reused(&self) -> Tokens {
        let text = self.text.as_ref().expect("no step with it is out");
        text.outputs.max_reused(
            Tokens(text.num_returned_logits),
            self.details.num_prompt_tokens,
        )
    }

    /// Says that it has blocks, and that `num_reused` of them were found in the cache.
    pub(super) fn found(&mut self, num_reused: Blocks) {
        self.details.num_reused = num_reused;
    }

    /// Adds the counts of its blocks and drafts to its extra outputs, where they are wanted and have changed.
    pub(super) fn tell_news(&mut self, extra_outputs: &mut Option<Box<ExtraOutputs>>) {
        let text = self.text.as_mut().expect("its tokens are back");
        text.returned_logits_to(self.computed);
        let outputs = text.outputs;
        let kv_blocks = self.kv_news().filter(|_| outputs.kv_blocks);
        let drafts = self.details.drafter.as_mut().and_then(|it| it.news());
        let drafts = drafts.filter(|_| outputs.drafts);
        if kv_blocks.is_some() || drafts.is_some() {
            let extra_outputs = extra_outputs.get_or_insert_default();
            extra_outputs.kv_blocks = kv_blocks;
            extra_outputs.drafts = drafts;
        }
    }

    /// What is new of its blocks.
    fn kv_news(&mut self) -> Option<KvBlocks> {
        let kv = Some(self.kv_blocks()).filter(|&kv| kv != self.details.kv_told)?;
        self.details.kv_told = kv;
        Some(kv)
    }

    pub(super) fn kv_blocks(&self) -> KvBlocks {
        let KvBlocks {
            num_new,
            num_reused,
        } = self.details.kv_before;
        let of_beams = self
            .details
            .beams
            .as_ref()
            .and_then(|beams| beams.num_new());
        KvBlocks {
            num_new: num_new
                + of_beams.unwrap_or_else(|| self.blocks.len() - self.details.num_reused),
            num_reused: num_reused + self.details.num_reused,
        }
    }

    /// Tokens that it has generated; if it has searched, those of all that it has found.
    pub(super) fn num_output_tokens(&self) -> Tokens {
        match &self.details.beams {
            None => self
                .text
                .as_ref()
                .expect("its tokens are back")
                .num_generated(),
            Some(beams) => beams.num_output_tokens(),
        }
    }

    /// Forgets what is in the cache, before its blocks are given back: all tokens are context again.
    pub(super) fn rewind(&mut self) {
        self.details.kv_before = self.kv_blocks();
        self.details.num_reused = Blocks::ZERO;
        self.context = self.len();
        self.computed = Tokens::ZERO;
    }

    /// The tokens with the drafts after them, and how many those are.
    pub(super) fn with_drafts(&self) -> (&[TokenId], u32) {
        let text = self.text.as_ref().expect("no step with it is out");
        (&text.tokens, text.num_drafts as u32)
    }

    /// Whether it may have drafts.
    pub(super) fn is_drafted(&self) -> bool {
        !self.is_plain && self.details.drafter.is_some()
    }

    /// Puts up to `max` drafts behind its tokens, and returns how many.
    pub(super) fn draft(&mut self, max: usize) -> Tokens {
        let Some(drafter) = &mut self.details.drafter else {
            return Tokens::ZERO;
        };
        let text = self.text.as_mut().expect("no step with it is out");
        debug_assert_eq!(text.num_drafts, 0, "drafts are dropped with their step");
        text.num_drafts = drafter.append(
            &mut text.tokens,
            text.num_prompt_tokens,
            max,
            &text.sampling,
        );
        Tokens(text.num_drafts as u32)
    }

    /// Takes the drafts of a step away that has come back, of which the first `num_accepted` were right.
    pub(super) fn take_back_drafts(&mut self, num_accepted: usize) {
        let text = self.text.as_mut().expect("its tokens are back");
        let num_drafts = std::mem::take(&mut text.num_drafts);
        text.tokens.truncate(text.tokens.len() - num_drafts);
        if let Some(drafter) = &mut self.details.drafter {
            drafter.count(num_drafts, num_accepted);
        }
    }

    /// Takes in the next token, and says whether the sequence ends with it.
    #[inline]
    pub(super) fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        let text = self.text.as_mut().expect("its tokens are back");
        text.tokens.push(token);
        self.last_token = token;
        let num_generated = text.num_generated();
        if num_generated < text.stop.max_new_tokens && !text.endings.may_have(token) {
            return None;
        }
        text.stop.after(&text.sampling, token, num_generated)
    }
}

/// The most positions that a sequence ever has in the cache: all its tokens but the last, which ends
/// it and is never computed.
pub(super) fn max_kv_len(num_prompt_tokens: Tokens, stop: &StopRule) -> Tokens {
    num_prompt_tokens + stop.max_new_tokens - Tokens(1)
}

/// The admitted sequences, running and paused, by row. There are as many rows as sequences may run.
pub(super) struct SequenceTable {
    rows: Vec<Option<Sequence>>,
    free_rows: Vec<SeqSlot>,
    // Ordered, because a hash map's order would differ from run to run and rank to rank.
    by_id: BTreeMap<SequenceId, SeqSlot>,
}

impl SequenceTable {
    /// A table of `num_rows` free rows.
    pub(super) fn new(num_rows: u32) -> Self {
        Self {
            rows: (0..num_rows).map(|_| None).collect(),
            free_rows: (0..num_rows).rev().map(SeqSlot).collect(),
            by_id: BTreeMap::new(),
        }
    }

    /// Gives `sequence` a row. There must be one: see [`has_free_row`](Self::has_free_row).
    pub(super) fn insert(&mut self, sequence: Sequence) -> SeqSlot {
        let slot = self.free_rows.pop().expect("a free row was asked for");
        let before = self.by_id.insert(sequence.id, slot);
        assert!(before.is_none(), "request id {} is used twice", sequence.id);
        self.rows[slot.index()] = Some(sequence);
        slot
    }

    /// Takes the sequence out of its row.
    pub(super) fn remove(&mut self, slot: SeqSlot) -> Sequence {
        let sequence = self.rows[slot.index()].take().expect("the row is taken");
        if self.by_id.get(&sequence.id) == Some(&slot) {
            self.by_id.remove(&sequence.id);
        }
        self.free_rows.push(slot);
        sequence
    }

    /// Lets nobody find the sequence in `slot` by its id any more.
    pub(super) fn hide(&mut self, slot: SeqSlot) {
        let id = self[slot].id;
        self.by_id.remove(&id);
    }

    /// The row of a request, if it is admitted.
    pub(super) fn find(&self, id: SequenceId) -> Option<SeqSlot> {
        self.by_id.get(&id).copied()
    }

    /// Whether a sequence can be inserted.
    pub(super) fn has_free_row(&self) -> bool {
        !self.free_rows.is_empty()
    }

    /// The sequence in `slot`, if there is one.
    pub(super) fn get_mut(&mut self, slot: SeqSlot) -> Option<&mut Sequence> {
        self.rows[slot.index()].as_mut()
    }

    /// Whether there is a sequence in `slot`.
    pub(super) fn is_taken(&self, slot: SeqSlot) -> bool {
        self.rows[slot.index()].is_some()
    }

    /// All rows in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SeqSlot, &Sequence)> {
        let rows = self.rows.iter().enumerate();
        rows.filter_map(|(row, sequence)| Some((SeqSlot(row as u32), sequence.as_ref()?)))
    }
}

impl std::ops::Index<SeqSlot> for SequenceTable {
    type Output = Sequence;

    fn index(&self, slot: SeqSlot) -> &Sequence {
        self.rows[slot.index()].as_ref().expect("the row is taken")
    }
}

impl std::ops::IndexMut<SeqSlot> for SequenceTable {
    fn index_mut(&mut self, slot: SeqSlot) -> &mut Sequence {
        self.rows[slot.index()].as_mut().expect("the row is taken")
    }
}
