//! Which crates of the workspace a crate depends on, as its manifest says.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The crates of the workspace that a package depends on, without those that only its tests and its build script need.
pub fn dependencies(package: &str) -> Vec<String> {
    let path = Path::new(package).join("Cargo.toml");
    let manifest = fs::read_to_string(&path).expect("a manifest");
    let lines = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['));
    lines
        .filter_map(|line| line.strip_prefix("inflight-"))
        .map(|line| line.split(['.', ' ']).next().unwrap_or(line).to_owned())
        .collect()
}

/// A crate and all crates of the workspace that it depends on, sorted.
pub fn all_below(name: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.pop() {
        left.extend(dependencies(&format!("crates/{name}")));
        found.insert(name);
    }
    found.into_iter().collect()
}
