//! An engine and its runner, step by step.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::base::{RequestError, SequenceId, StepError, Tokens};
use crate::engine::{
    BatchingScheme, DraftTotals, Engine, EngineConfig, Event, KvUsage, NewRequest, RequestStage,
    Step, StepOutput, StepStats,
};
use crate::manager::pipeline::{Computed, Pipeline};
use crate::runner::Runner;
use crate::sampling::{FinishReason, Hypothesis};

/// A batch manager: requests in, tokens out, a step at a time.
///
/// With one micro-batch a step is computed in `launch`, on the caller's thread. With two
/// ([`EngineConfig::num_micro_batches`]) the runner has a thread of its own, and what `land` brings back
/// is the step before:
///
/// ```text
/// caller   | launch A |       launch B | land A: answer, wait for more | launch A' | land B ...
/// runner              |------ A ------------||------ B -------------------||---- A' ----
/// ```
pub struct BatchManager {
    engine: Engine,
    computer: Computer,
    num_micro_batches: usize,
    /// Token ids are below it.
    vocab_size: u32,
    /// Whether tokens are chosen from logits.
    has_logits: bool,
    /// Whether requests may bring logits processors.
    may_process: bool,
    /// Steps that were launched and have not landed, the oldest first.
    launched: VecDeque<Launched>,
    /// Whether one was launched since the last time that one could land.
    has_launched: bool,
    /// A step in which nothing is computed: it only brings news.
    empty: Option<Step>,
    /// The record of a batch in lockstep that has ended since the last step.
    ended_before: Option<StepStats>,
    /// Where a runner of this thread writes.
    output: StepOutput,
}

/// Who computes.
enum Computer {
    Here(Runner),
    Thread(Pipeline),
}

/// A step on its way.
struct Launched {
    record: LandedStep,
    /// What came of it, unless the runner's thread has it.
    here: Option<Computed>,
}

/// What is known of a step that has landed.
#[derive(Clone, Debug)]
pub struct LandedStep {
    /// Its figures.
    pub stats: StepStats,
    /// In lockstep, the record of the batch that had ended before the step was planned.
    pub ended_before: Option<StepStats>,
    /// In lockstep, the record of the batch that has ended with the step.
    pub ended: Option<StepStats>,
    /// What each request did in it; empty unless [`EngineConfig::record_requests`].
    pub stages: Vec<RequestStage>,
    /// How long the runner took.
    pub model: Duration,
}

impl LandedStep {
    /// The records that are due with it: its own, or in lockstep those of the batches that have ended.
    pub fn records(&self) -> impl Iterator<Item = &StepStats> {
        let own = self.stats.lockstep.is_none().then_some(&self.stats);
        self.ended_before.iter().chain(&self.ended).chain(own)
    }
}

impl BatchManager {
    /// A batch manager without requests.
    ///
    /// # Errors
    /// The system refuses the runner's thread.
    ///
    /// # Panics
    /// With a configuration that [`EngineConfig::check`] refuses.
    pub fn new(config: EngineConfig, runner: Runner) -> std::io::Result<Self> {
        let num_micro_batches = config.num_micro_batches;
        let (vocab_size, has_logits) = (runner.vocab_size(), runner.has_logits());
        let may_process = has_logits && config.scheme != BatchingScheme::V1;
        let computer = match num_micro_batches {
            1 => Computer::Here(runner),
            _ => Computer::Thread(Pipeline::start(runner)?),
        };
        Ok(Self {
            engine: Engine::new(config),
            computer,
            num_micro_batches,
            vocab_size,
            has_logits,
            may_process,
            launched: VecDeque::with_capacity(num_micro_batches),
            has_launched: false,
            empty: None,
            ended_before: None,
            output: StepOutput::default(),
        })
    }

    /// Queues a request, see [`Engine::add`].
    ///
    /// # Errors
    /// A request that could never run, or one with a token outside the vocabulary. One with a logits processor where
    /// there are none: in lockstep, and with a runner that has no logits. Without logits there is no
    /// guided decoding, and there are no log-probabilities.
    ///
    /// # Panics
    /// As [`Engine::add`].
    pub fn add(&mut self, request: NewRequest) -> Result<(), RequestError> {
        let mut ids = request.prompt.iter().chain(request.drafts.expected.iter());
        if let Some(id) = ids.find(|id| **id >= self.vocab_size) {
            return Err(RequestError::Invalid(format!(
                "token {id} of the prompt, or of what is expected to follow it, is outside the vocabulary, 0 to {}",
                self.vocab_size - 1
            )));
        }
        if request.sampling.logits_processor.is_some() && !self.may_process {
            return Err(RequestError::Invalid(
                "a logits processor needs a model and in-flight batching".to_owned(),
            ));
        }
        if request.outputs.needs_logits() && !self.has_logits {
            return Err(RequestError::Invalid(
                "log-probabilities and logits need a model: the synthetic runner has none"
                    .to_owned(),
            ));
        }
        if request.sampling.guide.is_some() && !self.has_logits {
            return Err(RequestError::Invalid(
                "guided decoding needs a model: the synthetic runner has no logits".to_owned(),
            ));
        }
        self.engine.add(request)
    }

    /// Gives a request up, see [`Engine::cancel`].
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        self.engine.cancel(id)
    }

    /// Why a request has ended that is still there, see [`Engine::ended`].
    pub fn ended(&self, id: SequenceId) -> Option<FinishReason> {
        self.engine.ended(id)
    }

    /// Whether a request's beams are in a step on its way, see [`Engine::are_beams_out`]; not after
    /// [`BatchManager::settle`].
    pub fn are_beams_out(&self, id: SequenceId) -> bool {
        self.engine.are_beams_out(id)
    }

    /// What a request's search would return if it ended now, see [`Engine::best_so_far`].
    ///
    /// # Panics
    /// As there.
    pub fn best_so_far(&self, id: SequenceId) -> Box<[Hypothesis]> {
        self.engine.best_so_far(id)
    }

    /// Ends a request that has landed a token, see [`Engine::finish`].
    pub fn finish(
        &mut self,
        id: SequenceId,
        num_output_tokens: Tokens,
        reason: FinishReason,
    ) -> bool {
        self.engine.finish(id, num_output_tokens, reason)
    }

    /// Waits for all steps that are on their way, whatever is to be launched, and appends what has happened
    /// to `events`: what was cancelled meanwhile holds no blocks any more.
    ///
    /// # Errors
    /// A step failed as a whole; the manager cannot go on.
    pub fn settle(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        while let Some(launched) = self.launched.pop_front() {
            self.take_in(launched, events)?;
        }
        Ok(())
    }

    /// Whether no request is active.
    pub fn is_idle(&self) -> bool {
        self.engine.is_idle()
    }

    /// Requests that can be active at a time.
    pub fn max_num_active(&self) -> usize {
        self.engine.config().max_num_active as usize
    }

    /// Requests that have not ended.
    pub fn num_active(&self) -> usize {
        self.engine.num_active()
    }

    /// What drafts have come to so far.
    pub fn draft_totals(&self) -> DraftTotals {
        self.engine.draft_totals()
    }

    /// How full the KV cache is now.
    pub fn kv_usage(&self) -> KvUsage {
        self.engine.kv_usage()
    }

    /// Decides the next step and has it computed, if there is anything to compute.
    ///
    /// # Errors
    /// The step failed as a whole; the manager cannot go on.
    pub fn launch(&mut self) -> Result<(), StepError> {
        if self.engine.is_idle() {
            self.hear_of_ended();
            return Ok(());
        }
        let step = self.engine.schedule();
        self.hear_of_ended();
        if step.is_empty() {
            self.empty = Some(step);
            return Ok(());
        }
        let record = LandedStep {
            stats: self.engine.stats().cloned().expect("a request is active"),
            ended_before: self.ended_before.take(),
            ended: None,
            stages: self.engine.request_stages().to_vec(),
            model: Duration::ZERO,
        };
        match &mut self.computer {
            Computer::Thread(pipeline) => {
                pipeline.launch(step)?;
                self.launched.push_back(Launched { record, here: None });
            }
            Computer::Here(runner) => {
                let started = Instant::now();
                let mut output = std::mem::take(&mut self.output);
                output.clear();
                step.plans()
                    .try_for_each(|plan| runner.run(plan, &mut output))?;
                let here = Some(Computed {
                    step,
                    output,
                    model: started.elapsed(),
                });
                self.launched.push_back(Launched { record, here });
            }
        }
        self.has_launched = true;
        Ok(())
    }

    /// Takes in the oldest step that is on its way, if it is time to, and appends what has happened to
    /// `events`. With two micro-batches one step stays on its way, as long as there is another to launch.
    ///
    /// # Errors
    /// The step failed as a whole; the manager cannot go on.
    pub fn land(&mut self, events: &mut Vec<Event>) -> Result<Option<LandedStep>, StepError> {
        let has_launched = std::mem::take(&mut self.has_launched);
        let is_due = self.launched.len() == self.num_micro_batches || !has_launched;
        let landed = match self.launched.pop_front_if(|_| is_due) {
            Some(launched) => Some(self.take_in(launched, events)?),
            None => None,
        };
        if let Some(step) = self.empty.take() {
            self.engine.apply(step, &mut StepOutput::default(), events);
        }
        Ok(landed.or_else(|| self.end_without_step()))
    }

    /// Keeps the record of a batch in lockstep that has ended without a step: its last requests were ended
    /// from outside.
    fn hear_of_ended(&mut self) {
        let ended = self.engine.take_ended_iterations();
        self.ended_before = ended.into_iter().next().or(self.ended_before.take());
    }

    /// What brings such a record where there is no step to bring it.
    fn end_without_step(&mut self) -> Option<LandedStep> {
        let ended = self.ended_before.take()?;
        Some(LandedStep {
            stats: ended.idle(self.engine.kv_usage()),
            ended_before: Some(ended),
            ended: None,
            stages: Vec::new(),
            model: Duration::ZERO,
        })
    }

    fn take_in(
        &mut self,
        launched: Launched,
        events: &mut Vec<Event>,
    ) -> Result<LandedStep, StepError> {
        let mut record = launched.record;
        let mut computed = match (launched.here, &mut self.computer) {
            (Some(computed), _) => computed,
            (None, Computer::Thread(pipeline)) => pipeline.land()?,
            (None, Computer::Here(_)) => unreachable!("what is computed here is kept"),
        };
        record.model = computed.model;
        self.engine
            .apply(computed.step, &mut computed.output, events);
        record.ended = self.engine.take_ended_iterations().into_iter().next();
        let drafts = &mut record.stats.drafts;
        *drafts = drafts.map(|_| self.engine.draft_totals());
        match &mut self.computer {
            Computer::Thread(pipeline) => pipeline.give_back(computed.output),
            Computer::Here(_) => self.output = computed.output,
        }
        Ok(record)
    }
}
