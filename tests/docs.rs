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
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("docs/src/triton-batching.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let names: Vec<_> = page
        .split('`')
        .filter_map(|word| word.split_once("::"))
        .filter(|(file, name)| file.starts_with("test_") && *name != "test_x")
        .collect();
    assert!(names.len() > 40, "only {} tests are named", names.len());
    for (file, name) in names {
        let source = root.join("tests/server").join(file).with_extension("py");
        let source = std::fs::read_to_string(&source);
        let source = source.unwrap_or_else(|error| panic!("{file}: {error}"));
        let is_there = source.contains(&format!("\ndef {name}("));
        assert!(is_there, "{file}.py has no {name}");
    }
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
