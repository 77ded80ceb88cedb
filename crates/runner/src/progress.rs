//! Progress reports of long loads.

use std::time::{Duration, Instant};

/// The time between two reports.
const PERIOD: Duration = Duration::from_secs(5);

/// Logs the progress of a load that takes longer than a period.
pub(super) struct Progress {
    period: Duration,
    last_report: Instant,
    num_layers: usize,
}

impl Progress {
    /// Starts the first period.
    pub(super) fn new(num_layers: usize) -> Self {
        Self {
            period: PERIOD,
            last_report: Instant::now(),
            num_layers,
        }
    }

    /// Logs a line if a period has passed since the last.
    pub(super) fn report(&mut self, num_loaded: usize) {
        if let Some(line) = self.line(num_loaded) {
            log::info!("{line}");
        }
    }

    fn line(&mut self, num_loaded: usize) -> Option<String> {
        if self.last_report.elapsed() < self.period {
            return None;
        }
        self.last_report = Instant::now();
        Some(format!("loaded {num_loaded} of {} layers", self.num_layers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_load_says_how_far_it_is_each_period_and_a_short_one_nothing() {
        let mut progress = Progress::new(16);
        assert_eq!(progress.line(1), None);
        progress.period = Duration::from_millis(20);
        let started = Instant::now();
        let mut lines = Vec::new();
        for num_loaded in 1..=16 {
            std::thread::sleep(Duration::from_millis(5));
            lines.extend(progress.line(num_loaded));
        }
        let most = started.elapsed().as_millis() / 20 + 1;
        assert!((1..=most).contains(&(lines.len() as u128)), "{lines:?}");
        assert!(lines.iter().all(|line| line.ends_with(" of 16 layers")));
    }
}
