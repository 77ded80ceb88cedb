//! Share of a generation step that ranks spend in sums and in waiting for each other: the most that overlapping them
//! with computation could save.

use std::iter;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use inflight_base::StepError;
use inflight_collective::{Collective, CollectiveError, Grid, ShmWorld};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{EngineConfig, StepOutput};
use inflight_runner::{CpuRunner, ModelSource, RankOptions, RunnerLimits};

use crate::Result;
use crate::load::Load;

/// Longer than any step takes.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// The shares of each rank, in the steps in which all sequences generate: the mean over the ranks, and the rank that
/// waits least.
#[derive(Clone, Copy, Debug)]
pub struct SumShares {
    /// The mean.
    pub mean: f64,
    /// The least.
    pub least: f64,
}

/// Computes each load by ranks of one stage, which are threads that share memory as processes do.
///
/// # Errors
/// If the model cannot be loaded, or a step fails.
pub fn measure(
    source: &ModelSource,
    loads: &[Load],
    config: &EngineConfig,
    limits: &RunnerLimits,
    options: &[CpuOptions],
) -> Result<Vec<SumShares>> {
    let world = ShmWorld::new(options.len())?;
    let (senders, receivers): (Vec<_>, Vec<_>) = options[1..].iter().map(|_| channel()).unzip();
    let taken = receivers.into_iter().map(Outputs::Taken);
    let outputs = iter::once(Outputs::Sent(senders)).chain(taken);
    let shares = thread::scope(|scope| {
        let ranks: Vec<_> = options
            .iter()
            .zip(outputs)
            .enumerate()
            .map(|(rank, (options, outputs))| {
                let world = &world;
                scope.spawn(move || {
                    let rank = (rank, outputs);
                    let shares = of_rank(source, loads, config, limits, options, world, rank);
                    shares.map_err(|error| error.to_string())
                })
            })
            .collect();
        let shares = ranks.into_iter().map(|rank| rank.join());
        let shares = shares.map(|shares| shares.unwrap_or_else(|_| Err("a rank panicked".into())));
        shares.collect::<std::result::Result<Vec<_>, _>>()
    })?;
    let of_load = |load: usize| {
        let of_ranks = || shares.iter().map(|of_rank| of_rank[load]);
        SumShares {
            mean: of_ranks().sum::<f64>() / shares.len() as f64,
            least: of_ranks().fold(f64::INFINITY, f64::min),
        }
    };
    Ok((0..loads.len()).map(of_load).collect())
}

fn of_rank(
    source: &ModelSource,
    loads: &[Load],
    config: &EngineConfig,
    limits: &RunnerLimits,
    options: &CpuOptions,
    world: &ShmWorld,
    (rank, outputs): (usize, Outputs),
) -> Result<Vec<f64>> {
    let nanoseconds = Arc::new(AtomicU64::new(0));
    let collective = Timed {
        collective: Box::new(world.attach(rank, TIME_LIMIT)?),
        nanoseconds: Arc::clone(&nanoseconds),
    };
    let rank = RankOptions {
        collective: Box::new(collective),
        time_limit: TIME_LIMIT,
    };
    let mut runner = CpuRunner::of_rank(source, limits.clone(), options, rank)?;
    let vocab_size = runner.vocab_size();
    let mut shares = Vec::new();
    for load in loads {
        let (mut in_sums, mut in_all) = (0, 0);
        // The first time touches all memory.
        for is_counted in [false, true] {
            load.run_by(vocab_size, config, |plan, output| {
                let is_generation = plan.token_ids.len() == load.concurrency as usize
                    && plan.sequences.len() == load.concurrency as usize;
                let (started, before) = (Instant::now(), nanoseconds.load(Ordering::Relaxed));
                runner.run(plan, output)?;
                outputs.share(output)?;
                if is_counted && is_generation {
                    in_all += started.elapsed().as_nanos() as u64;
                    in_sums += nanoseconds.load(Ordering::Relaxed) - before;
                }
                Ok(())
            })?;
        }
        shares.push(in_sums as f64 / in_all as f64);
    }
    Ok(shares)
}

/// How the engine of a rank gets the sampled outputs, which only rank 0 computes.
enum Outputs {
    /// Rank 0 sends its outputs to the other ranks.
    Sent(Vec<Sender<StepOutput>>),
    /// Another rank receives the outputs of rank 0.
    Taken(Receiver<StepOutput>),
}

impl Outputs {
    /// Replaces the output of a model call by the output of rank 0.
    fn share(&self, output: &mut StepOutput) -> std::result::Result<(), StepError> {
        let has_ended = "another rank has ended";
        match self {
            Self::Sent(others) => others.iter().try_for_each(|other| {
                let sent = other.send(output.clone());
                sent.map_err(|_| StepError(has_ended.to_owned()))
            }),
            Self::Taken(first) => {
                let taken = first.recv();
                *output = taken.map_err(|_| StepError(has_ended.to_owned()))?;
                Ok(())
            }
        }
    }
}

/// The threads of each rank, on these CPUs if there are some.
pub fn options_of_ranks(
    all: &CpuOptions,
    num_ranks: usize,
    threads_per_rank: NonZeroUsize,
) -> Vec<CpuOptions> {
    let of_rank = |rank: usize| CpuOptions {
        num_threads: Some(threads_per_rank),
        rank_cpus: all.rank_cpus.get(rank).cloned().into_iter().collect(),
        ..all.clone()
    };
    (0..num_ranks).map(of_rank).collect()
}

/// Counts the time of operations, but for what they have the rank compute.
struct Timed {
    collective: Box<dyn Collective>,
    nanoseconds: Arc<AtomicU64>,
}

impl Timed {
    fn time<T>(&mut self, operation: impl FnOnce(&mut dyn Collective) -> T) -> T {
        let started = Instant::now();
        let result = operation(self.collective.as_mut());
        self.add(started.elapsed());
        result
    }

    fn add(&self, taken: Duration) {
        let taken = taken.as_nanos() as u64;
        self.nanoseconds.fetch_add(taken, Ordering::Relaxed);
    }
}

impl Collective for Timed {
    fn grid(&self) -> Grid {
        self.collective.grid()
    }

    fn stage(&self) -> usize {
        self.collective.stage()
    }

    fn rank(&self) -> usize {
        self.collective.rank()
    }

    fn num_ranks(&self) -> usize {
        self.collective.num_ranks()
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.collective.set_time_limit(limit);
    }

    fn all_reduce(
        &mut self,
        step: u64,
        values: &mut [f32],
    ) -> std::result::Result<(), CollectiveError> {
        self.time(|collective| collective.all_reduce(step, values))
    }

    fn all_reduce_of(
        &mut self,
        step: u64,
        sums: &mut [f32],
        write: &mut dyn FnMut(&mut [f32]),
    ) -> std::result::Result<(), CollectiveError> {
        let (started, mut computing) = (Instant::now(), Duration::ZERO);
        let summed = self.collective.all_reduce_of(step, sums, &mut |part| {
            let started = Instant::now();
            write(part);
            computing += started.elapsed();
        });
        self.add(started.elapsed().saturating_sub(computing));
        summed
    }

    fn gather(
        &mut self,
        step: u64,
        root: usize,
        own: &[f32],
        lens: &[usize],
        write: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> std::result::Result<(), CollectiveError> {
        self.time(|collective| collective.gather(step, root, own, lens, write))
    }

    fn broadcast(
        &mut self,
        step: u64,
        root: usize,
        words: &mut [u32],
    ) -> std::result::Result<(), CollectiveError> {
        self.time(|collective| collective.broadcast(step, root, words))
    }

    fn send(&mut self, step: u64, values: &[f32]) -> std::result::Result<(), CollectiveError> {
        self.time(|collective| collective.send(step, values))
    }

    fn receive(
        &mut self,
        step: u64,
        values: &mut [f32],
    ) -> std::result::Result<(), CollectiveError> {
        self.time(|collective| collective.receive(step, values))
    }

    fn max_unread(&self) -> usize {
        self.collective.max_unread()
    }

    fn check(&mut self) -> std::result::Result<(), CollectiveError> {
        self.collective.check()
    }

    fn abort(&mut self, reason: &str) {
        self.collective.abort(reason);
    }
}
