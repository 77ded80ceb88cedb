//! The results of a simulation in numbers.

use std::fmt;

use serde::Serialize;

use crate::simulation::{Outcome, RequestLog, Setup, StepLog};
use crate::time::Time;

/// A distribution of times, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

/// Utilisation of a resource while the server is not idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// Total amount.
    pub max: u32,
    /// Mean over time.
    pub mean: f64,
    /// Maximum over time.
    pub peak: u32,
}

/// The results of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Number of answered requests.
    pub num_requests: usize,
    /// Number of requests rejected because they can never fit.
    pub num_refused: usize,
    /// Prompt tokens of the answered requests.
    pub num_input_tokens: u64,
    /// Tokens returned to clients.
    pub num_output_tokens: u64,
    /// From sending the first request to receiving the last token.
    pub duration_s: f64,
    /// Answered requests per second.
    pub requests_per_s: f64,
    /// Tokens returned per second.
    pub output_tokens_per_s: f64,
    /// From sending a request to receiving its first token.
    pub time_to_first_token_ms: Latency,
    /// Mean time between two tokens of a request, for requests with more than one token.
    pub time_per_output_token_ms: Latency,
    /// From sending a request to receiving its last token.
    pub end_to_end_ms: Latency,
    /// Pauses for lack of KV blocks.
    pub num_pauses: u64,
    /// Requests that were paused at least once.
    pub num_paused_requests: usize,
    /// Number of steps.
    pub num_steps: usize,
    /// Mean time of a model call.
    pub model_ms_per_step: f64,
    /// Share of the duration that the model computes.
    pub model_share: f64,
    /// Mean number of tokens per step, prompts included.
    pub tokens_per_step: f64,
    /// Sequences per step.
    pub batch: Usage,
    /// KV cache blocks.
    pub kv_blocks: Usage,
}

impl Report {
    /// Computes the figures of a simulation.
    pub fn new(setup: &Setup, outcome: &Outcome) -> Self {
        let answered = || outcome.requests.iter().filter(|log| log.num_tokens > 0);
        let num_requests = answered().count();
        let first = answered()
            .map(|log| log.request.sent)
            .min()
            .unwrap_or_default();
        let last = answered()
            .map(|log| log.last_token)
            .max()
            .unwrap_or_default();
        let duration_s = (last - first).as_s();
        let num_output_tokens = answered().map(|log| u64::from(log.num_tokens)).sum();
        let steps = &outcome.steps;
        let model: Time = steps.iter().map(|step| step.ended - step.began).sum();
        let step_tokens: u64 = steps.iter().map(|step| u64::from(step.num_tokens)).sum();
        Self {
            num_requests,
            num_refused: outcome.requests.len() - num_requests,
            num_input_tokens: answered()
                .map(|log| u64::from(log.request.num_input_tokens))
                .sum(),
            num_output_tokens,
            duration_s,
            requests_per_s: ratio(num_requests as f64, duration_s),
            output_tokens_per_s: ratio(num_output_tokens as f64, duration_s),
            time_to_first_token_ms: Latency::of(answered().map(to_first_token)),
            time_per_output_token_ms: Latency::of(answered().filter_map(per_output_token)),
            end_to_end_ms: Latency::of(answered().map(end_to_end)),
            num_pauses: answered().map(|log| u64::from(log.num_pauses)).sum(),
            num_paused_requests: answered().filter(|log| log.num_pauses > 0).count(),
            num_steps: steps.len(),
            model_ms_per_step: ratio(model.as_ms(), steps.len() as f64),
            model_share: ratio(model.as_s(), duration_s),
            tokens_per_step: ratio(step_tokens as f64, steps.len() as f64),
            batch: Usage::of(setup.engine.max_num_requests, steps, |step| {
                step.num_scheduled
            }),
            kv_blocks: Usage::of(setup.engine.num_blocks.0, steps, |step| {
                step.num_used_blocks
            }),
        }
    }
}

fn to_first_token(log: &RequestLog) -> f64 {
    (log.first_token - log.request.sent).as_ms()
}

fn per_output_token(log: &RequestLog) -> Option<f64> {
    let between = (log.last_token - log.first_token).as_ms();
    (log.num_tokens > 1).then(|| between / f64::from(log.num_tokens - 1))
}

fn end_to_end(log: &RequestLog) -> f64 {
    (log.last_token - log.request.sent).as_ms()
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

impl Latency {
    /// The distribution of `times`; all zero if there are none.
    pub fn of(times: impl Iterator<Item = f64>) -> Self {
        let mut times: Vec<_> = times.collect();
        if times.is_empty() {
            return Self::default();
        }
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_unstable_by(f64::total_cmp);
        // The smallest value that is not below this share of all values.
        let percentile = |share: f64| times[(share * times.len() as f64).ceil() as usize - 1];
        Self {
            mean,
            p50: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
        }
    }
}

impl Usage {
    /// Utilisation of a resource of size `max`; `used` is the amount in use until the end of a step.
    fn of(max: u32, steps: &[StepLog], used: impl Fn(&StepLog) -> u32) -> Self {
        let span = |step: &StepLog| (step.ended - step.began).as_s();
        let weighted = steps.iter().map(|step| f64::from(used(step)) * span(step));
        Self {
            max,
            mean: ratio(weighted.sum(), steps.iter().map(span).sum()),
            peak: steps.iter().map(&used).max().unwrap_or(0),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, name: &str, value: String| {
            writeln!(f, "{name:<24}{value}")
        };
        let latency = |l: Latency| {
            format!(
                "mean {:<10.2} p50 {:<10.2} p90 {:<10.2} p99 {:.2}",
                l.mean, l.p50, l.p90, l.p99
            )
        };
        let usage = |u: Usage| {
            let percent = 100.0 * ratio(u.mean, f64::from(u.max));
            format!(
                "mean {:.1} of {} ({percent:.0} %), peak {}",
                u.mean, u.max, u.peak
            )
        };
        let refused = match self.num_refused {
            0 => String::new(),
            refused => format!(", {refused} rejected as too long"),
        };
        let (requests, input) = (self.num_requests, self.num_input_tokens);
        line(f, "requests", format!("{requests}{refused}"))?;
        line(
            f,
            "tokens",
            format!("{input} in, {} out", self.num_output_tokens),
        )?;
        line(f, "duration", format!("{:.3} s", self.duration_s))?;
        let rates = (self.output_tokens_per_s, self.requests_per_s);
        line(
            f,
            "throughput",
            format!("{:.1} output tokens/s, {:.2} requests/s", rates.0, rates.1),
        )?;
        line(
            f,
            "time to first token, ms",
            latency(self.time_to_first_token_ms),
        )?;
        line(
            f,
            "per output token, ms",
            latency(self.time_per_output_token_ms),
        )?;
        line(f, "end to end, ms", latency(self.end_to_end_ms))?;
        let paused = self.num_paused_requests;
        line(
            f,
            "pauses",
            format!("{} of {paused} requests", self.num_pauses),
        )?;
        let share = 100.0 * self.model_share;
        let (steps, tokens) = (self.num_steps, self.tokens_per_step);
        let model = format!(
            "{:.3} ms in the model and {tokens:.1} tokens each",
            self.model_ms_per_step
        );
        line(
            f,
            "steps",
            format!("{steps}, {model}; the model computes {share:.0} % of the time"),
        )?;
        line(f, "batch, sequences", usage(self.batch))?;
        line(f, "KV cache, blocks", usage(self.kv_blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let latency = Latency::of((1..=200).rev().map(f64::from));
        assert_eq!((latency.mean, latency.p50), (100.5, 100.0));
        assert_eq!((latency.p90, latency.p99), (180.0, 198.0));
        let one = Latency::of([7.0].into_iter());
        assert_eq!((one.mean, one.p50, one.p90, one.p99), (7.0, 7.0, 7.0, 7.0));
        assert_eq!(Latency::of([].into_iter()), Latency::default());
    }
}
