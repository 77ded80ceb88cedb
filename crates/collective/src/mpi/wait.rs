//! Waiting for a message. MPI makes progress only while it is called.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank looks without a pause. Shares of a step differ by less.
const SPIN: Duration = Duration::from_micros(500);
/// How often it looks between two readings of the clock.
const NUM_LOOKS: usize = 16;
/// The first pause. Each is twice as long as the one before, up to the longest: what a first call after an idle time
/// may wait.
const FIRST_NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Looks until there is something; `None` if there was nothing in time.
pub(super) fn wait_for<T, E>(
    limit: Option<Duration>,
    mut look: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let since = Instant::now();
    let mut nap = FIRST_NAP;
    loop {
        for _ in 0..NUM_LOOKS {
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            hint::spin_loop();
        }
        let waited = since.elapsed();
        if limit.is_some_and(|limit| waited > limit) {
            return Ok(None);
        }
        if waited > SPIN {
            thread::sleep(nap);
            nap = (2 * nap).min(LONGEST_NAP);
        }
    }
}
