//! The probe that times each operation.

use std::time::Instant;

use inflight_runner::{Operation, Probe, Work};

/// One operation's totals in a step, over all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lap {
    /// Seconds.
    pub seconds: f64,
    /// Number of bytes of its operands.
    pub num_bytes: u64,
    /// Number of multiplications and additions.
    pub num_operations: u64,
}

/// Times each operation of a step.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    last: Instant,
    laps: [Lap; Operation::ALL.len()],
}

impl Stopwatch {
    /// Starts timing a step.
    pub fn start() -> Self {
        Self {
            last: Instant::now(),
            laps: [Lap::default(); Operation::ALL.len()],
        }
    }

    /// The operations' totals since the start.
    pub fn laps(&self) -> &[Lap; Operation::ALL.len()] {
        &self.laps
    }
}

impl Probe for Stopwatch {
    fn ended(&mut self, operation: Operation, work: impl FnOnce() -> Work) {
        let now = Instant::now();
        let lap = &mut self.laps[operation as usize];
        lap.seconds += (now - self.last).as_secs_f64();
        let work = work();
        lap.num_bytes += work.num_bytes;
        lap.num_operations += work.num_operations;
        // The probe's own cost counts for no operation.
        self.last = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_operation_is_charged_the_time_since_the_previous_one() {
        let mut stopwatch = Stopwatch::start();
        let work = || Work {
            num_bytes: 3,
            num_operations: 5,
        };
        stopwatch.ended(Operation::Norm, work);
        std::thread::sleep(Duration::from_millis(2));
        stopwatch.ended(Operation::Qkv, work);
        stopwatch.ended(Operation::Norm, work);
        let [norm, qkv] =
            [Operation::Norm, Operation::Qkv].map(|operation| stopwatch.laps()[operation as usize]);
        assert!(qkv.seconds >= 0.002, "{qkv:?}");
        assert!(norm.seconds < qkv.seconds, "{norm:?}");
        assert_eq!((norm.num_bytes, norm.num_operations), (6, 10));
    }
}
