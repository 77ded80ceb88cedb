//! Marks in a text that arrives in pieces.

/// The first of `marks` at or after byte `from`: its place and itself. Otherwise the first byte that may begin one
/// which is still incomplete; the length of the text if there is none.
pub(super) fn find(
    text: &str,
    from: usize,
    marks: &[&'static str],
) -> Result<(usize, &'static str), usize> {
    let rest = &text[from..];
    let found = marks
        .iter()
        .filter_map(|mark| Some((rest.find(mark)?, *mark)));
    match found.min_by_key(|(start, _)| *start) {
        Some((start, mark)) => Ok((from + start, mark)),
        None => {
            let held = marks.iter().map(|mark| num_held(rest, mark)).max();
            Err(text.len() - held.unwrap_or(0))
        }
    }
}

/// Whether `text` begins with one of `marks`, and which; `None` if more text may make it one.
pub(super) fn first(text: &str, marks: &[&'static str]) -> Option<Option<&'static str>> {
    if let Some(mark) = marks.iter().find(|mark| text.starts_with(**mark)) {
        return Some(Some(mark));
    }
    let may_become = marks.iter().any(|mark| mark.starts_with(text));
    if may_become { None } else { Some(None) }
}

/// The text behind white space and `mark`, which may be missing; `None` while the mark may go on, or nothing follows
/// it.
pub(super) fn behind<'t>(text: &'t str, mark: &'static str) -> Option<&'t str> {
    let text = text.trim_start();
    match first(text, &[mark])? {
        Some(mark) => Some(text[mark.len()..].trim_start()).filter(|behind| !behind.is_empty()),
        None => Some(text),
    }
}

/// Bytes at the end of `text` that begin `mark`.
fn num_held(text: &str, mark: &str) -> usize {
    let beginnings = (1..mark.len().min(text.len() + 1)).rev();
    let is_end = |len: &usize| text.as_bytes().ends_with(&mark.as_bytes()[..*len]);
    beginnings.into_iter().find(is_end).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_marks_and_their_beginnings() {
        const MARKS: &[&str] = &["<a>", "<｜b"];
        for (text, from, expected) in [
            ("x<a>y<a>", 0, Ok((1, "<a>"))),
            ("x<a>y<｜b", 2, Ok((5, "<｜b"))),
            ("x<｜b<a>", 0, Ok((1, "<｜b"))),
            ("x<a", 0, Err(1)),
            ("<a", 0, Err(0)),
            ("xy<a", 3, Err(4)),
            ("x<｜", 0, Err(1)),
            ("x<<", 0, Err(2)),
            ("x<a ", 0, Err(4)),
            ("", 0, Err(0)),
        ] {
            assert_eq!(find(text, from, MARKS), expected, "{text}");
        }
        assert_eq!(first("<a>b", MARKS), Some(Some("<a>")));
        assert_eq!(first("<", MARKS), None);
        assert_eq!(first("a", MARKS), Some(None));
        for (text, expected) in [
            (" <a> b", Some("b")),
            (" b", Some("b")),
            ("<a> ", None),
            (" <", None),
            ("", None),
        ] {
            assert_eq!(behind(text, "<a>"), expected, "{text}");
        }
    }
}
