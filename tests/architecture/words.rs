//! What comments and documents say: files that they name exist, and pronouns stand beside their nouns.

use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

/// Kinds of files, by their extensions.
const RUST: &[&str] = &["rs"];
const PYTHON: &[&str] = &["py"];
const C: &[&str] = &["c", "cpp", "cu", "cuh", "h"];
const DOCUMENTS: &[&str] = &["md"];

/// Lines of comments and documents with a pronoun that makes its reader look for the noun. The numbers may only fall:
/// name the noun, and lower them.
const MAX_PRONOUNS: [(&str, &[&str], usize); 9] = [
    (r"\bthe same\b", RUST, 334),
    (r"\bthe same\b", PYTHON, 57),
    (r"\bthe same\b", C, 49),
    (r"\bthe same\b", DOCUMENTS, 251),
    (r"\b(that|those) of\b", RUST, 187),
    (r"\b(that|those) of\b", PYTHON, 6),
    (r"\b(that|those) of\b", C, 45),
    (r"\b(that|those) of\b", DOCUMENTS, 42),
    // A line that begins so may continue a sentence: only those at the beginning of a comment count.
    (BEGINNING, RUST, 37),
];

/// A comment of documentation whose first word is a pronoun: "Those of the stage.", "It is none."
const BEGINNING: &str = r"^\s*//[/!] (It|They|That|Those|None|Them)\b";

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
    let mut wrong = Vec::new();
    for (pattern, kind, max) in MAX_PRONOUNS {
        let regex = Regex::new(pattern).expect("a pattern");
        let num = files()
            .iter()
            .filter(|path| is_of(path, kind))
            .map(|path| num_matching(&regex, &prose(path), pattern == BEGINNING))
            .sum::<usize>();
        if num > max {
            wrong.push(format!(
                "{pattern} is on {num} lines of {kind:?}, and may be on {max}"
            ));
        } else if num + 20 <= max {
            wrong.push(format!(
                "{pattern} is on {num} lines of {kind:?}: lower {max}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// How many lines match; of the lines of a comment, only the first one if `only_first`.
fn num_matching(regex: &Regex, lines: &[(usize, String)], only_first: bool) -> usize {
    let before = std::iter::once(None).chain(lines.iter().map(|(number, _)| Some(*number)));
    lines
        .iter()
        .zip(before)
        .filter(|((number, _), before)| !only_first || *before != number.checked_sub(1))
        .filter(|((_, line), _)| regex.is_match(line))
        .count()
}

#[test]
fn a_pronoun_counts_where_a_comment_begins() {
    let lines = [
        (1, "/// That of a model."),
        (2, "/// It is none."),
        (4, "    /// None."),
        (6, "/// Nonetheless."),
    ];
    let lines = lines.map(|(number, line)| (number, line.to_owned()));
    let regex = Regex::new(BEGINNING).expect("a pattern");
    assert_eq!(num_matching(&regex, &lines, true), 2);
    assert_eq!(num_matching(&regex, &lines, false), 3);
}

#[test]
fn lines_of_prose_fit_a_window() {
    let mut long = Vec::new();
    for path in files() {
        // Written by crates/measure.
        let is_written = path.ends_with("gpu-figures.md");
        if is_written
            || ![RUST, PYTHON, C, DOCUMENTS]
                .iter()
                .any(|kind| is_of(&path, kind))
        {
            continue;
        }
        let mut is_fenced = false;
        for (number, line) in prose(&path) {
            let text = line.trim_start().trim_start_matches("//");
            let text = text.trim_start_matches(['/', '!']);
            is_fenced ^= text.trim_start().starts_with("```");
            // Tables, drawings, pictures and addresses cannot be broken.
            let is_one_piece = ["|", "![", "http", "    "];
            let is_one_piece = is_one_piece.iter().any(|it| line.trim().contains(it));
            // Names and their shapes are in columns there.
            let is_column = is_of(&path, C) && text.trim().contains("  ");
            let is_one_piece = is_one_piece || is_column;
            if !is_fenced && !is_one_piece && line.chars().count() > MAX_CHARS {
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

fn is_of(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().and_then(|it| it.to_str());
    extension.is_some_and(|it| extensions.contains(&it))
}

/// The lines of comments, or of a document, by their numbers.
fn prose(path: &Path) -> Vec<(usize, String)> {
    let Ok(text) = fs::read_to_string(path) else {
        return Vec::new();
    };
    let lines = text.lines().zip(1..);
    // Within a comment of several lines, or a docstring; within another string of several lines of Python.
    let (mut is_inside, mut is_in_string) = (false, false);
    lines
        .filter(|(line, _)| {
            let line = line.trim_start();
            if is_of(path, DOCUMENTS) {
                return true;
            }
            if is_of(path, PYTHON) {
                let was_inside = is_inside;
                let begins = ["\"\"\"", "r\"\"\""].iter().any(|it| line.starts_with(it));
                let is_odd = line.matches("\"\"\"").count() % 2 == 1;
                if is_in_string {
                    is_in_string = !is_odd;
                    return false;
                }
                match was_inside || begins {
                    true => is_inside ^= is_odd,
                    false => is_in_string = is_odd,
                }
                return was_inside || begins || line.starts_with('#');
            }
            if is_of(path, RUST) || is_of(path, C) {
                let was_inside = is_inside;
                is_inside = (was_inside || line.starts_with("/*")) && !line.contains("*/");
                return was_inside || line.starts_with("/*") || line.starts_with("//");
            }
            line.starts_with("//") || line.starts_with('#')
        })
        .map(|(line, number)| (number, line.to_owned()))
        .collect()
}
