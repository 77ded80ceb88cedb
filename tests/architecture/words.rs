//! What comments and documents say: files that they name exist, and pronouns stand beside their nouns.

use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

/// Comment lines with a pronoun that makes its reader look for the noun. The number may only fall: name the noun, and
/// lower it.
const MAX_PRONOUNS: [(&str, usize); 2] = [(r"\bthe same\b", 334), (r"\b(that|those) of\b", 187)];

/// The longest line of prose.
const MAX_CHARS: usize = 120;

/// The folders of the sources, and the files beside them.
const SOURCES: [&str; 13] = [
    "benches",
    "crates",
    "docs",
    "examples",
    "include",
    "kernels",
    "plugins",
    "src",
    "tests",
    "tools",
    "xtask",
    "README.md",
    "CONTRIBUTING.md",
];

#[test]
fn files_that_are_named_exist() {
    let folders = "src|tests|crates|kernels|benches|tools|xtask|docs|plugins|examples";
    let named = Regex::new(&format!(
        r"(?:^|[^\w/.-])((?:{folders})/[\w./-]+\.(?:rs|py|cuh|cu|md|cpp|h))\b"
    ))
    .expect("a pattern");
    let files = files();
    let known: Vec<String> = files
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let mut num_named = 0;
    let mut missing = Vec::new();
    for path in &files {
        for (number, line) in prose(path) {
            for captures in named.captures_iter(&line) {
                let name = &captures[1];
                num_named += 1;
                // Some are named from the root of a crate.
                let end = format!("/{name}");
                let exists = Path::new(name).is_file();
                if !exists && !known.iter().any(|path| path.ends_with(&end)) {
                    missing.push(format!("{}:{number}: {name}", path.display()));
                }
            }
        }
    }
    assert!(num_named > 100, "only {num_named} names found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn pronouns_become_fewer() {
    let comments: Vec<String> = files()
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .flat_map(|path| prose(path))
        .map(|(_, line)| line)
        .collect();
    for (pattern, max) in MAX_PRONOUNS {
        let regex = Regex::new(pattern).expect("a pattern");
        let num = comments.iter().filter(|line| regex.is_match(line)).count();
        assert!(num <= max, "{pattern} is on {num} lines of comments");
        assert!(
            num + 20 > max,
            "{pattern} is on {num} lines of comments: lower the number, which is {max}"
        );
    }
}

#[test]
fn lines_of_prose_fit_a_window() {
    let mut long = Vec::new();
    for path in files() {
        let is_read = |extension: &str| ["rs", "md"].contains(&extension);
        // Written by crates/measure.
        if path.ends_with("gpu-figures.md") {
            continue;
        }
        if !path
            .extension()
            .and_then(|it| it.to_str())
            .is_some_and(is_read)
        {
            continue;
        }
        let mut is_fenced = false;
        for (number, line) in prose(&path) {
            // Not an attribute.
            let is_code = line.trim_start().starts_with("#[");
            let text = line.trim_start().trim_start_matches("//");
            let text = text.trim_start_matches(['/', '!']);
            is_fenced ^= text.trim_start().starts_with("```");
            // Tables, drawings, pictures and addresses cannot be broken.
            let is_one_piece = ["|", "![", "http", "    "];
            let is_one_piece = is_one_piece.iter().any(|it| line.trim().contains(it));
            if !is_code && !is_fenced && !is_one_piece && line.chars().count() > MAX_CHARS {
                long.push(format!("{}:{number}", path.display()));
            }
        }
    }
    let num = long.len();
    assert!(
        long.is_empty(),
        "{num} lines have more than {MAX_CHARS} characters:\n{}",
        long.join("\n")
    );
}

/// All sources and documents, except the fixtures and what is built.
fn files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut left: Vec<PathBuf> = SOURCES.iter().map(PathBuf::from).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let is_generated = ["fixtures", "target", "node_modules", "__pycache__"]
                .iter()
                .any(|name| path.ends_with(name));
            if !is_generated {
                let entries = fs::read_dir(&path).expect("a folder of sources");
                left.extend(entries.flatten().map(|entry| entry.path()));
            }
        } else {
            files.push(path);
        }
    }
    files
}

/// The lines of comments, or of a document, by their numbers.
fn prose(path: &Path) -> Vec<(usize, String)> {
    let Ok(text) = fs::read_to_string(path) else {
        return Vec::new();
    };
    let is_document = path.extension().is_some_and(|extension| extension == "md");
    let lines = text.lines().zip(1..);
    lines
        .filter(|(line, _)| {
            let line = line.trim_start();
            is_document || ["//", "#", "\"\"\""].iter().any(|it| line.starts_with(it))
        })
        .map(|(line, number)| (number, line.to_owned()))
        .collect()
}
