//! Requests that start at once, and when their tokens came.

use std::time::{Duration, Instant};

use triton_inflight::base::{SequenceId, TokenId, Tokens};
use triton_inflight::engine::{Engine, EngineConfig, Event, NewRequest, StepOutput};
use triton_inflight::runner::CpuRunner;

use crate::Result;

/// Requests of one shape, all there from the start: greedy, and no end id ends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Requests.
    pub concurrency: u32,
    /// Tokens of each prompt.
    pub input: u32,
    /// Tokens that each request generates.
    pub output: u32,
}

/// When the tokens of a load came, from its start on.
#[derive(Clone, Debug)]
pub struct Outcome {
    load: Load,
    /// Of each request the moments of its tokens.
    moments: Vec<Vec<Duration>>,
}

impl Load {
    /// Prompt and output of one request.
    pub fn num_tokens(&self) -> Tokens {
        Tokens(self.input + self.output)
    }

    /// An engine with all of its requests.
    ///
    /// # Errors
    /// One is refused.
    pub fn start(&self, vocab_size: usize, config: &EngineConfig) -> Result<Engine> {
        let mut engine = Engine::new(config.clone());
        for request in 0..self.concurrency {
            let prompt = prompt(request, self.input, vocab_size as u32);
            let id = SequenceId(u64::from(request));
            engine.add(NewRequest::new(id, prompt, Tokens(self.output)))?;
        }
        Ok(engine)
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// A step failed, or a request is refused or gets fewer tokens.
    pub fn run(&self, runner: &mut CpuRunner, config: &EngineConfig) -> Result<Outcome> {
        let mut engine = self.start(runner.vocab_size(), config)?;
        let num_tokens = self.output as usize;
        let mut moments = vec![Vec::with_capacity(num_tokens); self.concurrency as usize];
        let mut output = StepOutput::default();
        let mut events = Vec::new();
        let start = Instant::now();
        while !engine.is_idle() {
            let step = engine.schedule();
            output.clear();
            for plan in step.plans() {
                runner.run(plan, &mut output)?;
            }
            engine.apply(step, &mut output, &mut events);
            let now = start.elapsed();
            for event in events.drain(..) {
                if let Event::Token(id, _) = event {
                    moments[id.0 as usize].push(now);
                }
            }
        }
        match moments.iter().find(|moments| moments.len() != num_tokens) {
            Some(moments) => Err(format!("{} tokens came in {self:?}", moments.len()).into()),
            None => Ok(Outcome {
                load: *self,
                moments,
            }),
        }
    }
}

impl Outcome {
    /// Output tokens a second from the start to the end, prompts included.
    pub fn end_to_end_tokens_per_s(&self) -> f64 {
        let end = self.moments.iter().flatten().max();
        f64::from(self.load.concurrency * self.load.output) / seconds(end)
    }

    /// Output tokens a second while all requests generate: those after the last prompt is through, until the
    /// first request ends. `None` if there is no such time.
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

    /// Prompt tokens a second until the last prompt is through.
    pub fn prompt_tokens_per_s(&self) -> f64 {
        f64::from(self.load.concurrency * self.load.input) / seconds(self.first().max())
    }

    /// Seconds to the first token, on average.
    pub fn mean_ttft(&self) -> f64 {
        let sum: Duration = self.first().sum();
        sum.as_secs_f64() / self.moments.len() as f64
    }

    fn first(&self) -> impl Iterator<Item = &Duration> {
        self.moments.iter().filter_map(|moments| moments.first())
    }
}

fn seconds(moment: Option<&Duration>) -> f64 {
    moment.map_or(0.0, Duration::as_secs_f64)
}

/// Ids of no meaning, others in each request.
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
    fn rates_are_of_the_time_that_they_are_about() {
        // The second request's prompt comes between two tokens of the first; then the first ends.
        let outcome = outcome(&[&[1, 3, 4, 5, 6], &[3, 4, 5, 6, 8]]);
        assert_eq!(outcome.end_to_end_tokens_per_s(), 10.0 / 8.0);
        assert_eq!(outcome.output_tokens_per_s(), Some(6.0 / 3.0));
        assert_eq!(outcome.prompt_tokens_per_s(), 200.0 / 3.0);
        assert_eq!(outcome.mean_ttft(), 2.0);
    }

    #[test]
    fn where_some_end_before_all_have_begun_there_is_no_rate_of_all() {
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
