//! Which of the models that were loaded under one name serves: one that is loaded over another takes its place.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// A model's name and version.
type Place = (String, u64);

/// The last of each name to have served a client.
static SERVING: Mutex<BTreeMap<Place, u64>> = Mutex::new(BTreeMap::new());

static NUM_LOADED: AtomicU64 = AtomicU64::new(0);

/// One load of a model.
#[derive(Clone, Debug)]
pub struct Tenure {
    place: Place,
    number: u64,
}

impl Tenure {
    /// The load of version `version` of `model` that begins now.
    pub fn new(model: &str, version: u64) -> Self {
        Self {
            place: (model.to_owned(), version),
            number: NUM_LOADED.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// A client is served: Triton sends none to those that were loaded before, from now on.
    pub fn serves(&self) {
        let mut serving = SERVING.lock();
        let last = serving.entry(self.place.clone()).or_insert(self.number);
        *last = self.number.max(*last);
    }

    /// Whether one that was loaded later serves.
    pub fn is_over(&self) -> bool {
        let serving = SERVING.lock();
        serving
            .get(&self.place)
            .is_some_and(|last| *last > self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenure_is_over_when_a_later_one_of_its_name_serves() {
        let first = Tenure::new("tenure", 1);
        let (other_version, other_name) = (Tenure::new("tenure", 2), Tenure::new("another", 1));
        let second = Tenure::new("tenure", 1);
        first.serves();
        other_version.serves();
        other_name.serves();
        assert!(!first.is_over(), "the second is not ready yet");
        second.serves();
        // The last clients of the first are served to their end.
        first.serves();
        assert!(first.is_over() && !second.is_over());
        assert!(!other_version.is_over() && !other_name.is_over());
    }
}
