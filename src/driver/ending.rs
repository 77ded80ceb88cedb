//! Whether a model is still served, by the answers of its server, which is asked from time to time.
//!
//! ```text
//! asked     |  1 s  |  1 s  |  1 s  |  ...  |
//!              loaded  unloaded               over
//!                         '--- grace: 5 s ---'
//! ```

use std::time::{Duration, Instant};

use inflight_triton::Serving;

/// How often the server is asked whether the model serves.
const PERIOD: Duration = Duration::from_secs(1);

/// An instance whose model is unloaded frees its resources after this time without requests. Triton finalises a model
/// that has not leaked earlier.
pub const UNLOAD_GRACE: Duration = Duration::from_secs(5);

/// The server's answers about a model.
pub struct Ending {
    asked: Instant,
    over_since: Option<Instant>,
}

impl Ending {
    /// No answer yet, at `now`.
    pub fn new(now: Instant) -> Self {
        Self {
            asked: now,
            over_since: None,
        }
    }

    /// Whether it is time to ask the server.
    pub fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.asked) >= PERIOD
    }

    /// Notes whether the model is served, and whether a later load of it serves instead.
    pub fn note(&mut self, serving: Serving, is_replaced: bool, now: Instant) {
        self.asked = now;
        // A server that stops unloads all models anyway.
        let serves = serving != Serving::Unloaded && !is_replaced;
        self.over_since = match serves {
            true => None,
            false => self.over_since.or(Some(now)),
        };
    }

    /// Whether the model has not been served for [`UNLOAD_GRACE`].
    pub fn is_over(&self, now: Instant) -> bool {
        self.over_since
            .is_some_and(|since| now.saturating_duration_since(since) >= UNLOAD_GRACE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Serving::{Loaded, ServerStops, Unloaded};

    /// The answers, one a second, until the model is over, if it is.
    fn seconds_until_over(answers: &[(Serving, bool)]) -> Option<u64> {
        let start = Instant::now();
        let mut ending = Ending::new(start);
        for (second, (serving, is_replaced)) in (1..).zip(answers) {
            let now = start + Duration::from_secs(second);
            ending.note(*serving, *is_replaced, now);
            if ending.is_over(now) {
                return Some(second);
            }
        }
        None
    }

    #[test]
    fn a_model_is_over_when_it_has_not_been_served_for_the_grace() {
        let with = |first: &[(Serving, bool)], rest| {
            let rest = std::iter::repeat_n(rest, 10 - first.len());
            let answers: Vec<_> = first.iter().copied().chain(rest).collect();
            seconds_until_over(&answers)
        };
        assert_eq!(with(&[], (Loaded, false)), None);
        assert_eq!(with(&[], (ServerStops, false)), None);
        assert_eq!(with(&[], (Unloaded, false)), Some(6));
        assert_eq!(with(&[], (Loaded, true)), Some(6));
        assert_eq!(with(&[], (ServerStops, true)), Some(6));
        assert_eq!(with(&[(Unloaded, false)], (Loaded, true)), Some(6));
        // Loaded again before the grace was over.
        let interrupted = [(Unloaded, false), (Unloaded, false), (Loaded, false)];
        assert_eq!(with(&interrupted, (Unloaded, false)), Some(9));
        assert_eq!(with(&interrupted, (Loaded, false)), None);
    }

    #[test]
    fn the_server_is_asked_once_a_second() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut ending = Ending::new(start);
        assert!(!ending.is_due(at(999)) && ending.is_due(at(1000)));
        ending.note(Loaded, false, at(1500));
        assert!(!ending.is_due(at(2499)) && ending.is_due(at(2500)));
    }
}
