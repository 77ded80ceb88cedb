//! The links of a Markdown text, and its link targets.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// A link or an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Link {
    /// Its target, as written.
    pub target: String,
    /// The position of the target in the text; `None` if it is in a reference definition elsewhere.
    pub range: Option<Range<usize>>,
    /// Where the link begins in the text.
    pub start: usize,
}

/// The links and images of a text.
pub fn links(text: &str) -> Vec<Link> {
    events(text)
        .filter_map(|(event, range)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some(Link {
                range: position(text, &range, &dest_url),
                target: dest_url.into_string(),
                start: range.start,
            }),
            _ => None,
        })
        .collect()
}

/// Code in running text, and where it begins.
pub fn code_spans(text: &str) -> Vec<(String, usize)> {
    events(text)
        .filter_map(|(event, range)| match event {
            Event::Code(code) => Some((code.into_string(), range.start)),
            _ => None,
        })
        .collect()
}

/// The fragments by which the headings of a text can be linked to, as GitHub and mdBook make them.
pub fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut num_uses = HashMap::new();
    let mut heading: Option<String> = None;
    for (event, _) in events(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(words) | Event::Code(words) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&words);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let uses = num_uses.entry(slug.clone()).or_insert(0);
                anchors.insert(match *uses {
                    0 => slug,
                    n => format!("{slug}-{n}"),
                });
                *uses += 1;
            }
            _ => {}
        }
    }
    anchors
}

/// The line of a byte of a text, from 1 on.
pub fn line(text: &str, byte: usize) -> usize {
    text[..byte].matches('\n').count() + 1
}

fn events(text: &str) -> impl Iterator<Item = (Event<'_>, Range<usize>)> {
    Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter()
}

fn position(text: &str, link: &Range<usize>, target: &str) -> Option<Range<usize>> {
    let opening = format!("]({target}");
    let start = link.start + text[link.clone()].rfind(&opening)? + "](".len();
    Some(start..start + target.len())
}

fn slug(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => Some(c),
            _ => None,
        })
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_links_target_is_found_where_it_stands() {
        let text =
            "A [page](a.md#b) and ![a picture](c.svg \"title\").\n\n| [cell](d.md) |\n|---|\n";
        let found = links(text);
        let targets: Vec<&str> = found.iter().map(|link| link.target.as_str()).collect();
        assert_eq!(targets, ["a.md#b", "c.svg", "d.md"]);
        for link in &found {
            assert_eq!(
                &text[link.range.clone().expect("inline")],
                link.target,
                "{link:?}"
            );
        }
    }

    #[test]
    fn a_target_in_a_reference_definition_has_no_place_in_the_link() {
        let found = links("[a][b]\n\n[b]: c.md\n");
        assert_eq!((found[0].target.as_str(), &found[0].range), ("c.md", &None));
    }

    #[test]
    fn code_is_no_link() {
        assert_eq!(links("`[a](b.md)`\n\n```\n[a](b.md)\n```\n"), []);
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# A `b_c --d`: *e*, f/g\n## Twice\n### Twice\n```\n# code\n```\n";
        let expected = ["a-b_c---d-e-fg", "twice", "twice-1"].map(String::from);
        assert_eq!(anchors(text), BTreeSet::from(expected));
    }
}
