//! The files of a package, and which file a path in one of them leads to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::paths::{PathUse, paths, test_modules};

/// Keywords before the name of an item.
const ITEMS: [&str; 8] = [
    "const", "enum", "fn", "static", "struct", "trait", "type", "union",
];

/// All files of a package.
pub struct Sources {
    pub files: Vec<Source>,
    /// The file of each module.
    modules: BTreeMap<Vec<String>, usize>,
}

/// One file.
pub struct Source {
    pub path: PathBuf,
    pub tokens: TokenStream,
    /// Its module, from the crate's root: `[folder, ..]`; empty for `lib.rs`.
    pub module: Vec<String>,
    pub paths: Vec<PathUse>,
    /// Whether only test builds have it.
    pub is_test: bool,
    items: BTreeSet<String>,
}

impl Sources {
    /// Reads a package by its folder of sources, `src` for that of the backend.
    pub fn read(root: &str) -> Self {
        let mut files = Vec::new();
        let mut folders = vec![PathBuf::from(root)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)
                .expect("a folder of sources")
                .flatten()
            {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = fs::read_to_string(&path).expect("a source file");
                    files.push(Source::new(root, path, &text));
                }
            }
        }
        Self::new(files)
    }

    fn new(mut files: Vec<Source>) -> Self {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let tests: BTreeSet<_> = files.iter().flat_map(Source::test_modules).collect();
        for file in &mut files {
            file.is_test = (1..=file.module.len()).any(|len| tests.contains(&file.module[..len]));
        }
        let modules = files.iter().map(|file| file.module.clone());
        let modules = modules.zip(0..).collect();
        Self { files, modules }
    }

    /// The files that the shipped code of a file uses, with the names that it takes from them.
    ///
    /// A re-export is no use, and a name that is re-exported leads to the file that defines it. What the `mod.rs` of a
    /// folder, or the `lib.rs` of a crate, and the files below it use of each other is not counted: the folder is one
    /// module.
    pub fn uses(&self, file: usize) -> BTreeMap<usize, BTreeSet<String>> {
        let mut uses = BTreeMap::<_, BTreeSet<_>>::new();
        let source = &self.files[file];
        for path in source.shipped_paths().filter(|path| !path.is_reexport) {
            let names = self.absolute(path);
            if let Some(target) = names.and_then(|names| self.resolve(&names, 0))
                && target != file
                && !self.is_one_folder(file, target)
            {
                let name = path.names.last().cloned().unwrap_or_default();
                uses.entry(target).or_default().insert(name);
            }
        }
        uses
    }

    /// Whether one of two files is the `mod.rs` of a folder that the other is in, or the `lib.rs` of its crate.
    fn is_one_folder(&self, a: usize, b: usize) -> bool {
        let is_root = |root: usize, other: usize| {
            let root = &self.files[root];
            let is_root = ["mod.rs", "lib.rs"]
                .iter()
                .any(|name| root.path.ends_with(name));
            is_root && self.files[other].module.starts_with(&root.module)
        };
        is_root(a, b) || is_root(b, a)
    }

    /// A path from the crate's root, if it leads into the crate.
    fn absolute(&self, path: &PathUse) -> Option<Vec<String>> {
        if path.is_rooted {
            return Some(path.names.clone());
        }
        let mut child = path.module.clone();
        child.push(path.names.first()?.clone());
        let is_child = self.modules.contains_key(&child);
        is_child.then(|| [&path.module[..], &path.names].concat())
    }

    /// The file that defines what a path from the root names.
    fn resolve(&self, names: &[String], depth: usize) -> Option<usize> {
        if depth > 8 {
            return None;
        }
        let mut lens = (0..=names.len()).rev();
        let len = lens.find(|&len| self.modules.contains_key(&names[..len]))?;
        let module = self.modules[&names[..len]];
        let source = &self.files[module];
        let Some(name) = names.get(len) else {
            return Some(module);
        };
        if source.items.contains(name) {
            return Some(module);
        }
        let imports = || source.shipped_paths().filter(|path| path.alias.is_some());
        let named = imports().find(|path| path.alias.as_ref() == Some(name));
        if let Some(path) = named {
            return self.resolve(&self.absolute(path)?, depth + 1);
        }
        imports()
            .filter(|path| path.alias.as_deref() == Some("*"))
            .filter_map(|path| {
                let mut names = self.absolute(path)?;
                names.push(name.clone());
                self.resolve(&names, depth + 1)
            })
            .next()
    }
}

impl Source {
    fn new(root: &str, path: PathBuf, text: &str) -> Self {
        let module = path.strip_prefix(root).expect("a file below its root");
        let module: Vec<String> = module
            .with_extension("")
            .iter()
            .map(|name| name.to_string_lossy().into_owned())
            .filter(|name| !["mod", "lib", "main"].contains(&name.as_str()))
            .collect();
        let tokens: TokenStream = text.parse().expect("Rust");
        Self {
            paths: paths(&tokens, &module),
            items: items(&tokens),
            is_test: false,
            path,
            tokens,
            module,
        }
    }

    /// The paths of code that is shipped, not only tested with.
    pub fn shipped_paths(&self) -> impl Iterator<Item = &PathUse> {
        self.paths
            .iter()
            .filter(|path| !self.is_test && !path.is_test)
    }

    fn test_modules(&self) -> Vec<Vec<String>> {
        let names = test_modules(&self.tokens).into_iter();
        names
            .map(|name| [&self.module[..], &[name]].concat())
            .collect()
    }
}

/// Names of the items that a file defines, without the items of its inline modules and blocks.
fn items(tokens: &TokenStream) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let tokens: Vec<_> = tokens.clone().into_iter().collect();
    for pair in tokens.windows(2) {
        if let [TokenTree::Ident(keyword), TokenTree::Ident(name)] = pair
            && ITEMS.iter().any(|item| keyword == item)
        {
            found.insert(name.to_string());
        }
        // Items that a macro makes: `numbers! { /// .. pub struct Tokens; }`.
        if let [TokenTree::Punct(bang), TokenTree::Group(group)] = pair
            && bang.as_char() == '!'
            && group.delimiter() == Delimiter::Brace
        {
            found.extend(items(&group.stream()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_the_file_that_defines_it() {
        let sources = sources(&[
            ("src/lib.rs", "pub mod a; pub mod b;"),
            (
                "src/a/mod.rs",
                "mod x; mod y; pub use x::X; pub use y::*; pub struct Own;",
            ),
            ("src/a/x.rs", "use super::{Own, Y}; pub struct X;"),
            (
                "src/a/y.rs",
                "pub struct Y;\n#[cfg(test)]\nmod tests { use crate::b; }",
            ),
            (
                "src/b.rs",
                "use crate::a::{X as Z, self}; fn f() { crate::a::Y; std::fs::read() }",
            ),
        ]);
        let uses = |path: &str| -> Vec<String> {
            let file = sources
                .files
                .iter()
                .position(|file| file.path.as_path() == Path::new(path));
            let uses = sources.uses(file.expect("a file"));
            let path = |file: usize| sources.files[file].path.display().to_string();
            uses.into_keys().map(path).collect()
        };
        // `Own` is of its own folder's `mod.rs`.
        assert_eq!(uses("src/a/x.rs"), ["src/a/y.rs"]);
        assert_eq!(
            uses("src/b.rs"),
            ["src/a/mod.rs", "src/a/x.rs", "src/a/y.rs"]
        );
        for alone in ["src/a/mod.rs", "src/a/y.rs", "src/lib.rs"] {
            assert_eq!(uses(alone), [""; 0], "{alone}");
        }
    }

    #[test]
    fn a_file_that_only_tests_declare_is_a_test() {
        let sources = sources(&[
            ("src/a/mod.rs", "#[cfg(test)]\nmod walks;\nmod shipped;"),
            ("src/a/shipped.rs", ""),
            ("src/a/walks.rs", ""),
        ]);
        let tests: Vec<_> = sources.files.iter().map(|file| file.is_test).collect();
        assert_eq!(tests, [false, false, true]);
    }

    pub fn sources(files: &[(&str, &str)]) -> Sources {
        let files = files.iter();
        Sources::new(
            files
                .map(|(path, text)| Source::new("src", PathBuf::from(path), text))
                .collect(),
        )
    }
}
