//! The manual page of a program, written from its options.

use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Compares `docs/man/NAME.1` with the options of a program, followed by examples. With `UPDATE_DOCS` it is written.
pub fn compare(command: Command, examples: &str) {
    let name = format!("{}.1", command.get_name());
    let mut page = Vec::new();
    let man = Man::new(command).manual("User Commands");
    man.render(&mut page).expect("memory can be written");
    let page = String::from_utf8(page).expect("it is a text") + examples.trim_start();
    // A crate lies two folders below the root.
    let path = Path::new("../../docs/man").join(&name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, page).expect("the page can be written");
        return;
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == committed,
        "docs/man/{name} is behind the code: run UPDATE_DOCS=1 cargo test -p {} manual_page",
        env!("CARGO_PKG_NAME")
    );
}
