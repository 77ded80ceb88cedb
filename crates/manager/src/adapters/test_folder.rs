//! A folder of one test.

use std::fs;
use std::path::{Path, PathBuf};

/// An empty folder, which is removed when this is dropped.
pub(super) struct TestFolder(PathBuf);

impl TestFolder {
    /// The folder of the test with this name.
    pub(super) fn new(test: &str) -> Self {
        let name = format!("inflight-adapters-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        // What is left there harms nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}
