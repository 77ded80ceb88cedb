//! Something may have changed: what a thread waits for.

use parking_lot::{Condvar, Mutex};

/// Counts what happens, for a thread that looks again when there is more.
#[derive(Default)]
pub(super) struct Signal {
    num_events: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    /// Something has happened.
    pub(super) fn notify(&self) {
        *self.num_events.lock() += 1;
        self.changed.notify_all();
    }

    /// What has happened so far.
    pub(super) fn num_events(&self) -> u64 {
        *self.num_events.lock()
    }

    /// Waits until more than `seen` has happened.
    pub(super) fn wait(&self, seen: u64) {
        let mut num_events = self.num_events.lock();
        self.changed
            .wait_while(&mut num_events, |num_events| *num_events == seen);
    }
}
