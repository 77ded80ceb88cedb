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

/// The sequences whose slots are in doubt.
#[derive(Default)]
pub struct SlotsInDoubt {
    /// Released since the batcher's last turn.
    recent: Vec<CorrelationKey>,
    /// Released before it.
    ripe: Vec<CorrelationKey>,
}

impl SlotsInDoubt {
    /// Notes the end of a released request's sequence, if the request `is_cancelled` by now.
    pub fn note(&mut self, key: CorrelationKey, is_cancelled: bool) {
        let has_slot = !matches!(key, CorrelationKey::Alone(_));
        if has_slot && is_cancelled {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_were_cancelled_are_ended_once_more_after_the_batchers_turn() {
        let mut slots = SlotsInDoubt::default();
        slots.note(CorrelationKey::Number(1), true);
        slots.note(CorrelationKey::Number(2), false);
        slots.note(CorrelationKey::Alone(3), true);
        assert_eq!(slots.take_ripe(), []);
        slots.ripen();
        slots.note(CorrelationKey::Number(4), true);
        slots.ripen();
        assert_eq!(slots.take_ripe(), [1, 4].map(CorrelationKey::Number));
        assert_eq!(slots.take_ripe(), []);
    }
}
