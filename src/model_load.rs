//! Which load of a model serves: loading a model again replaces the earlier load.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// A model's name and version.
type Place = (String, u64);

/// The latest load of each model that has served a client.
static SERVING: Mutex<BTreeMap<Place, u64>> = Mutex::new(BTreeMap::new());

static NUM_LOADED: AtomicU64 = AtomicU64::new(0);

/// One load of a model.
#[derive(Clone, Debug)]
pub struct ModelLoad {
    place: Place,
    number: u64,
}

impl ModelLoad {
    /// The load of version `version` of `model` that begins now.
    pub fn new(model: &str, version: u64) -> Self {
        Self {
            place: (model.to_owned(), version),
            number: NUM_LOADED.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Records that this load serves clients: from now on Triton sends none to earlier loads.
    pub fn serves(&self) {
        let mut serving = SERVING.lock();
        let last = serving.entry(self.place.clone()).or_insert(self.number);
        *last = self.number.max(*last);
    }

    /// Whether a later load serves.
    pub fn is_replaced(&self) -> bool {
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
    fn a_load_is_replaced_when_a_later_one_of_its_name_serves() {
        let first = ModelLoad::new("model", 1);
        let (other_version, other_name) =
            (ModelLoad::new("model", 2), ModelLoad::new("another", 1));
        let second = ModelLoad::new("model", 1);
        first.serves();
        other_version.serves();
        other_name.serves();
        assert!(!first.is_replaced(), "the second is not ready yet");
        second.serves();
        // The last clients of the first are served to their end.
        first.serves();
        assert!(first.is_replaced() && !second.is_replaced());
        assert!(!other_version.is_replaced() && !other_name.is_replaced());
    }
}
