//! A runner whose device, or whose other ranks, compute one step while the host launches the next one and works on the
//! results of the one before.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::step_loop::ComputedStep;
use inflight_base::StepError;
use inflight_engine::{Step, StepOutput};
use inflight_runner::Runner;

/// The runner, and the steps that are on their way. It is used on the caller's thread.
pub(super) struct AheadRunner {
    runner: Box<dyn Runner>,
    /// Its state is unknown.
    has_failed: bool,
    /// The steps that were launched and have not landed, the oldest first, and when they were launched.
    launched: VecDeque<(Step, Instant)>,
    /// When the last step landed.
    landed_at: Option<Instant>,
    /// Outputs that came back, kept for their memory.
    spare: Vec<StepOutput>,
}

impl AheadRunner {
    pub(super) fn new(runner: Box<dyn Runner>) -> Self {
        Self {
            runner,
            has_failed: false,
            launched: VecDeque::new(),
            landed_at: None,
            spare: Vec::new(),
        }
    }

    /// Launches a step, behind those that have not landed.
    ///
    /// # Errors
    /// It failed as a whole.
    pub(super) fn launch(&mut self, mut step: Step) -> Result<(), StepError> {
        let started = Instant::now();
        self.attempt(|runner| {
            runner.make_drafts(&mut step)?;
            step.plans().try_for_each(|plan| runner.launch(&plan))
        })?;
        self.launched.push_back((step, started));
        Ok(())
    }

    /// Waits for the oldest step that was launched and has not landed. It took as long as nothing before it was
    /// computed.
    ///
    /// # Errors
    /// It failed, or one before it.
    pub(super) fn land(&mut self) -> Result<ComputedStep<Duration>, StepError> {
        let (step, launched_at) = self.launched.pop_front().expect("a step was launched");
        let mut output = self.spare.pop().unwrap_or_default();
        output.clear();
        self.attempt(|runner| {
            step.plans()
                .try_for_each(|plan| runner.collect(&plan, &mut output))
        })?;
        let now = Instant::now();
        let before = self.landed_at.replace(now);
        let started = before.map_or(launched_at, |before| before.max(launched_at));
        Ok(ComputedStep {
            step,
            output,
            timing: now.duration_since(started),
        })
    }

    /// Keeps an output for its memory.
    pub(super) fn recycle(&mut self, output: StepOutput) {
        self.spare.push(output);
    }

    /// The runner; `None` if it has failed, or has a step.
    pub(super) fn runner_at_rest(&mut self) -> Option<&mut dyn Runner> {
        let is_at_rest = !self.has_failed && self.launched.is_empty();
        is_at_rest.then_some(&mut *self.runner)
    }

    fn attempt(
        &mut self,
        work: impl FnOnce(&mut dyn Runner) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        // It may end in a panic.
        self.has_failed = true;
        work(&mut *self.runner)?;
        self.has_failed = false;
        Ok(())
    }
}
