//! The rooms of the house: who may import whom, and where `unsafe` may stand (see `src/lib.rs`).
//!
//! Sources are read as tokens, tests and macros included: comments and strings are no code, and a path may be
//! written over as many lines as it likes.

use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Rooms and their levels: a room imports only rooms of a lower level.
const LEVELS: &[(&str, u32)] = &[
    ("base", 0),
    ("config", 1),
    ("sampling", 1),
    ("engine", 2),
    ("post_processors", 2),
    ("device", 3),
    ("runner", 4),
    ("text", 4),
    ("triton", 4),
    ("guidance", 5),
    ("manager", 5),
    ("backend", 6),
    ("entry", 7),
];

/// Where `unsafe` may stand: Triton's C API, kernels, the exported functions, a user's library.
/// The C functions of the batch manager are a package of their own, `embed`.
const UNSAFE: &[&str] = &[
    "src/triton/",
    "src/device/",
    "src/entry.rs",
    "src/post_processors/library/",
];

#[test]
fn a_room_imports_only_rooms_of_a_lower_level() {
    let mut wrong = Vec::new();
    let mut num_imports = 0;
    for file in sources() {
        for (line, imported) in imports(&tokens(&file.text), file.depth) {
            num_imports += 1;
            if !may_import(&file.room, &imported) {
                wrong.push(format!("{}:{line}: {imported}", file.path.display()));
            }
        }
    }
    assert!(num_imports > 200, "only {num_imports} imports found");
    assert_eq!(
        wrong,
        Vec::<String>::new(),
        "imports that go up or sideways"
    );
}

#[test]
fn unsafe_stands_only_where_c_and_memory_are_touched() {
    let mut wrong = Vec::new();
    let mut num_uses = 0;
    for file in sources() {
        let lines = lines_of(&tokens(&file.text), "unsafe");
        num_uses += lines.len();
        if !UNSAFE
            .iter()
            .any(|place| file.path.to_string_lossy().starts_with(place))
        {
            wrong.extend(
                lines
                    .iter()
                    .map(|line| format!("{}:{line}", file.path.display())),
            );
        }
    }
    assert!(num_uses > 100, "only {num_uses} uses found");
    assert_eq!(wrong, Vec::<String>::new(), "unsafe outside its rooms");
}

/// A file of `src`.
struct Source {
    path: PathBuf,
    text: String,
    /// The room that it is in; empty for `src/lib.rs`, which is in none.
    room: String,
    /// How many modules deep its own module is: 1 for `src/entry.rs` and `src/base/mod.rs`.
    depth: usize,
}

fn sources() -> Vec<Source> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of src").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(source(path));
            }
        }
    }
    files
}

fn source(path: PathBuf) -> Source {
    let modules: Vec<String> = path
        .with_extension("")
        .iter()
        .skip(1)
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name != "mod" && name != "lib")
        .collect();
    let room = modules.first().cloned().unwrap_or_default();
    assert!(
        path == Path::new("src/lib.rs") || level_of(&room).is_some(),
        "{} is in no known room: give '{room}' a level",
        path.display()
    );
    let text = fs::read_to_string(&path).expect("a source file");
    Source {
        path,
        text,
        room,
        depth: modules.len(),
    }
}

fn level_of(room: &str) -> Option<u32> {
    let found = LEVELS.iter().find(|(name, _)| *name == room);
    found.map(|(_, level)| *level)
}

/// Names of the crate's root that are no rooms, such as macros, may be imported by nobody: there are none.
fn may_import(room: &str, imported: &str) -> bool {
    room == imported || level_of(imported).is_some_and(|level| Some(level) < level_of(room))
}

fn tokens(text: &str) -> TokenStream {
    text.parse().expect("Rust")
}

/// Lines on which a keyword stands.
fn lines_of(tokens: &TokenStream, keyword: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    for token in tokens.clone() {
        match token {
            TokenTree::Ident(ident) if ident == keyword => lines.push(ident.span().start().line),
            TokenTree::Group(group) => lines.extend(lines_of(&group.stream(), keyword)),
            _ => {}
        }
    }
    lines
}

/// What a module `depth` modules deep takes from the crate's root, with the lines: the `a` of `crate::a::b`, both
/// of `crate::{a, b::{c, d}}`, and of `super::super::a` where two modules up is the root.
fn imports(tokens: &TokenStream, depth: usize) -> Vec<(usize, String)> {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut found = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        match &tokens[i] {
            TokenTree::Ident(ident) if ident == "crate" || ident == "super" => {
                let mut ups = 0;
                while is_ident(tokens.get(i), "super") && is_path_sep(&tokens, i + 1) {
                    ups += 1;
                    i += 3;
                }
                if is_ident(tokens.get(i), "crate") && is_path_sep(&tokens, i + 1) {
                    ups = depth;
                    i += 3;
                }
                match tokens.get(i) {
                    next if ups >= depth => found.extend(first_names(next)),
                    Some(TokenTree::Group(list)) if ups > 0 => {
                        found.extend(imports(&list.stream(), depth - ups));
                        i += 1;
                    }
                    _ => i += usize::from(ups == 0),
                }
            }
            TokenTree::Group(group) => {
                let is_module = i >= 2
                    && group.delimiter() == Delimiter::Brace
                    && is_ident(tokens.get(i - 2), "mod");
                found.extend(imports(&group.stream(), depth + usize::from(is_module)));
                i += 1;
            }
            _ => i += 1,
        }
    }
    found
}

/// The names that a path goes on with: one, or the first of each path in a list.
fn first_names(token: Option<&TokenTree>) -> Vec<(usize, String)> {
    match token {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let items: Vec<TokenTree> = group.stream().into_iter().collect();
            let paths =
                items.split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ','));
            paths.flat_map(|path| first_names(path.first())).collect()
        }
        Some(token) => vec![(token.span().start().line, token.to_string())],
        None => Vec::new(),
    }
}

fn is_ident(token: Option<&TokenTree>, name: &str) -> bool {
    matches!(token, Some(TokenTree::Ident(ident)) if ident == name)
}

fn is_path_sep(tokens: &[TokenTree], at: usize) -> bool {
    let is_colon =
        |i| matches!(tokens.get(i), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    is_colon(at) && is_colon(at + 1)
}

/// A module's depth, its code, and the lines and names that are imports.
type Case = (usize, &'static str, &'static [(usize, &'static str)]);

#[test]
fn imports_are_found_however_they_are_written() {
    let cases: &[Case] = &[
        (1, "use crate::engine::Engine;", &[(1, "engine")]),
        (
            2,
            "use crate::{\n    base::{BlockId, Tokens},\n    runner::{self},\n};",
            &[(2, "base"), (3, "runner")],
        ),
        (
            2,
            "#[cfg(test)]\nmod tests { use super::*; }\nfn f() { crate::text::f() }",
            &[(3, "text")],
        ),
        (
            2,
            "#[cfg(test)]\nmod tests {\n use crate::triton::Error;\n}",
            &[(3, "triton")],
        ),
        (2, "use super::super::backend::Driver;", &[(1, "backend")]),
        (2, "use super::{weights, super::engine};", &[(1, "engine")]),
        (3, "use super::super::weights;", &[]),
        (
            1,
            "mod a { mod b {\n use super::super::super::engine; } }",
            &[(2, "engine")],
        ),
        (1, "mod a { use super::b; }", &[]),
        (
            1,
            "fn f() { assert!(x == crate\n  ::config::y); }",
            &[(2, "config")],
        ),
        (
            1,
            "macro_rules! m { () => { $crate::sampling::f() } }",
            &[(1, "sampling")],
        ),
        (
            1,
            "pub(crate) fn f(_: &'a u8) {} // crate::engine\nconst S: &str = \"crate::engine\";",
            &[],
        ),
        (
            1,
            "/// See [`crate::engine`].\npub(in crate::base) fn f() {}",
            &[(2, "base")],
        ),
        (1, "use crate::*;", &[(1, "*")]),
    ];
    for (depth, code, expected) in cases {
        let found = imports(&tokens(code), *depth);
        let found: Vec<_> = found
            .iter()
            .map(|(line, name)| (*line, name.as_str()))
            .collect();
        assert_eq!(found, *expected, "{code}");
    }
}

#[test]
fn rooms_may_import_down_and_themselves() {
    for (room, imported, allowed) in [
        ("engine", "base", true),
        ("engine", "engine", true),
        ("engine", "runner", false),
        ("config", "sampling", false),
        ("triton", "text", false),
        ("entry", "backend", true),
        ("backend", "*", false),
        ("backend", "some_macro", false),
    ] {
        assert_eq!(
            may_import(room, imported),
            allowed,
            "{room} imports {imported}"
        );
    }
}

#[test]
fn unsafe_is_found_in_every_form_but_not_in_words() {
    let code = "unsafe fn a() {}\nfn b() { unsafe { a() } }\nunsafe impl Send for X {}\n\
                #[unsafe(no_mangle)]\nm!(unsafe { a() });\n// unsafe\n#![forbid(unsafe_code)]\nlet s = \"unsafe\";\n\
                #[cfg(test)]\nmod tests {\n  unsafe fn t() {}\n}";
    assert_eq!(lines_of(&tokens(code), "unsafe"), [1, 2, 3, 4, 5, 11]);
}
