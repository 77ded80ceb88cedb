//! The memory that the parsers of a model's guides have, and its limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum memory of all parsers of a model's guides together, in bytes. A parser beyond it frees its memory after each
/// token, and parses its output again from the beginning for the next one.
pub const MAX_GUIDE_BYTES: usize = 256 << 20;

/// The memory of all guides of a model.
pub(super) struct GuideMemory {
    num_bytes: AtomicUsize,
    max_bytes: usize,
}

/// A parser's share of the memory. Dropping it frees the share.
pub(super) struct MemoryShare {
    memory: Arc<GuideMemory>,
    num_bytes: usize,
}

impl GuideMemory {
    /// Up to `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            num_bytes: AtomicUsize::new(0),
            max_bytes,
        }
    }

    /// Maximum memory of all parsers, in bytes.
    pub(super) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Whether parsers have more.
    pub(super) fn is_over(&self) -> bool {
        self.num_bytes() > self.max_bytes
    }

    /// What parsers have.
    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes.load(Ordering::Relaxed)
    }
}

impl MemoryShare {
    /// A share of `num_bytes`.
    pub(super) fn new(memory: &Arc<GuideMemory>, num_bytes: usize) -> Self {
        memory.num_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        Self {
            memory: Arc::clone(memory),
            num_bytes,
        }
    }

    /// Has `num_bytes` from now on.
    pub(super) fn set(&mut self, num_bytes: usize) {
        let total = &self.memory.num_bytes;
        total.fetch_add(num_bytes, Ordering::Relaxed);
        total.fetch_sub(self.num_bytes, Ordering::Relaxed);
        self.num_bytes = num_bytes;
    }

    /// Size of this share, in bytes.
    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The memory of all guides.
    pub(super) fn memory(&self) -> &Arc<GuideMemory> {
        &self.memory
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.set(0);
    }
}
