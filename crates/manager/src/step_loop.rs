//! Launching and landing steps: how the work of the host overlaps with the computing.
//!
//! The only file that knows when a step is planned, computed and applied. A [`StepComputer`] computes the steps: a
//! runner, or the simulator's cost model in virtual time.
//!
//! ```text
//! one micro-batch     | launch A ...... land A | launch B ...... land B |
//! two                 | launch A | launch B ... land A | launch A' ... land B |
//! computer            |----- A -----||----- B -----||----- A' ----
//! ```
//!
//! Steps that are planned ahead are launched like two micro-batches.

use std::collections::VecDeque;
use std::time::Duration;

use inflight_base::StepError;
use inflight_engine::{Engine, EngineConfig, Event, RequestStage, Step, StepOutput, StepStats};

/// Computes steps one after the other, in the order in which they were launched.
pub trait StepComputer {
    /// Measurements of a step, in addition to the results.
    type Timing: Default;

    /// Starts to compute a step, or computes it.
    ///
    /// # Errors
    /// The step failed as a whole. The computer's state is unknown: it must not be used again. The same holds for
    /// `land`.
    fn launch(&mut self, step: Step) -> Result<(), StepError>;

    /// Waits for the oldest step that was launched and has not landed. There is one.
    ///
    /// # Errors
    /// As for `launch`.
    fn land(&mut self) -> Result<ComputedStep<Self::Timing>, StepError>;

    /// Takes an output back, to use its memory again.
    fn recycle(&mut self, output: StepOutput);
}

/// A step and its results.
pub struct ComputedStep<T> {
    /// The step.
    pub step: Step,
    /// Its results.
    pub output: StepOutput,
    /// Its measurements.
    pub timing: T,
}

/// The record of a step that has landed.
#[derive(Clone, Debug)]
pub struct LandedStep<T = Duration> {
    /// Its statistics.
    pub stats: StepStats,
    /// In lockstep, the record of the batch that had ended before the step was planned.
    pub ended_before: Option<StepStats>,
    /// In lockstep, the record of the batch that ended with the step.
    pub ended: Option<StepStats>,
    /// The stage of each request in it; empty unless [`EngineConfig::record_requests`].
    pub stages: Vec<RequestStage>,
    /// Its measurements; from a runner, how long it took.
    pub model: T,
}

impl<T> LandedStep<T> {
    /// The records that are due with it: its own or, in lockstep, one for each batch that has ended.
    pub fn records(&self) -> impl Iterator<Item = &StepStats> {
        let own = self.stats.lockstep.is_none().then_some(&self.stats);
        self.ended_before.iter().chain(&self.ended).chain(own)
    }
}

/// An engine, and the steps that are on their way.
pub struct StepLoop<C: StepComputer> {
    engine: Engine,
    computer: C,
    /// The records of the steps that were launched and have not landed, the oldest first.
    launched: VecDeque<LandedStep<C::Timing>>,
    max_launched: usize,
    /// Whether a step was launched since the last call of `land`.
    has_launched: bool,
    /// A step without computation, which only has events.
    empty: Option<Step>,
    /// The record of a lockstep batch that has ended since the last step.
    ended_before: Option<StepStats>,
}

impl<C: StepComputer> StepLoop<C> {
    /// A loop without requests.
    ///
    /// # Panics
    /// If [`EngineConfig::check`] refuses the configuration.
    pub fn new(config: EngineConfig, computer: C) -> Self {
        Self::with_engine(Engine::new(config), computer)
    }

    /// The same with an engine that has planned no step.
    pub fn with_engine(engine: Engine, computer: C) -> Self {
        let max_launched = engine.config().max_steps_out();
        Self {
            engine,
            computer,
            launched: VecDeque::with_capacity(max_launched),
            max_launched,
            has_launched: false,
            empty: None,
            ended_before: None,
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, to add, cancel and finish requests. Only the loop may schedule and apply.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The engine and the computer.
    pub fn parts_mut(&mut self) -> (&mut Engine, &mut C) {
        (&mut self.engine, &mut self.computer)
    }

    /// The computer.
    pub fn computer_mut(&mut self) -> &mut C {
        &mut self.computer
    }

    /// Plans the next step and has it computed, if there is anything to compute.
    ///
    /// # Errors
    /// The step failed as a whole. The loop cannot continue.
    pub fn launch(&mut self) -> Result<(), StepError> {
        if self.engine.is_idle() {
            self.keep_ended_batch();
            return Ok(());
        }
        let step = self.engine.schedule();
        self.keep_ended_batch();
        if step.is_empty() {
            self.empty = Some(step);
            return Ok(());
        }
        let record = LandedStep {
            stats: self.engine.stats().cloned().expect("a request is active"),
            ended_before: self.ended_before.take(),
            ended: None,
            stages: self.engine.request_stages().to_vec(),
            model: C::Timing::default(),
        };
        self.computer.launch(step)?;
        self.launched.push_back(record);
        self.has_launched = true;
        Ok(())
    }

    /// Applies the oldest step that is on its way, if it is due, and appends what has happened to `events`. With two
    /// micro-batches, or where steps are planned ahead, one step stays on its way as long as there is another to
    /// launch.
    ///
    /// # Errors
    /// The step failed as a whole. The loop cannot continue.
    pub fn land(
        &mut self,
        events: &mut Vec<Event>,
    ) -> Result<Option<LandedStep<C::Timing>>, StepError> {
        let has_launched = std::mem::take(&mut self.has_launched);
        let must_wait = self.engine.config().plan_ahead && !self.engine.can_plan_ahead();
        let is_due = self.launched.len() == self.max_launched || !has_launched || must_wait;
        let landed = match self.launched.pop_front_if(|_| is_due) {
            Some(record) => Some(self.apply(record, events)?),
            None => None,
        };
        if let Some(step) = self.empty.take() {
            self.engine.apply(step, &mut StepOutput::default(), events);
        }
        Ok(landed.or_else(|| self.batch_without_step()))
    }

    /// Applies all steps that are on their way, due or not, and appends what has happened to `events`: afterwards
    /// nothing that was cancelled holds blocks.
    ///
    /// # Errors
    /// A step failed as a whole. The loop cannot continue.
    pub fn settle(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        while let Some(record) = self.launched.pop_front() {
            self.apply(record, events)?;
        }
        Ok(())
    }

    fn apply(
        &mut self,
        mut record: LandedStep<C::Timing>,
        events: &mut Vec<Event>,
    ) -> Result<LandedStep<C::Timing>, StepError> {
        let mut computed = self.computer.land()?;
        record.model = computed.timing;
        self.engine
            .apply(computed.step, &mut computed.output, events);
        self.computer.recycle(computed.output);
        record.ended = self.engine.take_ended_iterations().into_iter().next();
        let drafts = &mut record.stats.drafts;
        *drafts = drafts.map(|_| self.engine.draft_totals());
        Ok(record)
    }

    /// Keeps the record of a lockstep batch that has ended without a step: its last requests were ended from outside.
    fn keep_ended_batch(&mut self) {
        let ended = self.engine.take_ended_iterations();
        self.ended_before = ended.into_iter().next().or(self.ended_before.take());
    }

    /// The record of such a batch, if no step carries it.
    fn batch_without_step(&mut self) -> Option<LandedStep<C::Timing>> {
        let ended = self.ended_before.take()?;
        Some(LandedStep {
            stats: ended.idle(self.engine.kv_usage()),
            ended_before: Some(ended),
            ended: None,
            stages: Vec::new(),
            model: C::Timing::default(),
        })
    }
}
