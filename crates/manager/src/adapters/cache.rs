//! The adapters in memory: which are kept, which go first, and the pages that they take.
//!
//! ```text
//! kept adapters    | d | c | b | a |    those used longest ago go first, and none that a request in flight uses
//! ```

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::loaded::LoadedAdapter;
use super::signal::Signal;
use inflight_checkpoint::AdapterStamp;
use inflight_engine::Adapter;
use inflight_runner::{AdapterParts, UsedAdapter};

/// How long the files of a kept adapter are taken to be the same before they are looked at again.
const MAX_UNCHECKED: Duration = Duration::from_secs(1);

/// How full the memory for a model's adapters is, under the names that it has in a statistics file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdapterCacheUsage {
    /// All pages.
    #[serde(rename = "Max host LoRA pages")]
    pub num_pages: u32,
    /// Pages of adapters that are kept, or are being loaded.
    #[serde(rename = "Used host LoRA pages")]
    pub num_used: u32,
    /// Adapters that are kept.
    #[serde(rename = "Kept LoRA adapters")]
    pub num_kept: u32,
    /// Requests whose adapters are being loaded, or wait for pages.
    #[serde(rename = "Loading LoRA requests")]
    pub num_loading: u32,
    /// Adapters that have been loaded since the model was.
    #[serde(rename = "Loaded LoRA adapters")]
    pub num_loaded: u64,
    /// Adapters that have left the memory for others.
    #[serde(rename = "Evicted LoRA adapters")]
    pub num_evicted: u64,
}

/// The adapters in memory.
pub(super) struct AdapterCache {
    /// Used longest ago first.
    kept: Vec<KeptAdapter>,
    usage: AdapterCacheUsage,
}

/// An adapter in memory.
pub(super) struct KeptAdapter {
    pub(super) name: String,
    pub(super) stamp: AdapterStamp,
    pub(super) parts: Arc<AdapterParts>,
    pub(super) num_pages: u32,
    version: Arc<str>,
    /// What the requests with it hold.
    used: Weak<UsedAdapter>,
    /// When its files were compared last with their stamps; `None` if they have been replaced.
    checked: Option<Instant>,
}

impl AdapterCache {
    pub(super) fn new(num_pages: u32) -> Self {
        Self {
            kept: Vec::new(),
            usage: AdapterCacheUsage {
                num_pages,
                ..AdapterCacheUsage::default()
            },
        }
    }

    pub(super) fn usage(&self) -> AdapterCacheUsage {
        AdapterCacheUsage {
            num_kept: self.kept.len() as u32,
            ..self.usage
        }
    }

    /// An adapter that is kept, and of whose files it was known a moment ago that they are the same.
    pub(super) fn at_hand(&mut self, name: &str, signal: &Arc<Signal>) -> Option<LoadedAdapter> {
        let mut kept = self.kept.iter();
        let index = kept.rposition(|kept| kept.name == name && kept.is_current())?;
        Some(self.take(index, signal))
    }

    /// The stamp and the pages of an adapter that is kept, and that no file has.
    pub(super) fn uploaded(&self, name: &str) -> Option<(AdapterStamp, u32)> {
        let mut kept = self.kept.iter().rev();
        let kept = kept.find(|it| it.name == name && it.is_upload() && it.is_current())?;
        Some((kept.stamp.clone(), kept.num_pages))
    }

    /// The version of an adapter with this stamp, if it is kept. The files that others were read from have been
    /// replaced; what a request has brought stays until another version is there.
    pub(super) fn checked(
        &mut self,
        name: &str,
        stamp: &AdapterStamp,
        signal: &Arc<Signal>,
    ) -> Option<LoadedAdapter> {
        let mut kept = self.kept.iter();
        let found = kept.position(|kept| kept.name == name && kept.stamp == *stamp);
        if found.is_some() || stamp.is_of_files() {
            self.replace(name);
        }
        self.kept[found?].checked = Some(Instant::now());
        Some(self.take(found?, signal))
    }

    /// Says that all versions of an adapter have been replaced.
    fn replace(&mut self, name: &str) {
        let versions = self.kept.iter_mut().filter(|kept| kept.name == name);
        versions.for_each(|kept| kept.checked = None);
    }

    /// Sets pages aside, and evicts adapters that no request uses, replaced ones first. Returns whether there was room.
    pub(super) fn reserve(&mut self, num_pages: u32, evicted: &mut Vec<KeptAdapter>) -> bool {
        let is_unused = |kept: &KeptAdapter| kept.used.strong_count() == 0;
        while num_pages > self.usage.num_pages - self.usage.num_used {
            let unused = |kept: &KeptAdapter| is_unused(kept) && kept.checked.is_none();
            let oldest = self.kept.iter().position(unused);
            let Some(oldest) = oldest.or_else(|| self.kept.iter().position(is_unused)) else {
                return false;
            };
            let kept = self.kept.remove(oldest);
            self.give_back(kept.num_pages);
            self.usage.num_evicted += 1;
            evicted.push(kept);
        }
        self.usage.num_used += num_pages;
        true
    }

    /// Gives pages back that were set aside.
    pub(super) fn give_back(&mut self, num_pages: u32) {
        self.usage.num_used -= num_pages;
    }

    /// Keeps an adapter in pages that were set aside, for a request. Other versions of it have been replaced.
    pub(super) fn insert(
        &mut self,
        name: String,
        stamp: AdapterStamp,
        parts: AdapterParts,
        num_pages: u32,
        signal: &Arc<Signal>,
    ) -> LoadedAdapter {
        self.usage.num_loaded += 1;
        self.replace(&name);
        self.kept.push(KeptAdapter {
            version: format!("{name}\0{stamp}").into(),
            name,
            stamp,
            parts: Arc::new(parts),
            num_pages,
            used: Weak::new(),
            checked: Some(Instant::now()),
        });
        self.take(self.kept.len() - 1, signal)
    }

    /// A kept adapter for a request, as the one that was used last.
    fn take(&mut self, index: usize, signal: &Arc<Signal>) -> LoadedAdapter {
        let mut kept = self.kept.remove(index);
        let used = kept.used.upgrade().unwrap_or_else(|| {
            let signal = Arc::clone(signal);
            Arc::new(UsedAdapter::new(Arc::clone(&kept.parts), move || {
                signal.notify();
            }))
        });
        kept.used = Arc::downgrade(&used);
        let loaded = LoadedAdapter {
            adapter: Adapter::new(used, kept.num_pages),
            version: Arc::clone(&kept.version),
        };
        self.kept.push(kept);
        loaded
    }
}

impl KeptAdapter {
    fn is_upload(&self) -> bool {
        !self.stamp.is_of_files()
    }

    /// Whether it can be used without a look at its files.
    fn is_current(&self) -> bool {
        let is_fresh = |checked: Instant| self.is_upload() || checked.elapsed() < MAX_UNCHECKED;
        self.checked.is_some_and(is_fresh)
    }
}

#[cfg(test)]
impl AdapterCache {
    /// The adapters that are kept, those used longest ago first.
    pub(super) fn kept(&mut self) -> &mut [KeptAdapter] {
        &mut self.kept
    }
}

#[cfg(test)]
impl KeptAdapter {
    /// As if the last look at its files were long ago.
    pub(super) fn forget_check(&mut self) {
        self.checked = None;
    }
}
