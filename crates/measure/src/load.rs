//! Requests that start together, the steps that serve them, and the arrival times of their tokens.

use std::time::{Duration, Instant};

use inflight_base::{SequenceId, StepError, TokenId, Tokens};
use inflight_device::Device;
use inflight_engine::{Adapter, Engine, EngineConfig, Event, NewRequest, StepOutput, StepPlan};
use inflight_manager::{StepComputer, StepLoop};
use inflight_runner::{ModelRunner, Probe};

use crate::Result;

/// Requests of equal lengths, all queued at the start: greedy, without end tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Number of requests.
    pub concurrency: u32,
    /// Tokens per prompt.
    pub input: u32,
    /// Tokens that each request generates.
    pub output: u32,
}

/// Arrival times of a load's tokens, since its start.
#[derive(Clone, Debug)]
pub struct Outcome {
    load: Load,
    /// The arrival times of each request's tokens.
    moments: Vec<Vec<Duration>>,
}

impl Load {
    /// Tokens of one request: prompt and output.
    pub fn num_tokens(&self) -> Tokens {
        Tokens(self.input + self.output)
    }

    /// An engine with all requests of this load.
    ///
    /// # Errors
    /// If a request is rejected.
    pub fn start(&self, vocab_size: usize, config: &EngineConfig) -> Result<Engine> {
        self.start_with(vocab_size, config, &[])
    }

    /// The same; the requests have these adapters in turns.
    fn start_with(
        &self,
        vocab_size: usize,
        config: &EngineConfig,
        adapters: &[Adapter],
    ) -> Result<Engine> {
        let mut engine = Engine::new(config.clone());
        for request in 0..self.concurrency {
            let prompt = prompt(request, self.input, vocab_size as u32);
            let id = SequenceId(u64::from(request));
            let adapter = adapters.iter().cycle().nth(request as usize);
            engine.add(NewRequest {
                adapter: adapter.cloned(),
                ..NewRequest::new(id, prompt, Tokens(self.output))
            })?;
        }
        Ok(engine)
    }

    /// Runs the load to its end.
    ///
    /// # Errors
    /// If a step fails, or a request is rejected or gets fewer tokens.
    pub fn run<D: Device, P: Probe>(
        &self,
        runner: &mut ModelRunner<D, P>,
        config: &EngineConfig,
    ) -> Result<Outcome> {
        self.run_with(runner, config, &[])
    }

    /// The same; the requests have these adapters in turns.
    ///
    /// # Errors
    /// As [`Load::run`].
    pub fn run_with<D: Device, P: Probe>(
        &self,
        runner: &mut ModelRunner<D, P>,
        config: &EngineConfig,
        adapters: &[Adapter],
    ) -> Result<Outcome> {
        let vocab_size = runner.vocab_size();
        self.drive(vocab_size, config, adapters, |plan, output| {
            runner.run(plan, output)
        })
    }

    /// As [`Load::run`], with anything that computes model calls.
    ///
    /// # Errors
    /// As there.
    pub fn run_by(
        &self,
        vocab_size: usize,
        config: &EngineConfig,
        run: impl FnMut(StepPlan<'_>, &mut StepOutput) -> std::result::Result<(), StepError>,
    ) -> Result<Outcome> {
        self.drive(vocab_size, config, &[], run)
    }

    /// As [`Load::run_by`], with what computes a step while others are launched and landed.
    ///
    /// # Errors
    /// As there.
    pub fn run_overlapped<C: StepComputer>(
        &self,
        vocab_size: usize,
        config: &EngineConfig,
        computer: C,
    ) -> Result<Outcome> {
        let engine = self.start(vocab_size, config)?;
        let mut steps = StepLoop::with_engine(engine, computer);
        let mut moments = self.no_moments();
        let mut events = Vec::new();
        let start = Instant::now();
        while !steps.engine().is_idle() {
            steps.launch()?;
            steps.land(&mut events)?;
            note(&mut moments, start.elapsed(), &mut events);
        }
        self.outcome(moments)
    }

    fn drive(
        &self,
        vocab_size: usize,
        config: &EngineConfig,
        adapters: &[Adapter],
        mut run: impl FnMut(StepPlan<'_>, &mut StepOutput) -> std::result::Result<(), StepError>,
    ) -> Result<Outcome> {
        let mut engine = self.start_with(vocab_size, config, adapters)?;
        let mut moments = self.no_moments();
        let mut output = StepOutput::default();
        let mut events = Vec::new();
        let start = Instant::now();
        while !engine.is_idle() {
            step(&mut engine, &mut output, &mut events, &mut run)?;
            note(&mut moments, start.elapsed(), &mut events);
        }
        self.outcome(moments)
    }

    fn no_moments(&self) -> Vec<Vec<Duration>> {
        vec![Vec::with_capacity(self.output as usize); self.concurrency as usize]
    }

    fn outcome(&self, moments: Vec<Vec<Duration>>) -> Result<Outcome> {
        let num_tokens = self.output as usize;
        match moments.iter().find(|moments| moments.len() != num_tokens) {
            Some(moments) => {
                Err(format!("a request got {} tokens in {self:?}", moments.len()).into())
            }
            None => Ok(Outcome {
                load: *self,
                moments,
            }),
        }
    }
}

impl Outcome {
    /// Output tokens per second from start to end, prompts included.
    pub fn end_to_end_tokens_per_s(&self) -> f64 {
        let end = self.moments.iter().flatten().max();
        f64::from(self.load.concurrency * self.load.output) / seconds(end)
    }

    /// Output tokens per second while all requests generate: from the end of the last prompt to the end of
    /// the first request. `None` if there is no such period.
    pub fn output_tokens_per_s(&self) -> Option<f64> {
        let start = self.first().max()?;
        let end = self
            .moments
            .iter()
            .filter_map(|moments| moments.last())
            .min()?;
        let while_all = self.moments.iter().flatten();
        let num_tokens = while_all
            .filter(|moment| (start < *moment) && (*moment <= end))
            .count();
        (num_tokens > 0).then(|| num_tokens as f64 / (*end - *start).as_secs_f64())
    }

    /// Prompt tokens per second until the last prompt is done.
    pub fn prompt_tokens_per_s(&self) -> f64 {
        f64::from(self.load.concurrency * self.load.input) / seconds(self.first().max())
    }

    /// Mean time to the first token, in seconds.
    pub fn mean_ttft(&self) -> f64 {
        let sum: Duration = self.first().sum();
        sum.as_secs_f64() / self.moments.len() as f64
    }

    fn first(&self) -> impl Iterator<Item = &Duration> {
        self.moments.iter().filter_map(|moments| moments.first())
    }
}

/// Runs a step of an engine, whose model calls `run` computes into `output`; appends what happens to `events`.
///
/// # Errors
/// If `run` fails.
pub fn step(
    engine: &mut Engine,
    output: &mut StepOutput,
    events: &mut Vec<Event>,
    mut run: impl FnMut(StepPlan<'_>, &mut StepOutput) -> std::result::Result<(), StepError>,
) -> std::result::Result<(), StepError> {
    let step = engine.schedule();
    output.clear();
    for plan in step.plans() {
        run(plan, output)?;
    }
    engine.apply(step, output, events);
    Ok(())
}

/// Notes the time of each token.
fn note(moments: &mut [Vec<Duration>], now: Duration, events: &mut Vec<Event>) {
    for event in events.drain(..) {
        if let Event::Token(id, _) = event {
            moments[id.0 as usize].push(now);
        }
    }
}

fn seconds(moment: Option<&Duration>) -> f64 {
    moment.map_or(0.0, Duration::as_secs_f64)
}

/// Arbitrary token ids, different for each request.
fn prompt(request: u32, len: u32, vocab_size: u32) -> Vec<TokenId> {
    let mut state = u64::from(request) + 1;
    let next = |_| {
        // Knuth's multiplier of a linear congruential generator.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % vocab_size
    };
    (0..len).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(moments: &[&[u64]]) -> Outcome {
        let seconds = |moments: &&[u64]| moments.iter().map(|&s| Duration::from_secs(s)).collect();
        Outcome {
            load: Load {
                concurrency: moments.len() as u32,
                input: 100,
                output: moments[0].len() as u32,
            },
            moments: moments.iter().map(seconds).collect(),
        }
    }

    #[test]
    fn each_rate_uses_its_own_period() {
        // The second request's first token arrives between two tokens of the first; then the first one ends.
        let outcome = outcome(&[&[1, 3, 4, 5, 6], &[3, 4, 5, 6, 8]]);
        assert_eq!(outcome.end_to_end_tokens_per_s(), 10.0 / 8.0);
        assert_eq!(outcome.output_tokens_per_s(), Some(6.0 / 3.0));
        assert_eq!(outcome.prompt_tokens_per_s(), 200.0 / 3.0);
        assert_eq!(outcome.mean_ttft(), 2.0);
    }

    #[test]
    fn without_a_period_in_which_all_generate_there_is_no_rate() {
        let outcome = outcome(&[&[1, 2, 3], &[9, 10, 11]]);
        assert_eq!(outcome.output_tokens_per_s(), None);
    }

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let [a, b] = [0, 1].map(|request| prompt(request, 64, 100));
        assert_ne!(a, b);
        assert!(a.iter().chain(&b).all(|&id| id < 100));
        assert_eq!(a, prompt(0, 64, 100));
    }
}
