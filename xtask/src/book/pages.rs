//! The pages of the book, and the files of the repository that they come from.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::markdown::links;
use crate::Result;

/// Where the book's own pages lie.
pub const BOOK: &str = "docs/src";
/// The table of contents.
pub const SUMMARY: &str = "docs/src/SUMMARY.md";

/// A page of the book.
#[derive(Debug)]
pub struct Page {
    /// The page as a file of the book, relative to `docs/src`.
    pub name: PathBuf,
    /// The file that has its text, relative to the root: the page itself, or the file it includes as a whole.
    pub source: PathBuf,
}

/// The pages that the table of contents names.
pub struct Pages {
    pub all: Vec<Page>,
}

impl Pages {
    pub fn read(root: &Path) -> Result<Self> {
        let summary = fs::read_to_string(root.join(SUMMARY))?;
        let mut all = Vec::new();
        for link in links(&summary) {
            let file = Path::new(BOOK).join(&link.target);
            let text = fs::read_to_string(root.join(&file))
                .map_err(|error| format!("{SUMMARY}: {}: {error}", link.target))?;
            let source = match included(&text) {
                Some(target) => resolve(&file, target)
                    .ok_or_else(|| format!("{}: {target} is outside", file.display()))?,
                None => file,
            };
            all.push(Page {
                name: PathBuf::from(link.target),
                source,
            });
        }
        Ok(Self { all })
    }

    /// The page that shows a file, relative to `docs/src`.
    pub fn page_of(&self, file: &Path) -> Option<&Path> {
        let of = |page: &&Page| page.source == file || Path::new(BOOK).join(&page.name) == file;
        self.all.iter().find(of).map(|page| page.name.as_path())
    }
}

/// The file that a page includes, if it does nothing else.
pub fn included(page: &str) -> Option<&str> {
    let inner = page
        .trim()
        .strip_prefix("{{#include ")?
        .strip_suffix("}}")?;
    (!inner.contains(['{', '}', '\n'])).then_some(inner.trim())
}

/// The file that a relative link in `file` points to, relative to the root; `None` if that is outside the repository.
pub fn resolve(file: &Path, target: &str) -> Option<PathBuf> {
    let mut path = file.parent()?.to_path_buf();
    for component in Path::new(target).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !path.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

/// Path and fragment of a link's target, if it points into the repository.
pub fn local(target: &str) -> Option<(&str, Option<&str>)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    Some(match target.split_once('#') {
        Some((path, fragment)) => (path, Some(fragment)),
        None => (target, None),
    })
}
