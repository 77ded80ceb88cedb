//! Adapters that requests name: where they are, and the memory in which they are kept.
//!
//! ```text
//! folders.rs   from a name to a folder
//! store.rs     AdapterStore: loads adapters on threads, and keeps them
//! cache.rs     the adapters in memory, and the pages that they take
//! pages.rs     how large a page is, and how many there are
//! loaded.rs    an adapter as requests get it
//! upload.rs    an adapter that a request brings
//! workers.rs   threads that look at files, or read weights
//! signal.rs    wakes the thread that gives pages
//! ```

mod cache;
mod folders;
mod loaded;
mod pages;
mod signal;
mod store;
#[cfg(test)]
mod test_folder;
mod upload;
mod workers;

pub use cache::AdapterCacheUsage;
pub use folders::AdapterFolders;
pub use loaded::LoadedAdapter;
pub use pages::AdapterPageLimits;
pub use store::{AdapterLimits, AdapterLoad, AdapterStore};
pub use upload::{AdapterUpload, UploadHeader, UploadWriter};
