//! Adapters as the engine sees them: it carries them from requests to steps.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The adapter that a sequence is computed with. Only the runner knows what is inside.
///
/// Sequences with different adapters must not share blocks: a request with one has a
/// [salt](super::ReuseOptions::salt) of this version of it.
#[derive(Clone)]
pub struct Adapter {
    contents: Arc<dyn Any + Send + Sync>,
    num_pages: u32,
}

impl Adapter {
    /// An adapter with these contents, which takes `num_pages` of the [pages](super::EngineConfig::num_adapter_pages)
    /// for adapters.
    pub fn new(contents: Arc<impl Any + Send + Sync>, num_pages: u32) -> Self {
        Self {
            contents,
            num_pages,
        }
    }

    /// The pages that it takes.
    pub fn num_pages(&self) -> u32 {
        self.num_pages
    }

    /// Its contents, if they are of this type.
    pub fn contents<T: 'static>(&self) -> Option<&T> {
        self.contents.downcast_ref()
    }
}

impl PartialEq for Adapter {
    /// Whether both are one object.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.contents, &other.contents)
    }
}

impl Eq for Adapter {}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({:p})", Arc::as_ptr(&self.contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_contents_are_for_who_knows_their_type() {
        let adapter = Adapter::new(Arc::new(7_u32), 1);
        assert_eq!(adapter.contents::<u32>(), Some(&7));
        assert_eq!(adapter.contents::<u64>(), None);
    }
}
