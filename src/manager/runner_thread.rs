//! A runner on a thread of its own, so that the host works on one step while another is computed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::base::StepError;
use crate::engine::{Step, StepOutput};
use crate::runner::Runner;

/// Steps that may be on their way: one being computed, and one behind it.
const MAX_LAUNCHED: usize = 2;

/// The thread, and the way to it and back.
pub(super) struct Pipeline {
    /// `None` only while it is dropped.
    to: Option<SyncSender<(Step, StepOutput)>>,
    from: Receiver<Result<Computed, StepError>>,
    thread: Option<JoinHandle<()>>,
    /// Outputs that came back, for their buffers.
    spare: Vec<StepOutput>,
}

/// A step and what came of it.
pub(super) struct Computed {
    pub(super) step: Step,
    pub(super) output: StepOutput,
    pub(super) model: Duration,
}

impl Pipeline {
    /// Starts the thread.
    pub(super) fn start(mut runner: Runner) -> std::io::Result<Self> {
        let (to, steps) = sync_channel::<(Step, StepOutput)>(MAX_LAUNCHED);
        let (results, from) = sync_channel(MAX_LAUNCHED);
        let work = move || {
            while let Ok((step, output)) = steps.recv() {
                // A panic in a kernel must reach the caller as an error, not as silence.
                let result = catch_unwind(AssertUnwindSafe(|| compute(&mut runner, step, output)))
                    .unwrap_or_else(|panic| Err(StepError(words_of(&*panic))));
                // After a failure the runner's state is unknown: it computes no more.
                let has_failed = result.is_err();
                if results.send(result).is_err() || has_failed {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("inflight-runner".into());
        Ok(Self {
            to: Some(to),
            from,
            thread: Some(thread.spawn(work)?),
            spare: Vec::with_capacity(MAX_LAUNCHED),
        })
    }

    /// Has a step computed after those before it.
    pub(super) fn launch(&mut self, step: Step) -> Result<(), StepError> {
        let mut output = self.spare.pop().unwrap_or_default();
        output.clear();
        let to = self.to.as_ref().expect("not dropped");
        to.send((step, output)).map_err(|_| gone())
    }

    /// Waits for the oldest step that was launched and has not landed.
    pub(super) fn land(&mut self) -> Result<Computed, StepError> {
        self.from.recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Keeps an output's buffer for a later step.
    pub(super) fn give_back(&mut self, output: StepOutput) {
        self.spare.push(output);
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.to = None;
        while self.from.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            // It catches its panics, so there is nothing to hear.
            let _ = thread.join();
        }
    }
}

fn compute(runner: &mut Runner, step: Step, mut output: StepOutput) -> Result<Computed, StepError> {
    let started = Instant::now();
    step.plans()
        .try_for_each(|plan| runner.run(plan, &mut output))?;
    Ok(Computed {
        step,
        output,
        model: started.elapsed(),
    })
}

fn gone() -> StepError {
    StepError("the runner's thread has ended".to_owned())
}

pub(super) fn words_of(panic: &(dyn Any + Send)) -> String {
    let words = panic
        .downcast_ref::<&str>()
        .map(|words| (*words).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    words.unwrap_or_else(|| "the runner panicked".to_owned())
}
