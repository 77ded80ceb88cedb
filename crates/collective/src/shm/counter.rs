//! A number in shared memory that only one rank raises, and others wait for.

use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::futex;

/// How long a rank looks at the number of another one before it sleeps. Shares of a step differ by less, and a core
/// that sleeps takes some 50 us to wake up.
const SPIN: Duration = Duration::from_micros(500);
/// How often it looks between two readings of the clock.
const NUM_LOOKS: usize = 64;

/// How often a rank has done something, modulo 2^32.
#[repr(C)]
pub(super) struct Counter {
    value: AtomicU32,
    /// How many sleep until it changes, or are about to.
    num_waiting: AtomicU32,
}

impl Counter {
    /// Raises it to `value`, after all that the rank has written.
    pub(super) fn raise(&self, value: u32) {
        self.value.store(value, Ordering::SeqCst);
        if self.num_waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    /// Wakes all who sleep because of it.
    pub(super) fn wake(&self) {
        futex::wake_all(&self.value);
    }

    /// Whether it is beyond `value`: by less than 2^31.
    pub(super) fn is_beyond(&self, value: u32) -> bool {
        is_beyond(self.value.load(Ordering::Acquire), value)
    }

    /// Looks for a moment, counted from `since`, whether it is beyond `value`.
    pub(super) fn spin_until_beyond(&self, value: u32, since: Instant) -> bool {
        loop {
            for _ in 0..NUM_LOOKS {
                if self.is_beyond(value) {
                    return true;
                }
                hint::spin_loop();
            }
            if since.elapsed() > SPIN {
                return false;
            }
        }
    }

    /// Sleeps until it may be beyond `value`, at most for `limit`.
    pub(super) fn sleep(&self, value: u32, limit: Duration) {
        self.num_waiting.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if !is_beyond(seen, value) && !limit.is_zero() {
            futex::wait(&self.value, seen, limit);
        }
        self.num_waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is_beyond(counter: u32, value: u32) -> bool {
    counter.wrapping_sub(value).wrapping_sub(1) < u32::MAX / 2
}
