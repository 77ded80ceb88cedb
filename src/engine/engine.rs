//! The batch manager: takes requests in, plans steps, takes their results in.
//!
//! One idea: what a step does is decided before it, as plain data, and nothing counts as computed before
//! `apply` has seen the step's results.
//!
//! It never waits, reads a clock, draws a random number or calls the runner: the same calls in the same
//! order give the same plans, on every machine and on every rank.

use crate::base::{RequestError, SeqSlot, SequenceId, Tokens};
use crate::engine::budget::ContextChunk;
use crate::engine::kv::{KvCacheManager, NextBlock};
use crate::engine::lockstep::LockstepBatch;
use crate::engine::queue::Queue;
use crate::engine::sequence::{Sequence, SequenceTable, max_kv_len};
use crate::engine::stats::{RequestStage, StepStats, Totals};
use crate::engine::{BatchingScheme, DraftTotals, EngineConfig, Event, KvUsage, NewRequest, Step};
use crate::sampling::{FinishReason, Hypothesis};

/// A batch manager.
///
/// ```text
/// add ---> queue ---> running, in order of rank ---> apply: Finished
///            ^             |
///            +--- pause ---+
/// ```
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) sequences: SequenceTable,
    pub(super) kv: KvCacheManager,
    /// By priority, then in order of first start.
    pub(super) running: Vec<SeqSlot>,
    pub(super) queue: Queue,
    /// Given up while a step with them is out.
    pub(super) cancelled: Vec<SeqSlot>,
    pub(super) num_started: u64,
    /// The micro-batch whose step is next.
    pub(super) turn: usize,
    /// Of each micro-batch, whether a step of it is out.
    pub(super) is_out: Vec<bool>,
    /// Steps that came back, for their buffers.
    pub(super) spare_steps: Vec<Step>,
    /// Those in context phase when the budget pass begins.
    pub(super) in_context: Vec<SeqSlot>,
    /// Those in generation phase, with one token each in the step that is planned.
    pub(super) generating: Vec<SeqSlot>,
    /// The budget pass's result for sequences in context phase.
    pub(super) contexts: Vec<(SeqSlot, ContextChunk)>,
    /// The blocks that those are about to write and that others could share.
    pub(super) being_written: Vec<NextBlock>,
    /// Who was admitted, paused or, in lockstep, finished since the last `apply`.
    pub(super) changes: Vec<Event>,
    pub(super) totals: Totals,
    /// What all drafts have come to.
    pub(super) drafts: DraftTotals,
    pub(super) num_steps: u64,
    pub(super) stats: Option<StepStats>,
    pub(super) stages: Vec<RequestStage>,
    /// The batch that runs in lockstep.
    pub(super) lockstep: LockstepBatch,
}

impl Engine {
    /// An engine with nothing to do.
    ///
    /// # Panics
    /// With a configuration that [`EngineConfig::check`] refuses.
    pub fn new(config: EngineConfig) -> Self {
        if let Err(error) = config.check() {
            panic!("the engine's configuration was not checked: {error}");
        }
        let max_rows = config.max_rows() as usize;
        Self {
            sequences: SequenceTable::new(config.max_rows()),
            kv: KvCacheManager::new(config.kv_cache()),
            running: Vec::with_capacity(max_rows),
            queue: Queue::new(max_rows),
            cancelled: Vec::new(),
            num_started: 0,
            turn: 0,
            is_out: vec![false; config.num_micro_batches],
            spare_steps: Vec::with_capacity(config.num_micro_batches),
            in_context: Vec::with_capacity(max_rows),
            generating: Vec::with_capacity(max_rows),
            contexts: Vec::with_capacity(max_rows),
            being_written: Vec::with_capacity(max_rows),
            changes: Vec::with_capacity(2 * max_rows),
            totals: Totals::default(),
            drafts: DraftTotals::default(),
            num_steps: 0,
            stats: None,
            stages: Vec::new(),
            lockstep: LockstepBatch::default(),
            config,
        }
    }

    /// Queues a request. Its `max_new_tokens` is lowered to what `max_seq_len` leaves room for.
    ///
    /// # Errors
    /// A request that could never run: empty, too long, or with too many beams; or one more than
    /// `max_num_active`. The engine is as before.
    ///
    /// # Panics
    /// At once or in a later step, if the id is that of an active request.
    pub fn add(&mut self, mut request: NewRequest) -> Result<(), RequestError> {
        debug_assert!(
            !self.is_active(request.id),
            "request id {} is used twice",
            request.id
        );
        let max_num_active = self.config.max_num_active;
        if self.num_active() >= max_num_active as usize {
            return Err(RequestError::Invalid(format!(
                "the batch manager holds max_num_active = {max_num_active} requests: send it again when one \
                 of them has ended"
            )));
        }
        let max_new_tokens = self.config.room_for_output(&request)?;
        request.stop.max_new_tokens = request.stop.max_new_tokens.min(max_new_tokens);
        if request.sampling.beam_search.is_some() {
            let width = request.sampling.beam_width();
            let num_prompt_tokens = Tokens(request.prompt.len() as u32);
            let max_kv_len = max_kv_len(num_prompt_tokens, &request.stop);
            let worst = self.worst_of_beams(width, num_prompt_tokens, max_kv_len);
            self.config.check_beams(width, worst)?;
        }
        self.queue.push(request);
        Ok(())
    }

    /// Gives a request up: its client or Triton gave it up, or its time has passed. Its blocks are free
    /// and its row is empty at once or, if a step with it is out, when that is back; no event follows,
    /// because the caller knows. Returns whether it was there: `false` if it has ended, even if its
    /// `Finished` is still to come.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(slot) = self.sequences.find(id) else {
            return self.queue.drop_waiting(id);
        };
        self.running.retain(|&running| running != slot);
        self.end_lockstep_iteration();
        self.queue.take_paused(slot);
        if self.sequences[slot].text.is_some() {
            forget(&mut self.sequences, &mut self.kv, slot);
        } else {
            self.sequences.hide(slot);
            self.cancelled.push(slot);
        }
        true
    }

    /// Ends a request for a reason that the engine does not see, such as a stop word in its text, with the
    /// first `num_output_tokens` that it has generated: what the same step brought after them is nothing.
    /// Returns whether it has ended, as after [`Engine::cancel`]; in lockstep it ends with its batch, with
    /// a [`Event::Finished`].
    ///
    /// # Panics
    /// If a step with it is out, and it has not ended.
    pub fn finish(
        &mut self,
        id: SequenceId,
        num_output_tokens: Tokens,
        reason: FinishReason,
    ) -> bool {
        let Some(slot) = self.sequences.find(id) else {
            return self.config.scheme != BatchingScheme::V1 && self.cancel(id);
        };
        let sequence = &mut self.sequences[slot];
        assert!(sequence.text.is_some(), "{id} is in a step that is out");
        if self.config.scheme == BatchingScheme::V1 {
            sequence.ended.get_or_insert(reason);
            return false;
        }
        self.totals
            .count_of(sequence.details.num_prompt_tokens, num_output_tokens);
        self.cancel(id)
    }

    /// Why a request has ended that is still there: in lockstep, it waits for the rest of its batch.
    pub fn ended(&self, id: SequenceId) -> Option<FinishReason> {
        self.sequences[self.sequences.find(id)?].ended
    }

    /// Whether a request searches with beams, and they are in a step that is out.
    pub fn are_beams_out(&self, id: SequenceId) -> bool {
        let slot = self.sequences.find(id);
        slot.is_some_and(|slot| self.sequences[slot].are_beams_out())
    }

    /// What a request's search would return if it ended now: the best of what has ended and of the beams that
    /// go on. Empty if there are no tokens, or no beams. In lockstep, if it waits for the rest of its batch,
    /// what it has found.
    ///
    /// # Panics
    /// If its beams are out, see [`Engine::are_beams_out`].
    pub fn best_so_far(&self, id: SequenceId) -> Box<[Hypothesis]> {
        let Some(slot) = self.sequences.find(id) else {
            return Box::default();
        };
        let sequence = &self.sequences[slot];
        assert!(!sequence.are_beams_out(), "{id} is in a step that is out");
        sequence.best_so_far()
    }

    /// Its limits.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Requests that have not ended: waiting, running or paused.
    pub fn num_active(&self) -> usize {
        self.running.len() + self.queue.num_paused() + self.queue.num_waiting()
    }

    /// Whether no request is active.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty()
    }

    /// Whether a request has not ended.
    pub fn is_active(&self, id: SequenceId) -> bool {
        self.sequences.find(id).is_some() || self.queue.waiting_ids().any(|waiting| waiting == id)
    }

    /// What drafts have come to so far.
    pub fn draft_totals(&self) -> DraftTotals {
        self.drafts
    }

    /// How full the KV cache is now.
    pub fn kv_usage(&self) -> KvUsage {
        self.kv.usage()
    }

    /// The record of the step that `schedule` decided last; `None` if nothing was active.
    pub fn stats(&self) -> Option<&StepStats> {
        self.stats.as_ref()
    }

    /// What each active request did in the step that `schedule` decided last, in order of id; empty
    /// unless [`EngineConfig::record_requests`].
    pub fn request_stages(&self) -> &[RequestStage] {
        &self.stages
    }

    /// The records of the iterations in lockstep that have ended since the last time. An iteration is a batch,
    /// from its start to its end.
    pub fn take_ended_iterations(&mut self) -> Vec<StepStats> {
        std::mem::take(&mut self.lockstep.ended)
    }

    /// In lockstep, rows of a model call that are computed for those of the batch that have ended.
    pub(super) fn num_ended_beams(&self) -> u32 {
        if self.config.scheme != BatchingScheme::V1 {
            return 0;
        }
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        let ended = running.filter(|sequence| sequence.ended.is_some());
        ended.map(|sequence| sequence.width()).sum()
    }

    /// In lockstep, those of the batch that have ended.
    pub(super) fn num_ended(&self) -> usize {
        if self.config.scheme != BatchingScheme::V1 {
            return 0;
        }
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        running.filter(|sequence| sequence.ended.is_some()).count()
    }
}

/// Takes a sequence out of its row and gives its blocks back.
pub(super) fn forget(sequences: &mut SequenceTable, kv: &mut KvCacheManager, slot: SeqSlot) {
    let mut sequence: Sequence = sequences.remove(slot);
    if let Some(beams) = &mut sequence.details.beams {
        beams.release(kv);
    }
    kv.release(&mut sequence.blocks);
}
