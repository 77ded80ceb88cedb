//! Workloads: arrival times and lengths of requests.
//!
//! ```text
//! open      |--x----xx-----x--|     requests arrive independently of the server
//! bursts    |--xxx-------xxx--|     the same, several at a time
//! closed    |x....x....x....x.|     a fixed number of clients, each sends after its previous answer
//! ```

use std::str::FromStr;

use crate::random::Random;
use crate::time::Time;

/// Maximum length: the largest 32-bit integer in a tensor.
const MAX_LENGTH: u32 = i32::MAX as u32;
/// Standard deviations from the mean to the 99th percentile of a normal distribution.
const SIGMAS_OF_P99: f64 = 2.326_347_874_040_841;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When its client sends it. In a closed loop, only used for each client's first request.
    pub sent: Time,
    /// Tokens of its prompt.
    pub num_input_tokens: u32,
    /// Tokens that it generates, if there is room.
    pub num_output_tokens: u32,
}

/// The requests of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The requests, in sending order.
    pub requests: Vec<Request>,
    /// Number of clients that send one request after the other; `None` sends every request at its own time.
    pub concurrency: Option<usize>,
}

/// Arrival process of the requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Poisson arrivals, `burst` requests at a time.
    Open {
        /// Mean requests per second.
        rate: f64,
        /// Requests per arrival.
        burst: u32,
    },
    /// A fixed number of clients, each of which waits for its answer.
    Closed {
        /// Number of clients.
        concurrency: usize,
    },
}

/// Distribution of prompt or output lengths, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// A fixed length.
    Fixed(u32),
    /// Uniform from the first to the last, inclusive.
    Uniform(u32, u32),
    /// Lognormal.
    Lognormal {
        /// The median.
        median: f64,
        /// The 99th percentile.
        p99: f64,
    },
}

impl Workload {
    /// `num_requests` random requests, reproducible by `seed`. The lengths do not depend on the arrivals.
    pub fn random(
        num_requests: usize,
        arrivals: Arrivals,
        [input, output]: [Lengths; 2],
        seed: u64,
    ) -> Self {
        // Separate streams, so that changing one distribution leaves the others unchanged.
        let mut seeds = Random::new(seed);
        let [mut times, mut inputs, mut outputs] =
            std::array::from_fn(|_| Random::new(seeds.next_u64()));
        let mut clock = 0.0;
        let requests = (0..num_requests).map(|n| {
            if let Arrivals::Open { rate, burst } = arrivals
                && n.is_multiple_of(burst.max(1) as usize)
            {
                clock += times.exponential(rate / f64::from(burst.max(1)));
            }
            Request {
                sent: Time::from_s(clock),
                num_input_tokens: input.draw(&mut inputs),
                num_output_tokens: output.draw(&mut outputs),
            }
        });
        Self {
            requests: requests.collect(),
            concurrency: match arrivals {
                Arrivals::Open { .. } => None,
                Arrivals::Closed { concurrency } => Some(concurrency),
            },
        }
    }
}

impl Lengths {
    /// A random length, minimum 1.
    pub fn draw(&self, random: &mut Random) -> u32 {
        match *self {
            Self::Fixed(length) => length,
            Self::Uniform(first, last) => random.integer(first, last),
            Self::Lognormal { median, p99 } => {
                let sigma = (p99 / median).ln() / SIGMAS_OF_P99;
                let length = median * (sigma * random.normal()).exp();
                (length.round() as u32).clamp(1, MAX_LENGTH)
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    /// Parses `fixed:128` or `128`, `uniform:16..512`, `lognormal:100,2000`.
    fn from_str(text: &str) -> Result<Self, String> {
        let length = |text: &str| {
            let length = text.trim().parse().ok();
            length.filter(|length| (1..=MAX_LENGTH).contains(length))
        };
        let parsed = match text.split_once(':').unwrap_or(("fixed", text)) {
            ("fixed", text) => length(text).map(Self::Fixed),
            ("uniform", text) => text.split_once("..").and_then(|(first, last)| {
                let (first, last) = (length(first)?, length(last)?);
                (first <= last).then_some(Self::Uniform(first, last))
            }),
            ("lognormal", text) => text.split_once(',').and_then(|(median, p99)| {
                let (median, p99) = (length(median)?, length(p99)?);
                (median <= p99).then_some(Self::Lognormal {
                    median: f64::from(median),
                    p99: f64::from(p99),
                })
            }),
            _ => None,
        };
        parsed.ok_or_else(|| {
            "write fixed:N, uniform:FIRST..LAST or lognormal:MEDIAN,P99, in tokens; the minimum is 1"
                .to_owned()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(arrivals: Arrivals, input: &str, seed: u64) -> Workload {
        let lengths = [input, "uniform:1..9"].map(|text| text.parse().expect(text));
        Workload::random(20_000, arrivals, lengths, seed)
    }

    #[test]
    fn parses_and_draws_lengths() {
        for (text, lengths) in [
            ("128", Lengths::Fixed(128)),
            ("fixed:1", Lengths::Fixed(1)),
            ("uniform:16..512", Lengths::Uniform(16, 512)),
            (
                "lognormal:100,2000",
                Lengths::Lognormal {
                    median: 100.0,
                    p99: 2000.0,
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(lengths));
        }
        for text in [
            "",
            "0",
            "-1",
            "uniform:9..3",
            "uniform:3",
            "normal:3",
            "lognormal:9,3",
            "fixed:x",
        ] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn lognormal_lengths_have_the_given_median_and_percentile() {
        let arrivals = Arrivals::Closed { concurrency: 1 };
        let requests = workload(arrivals, "lognormal:100,2000", 3).requests;
        let mut lengths: Vec<_> = requests.iter().map(|r| r.num_input_tokens).collect();
        lengths.sort_unstable();
        let (median, p99) = (lengths[10_000], lengths[19_800]);
        assert!((95..=105).contains(&median), "{median}");
        assert!((1800..=2200).contains(&p99), "{p99}");
    }

    #[test]
    fn requests_arrive_at_the_given_rate_with_and_without_bursts() {
        for burst in [1, 8] {
            let requests = workload(Arrivals::Open { rate: 50.0, burst }, "5", 11).requests;
            let seconds = requests.last().expect("requests").sent.as_s();
            assert!((375.0..425.0).contains(&seconds), "{burst}: {seconds} s");
            assert!(requests.is_sorted_by_key(|request| request.sent));
            let together = requests.chunk_by(|a, b| a.sent == b.sent);
            assert!(
                together
                    .into_iter()
                    .all(|burst_of| burst_of.len() == burst as usize)
            );
        }
    }

    #[test]
    fn the_seed_determines_the_workload() {
        let arrivals = Arrivals::Open {
            rate: 10.0,
            burst: 1,
        };
        let first = workload(arrivals, "uniform:1..100", 1);
        assert_eq!(first, workload(arrivals, "uniform:1..100", 1));
        assert_ne!(first, workload(arrivals, "uniform:1..100", 2));
        let outputs = |workload: &Workload| -> Vec<_> {
            let requests = workload.requests.iter();
            requests.map(|request| request.num_output_tokens).collect()
        };
        let other_rate = Arrivals::Open {
            rate: 99.0,
            burst: 4,
        };
        assert_eq!(outputs(&first), outputs(&workload(other_rate, "7", 1)));
    }
}
