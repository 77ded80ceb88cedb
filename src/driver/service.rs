//! When a model has begun to serve clients, and when the last of its requests must end.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::model_load::ModelLoad;

/// What the driver of an instance and the thread that watches it tell each other about the model's service.
#[derive(Clone, Debug)]
pub struct Service(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    load: ModelLoad,
    has_served: AtomicBool,
    deadline: OnceLock<Instant>,
}

impl Service {
    /// The service of this load of the model, which no client has used.
    pub fn new(load: ModelLoad) -> Self {
        Self(Arc::new(Shared {
            load,
            has_served: AtomicBool::new(false),
            deadline: OnceLock::new(),
        }))
    }

    /// Records that a client's request has arrived.
    pub fn serves(&self) {
        if !self.0.has_served.swap(true, Ordering::Relaxed) {
            self.0.load.serves();
        }
    }

    /// Whether a client's request has arrived.
    pub fn has_served(&self) -> bool {
        self.0.has_served.load(Ordering::Relaxed)
    }

    /// Whether a later load of the model serves.
    pub fn is_replaced(&self) -> bool {
        self.0.load.is_replaced()
    }

    /// Has all requests end at most `timeout` after `noticed`, when the model was first seen to be unloaded. Only the
    /// first call counts.
    pub fn end_within(&self, timeout: Duration, noticed: Instant) {
        if let Some(deadline) = noticed.checked_add(timeout)
            && self.0.deadline.set(deadline).is_ok()
        {
            log::info!("the model is being unloaded: its requests end within {timeout:?}");
        }
    }

    /// When all requests must end, if the model is being unloaded.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.deadline.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_deadline_counts() {
        let service = Service::new(ModelLoad::new("service", 1));
        assert_eq!(service.deadline(), None);
        let noticed = Instant::now();
        service.end_within(Duration::from_secs(5), noticed);
        service.end_within(Duration::from_secs(1), noticed);
        assert_eq!(service.deadline(), Some(noticed + Duration::from_secs(5)));
    }

    #[test]
    fn the_load_serves_with_the_first_client() {
        let (first, second) = (ModelLoad::new("twice", 1), ModelLoad::new("twice", 1));
        let [first, second] = [first, second].map(Service::new);
        assert!(!second.has_served() && !first.is_replaced());
        second.serves();
        assert!(second.has_served() && first.is_replaced());
    }
}
