//! The README's reference tables are those that the code makes. `UPDATE_README=1 cargo test --test
//! readme` rewrites them.

use triton_inflight::{backend, config};

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");

#[test]
fn the_readmes_tables_are_those_of_the_code() {
    let committed = std::fs::read_to_string(README).expect("README.md");
    let mut made = committed.clone();
    for (section, table) in [
        ("knobs", config::reference_table()),
        ("options", backend::reference_table()),
    ] {
        made = with_table(&made, section, &table);
    }
    if std::env::var_os("UPDATE_README").is_some() {
        std::fs::write(README, made).expect("README.md can be written");
    } else {
        assert!(
            made == committed,
            "README.md is behind the code: run UPDATE_README=1 cargo test --test readme"
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
