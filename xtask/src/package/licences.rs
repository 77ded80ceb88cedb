//! The licences of the crates in the programs, which have to go with these.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use super::dependencies::Dependencies;
use crate::Result;
use crate::workspace::root;

/// How the names of the files begin that say what a licence asks to be said, in upper case.
const BEGINNINGS: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "COPYING",
    "COPYRIGHT",
    "NOTICE",
    "UNLICENSE",
];

/// The licence of each crate of others, and every text once, below the crates that have it.
pub fn of_others(dependencies: &Dependencies) -> Result<String> {
    let mut list = String::from(
        "The library and the programs contain these crates, under these licences. The texts follow.\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let others = dependencies.crates.values();
    for other in others.filter(|found| !found.folder.starts_with(root())) {
        writeln!(list, "{} {}: {}", other.name, other.version, other.licence)?;
        let mut names: Vec<_> = fs::read_dir(&other.folder)?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| {
                let upper = name.to_uppercase();
                BEGINNINGS.iter().any(|start| upper.starts_with(start))
            })
            .collect();
        names.sort();
        for name in names {
            let path = other.folder.join(name);
            if path.is_file() {
                let text = String::from_utf8_lossy(&fs::read(path)?).replace("\r\n", "\n");
                let crates = texts.entry(text.trim_end().to_owned()).or_default();
                if crates.last() != Some(&other.id()) {
                    crates.push(other.id());
                }
            }
        }
    }
    let mut ordered: Vec<_> = texts.into_iter().collect();
    ordered.sort_by(|(_, left), (_, right)| left.cmp(right));
    for (text, crates) in ordered {
        let line = "-".repeat(80);
        writeln!(list, "\n{line}\n{}\n{line}\n\n{text}", crates.join(", "))?;
    }
    Ok(list)
}
