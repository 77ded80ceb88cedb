//! The pages about the APIs say what the code says. `UPDATE_DOCS=1 cargo test -p inflight-openai --test docs` rewrites
//! their tables.

use std::path::Path;

use inflight_openai::fields::{self, Field};
use inflight_openai::{anthropic, tei};

/// Endpoints by name, with their fields.
type Endpoints = &'static [(&'static str, &'static [Field])];

/// Each page, and the endpoints whose fields it lists.
const PAGES: [(&str, Endpoints); 3] = [
    ("openai.md", fields::ENDPOINTS),
    ("anthropic.md", anthropic::fields::ENDPOINTS),
    ("tei.md", tei::fields::ENDPOINTS),
];

#[test]
fn the_tables_of_fields_are_those_of_the_code() {
    for (page, endpoints) in PAGES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src");
        let path = folder.join(page);
        let committed = std::fs::read_to_string(&path).expect("the page is there");
        let mut made = committed.clone();
        for (section, fields) in endpoints {
            made = with_table(&made, section, &fields::table(fields));
        }
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, made).expect("the page can be written");
        } else {
            assert!(
                made == committed,
                "docs/src/{page} is behind the code: run UPDATE_DOCS=1 cargo test -p inflight-openai --test docs"
            );
        }
    }
}

#[test]
fn each_field_is_there_once() {
    for (section, fields) in PAGES.iter().flat_map(|(_, endpoints)| *endpoints) {
        let mut names: Vec<_> = fields.iter().map(|field| field.name).collect();
        names.sort_unstable();
        let num_names = names.len();
        names.dedup();
        assert_eq!(names.len(), num_names, "{section}");
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
