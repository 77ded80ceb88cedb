//! The engine: takes requests, plans steps, and takes their results in.
//!
//! One idea: a step is decided before it runs, as plain data, and nothing counts as computed before `apply` has
//! seen its results.
//!
//! The engine never waits, reads a clock, draws a random number or calls the runner. The same calls in the same
//! order give the same plans, on every machine and on every rank.

use std::sync::Arc;

use crate::active::ActiveSequences;
use crate::apply;
use crate::block_needs::BlockNeeds;
use crate::capacity;
use crate::lockstep::LockstepBatch;
use crate::micro_batches::MicroBatches;
use crate::recorder::Recorder;
use crate::scheduler::{Scheduler, Scope};
use crate::sequence::Sequence;
use crate::{
    BlockMove, CapacityPolicy, DraftTotals, EngineConfig, Event, KeptBlock, KvUsage, NewRequest,
    OutputOptions, RequestStage, RetainedPrefix, Room, Step, StepOutput, StepStats,
};
use inflight_base::{Blocks, HostBlockId, RequestError, SeqSlot, SequenceId, TokenId, Tokens};
use inflight_sampling::{FinishReason, Hypothesis};

/// Plans the steps of in-flight batching.
///
/// ```text
/// add ---> queue ---> running, in order of rank ---> apply: Finished
///            ^             |
///            +--- pause ---+
/// ```
pub struct Engine {
    config: EngineConfig,
    active: ActiveSequences,
    scheduler: Scheduler,
    micro_batches: MicroBatches,
    /// `None` unless batches run in lockstep.
    lockstep: Option<LockstepBatch>,
    recorder: Recorder,
    /// The events since the last `apply`.
    events: Vec<Event>,
    /// Steps that have landed, kept for their memory.
    spare_steps: Vec<Step>,
}

impl Engine {
    /// An engine without requests.
    ///
    /// # Panics
    /// If [`EngineConfig::check`] refuses the configuration.
    pub fn new(config: EngineConfig) -> Self {
        if let Err(error) = config.check() {
            panic!("the engine's configuration was not checked: {error}");
        }
        let max_rows = config.max_rows() as usize;
        Self {
            active: ActiveSequences::new(&config),
            scheduler: Scheduler::new(max_rows),
            micro_batches: MicroBatches::new(
                config.num_micro_batches,
                config.max_steps_out() / config.num_micro_batches,
            ),
            lockstep: LockstepBatch::new(config.scheme),
            recorder: Recorder::default(),
            events: Vec::with_capacity(2 * max_rows),
            spare_steps: Vec::with_capacity(config.max_steps_out()),
            config,
        }
    }

    /// Queues a request. Its `max_new_tokens` is lowered to what `max_seq_len` leaves room for.
    ///
    /// # Errors
    /// A request that could never run because it is empty, too long, has too many beams, or an adapter of too many
    /// pages, or images that take too much; or one more than `max_num_active`. The engine is unchanged.
    ///
    /// # Panics
    /// If an active sequence has the id: at once, or in a later step.
    pub fn add(&mut self, mut request: NewRequest) -> Result<(), RequestError> {
        debug_assert!(
            !self.is_active(request.id),
            "sequence id {} is used twice",
            request.id
        );
        let max_num_active = self.config.max_num_active;
        if self.num_active() >= max_num_active as usize {
            return Err(RequestError::Busy(format!(
                "the batch manager holds max_num_active = {max_num_active} requests: send it again when one \
                 of them has ended"
            )));
        }
        let max_new_tokens = self.config.room_for_output(&request)?;
        if let Some(adapter) = &request.adapter {
            self.active.adapters().check(adapter)?;
        }
        self.config.check_images(&request)?;
        request.stop.max_new_tokens = request.stop.max_new_tokens.min(max_new_tokens);
        if self.config.pools {
            request.outputs = OutputOptions {
                pooled: true,
                kv_blocks: request.outputs.kv_blocks,
                ..OutputOptions::default()
            };
        }
        if request.sampling.beam_search.is_some() {
            let width = request.sampling.beam_width();
            let needs = BlockNeeds::new(&self.config, &self.active);
            let worst = needs.of_beams(width, request.num_prompt_tokens(), request.max_kv_len());
            self.config.check_beams(width, worst)?;
        }
        if let Some(limits) = &self.config.images {
            request.images.set_whole(limits.has_whole_images);
        }
        if !request.images.is_empty() {
            let prompt = Arc::clone(&request.prompt);
            self.active.set_keys(&prompt, &mut request.images)?;
        }
        self.active.enqueue(request);
        Ok(())
    }

    /// Cancels a sequence. Its blocks and its row are free at once or, if a step with it is out, when that has been
    /// applied. No event follows, because the caller knows. Returns whether it was active: `false` if it has
    /// ended, even if its `Finished` is still to come.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let was_active = self.active.cancel(id);
        self.end_iteration_if_over();
        was_active
    }

    /// Ends a sequence for a reason that the engine does not see, such as a stop word in its text, after the first
    /// `num_output_tokens` tokens that it has generated: tokens behind them do not count. Returns whether it has
    /// ended, as after [`Engine::cancel`]; in lockstep it ends with its batch, and an [`Event::Finished`] follows.
    ///
    /// # Panics
    /// If it is active and a step with it is out, unless steps are planned ahead.
    pub fn finish(
        &mut self,
        id: SequenceId,
        num_output_tokens: Tokens,
        reason: FinishReason,
    ) -> bool {
        let is_lockstep = self.lockstep.is_some();
        let Some(sequence) = self.active.find_mut(id) else {
            return !is_lockstep && self.cancel(id);
        };
        assert!(
            self.config.plan_ahead || !sequence.is_out(),
            "{id} is in a step that has not landed"
        );
        if is_lockstep {
            sequence.end_in_batch(reason);
            return false;
        }
        self.recorder
            .count_ended_with(sequence.num_prompt_tokens(), num_output_tokens);
        self.cancel(id)
    }

    /// Why an active sequence has ended: in lockstep, it waits for the rest of its batch.
    pub fn ended(&self, id: SequenceId) -> Option<FinishReason> {
        self.active.find(id)?.ended()
    }

    /// Whether a sequence searches with beams that are in a step which is out.
    pub fn are_beams_out(&self, id: SequenceId) -> bool {
        let sequence = self.active.find(id);
        sequence.is_some_and(|sequence| sequence.has_beams() && sequence.is_out())
    }

    /// The hypotheses that a beam search would return if it ended now: the best of those that have ended and of
    /// the beams that continue. Empty before the first token, and without beam search. If it waits for the rest of
    /// its lockstep batch, its final hypotheses.
    ///
    /// # Panics
    /// If its beams are out, see [`Engine::are_beams_out`].
    pub fn best_so_far(&self, id: SequenceId) -> Box<[Hypothesis]> {
        assert!(
            !self.are_beams_out(id),
            "{id} is in a step that has not landed"
        );
        let sequence = self.active.find(id);
        sequence.map_or_else(Box::default, |sequence| sequence.best_so_far())
    }

    /// Plans the next step. It is empty only if nothing is active, or if everything active is in a step that has not
    /// landed or could not be given blocks because of one, or cannot go on before it has landed.
    ///
    /// # Panics
    /// If a step of every micro-batch is out; or two, where they are [planned ahead](EngineConfig::plan_ahead).
    pub fn schedule(&mut self) -> Step {
        assert!(
            !self.micro_batches.are_all_out(),
            "a step is planned after another has come back"
        );
        self.end_batch_if_over();
        let spare = self.spare_steps.pop();
        let mut step = spare.unwrap_or_else(|| Step::new(&self.config));
        for n in 0..self.micro_batches.len() {
            let Some(micro_batch) = self.micro_batches.due_after(n) else {
                continue;
            };
            let mut scope = Scope {
                config: &self.config,
                active: &mut self.active,
                micro_batches: &self.micro_batches,
                lockstep: self.lockstep.as_mut(),
                experience: self.recorder.experience(),
                events: &mut self.events,
            };
            self.scheduler.plan(&mut scope, micro_batch, &mut step);
            if !step.is_empty() {
                self.micro_batches.launch(micro_batch);
                break;
            }
        }
        // The first of those that run is never paused and is first to get tokens.
        assert!(
            self.is_idle() || self.micro_batches.any_out(),
            "{} requests are active and none can run",
            self.num_active()
        );
        self.recorder.record(
            &step,
            &self.config,
            &self.active,
            &self.scheduler,
            self.lockstep.as_mut(),
        );
        step
    }

    /// Applies the results of a step, and appends the events since the last call to `events`, in order.
    ///
    /// A sequence that was cancelled since `schedule` has no events.
    ///
    /// # Panics
    /// If `output` is not the step's: results for each sequence that samples, in the step's order.
    pub fn apply(&mut self, mut step: Step, output: &mut StepOutput, events: &mut Vec<Event>) {
        let is_known = |event: &Event| {
            matches!(event, Event::Finished(..) | Event::Hypotheses(..))
                || self.active.is_admitted(event.sequence_id())
        };
        events.extend(self.events.drain(..).filter(is_known));

        if !step.is_empty() {
            self.micro_batches.land(step.micro_batch());
        }
        let num_generated = apply::apply(
            &mut step,
            output,
            &mut self.active,
            &mut self.recorder,
            self.lockstep.is_some(),
            events,
        );
        if let Some(lockstep) = &mut self.lockstep {
            lockstep.count_generated(num_generated);
        }
        step.forget_sequences();
        self.spare_steps.push(step);
        self.end_batch_if_over();
        events.append(&mut self.events);
    }

    /// Moves what is cached to host memory, as far as there is room, to be kept beyond this engine. Returns the moves
    /// to make, and what is there afterwards, each content after the one before it.
    ///
    /// # Panics
    /// If a sequence has blocks.
    pub fn keep(&mut self) -> (Vec<BlockMove>, Vec<KeptBlock>) {
        assert_eq!(
            self.kv_usage().num_used,
            Blocks::ZERO,
            "sequences have blocks"
        );
        let kv = self.active.kv_mut();
        let kept = kv.keep();
        let moves = kv.moves().to_vec();
        kv.clear_moves();
        (moves, kept)
    }

    /// Takes contents that another engine has kept into blank host blocks, as far as there is room; each comes after
    /// the one before it, and fills a block. Returns for each that has found a place where it was, and where it is now.
    /// Their keys and values must be there before the next step.
    pub fn restore(&mut self, kept: &[KeptBlock]) -> Vec<(HostBlockId, HostBlockId)> {
        self.active.kv_mut().restore(kept)
    }

    /// Retains the blocks in which a prefix is cached, for a conversation that will continue: they are evicted only
    /// when no other block is free, and no request waits for them. Without reuse there are none.
    pub fn retain(&mut self, tokens: Arc<[TokenId]>, salt: Option<Arc<str>>) -> RetainedPrefix {
        self.active.kv_mut().retain(tokens, salt)
    }

    /// Retains the blocks of a prefix no longer. They stay cached, like all others.
    pub fn release_retained(&mut self, retained: &RetainedPrefix) {
        self.active.kv_mut().release_retained(retained);
    }

    /// Whether there may be something to plan before the step that is out has landed, where steps are
    /// [planned ahead](EngineConfig::plan_ahead).
    pub fn can_plan_ahead(&self) -> bool {
        self.config.plan_ahead && !self.micro_batches.are_all_out() && self.active.can_plan_ahead()
    }

    /// The configuration.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Sequences that have not ended: waiting, running or paused.
    pub fn num_active(&self) -> usize {
        self.active.len()
    }

    /// Whether no sequence is active.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// How many further requests could start in the next step, whatever their lengths: none while others wait, except
    /// for the pages of their adapters, and then as many fewer as wait for these. If there are too few blocks for one
    /// of the largest length, but some, a shorter one may fit: then it is one.
    pub fn num_startable(&self) -> usize {
        let num_running = self.active.num_running();
        let is_closed = self.lockstep.is_some() && !LockstepBatch::is_open(num_running);
        let may_start = capacity::may_start(self.config.policy, num_running > 0, false);
        let num_for_pages = self.scheduler.num_waiting_for_pages();
        if self.active.num_queued() > num_for_pages || is_closed || !may_start {
            return 0;
        }
        let largest = self.active.kv().max_blocks(self.config.max_seq_len);
        let blocks = BlockNeeds::new(&self.config, &self.active).budget();
        let num_free_rows = self.active.num_free_rows();
        // So that those that wait for pages are not without number.
        let num_left = num_free_rows.saturating_sub(num_for_pages);
        blocks.num_startable(largest).min(num_left)
    }

    /// What further requests can have in the next step, beside those that run. Where they start together or not at
    /// all, the token budget does not limit them.
    pub fn room(&self) -> Room {
        let budget = BlockNeeds::new(&self.config, &self.active).budget();
        let start_together =
            self.lockstep.is_some() || self.config.policy == CapacityPolicy::StaticBatch;
        let taken = self.active.running().fold(0, |sum: u32, (_, sequence)| {
            sum.saturating_add(sequence.num_uncomputed().0 * sequence.num_beams())
        });
        let tokens = match start_together {
            true => u32::MAX,
            false => self.config.max_num_tokens.0.saturating_sub(taken),
        };
        Room {
            blocks: budget.left(),
            tokens: Tokens(tokens),
            block_size: self.config.block_size,
            groups: self.config.groups,
            max_seq_len: self.config.max_seq_len,
            max_chunk: self.config.max_chunk(),
            reserves_to_the_end: budget.reserves_to_the_end(),
        }
    }

    /// Whether a sequence is active.
    pub fn is_active(&self, id: SequenceId) -> bool {
        self.active.contains(id)
    }

    /// The totals of all drafts so far.
    pub fn draft_totals(&self) -> DraftTotals {
        self.recorder.drafts()
    }

    /// How full the KV cache is now.
    pub fn kv_usage(&self) -> KvUsage {
        self.active.kv().usage()
    }

    /// The record of the step that `schedule` planned last; `None` if nothing was active.
    pub fn stats(&self) -> Option<&StepStats> {
        self.recorder.stats()
    }

    /// The stage of each active request in the step that `schedule` planned last, in order of id; empty unless
    /// [`EngineConfig::record_requests`].
    pub fn request_stages(&self) -> &[RequestStage] {
        self.recorder.stages()
    }

    /// The records of the lockstep iterations that have ended since the last call. An iteration is a batch, from its
    /// start to its end.
    pub fn take_ended_iterations(&mut self) -> Vec<StepStats> {
        self.recorder.take_iterations()
    }

    /// Panics if the engine contradicts itself. For tests and debugging, between `apply` and `schedule`; it costs a
    /// look at everything, and allocates.
    ///
    /// 1. Every block is free, or held by as many tables as it says.
    /// 2. Every row in use runs, is paused, or was cancelled while a step with it is out; every id is in one place.
    /// 3. A paused sequence has no blocks and nothing computed.
    /// 4. A running sequence has blocks for what is computed, and something left to compute.
    /// 5. Running and paused sequences are in order of rank.
    /// 6. No sequence is longer than `max_seq_len`.
    /// 7. Where sequences are never paused, the blocks that they may still need are free.
    /// 8. The pages of adapters are held by the sequences that have them, and by no others.
    pub fn check_integrity(&self) {
        self.active.check_integrity();
        let running = self.active.running().map(|(_, sequence)| sequence);
        for sequence in running.chain(self.active.paused()) {
            let id = sequence.id();
            let len = sequence.len();
            assert!(len <= self.config.max_seq_len, "{id:?} is too long");
            if sequence.ended().is_some() {
                assert!(self.lockstep.is_some(), "{id:?} has ended");
                continue;
            }
            assert!(sequence.computed() < len, "{id:?} is done");
            if !sequence.is_out() {
                let num_tokens = sequence.tokens().as_slice().len();
                assert_eq!(len.index(), num_tokens, "{id:?}");
            }
        }
        BlockNeeds::new(&self.config, &self.active).check_integrity();
    }

    /// In lockstep, lets the answers of the batch leave once all of it has ended.
    fn end_batch_if_over(&mut self) {
        if self.lockstep.is_none() || self.active.num_running() == 0 {
            return;
        }
        let is_unended = |(_, sequence): (SeqSlot, &Sequence)| sequence.ended().is_none();
        if self.active.running().any(is_unended) {
            return;
        }
        self.active.end_all_running(|sequence| {
            let reason = sequence.ended().expect("all have ended");
            self.recorder.count_ended(sequence);
            sequence.report_end(reason, &mut self.events);
        });
        self.end_iteration_if_over();
    }

    /// In lockstep, records the totals of the batch if it has ended.
    fn end_iteration_if_over(&mut self) {
        if let Some(lockstep) = &mut self.lockstep
            && self.active.num_running() == 0
            && let Some(totals) = lockstep.end()
        {
            self.recorder.end_iteration(totals);
        }
    }
}
