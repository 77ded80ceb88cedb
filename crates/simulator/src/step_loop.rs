//! The engine and its runner in virtual time: what the backend's batch manager is, without the computing.
//! The only file that knows the engine.
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

/// What every prompt begins with where they share a beginning, and what is generated.
const COMMON_TOKEN: TokenId = 0;

/// The batch manager of a simulation.
pub struct StepLoop {
    engine: Engine,
    cost: CostModel,
    num_micro_batches: usize,
    /// Tokens that all prompts begin with.
    num_shared_tokens: u32,
    launched: VecDeque<Launched>,
    /// When the runner has computed all that was launched.
    runner_free: Time,
    output: StepOutput,
    next_id: u64,
    /// When the batch in lockstep began of which there is no record yet.
    batch_began: Option<Time>,
}

/// A step on its way.
struct Launched {
    step: Step,
    landed: Landed,
}

/// A step that has been computed.
#[derive(Clone, Debug)]
pub struct Landed {
    /// When the model began.
    pub began: Time,
    /// When the model had ended.
    pub ended: Time,
    /// The batch manager's figures; `None` if nothing was active.
    pub stats: Option<StepStats>,
    /// The record that is due with it, and when what it is of began: in lockstep that is a whole batch.
    pub record: Option<(StepStats, Time)>,
    /// What each request did; empty unless [`EngineConfig::record_requests`].
    pub stages: Vec<RequestStage>,
    /// Tokens that were computed.
    pub num_tokens: u32,
}

impl StepLoop {
    /// A loop without requests, all of whose prompts will begin with the same `num_shared_tokens`.
    ///
    /// # Panics
    /// With a configuration that [`EngineConfig::check`] refuses.
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

    /// Queues a request; its id, which counts from 0. `None`: the engine refuses it, it is too long.
    pub fn add(&mut self, num_input_tokens: u32, num_output_tokens: u32) -> Option<SequenceId> {
        let id = SequenceId(self.next_id);
        let mut prompt = vec![COMMON_TOKEN; num_input_tokens as usize];
        // One token of its own is enough to share nothing from there on.
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

    /// Decides the next step at `now`, and gives it to the runner.
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

    /// Takes in the oldest step that is on its way, if it is time to, and appends what has happened to
    /// `events`. With two micro-batches one stays on its way, as long as there is another to launch.
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
