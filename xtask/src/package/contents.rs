//! What is packed, and where it lies.

use std::fs;
use std::path::Path;

use super::dependencies::Dependencies;
use super::tree::{Entry, Tree};
use super::{NAME, licences};
use crate::workspace::root;
use crate::{Result, library, source_paths};

/// The libraries and programs: the package that each is built from, its name, and its folder.
const PROGRAMS: [(&str, &str, &str); 4] = [
    ("inflight-backend", library::LIBRARY, BACKEND),
    (library::RANK_PROGRAM, library::RANK_PROGRAM, BACKEND),
    ("inflight-simulator", "inflight-sim", "bin"),
    ("inflight-openai", "inflight-openai", "bin"),
];
const BACKEND: &str = "backends/inflight";

/// The packages of the workspace that the programs are built from.
pub fn packages() -> [&'static str; PROGRAMS.len()] {
    PROGRAMS.map(|(package, _, _)| package)
}

/// The contents of the libraries and programs, in the order of the table.
pub struct Programs(Vec<Vec<u8>>);

impl Programs {
    /// Builds them as they ship.
    pub fn build() -> Result<Self> {
        let simulator = library::simulator()?;
        let front = library::openai()?;
        let backend = library::backend_directory()?.join("inflight");
        let [library, rank] =
            [library::LIBRARY, library::RANK_PROGRAM].map(|name| backend.join(name));
        let programs = [library, rank, simulator, front].map(|path| read(&path));
        Ok(Self(programs.into_iter().collect::<Result<_>>()?))
    }

    /// Reads them from one folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let programs = PROGRAMS.map(|(_, name, _)| read(&folder.join(name)));
        Ok(Self(programs.into_iter().collect::<Result<_>>()?))
    }

    /// Each as it is.
    pub fn contents(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// An error if one of them contains a path of this machine: its bytes would depend on where it was built.
    pub fn refuse_build_paths(&self) -> Result<()> {
        let folders = source_paths::folders()?;
        for ((_, name, _), bytes) in PROGRAMS.iter().zip(&self.0) {
            if let Some(path) = source_paths::find(bytes, &folders) {
                return Err(format!(
                    "{name} contains the path {path}: unset RUSTFLAGS, and build it with cargo xtask"
                )
                .into());
            }
        }
        Ok(())
    }
}

/// All files, in the layout of a prefix such as /opt/tritonserver.
pub fn tree(programs: &Programs, dependencies: &Dependencies, bill: &str) -> Result<Tree> {
    let mut tree = Tree::default();
    for ((_, name, folder), bytes) in PROGRAMS.iter().zip(&programs.0) {
        tree.insert(format!("{folder}/{name}"), Entry::Program(bytes.clone()));
    }
    // The library is its own batch strategy.
    tree.insert(
        format!("{BACKEND}/batchstrategy.so"),
        Entry::Link(library::LIBRARY.into()),
    );
    let header = "include/inflight_logits_processor.h";
    tree.insert(header, Entry::File(read(&root().join(header))?));
    for name in ["inflight-openai.1", "inflight-rank.1", "inflight-sim.1"] {
        let page = read(&root().join("docs/man").join(name))?;
        tree.insert(format!("share/man/man1/{name}"), Entry::File(page));
    }
    let documents = format!("share/doc/{NAME}");
    for name in ["LICENSE", "CHANGELOG.md"] {
        let text = read(&root().join(name))?;
        tree.insert(format!("{documents}/{name}"), Entry::File(text));
    }
    for (name, text) in [
        ("licences-of-crates.txt", licences::of_others(dependencies)?),
        ("sbom.spdx.json", bill.to_owned()),
    ] {
        tree.insert(
            format!("{documents}/{name}"),
            Entry::File(text.into_bytes()),
        );
    }
    Ok(tree)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()).into())
}
