//! What is packed, and where it lies.

use std::fs;
use std::path::Path;

use super::dependencies::Dependencies;
use super::tree::{Entry, Tree};
use super::{NAME, licences};
use crate::library::Build;
use crate::workspace::root;
use crate::{Result, library, source_paths};

/// A library or a program.
struct Part {
    /// The workspace that it is built in, as a folder of the project.
    workspace: &'static str,
    /// The package that it is built from.
    package: &'static str,
    name: &'static str,
    /// Where it lies.
    folder: &'static str,
    /// Its header, below `include`.
    header: Option<&'static str>,
    /// Whether there is no package without it.
    is_needed: bool,
}

const BACKEND: &str = "backends/inflight";
const PARTS: [Part; 6] = [
    Part {
        header: Some("inflight_logits_processor.h"),
        ..needed("inflight-backend", library::LIBRARY, BACKEND)
    },
    needed(library::RANK_PROGRAM, library::RANK_PROGRAM, BACKEND),
    needed("inflight-simulator", "inflight-sim", "bin"),
    needed("inflight-openai", "inflight-openai", "bin"),
    Part {
        header: Some("inflight_batch_manager.h"),
        is_needed: false,
        ..needed("inflight-embed", library::EMBED, "lib")
    },
    Part {
        workspace: "plugins/mpi",
        is_needed: false,
        ..needed("inflight-mpi", library::MPI_LIBRARY, BACKEND)
    },
];

const fn needed(package: &'static str, name: &'static str, folder: &'static str) -> Part {
    Part {
        workspace: "",
        package,
        name,
        folder,
        header: None,
        is_needed: true,
    }
}

impl Part {
    /// Whether programs are linked with it, and nothing loads or runs it as it is.
    fn is_archive(&self) -> bool {
        self.name.ends_with(".a")
    }
}

/// The libraries and programs that are packed, with their contents.
pub struct Programs(Vec<(&'static Part, Vec<u8>)>);

impl Programs {
    /// Builds them as they ship. Without MPI, its plug-in is left out.
    pub fn build() -> Result<Self> {
        let backend = library::backend_directory(Build::Shipped)?.join("inflight");
        let mut paths = vec![
            backend.join(library::LIBRARY),
            backend.join(library::RANK_PROGRAM),
            library::simulator(Build::Shipped)?,
            library::openai(Build::Shipped)?,
            library::embed()?,
        ];
        match library::mpi_plugin(Build::Shipped) {
            Ok(()) => paths.push(backend.join(library::MPI_LIBRARY)),
            Err(error) => eprintln!("{} is not packed: {error}", library::MPI_LIBRARY),
        }
        let programs = PARTS
            .iter()
            .zip(paths)
            .map(|(part, path)| Ok((part, read(&path)?)));
        Ok(Self(programs.collect::<Result<_>>()?))
    }

    /// Reads them from one folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut programs = Vec::new();
        for part in &PARTS {
            let path = folder.join(part.name);
            if part.is_needed || path.exists() {
                programs.push((part, read(&path)?));
            } else {
                eprintln!("{} is not packed: {} has none", part.name, folder.display());
            }
        }
        Ok(Self(programs))
    }

    /// The packages that they are built from, each with the folder of its workspace.
    pub fn packages(&self) -> Vec<(&'static str, &'static str)> {
        let parts = self.0.iter();
        parts
            .map(|(part, _)| (part.workspace, part.package))
            .collect()
    }

    /// Each that is loaded or run as it is.
    pub fn linked(&self) -> impl Iterator<Item = &[u8]> {
        let linked = self.0.iter().filter(|(part, _)| !part.is_archive());
        linked.map(|(_, bytes)| bytes.as_slice())
    }

    /// An error if one of them contains a path of this machine: its bytes would depend on where it was built.
    pub fn refuse_build_paths(&self) -> Result<()> {
        let folders = source_paths::folders()?;
        for (Part { name, .. }, bytes) in &self.0 {
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
    for (part, bytes) in &programs.0 {
        let entry = match part.is_archive() {
            true => Entry::File(bytes.clone()),
            false => Entry::Program(bytes.clone()),
        };
        tree.insert(format!("{}/{}", part.folder, part.name), entry);
        if let Some(name) = part.header {
            let header = format!("include/{name}");
            let text = read(&root().join(&header))?;
            tree.insert(header, Entry::File(text));
        }
    }
    // The library is its own batch strategy.
    tree.insert(
        format!("{BACKEND}/batchstrategy.so"),
        Entry::Link(library::LIBRARY.into()),
    );
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
