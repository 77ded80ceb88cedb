//! Where things are. Everything that the commands make lies below `target/`.

use std::path::{Path, PathBuf};

/// The root of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// A path below `target/`. Cargo's own folder may be elsewhere (`CARGO_TARGET_DIR`); this one is not.
pub fn target(path: &str) -> PathBuf {
    root().join("target").join(path)
}
