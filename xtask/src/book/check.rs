//! Checks of the documentation: links that lead nowhere, names of files that are gone, forgotten pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::markdown::{Link, anchors, code_spans, line, links};
use super::pages::{BOOK, Pages, SUMMARY, local, resolve};
use crate::Result;

/// Files about the past: what they name may be gone.
const HISTORY: &[&str] = &["CHANGELOG.md"];

/// The problems found, one per line.
pub fn problems(root: &Path) -> Result<Vec<String>> {
    let pages = Pages::read(root)?;
    let mut problems = Vec::new();
    let sources: BTreeSet<&Path> = pages.all.iter().map(|page| page.source.as_path()).collect();
    for &file in sources.iter().chain([&Path::new(SUMMARY)]) {
        let text = fs::read_to_string(root.join(file))
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let mut found = Vec::new();
        for link in links(&text) {
            let reason = broken(root, &pages, file, &link)?;
            found.extend(reason.map(|reason| (link.start, reason)));
        }
        if !HISTORY.iter().any(|name| file.ends_with(name)) {
            let gone =
                |(code, _): &(String, usize)| is_path(root, code) && !root.join(code).exists();
            let spans = code_spans(&text).into_iter().filter(gone);
            found.extend(spans.map(|(code, at)| (at, format!("`{code}` does not exist"))));
        }
        found.sort();
        problems.extend(
            found
                .into_iter()
                .map(|(at, reason)| format!("{}:{}: {reason}", file.display(), line(&text, at))),
        );
    }
    problems.extend(forgotten(root, &pages)?);
    Ok(problems)
}

/// Why a link leads nowhere, on GitHub or in the book.
fn broken(root: &Path, pages: &Pages, file: &Path, link: &Link) -> Result<Option<String>> {
    let Some((path, fragment)) = local(&link.target) else {
        return Ok(None);
    };
    let target = &link.target;
    if link.range.is_none() {
        return Ok(Some(format!("{target}: write the target into the link")));
    }
    let linked = match path {
        "" => Some(file.to_path_buf()),
        path => resolve(file, path),
    };
    let Some(linked) = linked.filter(|linked| root.join(linked).exists()) else {
        return Ok(Some(format!("{target}: no such file")));
    };
    let is_page = linked
        .extension()
        .is_some_and(|extension| extension == "md");
    if is_page && file != Path::new(SUMMARY) && pages.page_of(&linked).is_none() {
        return Ok(Some(format!("{target}: not a page of the book")));
    }
    let Some(fragment) = fragment else {
        return Ok(None);
    };
    let text = fs::read_to_string(root.join(&linked))?;
    Ok((!is_page || !anchors(&text).contains(fragment))
        .then(|| format!("{target}: no such heading")))
}

/// Whether code in a text is the path of a file of the repository.
fn is_path(root: &Path, code: &str) -> bool {
    let of_a_path = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    code.split_once('/').is_some_and(|(first, _)| {
        // Files that commands write below target/ need not exist now.
        first != "target" && code.chars().all(of_a_path) && root.join(first).is_dir()
    }) && !code.starts_with(['.', '/'])
}

/// Files of the book that its table of contents does not name.
fn forgotten(root: &Path, pages: &Pages) -> Result<Vec<String>> {
    let mut forgotten = Vec::new();
    for entry in fs::read_dir(root.join(BOOK))? {
        let name = PathBuf::from(entry?.file_name());
        let is_page = name.extension().is_some_and(|extension| extension == "md");
        let is_named = pages.all.iter().any(|page| page.name == name);
        if is_page && !is_named && !SUMMARY.ends_with(&*name.to_string_lossy()) {
            forgotten.push(format!("{BOOK}/{}: not in SUMMARY.md", name.display()));
        }
    }
    forgotten.sort();
    Ok(forgotten)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The problems of a book of two pages, one of its own and an included README.
    fn problems_of(name: &str, page: &str, readme: &str) -> Vec<String> {
        let root = std::env::temp_dir().join(format!("xtask-book-{name}-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            fs::write(file, text).expect("a file");
        };
        write(SUMMARY, "[Front](front.md)\n\n- [Page](page.md)\n");
        write("docs/src/front.md", "{{#include ../../README.md}}\n");
        write("docs/src/page.md", page);
        write("README.md", readme);
        write("NOTES.md", "# Notes\n");
        write("src/lib.rs", "");
        let problems = problems(&root).expect("the files can be read");
        fs::remove_dir_all(&root).expect("the folder exists");
        problems
    }

    #[test]
    fn sound_links_are_no_problem() {
        let page = "# A page\n## A heading\n[here](#a-heading) [up](../../README.md#top) \
                    [code](../../src/lib.rs) `src/lib.rs` [web](https://example.com/#x)\n";
        let readme = "# Top\n[page](docs/src/page.md#a-heading) [again](docs/src/front.md)\n";
        assert_eq!(problems_of("sound", page, readme), Vec::<String>::new());
    }

    #[test]
    fn a_link_that_leads_nowhere_is_named_with_its_line() {
        let page = "# A page\n[a](gone.md)\n[b](#gone)\n[c](../../README.md#gone)\n[d](../../src/lib.rs#gone)\n\
                    [e](../../../gone)\n";
        let readme = "# Top\n[page](docs/page.md)\n\n| a |\n|---|\n| [b](docs/src/page.md#b) |\n";
        let expected = [
            "README.md:2: docs/page.md: no such file",
            "README.md:6: docs/src/page.md#b: no such heading",
            "docs/src/page.md:2: gone.md: no such file",
            "docs/src/page.md:3: #gone: no such heading",
            "docs/src/page.md:4: ../../README.md#gone: no such heading",
            "docs/src/page.md:5: ../../src/lib.rs#gone: no such heading",
            "docs/src/page.md:6: ../../../gone: no such file",
        ];
        assert_eq!(problems_of("broken", page, readme), expected);
    }

    #[test]
    fn a_page_that_the_book_does_not_have_cannot_be_linked_to() {
        let found = problems_of("foreign", "[notes](../../NOTES.md)\n", "");
        let expected = ["docs/src/page.md:1: ../../NOTES.md: not a page of the book"];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_path_in_backticks_must_exist() {
        let page = "`src/gone.rs` `src/lib.rs` `src/` `a/b` `target/x` `/src/x` `src/x y`\n";
        let expected = ["docs/src/page.md:1: `src/gone.rs` does not exist"];
        assert_eq!(problems_of("paths", page, ""), expected);
    }
}
