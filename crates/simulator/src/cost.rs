//! The cost model of a step.
//!
//! ```text
//! model call   step_us + token_us * tokens + sequence_us * sequences + position_us * KV positions read
//! between      overhead_us + overhead_sequence_us * sequences      Triton's batcher, the driver
//! ```

use serde::Serialize;

use crate::time::Time;

/// The work of a model call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens computed, including padding.
    pub num_tokens: u64,
    /// Sequences in the step.
    pub num_sequences: u64,
    /// KV cache positions read, over all sequences.
    pub num_positions: u64,
}

/// The coefficients, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostModel {
    /// Per model call.
    pub step_us: f64,
    /// Per token.
    pub token_us: f64,
    /// Per sequence.
    pub sequence_us: f64,
    /// Per KV cache position read.
    pub position_us: f64,
    /// Between two steps.
    pub overhead_us: f64,
    /// Between two steps, per sequence of the first.
    pub overhead_sequence_us: f64,
}

impl CostModel {
    /// Duration of a model call.
    pub fn model_call(&self, work: Work) -> Time {
        Time::from_us(
            self.step_us
                + self.token_us * work.num_tokens as f64
                + self.sequence_us * work.num_sequences as f64
                + self.position_us * work.num_positions as f64,
        )
    }

    /// Time from the end of a step to the start of the next.
    pub fn overhead(&self, num_sequences: usize) -> Time {
        Time::from_us(self.overhead_us + self.overhead_sequence_us * num_sequences as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_coefficient_adds_its_cost() {
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
