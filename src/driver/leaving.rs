//! Cancelled requests, which Triton answers a moment later.
//!
//! ```text
//! steps      |  k        |  k+1      |  k+2      |
//! request        cancelled, seen at the end of k
//!                        '--- grace ---'         handed to Triton at the end of k+1 or later
//! ```
//!
//! A step waits for the grace only if no other step follows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a frontend is given to finish with a cancellation before Triton answers the request. The
/// gRPC frontend of server 2.51 releases a stream's state twice, and crashes, if the answer comes while
/// it is still at it; this makes that rare (13 crashes in 1280 cancellations became 1), not impossible.
const GRACE: Duration = Duration::from_millis(5);

/// Requests in the order in which their cancellations were seen.
pub(super) struct Leaving<R>(VecDeque<(Instant, R)>);

impl<R> Default for Leaving<R> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<R> Leaving<R> {
    /// Adds a request whose cancellation is seen `now`.
    pub fn push(&mut self, request: R, now: Instant) {
        self.0.push_back((now + GRACE, request));
    }

    /// The next request whose grace has passed.
    pub fn pop(&mut self, now: Instant) -> Option<R> {
        self.0
            .pop_front_if(|(due, _)| *due <= now)
            .map(|(_, request)| request)
    }

    /// When the grace of all has passed; `None` if there are none.
    pub fn last_due(&self) -> Option<Instant> {
        self.0.back().map(|(due, _)| *due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_leave_in_order_when_their_grace_has_passed() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut leaving = Leaving::default();
        assert_eq!((leaving.pop(at(100)), leaving.last_due()), (None, None));
        leaving.push("a", at(0));
        leaving.push("b", at(3));
        assert_eq!(leaving.last_due(), Some(at(8)));
        assert_eq!(leaving.pop(at(4)), None);
        assert_eq!(leaving.pop(at(7)), Some("a"));
        assert_eq!(leaving.pop(at(7)), None);
        leaving.push("c", at(7));
        assert_eq!(leaving.pop(at(20)), Some("b"));
        assert_eq!(leaving.pop(at(20)), Some("c"));
        assert_eq!((leaving.pop(at(20)), leaving.last_due()), (None, None));
    }
}
