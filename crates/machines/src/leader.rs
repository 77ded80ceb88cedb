//! Rank 0: the runner of a model that several processes compute.

use std::io;
use std::time::Duration;

use super::other_rank::{OtherRank, explain};
use super::rank_device::RankDevice;
use super::rank_process::Ending;
use super::task::{Instruction, Task};
use super::transport::RankConnections;
use inflight_base::{HostBlockId, LoadError, StepError};
use inflight_collective::Grid;
use inflight_device_cpu::Cpu;
use inflight_engine::{BlockMove, StepOutput, StepPlan};
use inflight_runner::{ModelRunner, ModelSource, RankOptions, Runner, RunnerLimits, SentCalls};

/// The most bytes of a call that a rank need not read for it to be sent: systems have at least thrice as much room.
const MAX_UNREAD_BYTES: usize = 64 * 1024;

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLimits {
    /// Until all have loaded their weights.
    pub load: Duration,
    /// In an operation of a step.
    pub step: Duration,
}

/// Rank 0 of a model, and the others.
pub struct LeadingRunner<D: RankDevice = Cpu> {
    grid: Grid,
    runner: ModelRunner<D>,
    others: Vec<OtherRank>,
    calls: SentCalls,
    failure: Option<StepError>,
}

/// Tells whether the processes live that rank 0 has started. (`mpirun` ends all when one ends.)
#[derive(Clone)]
pub struct RankWatch(Vec<(usize, Ending)>);

impl<D: RankDevice> LeadingRunner<D> {
    /// Loads the parts of all ranks at the same time.
    ///
    /// # Errors
    /// As [`ModelRunner::of_rank`], or a rank has other files, ends, or does not load in time.
    pub fn new(
        connections: RankConnections,
        source: &ModelSource,
        limits: RunnerLimits,
        options: &D::Options,
        time_limits: RankLimits,
    ) -> Result<Self, LoadError> {
        let RankLimits { load, step } = time_limits;
        let resource = |error: &dyn ToString| LoadError::Resource(error.to_string());
        let RankConnections {
            grid,
            collective,
            mut others,
            ..
        } = connections;
        // Before the others read their parts.
        source.check_ranks(grid, D::tiling(options))?;
        let task = Task::new(
            grid,
            source.folder().to_owned(),
            source.stamps(),
            &limits,
            D::of_rank(options, 0),
            [load, step],
        );
        for (other, rank) in others.0.iter_mut().zip(1..) {
            let mut task = task.clone();
            task.rank = rank;
            task.device = D::of_rank(options, rank);
            other.instruct(&Instruction::Load(Box::new(task)))?;
        }
        for other in &mut others.0 {
            other.wait_until_ready()?;
        }
        let calls = SentCalls::new(&limits);
        let rank = RankOptions {
            collective,
            time_limit: step,
        };
        let runner = ModelRunner::of_rank(source, limits, options, rank)
            .map_err(|error| others.explain_load(error))?;
        for other in &mut others.0 {
            let limited = other.set_time_limit(step);
            limited.map_err(|error| resource(&error))?;
        }
        Ok(Self {
            grid,
            runner,
            others: std::mem::take(&mut others.0),
            calls,
            failure: None,
        })
    }

    /// Tells whether the other ranks live.
    pub fn watch(&self) -> RankWatch {
        let others = self.others.iter().zip(1..);
        let endings = others.filter_map(|(other, rank)| Some((rank, other.ending()?.clone())));
        RankWatch(endings.collect())
    }

    /// Sends the other ranks their parts of the adapters of a plan that they do not have yet.
    fn send_adapters(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let Self { calls, others, .. } = self;
        let sent = calls.send_adapters(plan, others.len(), |other, piece| {
            others[other].send(piece).map_err(|error| {
                let rank = 1 + other;
                StepError(format!("rank {rank} has not taken an adapter: {error}"))
            })
        });
        sent.map_err(|error| self.fail(error))
    }

    /// Sends the call to the other ranks.
    fn send(&mut self) -> Result<(), StepError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let (num_tokens, num_bytes) = (self.calls.num_tokens(), self.calls.message().len());
        if num_bytes > MAX_UNREAD_BYTES || num_tokens > self.runner.max_unread_rows() {
            // The call might wait for a rank that waits in turn until the results of the one before are received.
            let received = self.runner.receive_results();
            received.map_err(|error| self.fail(error))?;
        }
        let message = self.calls.message();
        let mut others = self.others.iter_mut().zip(1..);
        let sent = others.try_for_each(|(other, rank)| {
            other.send(message).map_err(|error: io::Error| {
                StepError(format!("rank {rank} has not taken a model call: {error}"))
            })
        });
        sent.map_err(|error| self.fail(error))
    }

    /// Ends the other ranks, and says what is known of them.
    fn fail(&mut self, error: StepError) -> StepError {
        let explained = StepError(explain(&error.0, &mut self.others));
        self.others.iter_mut().for_each(OtherRank::close);
        self.failure.insert(explained).clone()
    }
}

/// After an error of a call the other ranks are ended, and no further call is computed.
impl<D: RankDevice> Runner for LeadingRunner<D>
where
    Self: Send,
{
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.launch(&plan)?;
        self.collect(&plan, output)
    }

    fn has_stages(&self) -> bool {
        self.runner.has_stages()
    }

    fn launch(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        self.send_adapters(plan)?;
        self.calls.set(plan, self.runner.gathers_largest());
        self.send()?;
        let launched = self.runner.launch(plan);
        launched.map_err(|error| self.fail(error))
    }

    fn collect(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        let collected = self.runner.collect(plan, output);
        collected.map_err(|error| self.fail(error))
    }

    /// A failure is an error of the next call.
    fn move_blocks(&mut self, moves: &[BlockMove]) {
        self.calls.set_moves(moves);
        if self.send().is_ok() {
            self.runner.move_blocks(moves);
        }
    }

    /// This rank's part of the block.
    fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError> {
        self.runner.host_block(block)
    }

    fn description(&self) -> String {
        let own = self.runner.description();
        let Grid {
            num_stages,
            ranks_per_stage,
        } = self.grid;
        match num_stages {
            1 => format!("{ranks_per_stage} ranks, each {own}"),
            _ => format!("{num_stages} stages of {ranks_per_stage} ranks, each {own}"),
        }
    }

    fn vocab_size(&self) -> u32 {
        self.runner.vocab_size() as u32
    }

    /// It tells the other ranks with each call.
    fn keep_all_logits(&mut self) {
        self.runner.keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        self.runner.logits()
    }
}

impl RankWatch {
    /// Whether there are processes that rank 0 has started, and can start anew.
    pub fn has_processes(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether all live.
    ///
    /// # Errors
    /// One has ended.
    pub fn check(&self) -> Result<(), StepError> {
        let endings = self.0.iter();
        let ended = endings.filter_map(|(rank, ending)| Some((rank, ending.get()?)));
        // Rank 0 ends the others once one has failed.
        match ended.min_by_key(|(_, how)| *how == "exit status: 0") {
            None => Ok(()),
            Some((rank, how)) => Err(StepError(format!(
                "the process of rank {rank} has ended ({how})"
            ))),
        }
    }
}

impl<D: RankDevice> Drop for LeadingRunner<D> {
    fn drop(&mut self) {
        self.others.iter_mut().for_each(OtherRank::close);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_processes_that_have_ended_the_one_that_failed_is_named() {
        let endings = ["exit status: 0", "signal: 9 (SIGKILL)", "exit status: 0"];
        let endings = (1..).zip(endings.map(Ending::of));
        let error = RankWatch(endings.collect()).check();
        let error = error.expect_err("all have ended").to_string();
        assert!(error.contains("rank 2 has ended (signal: 9"), "{error}");
    }
}
