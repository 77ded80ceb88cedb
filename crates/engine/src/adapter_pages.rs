//! The pages of adapters in flight: which adapters sequences hold, and how many pages are left for others.
//!
//! A sequence holds its adapter from its start to its end, also while it is paused. Sequences with the same adapter
//! share its pages.
//!
//! ```text
//! pages   | a a a | b b | free |      c, of 2 pages, waits until a or b has no sequence any more
//! ```

use crate::Adapter;
use inflight_base::RequestError;

/// How many pages adapters hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterUsage {
    /// All pages.
    pub num_pages: u32,
    /// The pages of adapters that sequences in flight hold.
    pub num_used: u32,
    /// The number of these adapters.
    pub num_adapters: u32,
    /// Requests that waited for pages when the last step was planned.
    pub num_waiting: u32,
}

impl AdapterUsage {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            num_pages: self.num_pages.saturating_add(other.num_pages),
            num_used: self.num_used + other.num_used,
            num_adapters: self.num_adapters + other.num_adapters,
            num_waiting: self.num_waiting + other.num_waiting,
        }
    }
}

/// The adapters that sequences in flight hold.
pub(super) struct AdapterPages {
    /// `None` if they are not limited.
    num_pages: Option<u32>,
    num_used: u32,
    /// Each with the number of sequences that hold it.
    held: Vec<(Adapter, u32)>,
}

impl AdapterPages {
    pub(super) fn new(num_pages: Option<u32>) -> Self {
        Self {
            num_pages,
            num_used: 0,
            held: Vec::new(),
        }
    }

    /// How many pages are used; `None` if they are not limited.
    pub(super) fn usage(&self) -> Option<AdapterUsage> {
        Some(AdapterUsage {
            num_pages: self.num_pages?,
            num_used: self.num_used,
            num_adapters: self.held.len() as u32,
            num_waiting: 0,
        })
    }

    /// Refuses an adapter that has more pages than there are.
    ///
    /// # Errors
    /// Both numbers.
    pub(super) fn check(&self, adapter: &Adapter) -> Result<(), RequestError> {
        match self.num_pages {
            Some(num_pages) if adapter.num_pages() > num_pages => {
                Err(RequestError::Invalid(format!(
                    "the request's adapter has {} pages, and all adapters that run together have {num_pages}: raise \
                     lora_cache_num_device_module_layer or lora_cache_gpu_memory_fraction",
                    adapter.num_pages()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Whether a sequence with this adapter can start.
    pub(super) fn fits(&self, adapter: &Adapter) -> bool {
        let Some(num_pages) = self.num_pages else {
            return true;
        };
        adapter.num_pages() <= num_pages - self.num_used || self.place_of(adapter).is_some()
    }

    /// A sequence with this adapter starts.
    pub(super) fn take(&mut self, adapter: &Adapter) {
        match self.place_of(adapter) {
            Some(place) => self.held[place].1 += 1,
            None => {
                self.num_used += adapter.num_pages();
                self.held.push((adapter.clone(), 1));
            }
        }
    }

    /// A sequence with this adapter has ended.
    pub(super) fn release(&mut self, adapter: &Adapter) {
        let place = self.place_of(adapter).expect("its sequence holds it");
        self.held[place].1 -= 1;
        if self.held[place].1 == 0 {
            self.held.swap_remove(place);
            self.num_used -= adapter.num_pages();
        }
    }

    /// Panics unless exactly `sequences` hold adapters, and these fit.
    pub(super) fn check_integrity<'a>(&self, sequences: impl Iterator<Item = &'a Adapter>) {
        let mut expected = Self::new(self.num_pages);
        sequences.for_each(|adapter| expected.take(adapter));
        assert_eq!(expected.held.len(), self.held.len(), "adapters in flight");
        for (adapter, num_sequences) in &self.held {
            let place = expected.place_of(adapter).expect("a sequence has it");
            assert_eq!(expected.held[place].1, *num_sequences, "{adapter:?}");
        }
        assert_eq!(expected.num_used, self.num_used, "pages in use");
        let max = self.num_pages.unwrap_or(u32::MAX);
        assert!(self.num_used <= max, "more pages than there are");
    }

    fn place_of(&self, adapter: &Adapter) -> Option<usize> {
        self.held.iter().position(|(held, _)| held == adapter)
    }
}
