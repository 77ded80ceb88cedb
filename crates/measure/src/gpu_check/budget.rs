//! The time that is left.

use std::time::{Duration, Instant};

/// A moment at which work must have ended.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    end: Instant,
}

impl Budget {
    /// From now on.
    pub fn new(time: Duration) -> Self {
        Self {
            end: Instant::now() + time,
        }
    }

    /// A part of what is left, at most `time`.
    pub fn part(&self, time: Duration) -> Self {
        Self {
            end: self.end.min(Instant::now() + time),
        }
    }

    /// What is left.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_never_longer_than_the_whole() {
        let whole = Budget::new(Duration::from_secs(100));
        assert_eq!(whole.part(Duration::from_secs(1000)).end, whole.end);
        assert!(whole.part(Duration::from_secs(10)).left() <= Duration::from_secs(10));
        assert!(!whole.is_over() && whole.part(Duration::ZERO).is_over());
    }
}
