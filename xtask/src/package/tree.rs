//! The files of a package, by path.

use std::collections::{BTreeMap, BTreeSet};

/// What lies at a path.
#[derive(Clone)]
pub enum Entry {
    File(Vec<u8>),
    /// A file that is executed, or loaded into a process.
    Program(Vec<u8>),
    /// A symbolic link to another path, relative to its own folder.
    Link(String),
}

/// Files and links in the order of their paths, which are relative and have `/` between names.
#[derive(Clone, Default)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    pub fn insert(&mut self, path: impl Into<String>, entry: Entry) {
        let path = path.into();
        let is_new = self.entries.insert(path.clone(), entry).is_none();
        assert!(is_new, "{path} is in the package twice");
    }

    /// The same files in a folder.
    pub fn below(&self, folder: &str) -> Self {
        self.renamed(|path| format!("{folder}/{path}"))
    }

    /// The same files at other paths.
    pub fn renamed(&self, rename: impl Fn(&str) -> String) -> Self {
        let mut renamed = Self::default();
        for (path, entry) in &self.entries {
            renamed.insert(rename(path), entry.clone());
        }
        renamed
    }

    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries
            .iter()
            .map(|(path, entry)| (path.as_str(), entry))
    }

    /// Every folder that a file lies in, parents first.
    pub fn folders(&self) -> BTreeSet<&str> {
        let parents = |path| std::iter::successors(parent(path), |path| parent(path));
        let paths = self.entries.keys();
        paths.flat_map(|path| parents(path.as_str())).collect()
    }
}

fn parent(path: &str) -> Option<&str> {
    path.rsplit_once('/').map(|(folder, _)| folder)
}
