//! `cargo xtask book`: the documentation as a site below `target/book/`, with its links checked.
//!
//! ```text
//! markdown.rs    links, headings and code of a Markdown text
//! pages.rs       the pages of the book, and the files they come from
//! check.rs       broken links, stale paths, pages missing from the table of contents
//! preprocess.rs  links between files of the repository -> links between pages of the book
//! ```

mod check;
mod markdown;
mod pages;
mod preprocess;

use std::path::PathBuf;

use crate::process::{command, run as run_command};
use crate::{Result, setup, workspace};
use pages::Pages;

/// Checks the links of the documentation, and builds the book.
pub fn run() -> Result<()> {
    build().map(|_| ())
}

/// Checks the links of the documentation, and builds the book; returns its folder.
pub fn build() -> Result<PathBuf> {
    let problems = check::problems(workspace::root())?;
    if !problems.is_empty() {
        return Err(format!("the documentation has\n  {}", problems.join("\n  ")).into());
    }
    // This program itself instead of `cargo xtask`, which would wait for whatever else cargo builds here; by its
    // process, as a build may have replaced its file.
    let preprocessor = format!("/proc/{}/exe preprocess-book", std::process::id());
    run_command(
        command(setup::mdbook()?)
            .args(["build", "docs"])
            .env("MDBOOK_PREPROCESSOR__REPOSITORY__COMMAND", preprocessor),
    )?;
    Ok(workspace::target("book"))
}

/// The preprocessor that docs/book.toml names: reads a book from standard input and writes it to
/// standard output.
pub fn preprocess(arguments: &[String]) -> Result<()> {
    // `supports RENDERER` asks by its exit status; Markdown is the same for all of them.
    if arguments.first().is_some_and(|word| word == "supports") {
        return Ok(());
    }
    preprocess::run(&Pages::read(workspace::root())?)
}
