//! The crates that the packed programs are made of.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Result;
use crate::process::{cargo, command, output};
use crate::workspace::root;

/// A crate in a program.
pub struct Crate {
    pub name: String,
    pub version: String,
    /// An expression of SPDX.
    pub licence: String,
    /// The SHA-256 of its archive in the registry; none for a member of the workspace.
    pub checksum: Option<String>,
    /// Where its sources lie.
    pub folder: PathBuf,
    /// Ids of the crates that it is compiled with.
    pub dependencies: BTreeSet<String>,
}

impl Crate {
    /// Name and version, by which no other crate of a program is known.
    pub fn id(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// The crates of some packages of the workspace, and of the packages themselves.
pub struct Dependencies {
    /// By id.
    pub crates: BTreeMap<String, Crate>,
    /// The ids of the packages.
    pub packed: BTreeSet<String>,
    /// The version of the compiler, and so of the standard library.
    pub rust: String,
}

impl Dependencies {
    /// Those that packages are compiled with, directly or not; each is a folder of a workspace, relative to the
    /// project's, and a name. What only builds or tests them is left out.
    pub fn of(packages: &[(&str, &str)]) -> Result<Self> {
        let mut all = Self {
            crates: BTreeMap::new(),
            packed: BTreeSet::new(),
            rust: rustc_says("release")?,
        };
        let mut workspaces: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (workspace, package) in packages {
            workspaces.entry(workspace).or_default().push(package);
        }
        for (workspace, packages) in workspaces {
            all.add(&root().join(workspace), &packages)?;
        }
        Ok(all)
    }

    fn add(&mut self, workspace: &Path, packages: &[&str]) -> Result<()> {
        let host = rustc_says("host")?;
        let metadata = output(
            cargo()
                .args(["metadata", "--format-version=1", "--locked"])
                .args(["--filter-platform", &host])
                .arg("--manifest-path")
                .arg(workspace.join("Cargo.toml")),
        )?;
        let metadata: Value = serde_json::from_str(&metadata)?;
        let checksums = checksums(&fs::read_to_string(workspace.join("Cargo.lock"))?);
        let edges = edges(&metadata);
        let known: BTreeMap<&str, &Value> = list(&metadata["packages"])
            .map(|package| (text(&package["id"]), package))
            .collect();
        let members: BTreeSet<&str> = list(&metadata["workspace_members"]).map(text).collect();
        let is_packed =
            |id: &&str| members.contains(id) && packages.contains(&text(&known[id]["name"]));
        let mut waiting: Vec<&str> = known.keys().copied().filter(is_packed).collect();
        let id_of = |id: &str| {
            format!(
                "{}-{}",
                text(&known[id]["name"]),
                text(&known[id]["version"])
            )
        };
        self.packed.extend(waiting.iter().map(|id| id_of(id)));
        while let Some(id) = waiting.pop() {
            if self.crates.contains_key(&id_of(id)) {
                continue;
            }
            let package = known[id];
            let normal = edges.get(id).into_iter().flatten().copied();
            waiting.extend(normal.clone());
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let found = Crate {
                name: text(&package["name"]).to_owned(),
                version: text(&package["version"]).to_owned(),
                // Before expressions of SPDX, alternatives had a slash between them.
                licence: text(&package["license"]).replace('/', " OR "),
                checksum: checksums.get(&id_of(id)).cloned(),
                folder: manifest.with_file_name(""),
                dependencies: normal.map(id_of).collect(),
            };
            self.crates.insert(found.id(), found);
        }
        Ok(())
    }
}

/// For each package, those that it is compiled with.
fn edges(metadata: &Value) -> BTreeMap<&str, Vec<&str>> {
    let is_normal =
        |dependency: &&Value| list(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null());
    list(&metadata["resolve"]["nodes"])
        .map(|node| {
            let normal = list(&node["deps"]).filter(is_normal);
            (text(&node["id"]), normal.map(|d| text(&d["pkg"])).collect())
        })
        .collect()
}

/// The checksums in a Cargo.lock, by the ids of crates.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let field = |package: &str, name: &str| {
        let value = package
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
        value.and_then(|value| Some(value.strip_suffix('"')?.to_owned()))
    };
    lock.split("[[package]]")
        .filter_map(|package| {
            let id = format!("{}-{}", field(package, "name")?, field(package, "version")?);
            Some((id, field(package, "checksum")?))
        })
        .collect()
}

/// A line of `rustc --version --verbose`.
fn rustc_says(key: &str) -> Result<String> {
    let lines = output(
        command(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
            .args(["--version", "--verbose"]),
    )?;
    let value = lines
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
    let value = value.ok_or_else(|| format!("rustc does not say its {key}"))?;
    Ok(value.to_owned())
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_of_a_registry_has_a_checksum_and_a_licence() {
        let found = Dependencies::of(&[("", "triton-inflight")]).expect("cargo answers");
        let own = |name: &str| &found.crates[&format!("{name}-{}", env!("CARGO_PKG_VERSION"))];
        let depends = |name: &str, other: &str| {
            let mut dependencies = own(name).dependencies.iter();
            dependencies.any(|id| id.starts_with(other))
        };
        assert!(own("triton-inflight").checksum.is_none());
        assert!(depends("triton-inflight", "inflight-text-"));
        assert!(depends("inflight-text", "tokenizers-"));
        let from_registry = found
            .crates
            .values()
            .filter(|found| !found.folder.starts_with(root()));
        for found in from_registry {
            let checksum = found.checksum.as_deref().unwrap_or_default();
            assert_eq!(checksum.len(), 64, "{}", found.id());
            assert!(!found.licence.is_empty(), "{}", found.id());
        }
        let ids: Vec<&String> = found.crates.keys().collect();
        let is_there = |name: &str| ids.iter().any(|id| id.starts_with(name));
        assert!(
            is_there("regex-automata-"),
            "a dependency of a dependency: {ids:?}"
        );
        assert!(!is_there("criterion-"), "only for benchmarks: {ids:?}");
        assert!(
            !is_there("inflight-kernel-sources-"),
            "only for the build: {ids:?}"
        );
    }
}
