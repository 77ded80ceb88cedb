//! Locations in the workspace. Everything that the commands create goes below `target/`.

use std::path::{Path, PathBuf};

/// The root of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the workspace")
}

/// A path below `target/` of the checkout, even if cargo's own folder is elsewhere (`CARGO_TARGET_DIR`).
pub fn target(path: &str) -> PathBuf {
    root().join("target").join(path)
}
