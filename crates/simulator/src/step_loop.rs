//! The engine and its runner in virtual time: the backend's batch manager without the computation. The only
//! file that knows the engine.
//!
//! ```text
//! one micro-batch     | launch A ...... land A | launch B ...... land B |
//! two                 | launch A | launch B ... land A | launch A' ... land B |
//! runner              |----- A -----||----- B -----||----- A' ----
//! ```

use std::collections::VecDeque;

use triton_inflight::base::{SequenceId, TokenId, Tokens};
use triton_inflight::engine::{
    Engine, EngineConfig, Event, NewRequest, RequestStage, Sampled, Step, StepOutput, StepStats,
};

use crate::cost::{CostModel, Work};
use crate::time::Time;

/// Token of shared prompt prefixes and of all outputs.
const COMMON_TOKEN: TokenId = 0;

/// The batch manager of a simulation.
pub struct StepLoop {
    engine: Engine,
    cost: CostModel,
    num_micro_batches: usize,
    /// Length of the prefix that all prompts share.
    num_shared_tokens: u32,
    launched: VecDeque<Launched>,
    /// When the runner will have finished all launched steps.
    runner_free: Time,
    output: StepOutput,
    next_id: u64,
    /// Start of the current lockstep batch, until its record is written.
    batch_began: Option<Time>,
}

/// A launched step that has not landed.
struct Launched {
    step: Step,
    landed: Landed,
}

/// A finished step.
#[derive(Clone, Debug)]
pub struct Landed {
    /// Start of the model call.
    pub began: Time,
    /// End of the model call.
    pub ended: Time,
    /// The batch manager's statistics; `None` if no request was active.
    pub stats: Option<StepStats>,
    /// The record to write, if one is due, and the start of the period that it covers: a step, or in lockstep
    /// a whole batch.
    pub record: Option<(StepStats, Time)>,
    /// The stage of each request; empty unless [`EngineConfig::record_requests`].
    pub stages: Vec<RequestStage>,
    /// Number of tokens computed.
    pub num_tokens: u32,
}

impl StepLoop {
    /// A loop without requests, whose prompts will all share a prefix of `num_shared_tokens`.
    ///
    /// # Panics
    /// If [`EngineConfig::check`] rejects `config`.
    pub fn new(config: EngineConfig, cost: CostModel, num_shared_tokens: u32) -> Self {
        Self {
            num_micro_batches: config.num_micro_batches,
            engine: Engine::new(config),
            cost,
            num_shared_tokens,
            launched: VecDeque::new(),
            runner_free: Time::ZERO,
            output: StepOutput::default(),
            next_id: 0,
            batch_began: None,
        }
    }

    /// Queues a request and returns its id; ids count from 0. `None` if the engine rejects it as too long.
    pub fn add(&mut self, num_input_tokens: u32, num_output_tokens: u32) -> Option<SequenceId> {
        let id = SequenceId(self.next_id);
        let mut prompt = vec![COMMON_TOKEN; num_input_tokens as usize];
        // One distinct token is enough: reuse ends at the first difference.
        if let Some(own) = prompt.get_mut(self.num_shared_tokens as usize) {
            *own = 1 + id.0 as TokenId % (TokenId::MAX - 1);
        }
        let request = NewRequest::new(id, prompt, Tokens(num_output_tokens));
        self.engine.add(request).ok()?;
        self.next_id += 1;
        Some(id)
    }

    /// Whether no request is active.
    pub fn is_idle(&self) -> bool {
        self.engine.is_idle()
    }

    /// Schedules the next step at `now` and starts it on the runner.
    pub fn launch(&mut self, now: Time) {
        let step = self.engine.schedule();
        let began = now.max(self.runner_free);
        let calls = step.plans().map(|plan| {
            let sequences = plan.sequences.iter();
            self.cost.model_call(Work {
                num_tokens: plan.token_ids.len() as u64 + u64::from(plan.num_padding_tokens.0),
                num_sequences: plan.sequences.len() as u64,
                num_positions: sequences.map(|planned| u64::from(planned.kv_len)).sum(),
            })
        });
        let ended = began + calls.sum();
        self.runner_free = ended;
        let landed = Landed {
            began,
            ended,
            stats: self.engine.stats().cloned(),
            record: None,
            stages: self.engine.request_stages().to_vec(),
            num_tokens: step.num_tokens().0,
        };
        self.launched.push_back(Launched { step, landed });
    }

    /// Lands the oldest launched step if it is due, and appends its events. With two micro-batches, one step
    /// stays in flight as long as another one can be launched.
    pub fn land(&mut self, events: &mut Vec<Event>) -> Option<Landed> {
        let last_is_empty = self.launched.back().is_none_or(|last| last.step.is_empty());
        if self.launched.len() < self.num_micro_batches && !last_is_empty {
            return None;
        }
        let Launched { step, mut landed } = self.launched.pop_front()?;
        self.output.sampled.clear();
        let samples = step.sequences().iter().filter(|planned| planned.samples);
        let tokens = samples.map(|planned| (planned.slot, Sampled::Token(COMMON_TOKEN)));
        self.output.sampled.extend(tokens);
        self.engine.apply(step, &mut self.output, events);
        let is_lockstep = landed
            .stats
            .as_ref()
            .is_some_and(|it| it.lockstep.is_some());
        landed.record = match is_lockstep {
            false => landed.stats.clone().map(|stats| (stats, landed.began)),
            true => {
                let began = *self.batch_began.get_or_insert(landed.began);
                let ended = self.engine.take_ended_iterations().into_iter().next();
                ended.map(|stats| (stats, self.batch_began.take().unwrap_or(began)))
            }
        };
        Some(landed)
    }
}
