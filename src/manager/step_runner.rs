//! A runner as the computer of steps: on the caller's thread, on a thread of its own, or on a device or other stages of ranks
//! that compute while the caller goes on.

use std::time::Duration;

use crate::base::StepError;
use crate::engine::{BatchingScheme, EngineConfig, Step, StepOutput};
use crate::manager::ahead_runner::AheadRunner;
use crate::manager::runner_thread::{RunnerThread, compute};
use crate::manager::step_loop::{ComputedStep, StepComputer};
use crate::runner::Runner;

/// Computes steps with a runner.
pub(super) enum StepRunner {
    /// In `launch`.
    Caller(Box<CallerRunner>),
    /// On a thread, while the caller does something else.
    Thread(RunnerThread),
    /// On a device, or on other stages of ranks, while the caller does something else.
    Ahead(Box<AheadRunner>),
}

/// A runner that computes on the caller's thread.
pub(super) struct CallerRunner {
    runner: Runner,
    /// Its state is unknown.
    has_failed: bool,
    /// The step that was launched and has not landed.
    computed: Option<ComputedStep<Duration>>,
    /// An output that came back, kept for its memory.
    spare: Option<StepOutput>,
}

impl StepRunner {
    /// A runner for the steps of an engine. With two micro-batches it gets a thread of its own; or one is computed by the first
    /// stage of ranks, on the caller's thread, while the other one is in the stages behind.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub(super) fn new(runner: Runner, config: &EngineConfig) -> std::io::Result<Self> {
        // Steps of one call each: the stages have room for two.
        let overlaps_stages = runner.has_stages() && config.scheme == BatchingScheme::InflightFused;
        Ok(match config.num_micro_batches {
            1 if config.plan_ahead => Self::Ahead(Box::new(AheadRunner::new(runner))),
            1 => Self::Caller(Box::new(CallerRunner {
                runner,
                has_failed: false,
                computed: None,
                spare: None,
            })),
            _ if overlaps_stages => Self::Ahead(Box::new(AheadRunner::new(runner))),
            _ => Self::Thread(RunnerThread::start(runner)?),
        })
    }

    /// The runner, when all steps have landed; `None` if it has failed. No further step is computed.
    pub(super) fn stop(&mut self) -> Option<&mut Runner> {
        if let Self::Thread(thread) = self {
            let runner = thread.stop()?;
            *self = Self::Caller(Box::new(CallerRunner {
                runner,
                has_failed: false,
                computed: None,
                spare: None,
            }));
        }
        match self {
            Self::Caller(caller) if !caller.has_failed => Some(&mut caller.runner),
            Self::Ahead(ahead) => ahead.runner_at_rest(),
            Self::Caller(_) | Self::Thread(_) => None,
        }
    }
}

impl StepComputer for StepRunner {
    type Timing = Duration;

    fn launch(&mut self, step: Step) -> Result<(), StepError> {
        match self {
            Self::Thread(thread) => thread.launch(step),
            Self::Ahead(ahead) => ahead.launch(step),
            Self::Caller(caller) => {
                let output = caller.spare.take().unwrap_or_default();
                // It may end in a panic.
                caller.has_failed = true;
                caller.computed = Some(compute(&mut caller.runner, step, output)?);
                caller.has_failed = false;
                Ok(())
            }
        }
    }

    fn land(&mut self) -> Result<ComputedStep<Duration>, StepError> {
        match self {
            Self::Thread(thread) => thread.land(),
            Self::Ahead(ahead) => ahead.land(),
            Self::Caller(caller) => Ok(caller.computed.take().expect("a step was launched")),
        }
    }

    fn recycle(&mut self, output: StepOutput) {
        match self {
            Self::Thread(thread) => thread.recycle(output),
            Self::Ahead(ahead) => ahead.recycle(output),
            Self::Caller(caller) => caller.spare = Some(output),
        }
    }
}
