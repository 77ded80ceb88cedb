//! The engine's counters, and its records of the last step.

use crate::active::ActiveSequences;
use crate::lockstep::{LockstepBatch, LockstepTotals};
use crate::model_drafts::Experience;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::{
    AdapterUsage, DraftTotals, EngineConfig, RequestStage, Stage, Step, StepStats, Totals,
};
use inflight_base::Tokens;

/// The counters of an engine and the records of its last step.
#[derive(Default)]
pub(super) struct Recorder {
    num_steps: u64,
    ended: Totals,
    drafts: DraftTotals,
    experience: Experience,
    /// The record of the last step; `None` if nothing was active.
    stats: Option<StepStats>,
    stages: Vec<RequestStage>,
    /// Records of lockstep iterations that have ended and have not been taken yet.
    iterations: Vec<StepStats>,
}

impl Recorder {
    /// The record of the last step; `None` if nothing was active.
    pub(super) fn stats(&self) -> Option<&StepStats> {
        self.stats.as_ref()
    }

    /// The stage of each active request in the last step, in order of id; empty unless it is configured.
    pub(super) fn stages(&self) -> &[RequestStage] {
        &self.stages
    }

    /// The total of all drafts.
    pub(super) fn drafts(&self) -> DraftTotals {
        self.drafts
    }

    /// Counts the drafts of a sequence in one step, which the draft model has made or not.
    pub(super) fn count_drafts(&mut self, num_drafted: usize, num_accepted: usize, are_made: bool) {
        self.drafts.add(num_drafted, num_accepted);
        if are_made {
            self.experience.count(num_drafted, num_accepted);
        }
    }

    /// How often the drafts of the draft model were right lately.
    pub(super) fn experience(&self) -> &Experience {
        &self.experience
    }

    /// The records of the lockstep iterations that have ended since the last time.
    pub(super) fn take_iterations(&mut self) -> Vec<StepStats> {
        std::mem::take(&mut self.iterations)
    }

    /// Counts a sequence that has ended with all that it has generated.
    pub(super) fn count_ended(&mut self, sequence: &Sequence) {
        self.count_ended_with(sequence.num_prompt_tokens(), sequence.num_output_tokens());
    }

    /// Counts a sequence that has ended with `num_output_tokens`.
    pub(super) fn count_ended_with(&mut self, num_input_tokens: Tokens, num_output_tokens: Tokens) {
        self.ended.num_requests += 1;
        self.ended.num_input_tokens += u64::from(num_input_tokens.0);
        self.ended.num_output_tokens += u64::from(num_output_tokens.0);
    }

    /// Records that a lockstep batch has ended, with its totals.
    pub(super) fn end_iteration(&mut self, totals: LockstepTotals) {
        let record = self.stats.clone().map(|stats| StepStats {
            lockstep: Some(totals),
            ..stats
        });
        self.iterations.extend(record);
    }

    /// Records the step that was just planned.
    pub(super) fn record(
        &mut self,
        step: &Step,
        config: &EngineConfig,
        active: &ActiveSequences,
        scheduler: &Scheduler,
        mut lockstep: Option<&mut LockstepBatch>,
    ) {
        self.stages.clear();
        if active.is_empty() {
            self.stats = None;
            return;
        }
        if config.record_requests {
            self.record_stages(step, active, scheduler.num_context_rows());
        }
        // In lockstep a batch is one iteration, which begins with its first step.
        if lockstep
            .as_ref()
            .is_none_or(|it| !it.is_running() || it.is_new())
        {
            self.num_steps += 1;
        }
        let num_scheduled = step.num_requests();
        let num_contexts = scheduler.num_contexts();
        let num_context_tokens = scheduler.num_context_tokens();
        let num_active = active.len();
        let mut num_waiting = num_active - num_scheduled;
        if let Some(lockstep) = &mut lockstep {
            let running = active.running();
            let num_ended = running.filter(|(_, it)| it.ended().is_some()).count();
            let num_empty_slots = match scheduler.any_generating() {
                true => num_ended,
                false => 0,
            };
            lockstep.count_planned(num_context_tokens, num_empty_slots);
            // A sequence that waits for the rest of its batch is in it.
            num_waiting = num_active - active.num_running();
        }
        self.stats = Some(StepStats {
            iteration_counter: self.num_steps,
            scheme: config.scheme,
            num_active,
            max_num_active: config.max_num_active,
            num_scheduled,
            num_context: num_contexts,
            num_generation: num_scheduled - num_contexts,
            num_context_tokens,
            lockstep: lockstep.map(|it| it.totals()),
            micro_batch: step.micro_batch(),
            num_paused: active.num_paused(),
            num_waiting,
            kv: active.kv().usage(),
            num_state_slots: config.num_state_slots(),
            num_state_slots_used: match config.num_state_snapshots {
                0 => 0,
                _ => active.running().map(|(_, it)| it.num_beams()).sum(),
            },
            paged_kv: config.paged_kv,
            reuse: active.kv().totals(),
            ended: self.ended,
            drafts: config.speculation.map(|_| self.drafts),
            adapters: active.adapters().usage().map(|usage| AdapterUsage {
                num_waiting: scheduler.num_waiting_for_pages() as u32,
                ..usage
            }),
        });
    }

    /// Records what is active. The first `num_context_rows` of the planned sequences are contexts.
    fn record_stages(&mut self, step: &Step, active: &ActiveSequences, num_context_rows: usize) {
        let stage = |id, stage| RequestStage {
            id,
            stage,
            tokens: 0,
        };
        let running = active.running().map(|(_, it)| match it.is_in_context() {
            true => stage(it.id(), Stage::Context),
            false => stage(it.id(), Stage::Generation),
        });
        self.stages.extend(running);
        let paused = active.paused().map(|it| stage(it.id(), Stage::Paused));
        self.stages.extend(paused);
        let waiting = active.waiting_ids().map(|id| stage(id, Stage::Waiting));
        self.stages.extend(waiting);
        self.stages.sort_unstable_by_key(|stage| stage.id);
        for (index, planned) in step.sequences().iter().enumerate() {
            let place = self
                .stages
                .binary_search_by_key(&planned.id, |stage| stage.id);
            let place = place.expect("every planned sequence runs");
            // What a step that was planned ahead computes counts as computed already.
            self.stages[place].stage = match index < num_context_rows {
                true => Stage::Context,
                false => Stage::Generation,
            };
            self.stages[place].tokens += planned.tokens.end - planned.tokens.start;
        }
    }
}
