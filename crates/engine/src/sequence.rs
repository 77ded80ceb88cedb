//! An admitted sequence.
//!
//! A sequence is tokens and the number of them that are computed: whose keys and values are in the cache. A
//! step moves `computed` towards the end of the tokens. The phase follows from the two.
//!
//! ```text
//!             admit            last chunk             stop / length / cancel / error
//! waiting -----------> context ----------> generation -----------------------------> gone
//!                       |   ^                  |             (cancel / error: from any state)
//!                 pause |   | resume           | pause
//!                       v   |                  |       a pause gives the blocks back and sets
//!                       paused <---------------+       computed to 0; the tokens are kept
//! ```
//!
//! With beams, `computed` counts the tokens of each. After a pause the context is the tokens of all beams: first what
//! they have in common, computed by one, and then the rest of each (`beams.rs`).

use std::sync::Arc;

use crate::beam::Beam;
use crate::beams::Beams;
use crate::draft::{DraftRoom, Drafter};
use crate::draft_prices::DraftPrices;
use crate::kv::{BlockTable, KvCacheManager};
use crate::model_drafts::ModelDrafts;
use crate::sequence_tokens::SequenceTokens;
use crate::{
    Adapter, BeamCandidates, Event, ExtraOutputs, KvBlocks, NewRequest, ReuseOptions, Sampled,
    Speculation,
};
use inflight_base::{Blocks, SequenceId, SnapshotId, StateRow, TokenId, Tokens};
use inflight_sampling::{FinishReason, Hypothesis, PlainSampling, SamplingParams};

/// An admitted sequence, running or paused.
///
/// ```text
/// tokens          |---------- prompt ----------|---- generated ----|
/// never paused    |---------- context ---------|
/// paused here     |---------- context -------------------|
/// in the cache    |------ computed ------|
/// ```
///
/// It holds what a generation step reads, in one cache line: a step of hundreds of sequences takes as long as it
/// takes to fetch these. The rest is in [`Details`].
#[repr(align(64))]
pub(super) struct Sequence {
    id: SequenceId,
    /// Its text; the first one, if it searches with several beams.
    first: Beam,
    /// The last token. A copy, so that a step need not fetch the tokens.
    last_token: TokenId,
    /// The number of tokens when it was admitted, or paused last.
    context: Tokens,
    /// The number of tokens whose keys and values are in the cache. Where steps are planned ahead, those that a step
    /// which is out computes are counted already.
    computed: Tokens,
    micro_batch: MicroBatch,
    /// The steps that it is in and that have not been applied.
    num_out: u8,
    /// Why it has ended; set only while it waits for the rest of its lockstep batch.
    ended: Option<FinishReason>,
    /// Whether each step yields one token and nothing else: no beams, no drafts, no extra outputs; and it has not
    /// missed its next one.
    is_plain: bool,
    details: Box<Details>,
}

const _: () = assert!(size_of::<Option<Sequence>>() == 64);

/// The micro-batch of a sequence, and whether the sequence has an adapter: in one byte, for the cache line has no
/// other.
#[derive(Clone, Copy)]
struct MicroBatch(u8);

impl MicroBatch {
    const ADAPTER: u8 = 1 << 7;

    fn new(has_adapter: bool) -> Self {
        Self(if has_adapter { Self::ADAPTER } else { 0 })
    }

    #[inline]
    fn has_adapter(self) -> bool {
        self.0 & Self::ADAPTER != 0
    }

    #[inline]
    fn index(self) -> usize {
        usize::from(self.0 & !Self::ADAPTER)
    }

    fn set(&mut self, index: usize) {
        let index = u8::try_from(index).expect("there are two at most");
        self.0 = self.0 & Self::ADAPTER | index;
    }
}

/// The fields that a generation step does not read.
struct Details {
    rank: Rank,
    num_prompt_tokens: Tokens,
    max_kv_len: Tokens,
    adapter: Option<Adapter>,
    reuse: ReuseOptions,
    /// Blocks that it had used when it was paused last.
    kv_before: KvBlocks,
    /// Blocks that it found in the cache since.
    num_reused: Blocks,
    /// The last count of blocks that was reported.
    kv_reported: KvBlocks,
    has_extra_outputs: bool,
    /// Whether its last result was [`Sampled::Missed`].
    has_missed: bool,
    sampling: Arc<SamplingParams>,
    /// `None` if it is never drafted.
    drafter: Option<Box<Drafter>>,
    /// `None` without beam search.
    beams: Option<Box<Beams>>,
}

/// The beams that a sequence has once its context is computed; one without beam search.
#[derive(Clone, Copy, Debug)]
pub(super) struct BeamsToCome {
    pub(super) num_beams: u32,
    /// The tokens that all have in common, to be computed once.
    pub(super) num_common: Tokens,
    /// The tokens of each.
    pub(super) len: Tokens,
}

impl BeamsToCome {
    /// The beams, at most `width`, that go on from a context of `len` tokens.
    pub(super) fn of_context(width: u32, len: Tokens, max_kv_len: Tokens) -> Self {
        let num_own = Tokens(u32::from(width > 1));
        Self {
            num_beams: width,
            num_common: len,
            len: (len + num_own).min(max_kv_len),
        }
    }
}

/// The order in which sequences get blocks and tokens: the smaller first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) priority: i32,
    /// Counts admitted sequences. A sequence keeps its number when it is paused.
    pub(super) start: u64,
}

impl Sequence {
    /// A sequence that holds no blocks yet. `blocks` has room for all that it will ever need.
    pub(super) fn new(
        request: NewRequest,
        rank: Rank,
        blocks: BlockTable,
        speculation: Option<&Speculation>,
    ) -> Self {
        let tokens = SequenceTokens::new(&request);
        let search = request.sampling.beam_search;
        let stop_text = request.sampling.stop_text.as_ref();
        let beams = search.map(|search| Beams::new(search, request.stop.max_new_tokens, stop_text));
        let num_prompt_tokens = request.num_prompt_tokens();
        let max_kv_len = request.max_kv_len();
        // Beams are never drafted.
        let drafter = speculation.filter(|_| beams.is_none());
        let drafter = drafter.and_then(|it| Drafter::new(it, request.drafts, &request.sampling));
        let has_extra_outputs = request.outputs.any();
        Self {
            id: request.id,
            last_token: tokens.last(),
            first: Beam::new(tokens, blocks),
            context: num_prompt_tokens,
            computed: Tokens::ZERO,
            micro_batch: MicroBatch::new(request.adapter.is_some()),
            num_out: 0,
            ended: None,
            is_plain: beams.is_none() && drafter.is_none() && !has_extra_outputs,
            details: Box::new(Details {
                rank,
                num_prompt_tokens,
                max_kv_len,
                adapter: request.adapter,
                reuse: request.reuse,
                kv_before: KvBlocks::default(),
                num_reused: Blocks::ZERO,
                kv_reported: KvBlocks::default(),
                has_extra_outputs,
                has_missed: false,
                sampling: request.sampling,
                drafter: drafter.map(Box::new),
                beams: beams.map(Box::new),
            }),
        }
    }

    #[inline]
    pub(super) fn id(&self) -> SequenceId {
        self.id
    }

    pub(super) fn rank(&self) -> Rank {
        self.details.rank
    }

    pub(super) fn num_prompt_tokens(&self) -> Tokens {
        self.details.num_prompt_tokens
    }

    /// The most positions that it will ever have in the cache.
    pub(super) fn max_kv_len(&self) -> Tokens {
        self.details.max_kv_len
    }

    /// Which blocks it shares with other sequences.
    pub(super) fn reuse(&self) -> &ReuseOptions {
        &self.details.reuse
    }

    /// The adapter that it is computed with.
    #[inline]
    pub(super) fn adapter(&self) -> Option<&Adapter> {
        match self.micro_batch.has_adapter() {
            true => self.details.adapter.as_ref(),
            false => None,
        }
    }

    /// Whether each step yields one token and nothing else: no beams, no drafts, no extra outputs.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Whether a step that has not been applied has it.
    #[inline]
    pub(super) fn is_out(&self) -> bool {
        self.num_out > 0
    }

    /// Whether the step that it is in is its last one, whatever that samples.
    pub(super) fn is_in_last_step(&self) -> bool {
        self.is_out() && self.computed >= self.max_kv_len()
    }

    /// How its token is sampled in a step that is planned while it is in another one, from which it goes on; `None` if
    /// its next token has to be known for that.
    pub(super) fn sampling_ahead(&self) -> Option<PlainSampling> {
        if !self.is_plain || self.is_in_context() {
            return None;
        }
        let num_generated = self.len() - self.num_prompt_tokens();
        PlainSampling::without_tokens(&self.details.sampling, num_generated.index())
    }

    /// Whether its last result was [`Sampled::Missed`]: results of steps that were planned before that was known do not
    /// count.
    pub(super) fn has_missed(&self) -> bool {
        self.details.has_missed
    }

    /// Its tokens. No step may have them.
    pub(super) fn tokens(&self) -> &SequenceTokens {
        self.first.tokens()
    }

    /// Its last token.
    #[inline]
    pub(super) fn last_token(&self) -> TokenId {
        self.last_token
    }

    /// The number of tokens whose keys and values are in the cache.
    #[inline]
    pub(super) fn computed(&self) -> Tokens {
        self.computed
    }

    /// The block table of its text, or of its first beam.
    #[inline]
    pub(super) fn blocks(&self) -> &BlockTable {
        self.first.blocks()
    }

    /// The block tables of all its beams.
    pub(super) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        let beams = self.details.beams.iter();
        let others = beams.flat_map(|beams| beams.other_tables());
        std::iter::once(self.first.blocks()).chain(others)
    }

    /// Whether its context is not computed yet.
    #[inline]
    pub(super) fn is_in_context(&self) -> bool {
        self.computed < self.context
    }

    /// The number of tokens between two steps: the context's until it is computed, and then one more than are computed.
    #[inline]
    pub(super) fn len(&self) -> Tokens {
        match self.is_in_context() {
            true => self.context,
            false => self.computed + Tokens(1),
        }
    }

    /// How far it is computed by as many beams as by its next step: to where its beams part, or to its end.
    #[inline]
    fn end_of_stretch(&self) -> Tokens {
        let num_common = self.beams().and_then(Beams::num_common);
        num_common.unwrap_or_else(|| self.len())
    }

    /// The tokens up to there, as prefix reuse compares them.
    pub(super) fn stretch(&self) -> &[TokenId] {
        &self.tokens().keys()[..self.end_of_stretch().index()]
    }

    /// The number of tokens up to there that are not computed.
    #[inline]
    pub(super) fn num_uncomputed(&self) -> Tokens {
        self.end_of_stretch() - self.computed
    }

    /// How far the next step computes it at most, with chunks of at most `max_chunk`.
    #[inline]
    pub(super) fn next_end(&self, max_chunk: Tokens) -> Tokens {
        self.computed + self.num_uncomputed().min(max_chunk)
    }

    /// Its micro-batch.
    #[inline]
    pub(super) fn micro_batch(&self) -> usize {
        self.micro_batch.index()
    }

    /// Whether it takes part in the steps of `micro_batch`.
    #[inline]
    pub(super) fn runs_in(&self, micro_batch: usize) -> bool {
        self.micro_batch() == micro_batch && self.ended.is_none() && !self.is_in_last_step()
    }

    /// Why it has ended, if it waits for the rest of its lockstep batch.
    #[inline]
    pub(super) fn ended(&self) -> Option<FinishReason> {
        self.ended
    }

    /// Ends it, to wait for the rest of its lockstep batch. The first reason holds.
    pub(super) fn end_in_batch(&mut self, reason: FinishReason) {
        self.ended.get_or_insert(reason);
    }

    /// Admits or resumes it, with its first recurrent states in this row: takes the blocks of its context, and shares
    /// those that are found in the cache.
    pub(super) fn start(&mut self, states: StateRow, micro_batch: usize, kv: &mut KvCacheManager) {
        debug_assert_eq!(self.computed, Tokens::ZERO, "{} holds blocks", self.id);
        self.micro_batch.set(micro_batch);
        let num_reused = kv.totals().num_reused_blocks;
        let end = self.end_of_stretch();
        self.computed = self.first.reserve(end, &self.details.reuse, kv);
        debug_assert_eq!(self.state(), 0, "a pause ends what beams had");
        self.first.restore_states(self.computed, states, kv);
        let num_reused = kv.totals().num_reused_blocks - num_reused;
        self.details.num_reused = Blocks(num_reused as u32);
        let computed = self.computed;
        if let Some(model) = self.model_drafts_mut() {
            model.start(computed);
        }
    }

    /// Takes snapshots of the states that its next `num_tokens` tokens leave, see [`KvCacheManager::take_snapshots`].
    pub(super) fn take_snapshots(
        &mut self,
        num_tokens: Tokens,
        kv: &mut KvCacheManager,
    ) -> impl Iterator<Item = (Tokens, SnapshotId)> {
        let chunk = self.computed..self.computed + num_tokens;
        let context = self.is_in_context().then(|| self.len());
        self.first.take_snapshots(chunk, context, kv)
    }

    /// Releases its blocks. All its tokens are context again.
    pub(super) fn pause(&mut self, kv: &mut KvCacheManager) {
        self.details.kv_before = self.kv_blocks();
        self.details.num_reused = Blocks::ZERO;
        self.context = self.len();
        self.computed = Tokens::ZERO;
        self.first.release(kv);
        if let Some(beams) = &mut self.details.beams {
            beams.pause(self.first.tokens(), kv);
        }
    }

    /// Gives all its blocks back, because it has ended.
    pub(super) fn release(&mut self, kv: &mut KvCacheManager) {
        if let Some(beams) = &mut self.details.beams {
            beams.release_others(kv);
        }
        self.first.release(kv);
    }

    /// Takes the blocks that it lacks to compute up to `kv_len` positions.
    #[inline]
    pub(super) fn grow(&mut self, kv: &mut KvCacheManager, kv_len: Tokens) {
        match self.is_plain {
            true => self.first.grow(kv, kv_len),
            false => self.grow_beams(kv, kv_len),
        }
    }

    fn grow_beams(&mut self, kv: &mut KvCacheManager, kv_len: Tokens) {
        match &mut self.details.beams {
            None => self.first.grow(kv, kv_len),
            Some(beams) => beams.grow(&mut self.first, self.computed, kv_len, kv),
        }
    }

    /// Moves its tokens out, for a step.
    #[inline]
    pub(super) fn take_tokens(&mut self) -> Box<SequenceTokens> {
        self.go_out();
        self.first.take_tokens()
    }

    /// A step has it that does not need its tokens, or does not know them.
    #[inline]
    pub(super) fn go_out(&mut self) {
        self.num_out += 1;
    }

    /// Counts what a step computes before it has landed.
    #[inline]
    pub(super) fn advance_to(&mut self, computed: Tokens) {
        if self.is_plain {
            self.computed = computed;
        }
    }

    /// Takes it back from a step, with its tokens if that has them.
    #[inline]
    pub(super) fn come_back(&mut self, tokens: Option<Box<SequenceTokens>>) {
        self.num_out -= 1;
        if let Some(tokens) = tokens {
            self.first.put_tokens(tokens);
        }
    }

    /// Its beams but the first, with their tokens, which are moved out for a step.
    pub(super) fn take_tokens_of_other_beams(
        &mut self,
    ) -> impl Iterator<Item = (Box<SequenceTokens>, &BlockTable, u32)> {
        let beams = self.details.beams.as_mut().into_iter();
        beams.flat_map(|beams| beams.take_tokens())
    }

    /// The index of the recurrent states of its text, or of its first beam, among the states of its beams.
    #[inline]
    pub(super) fn state(&self) -> u32 {
        self.beams().map_or(0, Beams::first_state)
    }

    /// See [`Beams::take_state_copies`].
    pub(super) fn take_state_copies(&mut self) -> impl Iterator<Item = [u32; 2]> {
        let beams = self.details.beams.as_mut().into_iter();
        beams.flat_map(|beams| beams.take_state_copies())
    }

    /// Takes it back from a step that has computed it up to `computed`.
    #[inline]
    pub(super) fn land(
        &mut self,
        tokens: Option<Box<SequenceTokens>>,
        computed: Tokens,
        has_failed: bool,
        kv: &mut KvCacheManager,
    ) {
        self.come_back(tokens);
        if !has_failed {
            self.first.commit(computed, kv);
        }
        // A step that was planned ahead computes more.
        if !self.is_out() {
            self.computed = computed;
        }
        if !self.is_plain {
            self.part_beams(kv);
        }
    }

    /// Lets its beams part, if it has computed what they have in common.
    fn part_beams(&mut self, kv: &mut KvCacheManager) {
        let num_taken = self.num_taken_by_first();
        if let Some(beams) = &mut self.details.beams {
            beams.part(&mut self.first, self.computed, num_taken, kv);
        }
    }

    /// The same for one of its beams that is not the first.
    pub(super) fn land_beam(
        &mut self,
        beam: u32,
        tokens: Box<SequenceTokens>,
        kv_len: Tokens,
        has_failed: bool,
        kv: &mut KvCacheManager,
    ) {
        let beams = self.details.beams.as_mut().expect("it has beams");
        beams.land(beam, tokens, kv_len, has_failed, kv);
    }

    /// Applies the result of a step. Returns the finish reason if the sequence ends with it.
    #[inline(always)]
    pub(super) fn take_result(
        &mut self,
        result: Sampled,
        events: &mut Vec<Event>,
    ) -> Option<FinishReason> {
        match result {
            Sampled::Token(token) => {
                events.push(Event::Token(self.id, token));
                self.last_token = token;
                self.first.tokens_mut().push(token)
            }
            Sampled::Pooled => Some(FinishReason::Pooled),
            Sampled::Failed(error) => Some(FinishReason::of(error)),
            Sampled::Missed => {
                self.miss();
                None
            }
            Sampled::Candidates => unreachable!("only a beam has candidates"),
        }
    }

    /// Forgets that its last token was computed, and what is computed behind it. It is planned again when no step has
    /// it, and not ahead of that step.
    fn miss(&mut self) {
        let computed = Tokens(self.first.tokens().as_slice().len() as u32) - Tokens(1);
        self.computed = computed;
        if let Some(model) = self.model_drafts_mut() {
            model.go_back(computed);
        }
        self.is_plain = false;
        self.details.has_missed = true;
    }

    /// It has the token that it had missed.
    pub(super) fn make_up(&mut self) {
        let details = &mut self.details;
        if std::mem::take(&mut details.has_missed) {
            self.is_plain = details.drafter.is_none() && !details.has_extra_outputs;
        }
    }

    /// Records the result of its next beam. When all beams have theirs, it selects the beams that continue.
    /// Returns the finish reason if the search is over.
    pub(super) fn take_candidates(
        &mut self,
        result: Sampled,
        candidates: Option<BeamCandidates>,
        kv: &mut KvCacheManager,
        events: &mut Vec<Event>,
    ) -> Option<FinishReason> {
        let num_taken = self.num_taken_by_first();
        let beams = self
            .details
            .beams
            .as_mut()
            .expect("only beams have candidates");
        if beams.take_candidates(result, candidates) {
            let ended = beams.advance(&mut self.first, num_taken, kv);
            if ended.is_some() {
                return ended;
            }
            self.last_token = self.first.tokens().last();
        }
        events.extend(self.intermediate_hypotheses());
        None
    }

    /// Whether it searches with several beams.
    #[inline]
    pub(super) fn has_beams(&self) -> bool {
        // A plain sequence has none, and need not fetch its details.
        self.beams().is_some()
    }

    /// The number of beams that its next step computes; 1 without beam search.
    #[inline]
    pub(super) fn num_beams(&self) -> u32 {
        self.beams().map_or(1, |beams| beams.num_in_step() as u32)
    }

    /// Its beams, if it searches. Most sequences do not, and their details are not read.
    #[inline]
    fn beams(&self) -> Option<&Beams> {
        match self.is_plain {
            true => None,
            false => self.details.beams.as_deref(),
        }
    }

    /// While its context is computed, the beams that it will have then.
    pub(super) fn beams_to_come(&self) -> BeamsToCome {
        match &self.details.beams {
            Some(beams) if beams.len() > 1 => BeamsToCome {
                num_beams: beams.len() as u32,
                num_common: self.end_of_stretch(),
                len: self.len(),
            },
            _ => BeamsToCome::of_context(self.width(), self.len(), self.max_kv_len()),
        }
    }

    /// The most beams that it may have.
    pub(super) fn width(&self) -> u32 {
        self.details.beams.as_ref().map_or(1, |beams| beams.width())
    }

    /// The hypotheses that its search would return if it ended now; none before its first token, or without beam
    /// search. Its beams must not be out with a step.
    pub(super) fn best_so_far(&self) -> Box<[Hypothesis]> {
        match &self.details.beams {
            Some(beams) if self.ended.is_some() => beams.found().into(),
            Some(beams) => beams.best_so_far(self.first.tokens()),
            None => Box::default(),
        }
    }

    /// The event that it has ended, after the hypotheses that it has found.
    pub(super) fn report_end(&mut self, reason: FinishReason, events: &mut Vec<Event>) {
        let found = self.details.beams.as_mut().map(|beams| beams.take_found());
        if let Some(found) = found.filter(|found| !found.is_empty()) {
            events.push(Event::Hypotheses(self.id, found));
        }
        events.push(Event::Finished(self.id, reason));
    }

    /// The hypotheses so far as an event, if it asked for them and they are due.
    fn intermediate_hypotheses(&self) -> Option<Event> {
        if self.is_out() {
            return None;
        }
        let tokens = self.first.tokens();
        let interval = tokens.outputs().beams?;
        let num_tokens = tokens.num_generated().0;
        let is_settled = self.details.beams.as_ref()?.are_settled();
        let is_due = is_settled && (num_tokens - 1).is_multiple_of(interval.get());
        is_due.then(|| Event::Hypotheses(self.id, self.best_so_far()))
    }

    /// Whether extra outputs are requested.
    pub(super) fn has_extra_outputs(&self) -> bool {
        self.details.has_extra_outputs
    }

    /// Adds the counts of its blocks and drafts to its extra outputs, where they are wanted and have changed.
    pub(super) fn add_counts(&mut self, extra_outputs: &mut Option<Box<ExtraOutputs>>) {
        let tokens = self.first.tokens_mut();
        tokens.returned_logits_to(self.computed);
        let outputs = tokens.outputs();
        let kv_blocks = Some(self.kv_blocks()).filter(|&kv| kv != self.details.kv_reported);
        self.details.kv_reported = kv_blocks.unwrap_or(self.details.kv_reported);
        let kv_blocks = kv_blocks.filter(|_| outputs.kv_blocks);
        let drafts = self.details.drafter.as_mut().and_then(|it| it.new_totals());
        let drafts = drafts.filter(|_| outputs.drafts);
        if kv_blocks.is_some() || drafts.is_some() {
            let extra_outputs = extra_outputs.get_or_insert_default();
            extra_outputs.kv_blocks = kv_blocks;
            extra_outputs.drafts = drafts;
        }
    }

    /// The KV cache blocks that it has used since it was admitted.
    fn kv_blocks(&self) -> KvBlocks {
        let KvBlocks {
            num_new,
            num_reused,
        } = self.details.kv_before;
        let by_beams = self.details.beams.as_ref().and_then(|it| it.num_taken());
        let num_taken = by_beams.unwrap_or_else(|| self.num_taken_by_first());
        KvBlocks {
            num_new: num_new + num_taken,
            num_reused: num_reused + self.details.num_reused,
        }
    }

    /// The blocks that it has taken since it started or resumed, if only its first beam holds blocks.
    fn num_taken_by_first(&self) -> Blocks {
        self.first.num_blocks() - self.details.num_reused
    }

    /// The number of tokens that it has generated; of a beam search, in all hypotheses that it has found.
    pub(super) fn num_output_tokens(&self) -> Tokens {
        match &self.details.beams {
            None => self.first.tokens().num_generated(),
            Some(beams) => beams.num_output_tokens(),
        }
    }

    /// Whether it may have drafts.
    #[inline]
    pub(super) fn is_drafted(&self) -> bool {
        !self.is_plain && self.details.drafter.is_some()
    }

    /// Appends up to `max` drafts to its tokens, as many as are worth their price. Returns how many. The draft model
    /// catches up on at most as many positions as `left_to_catch_up`, which they are taken from.
    pub(super) fn draft(
        &mut self,
        max: usize,
        left_to_catch_up: &mut Tokens,
        prices: Option<&DraftPrices>,
    ) -> Tokens {
        let computed = self.computed;
        let room = DraftRoom {
            max,
            num_left: self.max_kv_len() + Tokens(1) - self.len(),
            max_caught_up: *left_to_catch_up,
            prices,
        };
        let Some(drafter) = &mut self.details.drafter else {
            return Tokens::ZERO;
        };
        let num_drafts = self.first.tokens_mut().draft(drafter, &room);
        if let Some(made_from) = drafter.model().and_then(ModelDrafts::made_from) {
            *left_to_catch_up -= computed - made_from;
        }
        Tokens(num_drafts as u32)
    }

    /// Its part that the draft model has, if there is one.
    pub(super) fn model_drafts(&self) -> Option<&ModelDrafts> {
        self.details.drafter.as_ref()?.model()
    }

    /// The same, to be changed.
    pub(super) fn model_drafts_mut(&mut self) -> Option<&mut ModelDrafts> {
        self.details.drafter.as_mut()?.model_mut()
    }

    /// Removes the drafts of a step that has landed, the first `num_accepted` of which were accepted.
    pub(super) fn drop_drafts(&mut self, num_accepted: usize) {
        let num_drafts = self.first.tokens_mut().drop_drafts();
        if let Some(drafter) = &mut self.details.drafter {
            drafter.count(num_drafts, num_accepted, self.computed);
        }
    }

    /// If the runner's draft model makes the drafts that it has, how many positions that has computed.
    pub(super) fn drafts_made_from(&self) -> Option<Tokens> {
        self.model_drafts()?.made_from()
    }
}
