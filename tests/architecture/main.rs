//! The rules for rooms: which crates may import which, and where `unsafe` is allowed (see `docs/src/architecture.md`).
//!
//! Sources are read as tokens, tests and macros included: comments and strings are no code, and a path may be
//! written over as many lines as it likes.

mod circles;
mod manifests;
mod paths;
mod sources;
mod words;

use std::fs;
use std::process::Command;

use proc_macro2::{TokenStream, TokenTree};
use regex::Regex;

use circles::circles;
use sources::Sources;

/// The crates of the library and their levels: a crate imports only crates of a lower level.
const LEVELS: &[(&str, u32)] = &[
    ("base", 0),
    ("jinja", 0),
    ("mpi-interface", 0),
    ("numbers", 0),
    ("collective", 1),
    ("config", 1),
    ("sampling", 1),
    ("threads", 1),
    ("triton", 1),
    ("checkpoint", 2),
    ("device", 2),
    ("engine", 2),
    ("images", 2),
    ("post-processors", 2),
    ("text", 2),
    ("device-cpu", 3),
    ("device-cuda", 3),
    ("guidance", 3),
    ("runner", 4),
    ("machines", 5),
    ("manager", 6),
];

/// Where `unsafe` may stand: Triton's C API, kernels and their launches, the exported functions, a user's library, the
/// C functions of the batch manager and of the stand-in for a GPU, what measures the machine and checks a GPU, memory
/// that processes share, where the library lies, the program that opens it as a rank, and the process group of a
/// server.
const UNSAFE: &[&str] = &[
    "crates/cuda-stand-in/src/",
    "crates/embed/src/",
    "crates/kernels-on-cpu/src/",
    "crates/measure/src/gpu_check/libraries.rs",
    "crates/measure/src/gpu_check/programs.rs",
    "crates/measure/src/gpu_check/server.rs",
    "crates/measure/src/limits/arithmetic.rs",
    "crates/measure/src/limits/memory.rs",
    "crates/measure/src/limits/timing.rs",
    "crates/mpi-interface/src/",
    "crates/rank/src/",
    "crates/triton/src/",
    "crates/collective/src/library.rs",
    "crates/collective/src/shm/",
    "crates/collective/src/mpi/plugin.rs",
    "crates/device/src/",
    "crates/device-cpu/src/",
    "crates/device-cuda/src/",
    "crates/threads/src/",
    "src/entry.rs",
    "xtask/src/process.rs",
    "crates/post-processors/src/library/",
];

/// What the engine must not use, so that its decisions do not depend on it: the clock, threads, files, processes, the
/// network, and the order of a hash map.
const IMPURE: &[&str] = &[
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time",
    "std::collections::HashMap",
    "std::collections::HashSet",
    "std::collections::hash_map",
    "std::sync::atomic",
    "std::sync::mpsc",
    "std::sync::Condvar",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "chrono",
    "libc",
    "log",
    "parking_lot",
    "rustc_hash",
];

#[test]
fn a_crate_imports_only_crates_of_a_lower_level() {
    for (name, level) in LEVELS {
        for imported in manifests::dependencies(&format!("crates/{name}")) {
            let other = level_of(&imported);
            assert!(
                other.is_some_and(|other| other < *level),
                "crates/{name} of level {level} imports {imported} of level {other:?}"
            );
        }
    }
    for imported in manifests::dependencies(".") {
        let level = level_of(&imported);
        assert!(level.is_some(), "give crates/{imported} a level");
    }
}

/// A rank of another build computes other bits: what it runs is hashed, all of it.
#[test]
fn the_name_of_a_build_is_a_hash_of_all_that_a_rank_runs() {
    let script = fs::read_to_string("crates/machines/build.rs").expect("the build script");
    let list = script.split_once("const CRATES").expect("the list").1;
    let list = list.split_once(';').expect("a length").1;
    let list = list.split_once("];").expect("the end of the list").0;
    let hashed: Vec<_> = list.split('"').skip(1).step_by(2).collect();
    assert_eq!(hashed, manifests::all_below("machines"));
}

#[test]
fn a_build_without_cuda_has_nothing_of_it() {
    let packages = |options: &[&str]| {
        let tree = ["tree", "--offline", "--edges=normal", "--prefix=none"];
        let mut command = Command::new(env!("CARGO"));
        command.args(tree).args(["--package", "inflight-backend"]);
        let output = command.args(options).output().expect("cargo runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("names")
    };
    for name in ["cudarc ", "inflight-device-cuda "] {
        assert!(packages(&[]).contains(name), "{name}");
        assert!(
            !packages(&["--no-default-features"]).contains(name),
            "{name}"
        );
    }
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let mut num_uses = 0;
    let mut found = Vec::new();
    for package in packages() {
        let sources = Sources::read(&package);
        let files = 0..sources.files.len();
        num_uses += files.map(|file| sources.uses(file).len()).sum::<usize>();
        found.extend(circles(&sources));
    }
    assert!(num_uses > 600, "only {num_uses} uses found");
    assert!(
        found.is_empty(),
        "{} circles:\n{}",
        found.len(),
        found.join("\n\n")
    );
}

#[test]
fn the_engine_decides_without_clock_threads_files_or_chance() {
    let engine = Sources::read("crates/engine/src").files;
    let mut num_paths = 0;
    let mut wrong = Vec::new();
    for file in &engine {
        for path in file.shipped_paths().filter(|path| !path.is_rooted) {
            num_paths += 1;
            if is_impure(&path.names.join("::")) {
                let path = (path.line, path.names.join("::"));
                wrong.push(format!("{}:{}: {}", file.path.display(), path.0, path.1));
            }
        }
    }
    assert!(num_paths > 100, "only {num_paths} paths found");
    assert_eq!(wrong, Vec::<String>::new(), "impure code in the engine");
}

#[test]
fn unsafe_stands_only_where_c_and_memory_are_touched() {
    let mut wrong = Vec::new();
    let mut num_uses = 0;
    for file in packages()
        .iter()
        .flat_map(|package| Sources::read(package).files)
    {
        let lines = lines_of(&file.tokens, "unsafe");
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

#[test]
fn no_item_is_visible_in_a_path_of_its_own() {
    let is_restricted = Regex::new(r"\bpub\s*\(\s*in\b").expect("a pattern");
    assert!(is_restricted.is_match("pub(in super::super) fn f()"));
    let mut wrong = Vec::new();
    for file in packages()
        .iter()
        .flat_map(|package| Sources::read(package).files)
    {
        let text = fs::read_to_string(&file.path).expect("a source");
        let lines = text.lines().zip(1..);
        let restricted = lines.filter(|(line, _)| is_restricted.is_match(line));
        wrong.extend(restricted.map(|(_, line)| format!("{}:{line}", file.path.display())));
    }
    assert_eq!(
        wrong,
        Vec::<String>::new(),
        "write pub(super) or pub(crate), or move the item"
    );
}

/// The folders of sources of the workspace's packages.
fn packages() -> Vec<String> {
    let crates = fs::read_dir("crates").expect("the packages").flatten();
    let crates = crates.map(|entry| format!("{}/src", entry.path().display()));
    ["src", "xtask/src"]
        .into_iter()
        .map(str::to_owned)
        .chain(crates)
        .collect()
}

fn level_of(room: &str) -> Option<u32> {
    let found = LEVELS.iter().find(|(name, _)| *name == room);
    found.map(|(_, level)| *level)
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

fn is_impure(path: &str) -> bool {
    IMPURE.iter().any(|impure| {
        let rest = path.strip_prefix(impure);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    })
}

#[test]
fn impure_paths_are_told_from_pure_ones() {
    for impure in [
        "std::time::Instant",
        "std::thread",
        "log::warn",
        "std::sync::Mutex",
    ] {
        assert!(is_impure(impure), "{impure}");
    }
    for pure in [
        "std::sync::Arc",
        "std::collections::BTreeMap",
        "logits::Row",
    ] {
        assert!(!is_impure(pure), "{pure}");
    }
}

#[test]
fn unsafe_is_found_in_every_form_but_not_in_words() {
    let code = "unsafe fn a() {}\nfn b() { unsafe { a() } }\nunsafe impl Send for X {}\n\
                #[unsafe(no_mangle)]\nm!(unsafe { a() });\n// unsafe\n#![forbid(unsafe_code)]\nlet s = \"unsafe\";\n\
                #[cfg(test)]\nmod tests {\n  unsafe fn t() {}\n}";
    assert_eq!(
        lines_of(&code.parse().expect("Rust"), "unsafe"),
        [1, 2, 3, 4, 5, 11]
    );
}
