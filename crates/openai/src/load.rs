//! How busy the server is: the requests in flight, and how long a client that finds no room should wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The longest that a client is asked to wait, in seconds.
const MAX_WAIT_S: u64 = 60;
/// The share of a new duration in the mean, as a divisor.
const WEIGHT: u64 = 8;

/// The prompts in flight.
#[derive(Debug)]
pub struct Load {
    max_requests: usize,
    room: Arc<Semaphore>,
    /// The mean duration of the requests that ended last, in microseconds; 0 if none has.
    mean_us: AtomicU64,
    /// Requests that were refused, and for which none has ended since.
    num_refused: AtomicU64,
}

/// Some prompts, which are in flight until this is dropped.
#[derive(Debug)]
pub struct Held {
    load: Arc<Load>,
    since: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Load {
    /// Room for so many prompts.
    pub fn new(max_requests: usize) -> Arc<Self> {
        Arc::new(Self {
            max_requests,
            room: Arc::new(Semaphore::new(max_requests)),
            mean_us: AtomicU64::new(0),
            num_refused: AtomicU64::new(0),
        })
    }

    /// Counts prompts as in flight; `None` if there is no room.
    pub fn hold(self: &Arc<Self>, num_prompts: usize) -> Option<Held> {
        let num_prompts = u32::try_from(num_prompts).ok()?;
        let permit = self.room.clone().try_acquire_many_owned(num_prompts).ok()?;
        Some(Held {
            load: self.clone(),
            since: Instant::now(),
            _permit: permit,
        })
    }

    /// The prompts in flight.
    pub fn num_in_flight(&self) -> usize {
        self.max_requests - self.room.available_permits()
    }

    /// Counts a request that was refused. Returns after how many seconds there should be room for it: when as many
    /// requests have ended as were refused so far, at the rate at which those in flight end.
    pub fn refuse(&self) -> u64 {
        let num_refused = self.num_refused.fetch_add(1, Ordering::Relaxed) + 1;
        let num_in_flight = self.num_in_flight();
        let mean_us = self.mean_us.load(Ordering::Relaxed);
        let wait_us = mean_us.saturating_mul(num_refused) / num_in_flight.max(1) as u64;
        wait_us.div_ceil(1_000_000).clamp(1, MAX_WAIT_S)
    }

    fn ended(&self, duration: Duration) {
        let new = duration.as_micros().try_into().unwrap_or(u64::MAX);
        let next = |mean: u64| {
            Some(match mean {
                0 => new,
                mean => mean - mean / WEIGHT + new / WEIGHT,
            })
        };
        let order = Ordering::Relaxed;
        let _ = self.mean_us.fetch_update(order, order, next);
        let one_less = |num: u64| num.checked_sub(1);
        let _ = self.num_refused.fetch_update(order, order, one_less);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.load.ended(self.since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_so_many_prompts() {
        let load = Load::new(3);
        let held = load.hold(2).expect("room");
        assert!(load.hold(2).is_none());
        assert!(load.hold(1).is_some());
        drop(held);
        assert!(load.hold(3).is_some());
        assert!(load.hold(4).is_none());
    }

    #[test]
    fn the_wait_follows_the_load() {
        let load = Load::new(2);
        let _held = load.hold(2).expect("room");
        assert_eq!(load.refuse(), 1);
        load.ended(Duration::from_secs(8));
        // Two end in 8 seconds.
        assert_eq!([load.refuse(), load.refuse(), load.refuse()], [4, 8, 12]);
        load.ended(Duration::from_secs(8));
        assert_eq!(load.refuse(), 12);
        load.ended(Duration::from_secs(1_000_000));
        assert_eq!(load.refuse(), MAX_WAIT_S);
    }
}
