//! Adapters that requests name: where they are, and the memory in which they are kept.
//!
//! ```text
//! folders.rs   from a name to a folder
//! store.rs     AdapterStore: loads adapters on a thread, and keeps them
//! signal.rs    wakes the thread
//! ```

mod folders;
mod signal;
mod store;
#[cfg(test)]
mod test_folder;

pub use folders::AdapterFolders;
pub use store::{AdapterLoad, AdapterStore, LoadedAdapter};
