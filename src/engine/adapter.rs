//! Adapters as the engine sees them: it carries them from requests to steps.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The adapter that a sequence is computed with. Only the runner knows what is inside.
///
/// Sequences with different adapters must not share blocks: a request with one has a
/// [salt](super::ReuseOptions::salt) of this version of it.
#[derive(Clone)]
pub struct Adapter(Arc<dyn Any + Send + Sync>);

impl Adapter {
    /// An adapter with these contents.
    pub fn new(contents: Arc<impl Any + Send + Sync>) -> Self {
        Self(contents)
    }

    /// Its contents, if they are of this type.
    pub fn contents<T: 'static>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl PartialEq for Adapter {
    /// Whether both are the same one.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Adapter {}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({:p})", Arc::as_ptr(&self.0))
    }
}
