//! How long a step takes.
//!
//! ```text
//! model call   step_us + token_us * tokens + sequence_us * sequences + position_us * KV positions read
//! between      overhead_us + overhead_sequence_us * sequences      Triton's batcher, the driver
//! ```

use serde::Serialize;

use crate::time::Time;

/// What a model call has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens computed, padding included.
    pub num_tokens: u64,
    /// Sequences that they are of.
    pub num_sequences: u64,
    /// Positions of the KV cache that they see, over all sequences.
    pub num_positions: u64,
}

/// The coefficients, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostModel {
    /// For a model call.
    pub step_us: f64,
    /// For each token.
    pub token_us: f64,
    /// For each sequence.
    pub sequence_us: f64,
    /// For each position of the KV cache.
    pub position_us: f64,
    /// Between two steps.
    pub overhead_us: f64,
    /// The same, for each sequence of the first.
    pub overhead_sequence_us: f64,
}

impl CostModel {
    /// How long a model call takes.
    pub fn model_call(&self, work: Work) -> Time {
        Time::from_us(
            self.step_us
                + self.token_us * work.num_tokens as f64
                + self.sequence_us * work.num_sequences as f64
                + self.position_us * work.num_positions as f64,
        )
    }

    /// How long it takes from the end of a step to the beginning of the next.
    pub fn overhead(&self, num_sequences: usize) -> Time {
        Time::from_us(self.overhead_us + self.overhead_sequence_us * num_sequences as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_work_has_its_price() {
        let cost = CostModel {
            step_us: 1000.0,
            token_us: 10.0,
            sequence_us: 0.5,
            position_us: 0.001,
            overhead_us: 100.0,
            overhead_sequence_us: 2.0,
        };
        let work = Work {
            num_tokens: 7,
            num_sequences: 4,
            num_positions: 1000,
        };
        assert_eq!(cost.model_call(work), Time(1_073_000));
        assert_eq!(cost.overhead(4), Time(108_000));
    }
}
