//! The engine in virtual time: the backend's batch manager, with a cost model instead of a runner. The only file that
//! knows the engine.

use std::collections::VecDeque;

use inflight_base::{SequenceId, StepError, TokenId, Tokens};
use inflight_engine::{
    EngineConfig, Event, NewRequest, RequestStage, Sampled, Step, StepOutput, StepStats,
};
use inflight_manager::{ComputedStep, StepComputer};

use crate::cost::{CostModel, Work};
use crate::time::Time;

/// Token of shared prompt prefixes and of all outputs.
const COMMON_TOKEN: TokenId = 0;

/// The batch manager of a simulation.
pub struct StepLoop {
    steps: inflight_manager::StepLoop<VirtualRunner>,
    /// Length of the prefix that all prompts share.
    num_shared_tokens: u32,
    next_id: u64,
    /// Start of the current lockstep batch, until its record is written.
    batch_began: Option<Time>,
}

/// A step that has landed.
#[derive(Clone, Debug)]
pub struct Landed {
    /// Start of the model call.
    pub began: Time,
    /// End of the model call.
    pub ended: Time,
    /// The batch manager's statistics.
    pub stats: StepStats,
    /// The record to write, if one is due, and the start of the period that it covers: a step, or in lockstep a
    /// whole batch.
    pub record: Option<(StepStats, Time)>,
    /// The stage of each request; empty unless [`EngineConfig::record_requests`].
    pub stages: Vec<RequestStage>,
    /// Number of tokens computed.
    pub num_tokens: u32,
}

/// A runner that computes nothing, and takes as long as the cost model says.
struct VirtualRunner {
    cost: CostModel,
    now: Time,
    /// When all that was launched is computed.
    free_at: Time,
    launched: VecDeque<(Step, Timing)>,
    spare: Vec<StepOutput>,
}

/// When a step was computed, and how much it was.
#[derive(Clone, Copy)]
struct Timing {
    began: Time,
    ended: Time,
    num_tokens: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            began: Time::ZERO,
            ended: Time::ZERO,
            num_tokens: 0,
        }
    }
}

impl StepComputer for VirtualRunner {
    type Timing = Timing;

    fn launch(&mut self, step: Step) -> Result<(), StepError> {
        let began = self.now.max(self.free_at);
        let calls = step.plans().map(|plan| {
            let sequences = plan.sequences.iter();
            self.cost.model_call(Work {
                num_tokens: plan.token_ids.len() as u64 + u64::from(plan.num_padding_tokens.0),
                num_sequences: plan.sequences.len() as u64,
                num_positions: sequences.map(|planned| u64::from(planned.kv_len)).sum(),
            })
        });
        let ended = began + calls.sum();
        self.free_at = ended;
        let num_tokens = step.num_tokens().0;
        let timing = Timing {
            began,
            ended,
            num_tokens,
        };
        self.launched.push_back((step, timing));
        Ok(())
    }

    fn land(&mut self) -> Result<ComputedStep<Timing>, StepError> {
        let (step, timing) = self.launched.pop_front().expect("a step was launched");
        let mut output = self.spare.pop().unwrap_or_default();
        output.clear();
        let samples = step.sequences().iter().filter(|planned| planned.samples);
        let tokens = samples.map(|planned| (planned.slot, Sampled::Token(COMMON_TOKEN)));
        output.sampled.extend(tokens);
        Ok(ComputedStep {
            step,
            output,
            timing,
        })
    }

    fn recycle(&mut self, output: StepOutput) {
        self.spare.push(output);
    }
}

impl StepLoop {
    /// A loop without requests, whose prompts will all share a prefix of `num_shared_tokens`.
    ///
    /// # Panics
    /// If [`EngineConfig::check`] refuses the configuration.
    pub fn new(config: EngineConfig, cost: CostModel, num_shared_tokens: u32) -> Self {
        let runner = VirtualRunner {
            cost,
            now: Time::ZERO,
            free_at: Time::ZERO,
            launched: VecDeque::new(),
            spare: Vec::new(),
        };
        Self {
            steps: inflight_manager::StepLoop::new(config, runner),
            num_shared_tokens,
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
        self.steps.engine_mut().add(request).ok()?;
        self.next_id += 1;
        Some(id)
    }

    /// Whether no request is active.
    pub fn is_idle(&self) -> bool {
        self.steps.engine().is_idle()
    }

    /// Plans the next step at `now`, and launches it.
    ///
    /// # Errors
    /// None: nothing fails in virtual time. So for `land`.
    pub fn launch(&mut self, now: Time) -> Result<(), StepError> {
        self.steps.computer_mut().now = now;
        self.steps.launch()
    }

    /// Applies the oldest step that is on its way, if it is due, and appends what has happened to `events`. With two
    /// micro-batches one step stays on its way as long as there is another to launch.
    ///
    /// # Errors
    /// As for `launch`.
    pub fn land(&mut self, events: &mut Vec<Event>) -> Result<Option<Landed>, StepError> {
        let Some(landed) = self.steps.land(events)? else {
            return Ok(None);
        };
        let Timing {
            began,
            ended,
            num_tokens,
        } = landed.model;
        let what_began = match landed.stats.lockstep {
            None => began,
            Some(_) => *self.batch_began.get_or_insert(began),
        };
        let record = landed.records().next().cloned();
        if record.is_some() {
            self.batch_began = None;
        }
        Ok(Some(Landed {
            began,
            ended,
            record: record.map(|stats| (stats, what_began)),
            stats: landed.stats,
            stages: landed.stages,
            num_tokens,
        }))
    }
}
