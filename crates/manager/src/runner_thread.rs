//! A runner on a thread of its own, so that the host works on one step while another is computed.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::step_loop::ComputedStep;
use inflight_base::{StepError, catch_panic};
use inflight_engine::{Step, StepOutput};
use inflight_runner::Runner;

/// The most steps that are on their way: one that is computed, and one behind it.
const MAX_LAUNCHED: usize = 2;

/// The thread, and the channels to it and back.
pub(super) struct RunnerThread {
    /// `None` only while it is dropped.
    steps: Option<SyncSender<(Step, StepOutput)>>,
    results: Receiver<Result<ComputedStep<Duration>, StepError>>,
    /// It returns its runner, unless that has failed.
    thread: Option<JoinHandle<Option<Box<dyn Runner>>>>,
    /// Outputs that came back, kept for their memory.
    spare: Vec<StepOutput>,
}

impl RunnerThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses it.
    pub(super) fn start(mut runner: Box<dyn Runner>) -> std::io::Result<Self> {
        let (steps, to_compute) = sync_channel::<(Step, StepOutput)>(MAX_LAUNCHED);
        let (computed, results) = sync_channel(MAX_LAUNCHED);
        let work = move || {
            while let Ok((step, output)) = to_compute.recv() {
                // A panic in a kernel must reach the caller as an error, not as silence.
                let result = catch_panic(|| compute(&mut *runner, step, output))
                    .unwrap_or_else(|panic| Err(StepError(panic)));
                // After a failure the runner's state is unknown: it computes no more.
                let has_failed = result.is_err();
                if computed.send(result).is_err() || has_failed {
                    return None;
                }
            }
            Some(runner)
        };
        let thread = thread::Builder::new().name("inflight-runner".into());
        Ok(Self {
            steps: Some(steps),
            results,
            thread: Some(thread.spawn(work)?),
            spare: Vec::with_capacity(MAX_LAUNCHED),
        })
    }

    /// Has a step computed after those before it.
    ///
    /// # Errors
    /// The thread has ended. So for `land`, or the step has failed.
    pub(super) fn launch(&mut self, step: Step) -> Result<(), StepError> {
        let output = self.spare.pop().unwrap_or_default();
        let steps = self.steps.as_ref().expect("not dropped");
        steps.send((step, output)).map_err(|_| has_ended())
    }

    /// Waits for the oldest step that was launched and has not landed.
    pub(super) fn land(&mut self) -> Result<ComputedStep<Duration>, StepError> {
        self.results.recv().unwrap_or_else(|_| Err(has_ended()))
    }

    /// Ends the thread, and returns its runner, unless that has failed.
    pub(super) fn stop(&mut self) -> Option<Box<dyn Runner>> {
        self.steps = None;
        while self.results.recv().is_ok() {}
        // It catches its panics, so there is no error.
        self.thread.take()?.join().ok()?
    }

    /// Keeps an output for its memory.
    pub(super) fn recycle(&mut self, output: StepOutput) {
        self.spare.push(output);
    }
}

impl Drop for RunnerThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes the drafts of a step, and runs it, see [`run`].
///
/// # Errors
/// As for `run`.
pub(super) fn compute(
    runner: &mut dyn Runner,
    mut step: Step,
    output: StepOutput,
) -> Result<ComputedStep<Duration>, StepError> {
    let started = Instant::now();
    runner.make_drafts(&mut step)?;
    let drafting = started.elapsed();
    let computed = run(runner, step, output)?;
    Ok(ComputedStep {
        timing: drafting + computed.timing,
        ..computed
    })
}

/// Runs all model calls of a step. What was in `output` is lost, its memory is used again.
///
/// # Errors
/// The runner failed.
pub(super) fn run(
    runner: &mut dyn Runner,
    step: Step,
    mut output: StepOutput,
) -> Result<ComputedStep<Duration>, StepError> {
    let started = Instant::now();
    output.clear();
    step.plans()
        .try_for_each(|plan| runner.run(plan, &mut output))?;
    Ok(ComputedStep {
        step,
        output,
        timing: started.elapsed(),
    })
}

fn has_ended() -> StepError {
    StepError("the runner's thread has ended".to_owned())
}
