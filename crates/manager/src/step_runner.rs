//! A runner as the computer of steps: on the caller's thread, on a thread of its own, or on a device or other stages of
//! ranks that compute while the caller goes on.

use std::time::Duration;

use crate::ahead_runner::AheadRunner;
use crate::runner_thread::{RunnerThread, compute};
use crate::step_loop::{ComputedStep, StepComputer};
use inflight_base::StepError;
use inflight_engine::{BatchingScheme, EngineConfig, Step, StepOutput};
use inflight_runner::Runner;

/// Computes steps with a runner.
pub(super) struct StepRunner {
    place: Place,
}

/// Where a runner computes.
enum Place {
    /// In `launch`.
    Caller(Box<CallerRunner>),
    /// On a thread, while the caller does something else.
    Thread(RunnerThread),
    /// On a device, or on other stages of ranks, while the caller does something else.
    Ahead(Box<AheadRunner>),
}

/// A runner that computes on the caller's thread.
struct CallerRunner {
    runner: Box<dyn Runner>,
    /// Its state is unknown.
    has_failed: bool,
    /// The step that was launched and has not landed.
    computed: Option<ComputedStep<Duration>>,
    /// An output that came back, kept for its memory.
    spare: Option<StepOutput>,
}

impl StepRunner {
    /// A runner for the steps of an engine. With two micro-batches it gets a thread of its own; or one is computed by
    /// the first stage of ranks, on the caller's thread, while the other one is in the stages behind.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub(super) fn new(runner: Box<dyn Runner>, config: &EngineConfig) -> std::io::Result<Self> {
        // Steps of one call each: the stages have room for two.
        let overlaps_stages = runner.has_stages() && config.scheme == BatchingScheme::InflightFused;
        let place = match config.num_micro_batches {
            1 if config.plan_ahead => Place::Ahead(Box::new(AheadRunner::new(runner))),
            1 => Place::Caller(Box::new(CallerRunner::new(runner))),
            _ if overlaps_stages => Place::Ahead(Box::new(AheadRunner::new(runner))),
            _ => Place::Thread(RunnerThread::start(runner)?),
        };
        Ok(Self { place })
    }

    /// The runner, when all steps have landed; `None` if it has failed. No further step is computed.
    pub(super) fn stop(&mut self) -> Option<&mut dyn Runner> {
        if let Place::Thread(thread) = &mut self.place {
            let runner = thread.stop()?;
            self.place = Place::Caller(Box::new(CallerRunner::new(runner)));
        }
        match &mut self.place {
            Place::Caller(caller) if !caller.has_failed => Some(&mut *caller.runner),
            Place::Ahead(ahead) => ahead.runner_at_rest(),
            Place::Caller(_) | Place::Thread(_) => None,
        }
    }
}

impl CallerRunner {
    fn new(runner: Box<dyn Runner>) -> Self {
        Self {
            runner,
            has_failed: false,
            computed: None,
            spare: None,
        }
    }
}

impl StepComputer for StepRunner {
    type Timing = Duration;

    fn launch(&mut self, step: Step) -> Result<(), StepError> {
        match &mut self.place {
            Place::Thread(thread) => thread.launch(step),
            Place::Ahead(ahead) => ahead.launch(step),
            Place::Caller(caller) => {
                let output = caller.spare.take().unwrap_or_default();
                // It may end in a panic.
                caller.has_failed = true;
                let computed = compute(&mut *caller.runner, step, output)?;
                caller.computed = Some(computed);
                caller.has_failed = false;
                Ok(())
            }
        }
    }

    fn land(&mut self) -> Result<ComputedStep<Duration>, StepError> {
        match &mut self.place {
            Place::Thread(thread) => thread.land(),
            Place::Ahead(ahead) => ahead.land(),
            Place::Caller(caller) => Ok(caller.computed.take().expect("a step was launched")),
        }
    }

    fn recycle(&mut self, output: StepOutput) {
        match &mut self.place {
            Place::Thread(thread) => thread.recycle(output),
            Place::Ahead(ahead) => ahead.recycle(output),
            Place::Caller(caller) => caller.spare = Some(output),
        }
    }
}
