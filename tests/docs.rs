//! The documentation says what the code says. `UPDATE_DOCS=1 cargo test --test docs` rewrites its reference tables.

use std::path::Path;

use triton_inflight::{backend, config, post_processors};

#[test]
fn the_table_of_parameters_is_that_of_the_code() {
    compare("configuration.md", &[("knobs", config::reference_table())]);
}

#[test]
fn the_table_of_request_options_is_that_of_the_code() {
    compare(
        "request-options.md",
        &[("options", backend::reference_table())],
    );
}

#[test]
fn the_tables_of_other_backends_clients_are_those_of_the_code() {
    compare("clients.md", &backend::client_tables());
}

#[test]
fn the_table_of_built_in_post_processors_is_that_of_the_code() {
    compare(
        "logits-processors.md",
        &[("built_in", post_processors::reference_table())],
    );
}

#[test]
fn the_architecture_page_has_every_room() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page =
        std::fs::read_to_string(root.join("docs/src/architecture.md")).expect("the page is there");
    for entry in std::fs::read_dir(root.join("src")).expect("the sources are there") {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("a type").is_dir() {
            let room = format!("| `src/{}/` |", entry.file_name().display());
            assert!(
                page.contains(&room),
                "docs/src/architecture.md has no row {room}"
            );
        }
    }
}

#[test]
fn the_tests_that_a_page_names_exist() {
    for (page, min_named) in [
        ("triton-batching.md", 40),
        ("batch-manager.md", 50),
        ("scheduling.md", 25),
    ] {
        let page_text = page_of(page);
        let words = page_text.split('`').skip(1).step_by(2);
        let names: Vec<_> = words
            .filter_map(|word| word.split_once("::"))
            .filter(|example| !matches!(example, ("file", _) | (_, "test_x")))
            .collect();
        assert!(
            names.len() >= min_named,
            "{page}: only {} tests are named",
            names.len()
        );
        for (file, name) in names {
            let is_there = sources_of(file).any(|source| has_function(&source, name));
            assert!(is_there, "{page}: {file} has no {name}");
        }
    }
}

/// The founding documents are beside the repository.
#[test]
fn the_sentences_that_a_page_quotes_are_those_of_the_document() {
    for (page, document, min_quoted) in [
        ("batch-manager.md", "batch-manager.txt", 45),
        (
            "scheduling.md",
            "paged-attention-ifb-request-scheduling.txt",
            25,
        ),
    ] {
        let document = root().join("../shared/founding").join(document);
        let Ok(document) = std::fs::read_to_string(&document) else {
            eprintln!("skipped: {} is not there", document.display());
            continue;
        };
        let document = without_spaces(&document);
        let page_text = page_of(page);
        let quotes = page_text.lines().filter_map(|line| {
            let row = line.strip_prefix("| \"")?;
            Some(row.split_once("\" | ").expect("a quote ends").0)
        });
        let mut num_quoted = 0;
        for quote in quotes {
            num_quoted += 1;
            let mut rest = &*document;
            for part in quote.split(" ... ") {
                let part = without_spaces(part);
                let found = rest.find(&part);
                let start = found.unwrap_or_else(|| panic!("{page}: no such sentence: {quote}"));
                rest = &rest[start + part.len()..];
            }
        }
        assert!(num_quoted >= min_quoted, "{page}: {num_quoted} sentences");
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page_of(name: &str) -> String {
    std::fs::read_to_string(root().join("docs/src").join(name)).expect("the page is there")
}

/// The documents have names of code on lines of their own.
fn without_spaces(text: &str) -> String {
    text.chars()
        .filter(|it| !it.is_whitespace() && *it != '`')
        .collect()
}

/// The texts of the files of tests that a page calls `file`.
fn sources_of(file: &str) -> impl Iterator<Item = String> {
    let paths = [
        root().join("tests/server").join(file).with_extension("py"),
        root().join("tests").join(file).with_extension("rs"),
        root().join("src").join(file).with_extension("rs"),
        root().join(file).with_extension("rs"),
    ];
    paths
        .into_iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
}

/// Whether a source in Python or Rust has a function of this name.
fn has_function(source: &str, name: &str) -> bool {
    let is_it = |line: &str| {
        let line = line.trim_start();
        ["def ", "async def ", "fn "].iter().any(|keyword| {
            let rest = line.strip_prefix(keyword);
            rest.is_some_and(|rest| {
                rest.strip_prefix(name)
                    .is_some_and(|it| it.starts_with('('))
            })
        })
    };
    source.lines().any(is_it)
}

/// Compares the sections of a page with what the code makes of them, or rewrites them.
fn compare(page: &str, sections: &[(&str, String)]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("docs/src")
        .join(page);
    let committed = std::fs::read_to_string(&path).expect("the page is there");
    let mut made = committed.clone();
    for (section, table) in sections {
        made = with_table(&made, section, table);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, made).expect("the page can be written");
    } else {
        assert!(
            made == committed,
            "docs/src/{page} is behind the code: run UPDATE_DOCS=1 cargo test --test docs"
        );
    }
}

/// `text` with `table` between the comments that open and close `section`.
fn with_table(text: &str, section: &str, table: &str) -> String {
    let opening = format!("<!-- {section}:");
    let closing = format!("<!-- /{section} -->");
    let start = text.find(&opening).expect("the section opens");
    let start = start + text[start..].find("-->\n").expect("the comment ends") + "-->\n".len();
    let end = start + text[start..].find(&closing).expect("the section closes");
    format!("{}{table}{}", &text[..start], &text[end..])
}
