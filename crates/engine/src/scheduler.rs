//! How a step is planned: two passes over the sequences in order, then the result is packed.
//!
//! **Capacity** decides who may run, given the KV blocks. **Budget** decides how many tokens each gets. A sequence
//! that starts gets its blocks and its tokens at once, so that the next one sees what is really left.

use crate::active::ActiveSequences;
use crate::block_needs::{BlockNeeds, Prospect};
use crate::budget::{ContextChunk, TokenBudget};
use crate::capacity;
use crate::draft::room_for_drafts;
use crate::draft_prices::DraftPrices;
use crate::kv::NextBlock;
use crate::lockstep::LockstepBatch;
use crate::micro_batches::MicroBatches;
use crate::model_drafts::Experience;
use crate::queue::{QueueCursor, QueueEntry};
use crate::step::Step;
use crate::{BatchingScheme, EngineConfig, Event};
use inflight_base::{Blocks, SeqSlot, Tokens};

/// How many queued sequences one step may skip because they wait for blocks that another is about to write: for
/// each, its whole prompt is looked up.
const MAX_SKIPPED: usize = 16;

/// How many queued requests one step may skip because they wait for pages of adapters: for each, the queue is looked
/// up.
const MAX_SKIPPED_FOR_PAGES: usize = 1024;

/// Plans steps. Its lists keep their memory from step to step.
pub(super) struct Scheduler {
    /// The running sequences that are in context phase when the budget pass begins.
    in_context: Vec<SeqSlot>,
    /// The sequences in generation phase, each of which gets a token of the step.
    generating: Vec<SeqSlot>,
    /// The chunks that contexts get.
    contexts: Vec<(SeqSlot, ContextChunk)>,
    /// The blocks that these are about to write and that others could reuse.
    being_written: Vec<NextBlock>,
    /// Requests that wait for the pages of their adapters.
    num_waiting_for_pages: usize,
}

/// The state that the scheduler decides on.
pub(super) struct Scope<'a> {
    pub(super) config: &'a EngineConfig,
    pub(super) active: &'a mut ActiveSequences,
    pub(super) micro_batches: &'a MicroBatches,
    /// `None` unless batches run in lockstep.
    pub(super) lockstep: Option<&'a mut LockstepBatch>,
    /// Of the draft model.
    pub(super) experience: &'a Experience,
    /// Which sequences are admitted or paused.
    pub(super) events: &'a mut Vec<Event>,
}

impl Scheduler {
    pub(super) fn new(max_rows: usize) -> Self {
        Self {
            in_context: Vec::with_capacity(max_rows),
            generating: Vec::with_capacity(max_rows),
            contexts: Vec::with_capacity(max_rows),
            being_written: Vec::with_capacity(max_rows),
            num_waiting_for_pages: 0,
        }
    }

    /// Plans the next step of one micro-batch, which may turn out to be empty.
    pub(super) fn plan(&mut self, scope: &mut Scope<'_>, micro_batch: usize, step: &mut Step) {
        step.begin(micro_batch);
        self.contexts.clear();
        self.num_waiting_for_pages = 0;
        let is_ahead = scope.config.plan_ahead && scope.micro_batches.any_out();
        if is_ahead && !scope.active.can_plan_ahead() {
            return;
        }
        let Some(any_paused) = make_room(scope, micro_batch) else {
            return;
        };
        if let Some(images) = scope.active.images_mut() {
            images.begin_step();
        }
        let mut budget = TokenBudget::new(scope.config);
        self.schedule_running(scope, micro_batch, &mut budget);
        self.take_images(scope);
        self.admit_waiting(scope, micro_batch, &mut budget, any_paused);
        let images_of = |slot| scope.active.sequence(slot).tokens().images();
        budget.distribute(&mut self.contexts, images_of);
        self.take_images(scope);
        if scope.config.speculation.is_some() {
            self.draft(scope, &mut budget);
        }
        self.pack(scope, step);
    }

    /// The number of contexts in the step that was planned last.
    pub(super) fn num_contexts(&self) -> usize {
        self.contexts.len()
    }

    /// The planned sequences that are contexts: one for each, or for each of its beams.
    pub(super) fn num_context_rows(&self) -> usize {
        let rows = self.contexts.iter().map(|(_, chunk)| chunk.num_beams());
        rows.sum::<u32>() as usize
    }

    /// The context tokens in it.
    pub(super) fn num_context_tokens(&self) -> Tokens {
        let contexts = self.contexts.iter();
        contexts.map(|(_, chunk)| chunk.num_tokens()).sum()
    }

    /// Requests that it skipped because they wait for the pages of their adapters.
    pub(super) fn num_waiting_for_pages(&self) -> usize {
        self.num_waiting_for_pages
    }

    /// Whether any sequence generates in it.
    pub(super) fn any_generating(&self) -> bool {
        !self.generating.is_empty()
    }

    /// Gives blocks and tokens to those that run: a token to each that generates, then chunks to contexts in order.
    fn schedule_running(
        &mut self,
        scope: &mut Scope<'_>,
        micro_batch: usize,
        budget: &mut TokenBudget,
    ) {
        let max_chunk = scope.config.max_num_tokens;
        self.being_written.clear();
        self.in_context.clear();
        self.generating.clear();
        let mut num_generated = 0;
        scope.active.for_each_running(|slot, sequence, kv| {
            if !sequence.runs_in(micro_batch) {
                return;
            }
            sequence.grow(kv, sequence.next_end(max_chunk));
            if sequence.is_in_context() {
                self.in_context.push(slot);
            } else {
                num_generated += sequence.num_beams();
                self.generating.push(slot);
            }
        });
        if scope.lockstep.is_some() && LockstepBatch::holds_generation(!self.in_context.is_empty())
        {
            self.generating.clear();
            num_generated = 0;
        }
        budget.take_generation(Tokens(num_generated));
        for &slot in &self.in_context {
            if !budget.is_open() {
                return;
            }
            let sequence = scope.active.sequence(slot);
            let chunk = budget.take_context(
                sequence.computed(),
                sequence.num_uncomputed(),
                sequence.num_beams(),
                sequence.tokens().images(),
            );
            let Some(chunk) = chunk else { return };
            self.contexts.push((slot, chunk));
            self.being_written.extend(scope.active.next_block(slot));
        }
    }

    /// Starts sequences from the queue, in order, as long as there are blocks and tokens for them.
    fn admit_waiting(
        &mut self,
        scope: &mut Scope<'_>,
        micro_batch: usize,
        budget: &mut TokenBudget,
        any_paused: bool,
    ) {
        let Scope { config, active, .. } = scope;
        if !active.any_queued() {
            return;
        }
        let in_batch = active.running().map(|(_, sequence)| sequence);
        let num_running = in_batch
            .filter(|sequence| sequence.micro_batch() == micro_batch)
            .count();
        let is_lockstep = scope.lockstep.is_some();
        if !capacity::may_start(config.policy, num_running > 0, any_paused)
            || is_lockstep && !LockstepBatch::is_open(num_running)
        {
            return;
        }
        let may_wait = !is_lockstep && capacity::may_wait_for_reuse(config.policy);
        let is_whole = !config.is_context_chunked();
        // Micro-batches are kept at about equal sizes.
        let max_running = active
            .len()
            .min(config.max_rows() as usize)
            .div_ceil(config.num_micro_batches);
        let mut num_free = max_running.saturating_sub(num_running);
        let needs = BlockNeeds::new(config, active);
        let mut beside_beams = needs.beside_beams(micro_batch);
        let mut blocks = needs.budget();
        let mut cursor = QueueCursor::default();
        let mut num_skipped = 0;
        while num_free > 0 && (is_lockstep || budget.is_open()) {
            let Some(entry) = active.next_queued(&cursor) else {
                return;
            };
            // None takes pages before one that has waited for some longer.
            let has_pages = active.has_pages(entry);
            if has_pages.is_some_and(|has_pages| !has_pages || self.num_waiting_for_pages > 0) {
                self.num_waiting_for_pages += 1;
                if self.num_waiting_for_pages == MAX_SKIPPED_FOR_PAGES {
                    return;
                }
                cursor.skip(entry);
                continue;
            }
            let Prospect {
                len,
                reused,
                demand,
                width,
                next_block,
            } = BlockNeeds::new(config, active).prospect(entry);
            let is_being_written = || {
                next_block.is_some_and(|next| self.being_written.contains(&next))
                    || self.leaves_states_for(entry, reused, config, active)
            };
            if may_wait && is_being_written() {
                num_skipped += 1;
                if num_skipped == MAX_SKIPPED {
                    return;
                }
                cursor.skip(entry);
                continue;
            }
            if !beside_beams.admit(width) || !blocks.admit(demand) {
                return;
            }
            let num_uncomputed = len - reused;
            let chunk = match budget.is_open() {
                true => {
                    let images = active.images_of_queued(entry);
                    budget.take_context(reused, num_uncomputed, 1, images)
                }
                false => None,
            };
            if chunk.is_none() && !is_lockstep {
                return;
            }
            // One that has blocks but computes nothing would be in the way of others. A batch in lockstep needs all.
            if let Some(chunk) = &chunk
                && !is_lockstep
                && let Some(end) = active.take_images_of_queued(entry, chunk.positions(), is_whole)
                && (is_whole || end == chunk.start())
            {
                return;
            }
            let speculation = config.speculation.as_ref();
            let slot = active.start(entry, micro_batch, speculation, scope.events);
            assert_eq!(
                active.sequence(slot).computed(),
                reused,
                "what was found is still there"
            );
            self.contexts.extend(chunk.map(|chunk| (slot, chunk)));
            if let Some(lockstep) = &mut scope.lockstep {
                lockstep.join(num_uncomputed);
            }
            self.being_written.extend(active.next_block(slot));
            num_free -= 1;
        }
    }

    /// Has the step encode the images of its contexts, as far as it may: a chunk ends in front of the first image that
    /// is missing. The first context always has the image that its chunk begins with or comes to first.
    fn take_images(&mut self, scope: &mut Scope<'_>) {
        let Scope { config, active, .. } = scope;
        if active.images().is_none() {
            return;
        }
        let is_whole = !config.is_context_chunked();
        self.contexts.retain_mut(|(slot, chunk)| {
            match active.take_images(*slot, chunk.positions(), is_whole) {
                None => true,
                Some(_) if is_whole => false,
                Some(end) => {
                    let images = active.sequence(*slot).tokens().images();
                    chunk.cut_at(end, config.chunk_unit, images);
                    chunk.len() > Tokens::ZERO
                }
            }
        });
    }

    /// Whether a context of the step leaves a snapshot of its states at its end that `entry`, of which `reused` tokens
    /// are found now, could begin with.
    fn leaves_states_for(
        &self,
        entry: QueueEntry,
        reused: Tokens,
        config: &EngineConfig,
        active: &ActiveSequences,
    ) -> bool {
        if config.num_state_snapshots == 0 {
            return false;
        }
        let (tokens, reuse, max_reusable) = active.context_of(entry);
        let max_end = max_reusable.min(Tokens(tokens.len() as u32 - 1));
        let block = config.block_size.tokens();
        self.contexts.iter().any(|&(slot, _)| {
            let writer = active.sequence(slot);
            let end = (writer.len() - Tokens(1)).floor_to_block(config.block_size);
            let written = writer.stretch();
            // Beams that part before it leave none.
            let is_written = end.index() <= written.len();
            let is_later = end > reused.max(writer.computed());
            if !is_written || !is_later || end > max_end || writer.reuse() != reuse {
                return false;
            }
            // Prompts that begin alike mostly differ in the last block.
            let last = (end - block).index()..end.index();
            reuse.enabled
                && tokens[last.clone()] == written[last]
                && tokens[..end.index()] == written[..end.index()]
        })
    }

    /// Drafts tokens for those that generate, in order, with the tokens and the blocks that are left.
    fn draft(&mut self, scope: &mut Scope<'_>, budget: &mut TokenBudget) {
        let needs = BlockNeeds::new(scope.config, scope.active);
        let mut free = capacity::blocks_for_drafts(
            scope.config.policy,
            needs.free(),
            needs.num_beams() * scope.config.groups.num_groups() as u32,
            scope.active.any_queued(),
        );
        let prices = self.draft_prices(scope);
        // A step of the draft model has no more tokens than one of the model.
        let mut left_to_catch_up = scope.config.max_num_tokens;
        for &slot in &self.generating {
            let (sequence, kv) = scope.active.sequence_mut(slot);
            // Recurrent states have its last token already: they give that again, but do not roll back behind it.
            if !sequence.is_drafted() || sequence.has_missed() {
                continue;
            }
            let num_places = sequence.blocks().len();
            // As many places as there are blocks for in each group.
            let num_more = Blocks(free.0 / scope.config.groups.num_groups() as u32);
            let room = room_for_drafts(
                sequence.len(),
                sequence.max_kv_len(),
                (num_places + num_more).tokens(scope.config.block_size),
                budget.left(),
            );
            if room == 0 {
                continue;
            }
            let num_drafts = sequence.draft(room, &mut left_to_catch_up, prices.as_ref());
            let num_free = kv.usage().num_free();
            sequence.grow(kv, sequence.len() + num_drafts);
            free -= num_free - kv.usage().num_free();
            budget.take_drafts(num_drafts);
        }
    }

    /// Cost of draft tokens in this step; `None` if costs have not been measured. All sequences that draft share a pass
    /// of the draft model, so its cost and the number of sequences for which drafting pays off depend on each other.
    fn draft_prices(&self, scope: &mut Scope<'_>) -> Option<DraftPrices> {
        let cost = scope.config.step_cost?;
        let draft_cost = scope.config.draft_cost;
        let num_generating = self.generating.len();
        let with = |num_drafting| DraftPrices::new(cost, draft_cost, num_generating, num_drafting);
        let mut prices = with(num_generating);
        if draft_cost.is_none() {
            return Some(prices);
        }
        for &slot in &self.generating {
            if let Some(model) = scope.active.sequence_mut(slot).0.model_drafts_mut() {
                model.learn(scope.experience);
            }
        }
        let mut num_drafting = num_generating;
        loop {
            let models = self.generating.iter();
            let models = models.filter_map(|&slot| scope.active.sequence(slot).model_drafts());
            let num_worth = models.filter(|it| it.is_worth(&prices)).count();
            if num_worth >= num_drafting || num_drafting <= 1 {
                return Some(prices);
            }
            num_drafting = num_worth.max(1);
            prices = with(num_drafting);
        }
    }

    /// Packs what was decided: contexts first, then those that generate.
    fn pack(&self, scope: &mut Scope<'_>, step: &mut Step) {
        let has_snapshots = scope.config.num_state_snapshots > 0;
        for &(slot, chunk) in &self.contexts {
            if let Some(images) = scope.active.images() {
                let of_prompt = scope.active.sequence(slot).tokens().images();
                step.push_images(of_prompt, chunk.positions(), |image| images.slot(image));
            }
            let (sequence, kv) = scope.active.sequence_mut(slot);
            if has_snapshots {
                step.save_states(sequence.take_snapshots(chunk.len(), kv));
            }
            step.push_context(slot, sequence, chunk.len());
        }
        if scope.config.scheme != BatchingScheme::InflightFused {
            step.end_call(self.padding(scope));
        }
        for &slot in &self.generating {
            let (sequence, kv) = scope.active.sequence_mut(slot);
            if has_snapshots {
                step.save_states(sequence.take_snapshots(Tokens(1), kv));
            }
            match sequence.is_drafted() {
                true => step.push_drafted(slot, sequence),
                false if sequence.is_out() => {
                    let sampling = sequence.sampling_ahead();
                    step.push_ahead(slot, sequence, sampling.expect("it can be planned ahead"));
                }
                false => step.push_generation(slot, sequence),
            }
        }
        step.end_call(num_empty_rows(scope));
        // A step that computes nothing is not run: the next one makes its moves. A snapshot that the step takes may
        // move another one to host memory.
        if !step.is_empty() {
            step.push_moves(scope.active.kv().moves());
            step.push_state_moves(scope.active.kv().state_moves());
            scope.active.clear_moves();
            if let Some(images) = scope.active.images_mut() {
                step.push_image_moves(images.moves());
                images.clear_moves();
            }
        }
    }

    /// The padding of the contexts in the step, which only lockstep has.
    fn padding(&self, scope: &Scope<'_>) -> Tokens {
        let Some(lockstep) = &scope.lockstep else {
            return Tokens::ZERO;
        };
        let completed = self.contexts.iter().filter(|(_, chunk)| chunk.is_last());
        let in_context = scope.active.running();
        let in_context = in_context.filter(|(_, it)| it.ended().is_none() && it.is_in_context());
        lockstep.padding(completed.count(), in_context.count())
    }
}

/// Pauses sequences as the capacity policy says, so that there are blocks for what the others of `micro_batch`
/// compute next. Returns whether any was paused; `None` if none can run, because those that could be paused may be out
/// with a step.
fn make_room(scope: &mut Scope<'_>, micro_batch: usize) -> Option<bool> {
    if !capacity::pauses(scope.config.policy) {
        return Some(false);
    }
    let needs = BlockNeeds::new(scope.config, scope.active);
    let mut free = needs.free();
    let mut lacking = needs.lacking_of_all(micro_batch, free);
    let mut any_paused = false;
    while capacity::must_pause(scope.config.policy, free, lacking) {
        if scope.config.plan_ahead && scope.micro_batches.any_out() {
            // The step that is out may free blocks, and has those that should be paused.
            return None;
        }
        let slot = last_that_can_pause(scope)?;
        let sequence = scope.active.sequence(slot);
        if sequence.runs_in(micro_batch) {
            lacking -= BlockNeeds::new(scope.config, scope.active).lacking(sequence);
        }
        scope.active.pause(slot, scope.events);
        free = BlockNeeds::new(scope.config, scope.active).free();
        any_paused = true;
    }
    Some(any_paused)
}

/// The last running sequence that is not out with a step; never the first of all.
fn last_that_can_pause(scope: &Scope<'_>) -> Option<SeqSlot> {
    let mut but_the_first = scope.active.running().skip(1).rev();
    let found =
        but_the_first.find(|(_, sequence)| !scope.micro_batches.is_out(sequence.micro_batch()));
    found.map(|(slot, _)| slot)
}

/// In lockstep, the rows of a model call that are computed for sequences which have ended.
fn num_empty_rows(scope: &Scope<'_>) -> Tokens {
    if scope.lockstep.is_none() {
        return Tokens::ZERO;
    }
    let running = scope.active.running().map(|(_, sequence)| sequence);
    let ended = running.filter(|sequence| sequence.ended().is_some());
    Tokens(ended.map(|sequence| sequence.width()).sum())
}
