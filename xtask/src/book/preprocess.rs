//! A preprocessor of mdBook: links between files of the repository become links between pages of the book.
//!
//! In the repository, README.md links to `docs/src/<page>.md`, and a page of the book to `../../README.md`. In the book
//! both are pages beside each other. A page that includes another file gets its text here, while it is still known
//! which folder its links start from. Files that are not in the book are linked to in the checkout:
//! `target/book/<page>.html` is as deep in it as `docs/src/<page>.md`, so `../../` leads to the root from both.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::markdown::links;
use super::pages::{BOOK, Pages, included, local, resolve};
use crate::{Result, workspace};

/// Reads mdBook's context and book from standard input, and writes the book to standard output.
pub fn run(pages: &Pages) -> Result<()> {
    let (_context, mut book): (Value, Value) = serde_json::from_reader(io::stdin().lock())?;
    rewrite_chapters(pages, &mut book["items"])?;
    serde_json::to_writer(io::stdout().lock(), &book)?;
    Ok(())
}

fn rewrite_chapters(pages: &Pages, items: &mut Value) -> Result<()> {
    for item in items.as_array_mut().into_iter().flatten() {
        let Some(chapter) = item.get_mut("Chapter") else {
            continue;
        };
        rewrite_chapters(pages, &mut chapter["sub_items"])?;
        let Some(page) = chapter["source_path"].as_str() else {
            continue;
        };
        let mut source = Path::new(BOOK).join(page);
        let mut text = chapter["content"].as_str().unwrap_or_default().to_owned();
        if let Some(target) = included(&text) {
            source =
                resolve(&source, target).ok_or("an included file is outside the repository")?;
            text = fs::read_to_string(workspace::root().join(&source))?;
        }
        chapter["content"] = rewrite(pages, &source, &text).into();
    }
    Ok(())
}

/// A text of `source`, with the links that a page of the book has.
fn rewrite(pages: &Pages, source: &Path, text: &str) -> String {
    let mut rewritten = text.to_owned();
    // From the last to the first: the places of those before stay.
    for link in links(text).into_iter().rev() {
        let (Some(range), Some((path, fragment))) = (link.range, local(&link.target)) else {
            continue;
        };
        let Some(file) = resolve(source, path).filter(|_| !path.is_empty()) else {
            continue;
        };
        let fragment = fragment.map(|fragment| format!("#{fragment}"));
        let target = format!(
            "{}{}",
            in_book(pages, &file).display(),
            fragment.unwrap_or_default()
        );
        rewritten.replace_range(range, &target);
    }
    rewritten
}

/// Where a file of the repository is, seen from a page of the book.
fn in_book(pages: &Pages, file: &Path) -> PathBuf {
    match (pages.page_of(file), file.strip_prefix(BOOK)) {
        (Some(page), _) => page.to_path_buf(),
        // A picture.
        (None, Ok(file)) => file.to_path_buf(),
        (None, Err(_)) => Path::new("../..").join(file),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::Page;
    use super::*;
    use serde_json::json;

    fn pages() -> Pages {
        let page = |name: &str, source: &str| Page {
            name: name.into(),
            source: source.into(),
        };
        let all = vec![
            page("front.md", "README.md"),
            page("page.md", "docs/src/page.md"),
            page("changes.md", "CHANGELOG.md"),
        ];
        Pages { all }
    }

    #[test]
    fn links_of_an_included_file_lead_to_pages_pictures_and_the_checkout() {
        let text = "[a](docs/src/page.md#x) ![b](docs/src/b.svg) [c](src/lib.rs) [d](#d) [e](https://e.md)";
        let expected = "[a](page.md#x) ![b](b.svg) [c](../../src/lib.rs) [d](#d) [e](https://e.md)";
        assert_eq!(rewrite(&pages(), Path::new("README.md"), text), expected);
    }

    #[test]
    fn links_of_a_page_lead_to_included_files_as_pages() {
        let text =
            "[a](../../README.md) [b](../../CHANGELOG.md#x) [c](front.md) `[d](../../README.md)`";
        let expected = "[a](front.md) [b](changes.md#x) [c](front.md) `[d](../../README.md)`";
        let source = Path::new("docs/src/page.md");
        assert_eq!(rewrite(&pages(), source, text), expected);
    }

    #[test]
    fn chapters_below_chapters_are_rewritten_too() {
        let chapter = |content: &str, sub_items: Value| json!({"Chapter": {"content": content, "source_path": "page.md", "sub_items": sub_items}});
        let link = "[a](../../README.md)";
        let mut items = json!([{"PartTitle": "a"}, "Separator", chapter("", json!([chapter(link, json!([]))]))]);
        rewrite_chapters(&pages(), &mut items).expect("nothing is included");
        let below = &items[2]["Chapter"]["sub_items"][0]["Chapter"]["content"];
        assert_eq!(below, "[a](front.md)");
    }
}
