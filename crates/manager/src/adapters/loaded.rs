//! An adapter as requests get it.

use std::sync::Arc;

use inflight_engine::{Adapter, NewRequest};

/// An adapter as a request gets it. It stays in memory until the last request with it has ended.
#[derive(Clone, Debug)]
pub struct LoadedAdapter {
    pub(super) adapter: Adapter,
    /// The name, and the stamps of the files.
    pub(super) version: Arc<str>,
}

impl LoadedAdapter {
    /// Has a request computed with it. Its blocks are shared only with requests with this version of it.
    pub fn apply_to(&self, request: &mut NewRequest) {
        let salt = request.reuse.salt.as_deref().unwrap_or_default();
        request.reuse.salt = Some(format!("\0{}\0{salt}", self.version).into());
        request.adapter = Some(self.adapter.clone());
    }
}
