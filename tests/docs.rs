//! The documentation says what the code says. `UPDATE_DOCS=1 cargo test --test docs` rewrites its references.

#[path = "docs_support/limits.rs"]
mod limits;

use std::path::Path;

#[test]
fn the_reference_of_parameters_is_made_from_the_code() {
    compare(
        "configuration.md",
        &[("knobs", inflight_config::reference())],
    );
}

#[test]
fn the_table_of_request_options_is_that_of_the_code() {
    compare(
        "request-options.md",
        &[("options", triton_inflight::reference_table())],
    );
}

#[test]
fn the_tables_of_other_backends_clients_are_those_of_the_code() {
    compare("clients.md", &triton_inflight::client_tables());
}

#[test]
fn the_table_of_built_in_post_processors_is_that_of_the_code() {
    compare(
        "logits-processors.md",
        &[("built_in", inflight_post_processors::reference_table())],
    );
}

#[test]
fn the_refusals_that_a_page_lists_are_the_answers_of_the_code() {
    compare("limitations.md", &[("limits", limits::table())]);
}

#[test]
fn the_architecture_page_has_every_crate() {
    let page = page_of("architecture.md");
    for entry in std::fs::read_dir(root().join("crates")).expect("the crates are there") {
        let name = format!(
            "`crates/{}/`",
            entry.expect("an entry").file_name().display()
        );
        assert!(
            page.contains(&name),
            "docs/src/architecture.md names no {name}"
        );
    }
}

#[test]
fn the_picture_of_rooms_has_each_crate_at_its_level() {
    let picture = page_of("rooms.svg");
    // The height at which a text stands.
    let height_of = |text: &str| -> f64 {
        let end = format!(">{text}</text>");
        let line = picture.lines().find(|line| line.ends_with(&end));
        let line = line.unwrap_or_else(|| panic!("docs/src/rooms.svg has no {text}"));
        let height = line
            .split("y=\"")
            .nth(1)
            .and_then(|it| it.split('"').next());
        height.and_then(|it| it.parse().ok()).expect("a number")
    };
    let page = page_of("architecture.md");
    let mut num_rooms = 0;
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, level, ..] = cells[..] else {
            continue;
        };
        let room = name.trim_matches('`').trim_start_matches("crates/");
        if level.parse::<u32>().is_ok() {
            let name = room.strip_suffix('/').filter(|&name| name != "src");
            let below = height_of(level) - height_of(name.unwrap_or("src/"));
            assert!((0.0..20.0).contains(&below), "{room} is not at {level}");
            num_rooms += 1;
        }
    }
    assert!(num_rooms > 15, "{num_rooms}");
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

/// The texts of the files of tests that a page calls `file`: a file of `tests/` or `src/`, or `package/file`.
fn sources_of(file: &str) -> impl Iterator<Item = String> {
    let (package, inner) = file.split_once('/').unwrap_or((file, file));
    let paths = [
        root().join("tests/server").join(file).with_extension("py"),
        root().join("tests").join(file).with_extension("rs"),
        root().join("src").join(file).with_extension("rs"),
        root()
            .join("crates")
            .join(package)
            .join("src")
            .join(inner)
            .with_extension("rs"),
        root()
            .join("crates")
            .join(package)
            .join("tests/suite")
            .join(inner)
            .with_extension("rs"),
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
