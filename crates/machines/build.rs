//! Names the build: `INFLIGHT_BUILD` is a hash of the sources of this crate and of those below it, of the kernels, and
//! of how they are compiled. By it the processes of a model's ranks know that they are of one build.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The crates that a rank runs: this one, and all that it depends on.
const CRATES: [&str; 15] = [
    "base",
    "checkpoint",
    "collective",
    "config",
    "device",
    "device-cpu",
    "device-cuda",
    "engine",
    "images",
    "machines",
    "mpi-interface",
    "numbers",
    "runner",
    "sampling",
    "threads",
];

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let crates = package.parent().expect("the folder of the crates");
    let mut hasher = DefaultHasher::new();
    let sources = CRATES.iter().flat_map(|name| {
        let package = crates.join(name);
        [package.join("src"), package.join("Cargo.toml")]
    });
    for path in sources.chain([crates.join("../Cargo.lock"), crates.join("../Cargo.toml")]) {
        println!("cargo::rerun-if-changed={}", path.display());
        hash(&path, &mut hasher);
    }
    for name in [
        "DEP_INFLIGHT_KERNELS_HASH",
        "PROFILE",
        "OPT_LEVEL",
        "TARGET",
    ] {
        env::var_os(name).hash(&mut hasher);
    }
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    // Where the sources lay makes no other build.
    let flags = flags.split('\x1f');
    for flag in flags.filter(|flag| !flag.starts_with("--remap-path-prefix=")) {
        flag.hash(&mut hasher);
    }
    println!("cargo::rustc-env=INFLIGHT_BUILD={:016x}", hasher.finish());
}

/// Hashes a file, or the files of a folder in the order of their names. A missing path has no content.
fn hash(path: &Path, hasher: &mut DefaultHasher) {
    path.file_name().hash(hasher);
    match fs::read_dir(path) {
        Ok(entries) => {
            let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
            paths.sort();
            paths.iter().for_each(|path| self::hash(path, hasher));
        }
        Err(_) => fs::read(path).unwrap_or_default().hash(hasher),
    }
}
