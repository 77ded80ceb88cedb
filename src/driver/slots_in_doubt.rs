//! Slots of ended sequences that Triton may not have freed.
//!
//! Triton frees the slot of a released request by itself, unless the request was cancelled before its release; and a
//! client may cancel it at that moment, so that nobody can tell. With the `oldest` strategy Triton does not free the
//! slot either if a request is cancelled in the queue of its batcher. Such a sequence is ended once more, by a request
//! of our own. That must not happen before Triton's batcher has dealt with the end that came with the release. If it
//! does, the batcher forgets the second sequence together with the first, and the second one's slot is lost until the
//! model is unloaded (Triton's `SequenceBatchScheduler::ReleaseSequenceSlot`).
//!
//! ```text
//! call k      release S   -> recent
//! batcher     frees the slot of S, if it does
//! call k+1    ripen       recent -> ripe
//!             accept...   a client may start S again
//!             take_ripe   S is ended once more
//! ```

use std::mem;

use crate::driver::correlation::CorrelationKey;
use inflight_triton::ResponseFactory;

/// The sequences whose slots are in doubt.
#[derive(Default)]
pub struct SlotsInDoubt {
    /// Released since the batcher's last turn.
    recent: Vec<CorrelationKey>,
    /// Released before it.
    ripe: Vec<CorrelationKey>,
}

impl SlotsInDoubt {
    /// Notes the end of a released request's sequence, if the request has been cancelled by now.
    pub fn note(&mut self, key: CorrelationKey, factory: &ResponseFactory) {
        let has_slot = !matches!(key, CorrelationKey::Alone(_));
        if has_slot && factory.is_cancelled() {
            self.recent.push(key);
        }
    }

    /// Notes that the batcher has had its turn since the last release.
    pub fn ripen(&mut self) {
        self.ripe.append(&mut self.recent);
    }

    /// The sequences that can be ended once more.
    pub fn take_ripe(&mut self) -> Vec<CorrelationKey> {
        mem::take(&mut self.ripe)
    }
}
