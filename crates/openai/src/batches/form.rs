//! The parts of a body of the type multipart/form-data (RFC 7578).

use crate::Error;

/// The most parts of a form.
const MAX_PARTS: usize = 16;
/// The most bytes of the head of a part.
const MAX_HEAD_BYTES: usize = 8192;
/// The most bytes of the text between parts.
const MAX_BOUNDARY_BYTES: usize = 70;

/// A part of a form.
#[derive(Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The name of the field.
    pub name: String,
    /// The name of the file, if the part is one.
    pub file_name: Option<String>,
    /// The value.
    pub content: &'a [u8],
}

/// The parts of a body whose header `Content-Type` is this.
///
/// # Errors
/// It is no form, or one that is damaged.
pub fn parts<'a>(content_type: &str, body: &'a [u8]) -> Result<Vec<Part<'a>>, Error> {
    let boundary = boundary(content_type).ok_or_else(|| {
        Error::invalid(
            "the body is no form; send multipart/form-data with a boundary, as OpenAI's clients do",
        )
    })?;
    read(&boundary, body)
        .ok_or_else(|| Error::invalid("the form is damaged, or has too many parts"))
}

fn boundary(content_type: &str) -> Option<String> {
    let mut words = content_type.split(';').map(str::trim);
    let is_form = words.next()?.eq_ignore_ascii_case("multipart/form-data");
    let boundary = words.find_map(|word| {
        let (name, value) = word.split_once('=')?;
        let is_boundary = name.trim().eq_ignore_ascii_case("boundary");
        is_boundary.then(|| value.trim().trim_matches('"').to_owned())
    })?;
    let is_sound = (1..=MAX_BOUNDARY_BYTES).contains(&boundary.len());
    (is_form && is_sound).then_some(boundary)
}

fn read<'a>(boundary: &str, body: &'a [u8]) -> Option<Vec<Part<'a>>> {
    let first = format!("--{boundary}");
    let next = format!("\r\n--{boundary}");
    let start = find(body, first.as_bytes())?;
    let mut rest = &body[start + first.len()..];
    let mut parts = Vec::new();
    while !rest.starts_with(b"--") {
        if parts.len() == MAX_PARTS {
            return None;
        }
        let head_end = find(&rest[..rest.len().min(MAX_HEAD_BYTES)], b"\r\n\r\n")?;
        let head = std::str::from_utf8(&rest[..head_end]).ok()?;
        rest = &rest[head_end + 4..];
        let end = find(rest, next.as_bytes())?;
        let (name, file_name) = names(head)?;
        parts.push(Part {
            name,
            file_name,
            content: &rest[..end],
        });
        rest = &rest[end + next.len()..];
    }
    Some(parts)
}

/// The names of the field and of the file in the head of a part.
fn names(head: &str) -> Option<(String, Option<String>)> {
    let disposition = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_disposition = name.trim().eq_ignore_ascii_case("content-disposition");
        is_disposition.then_some(value)
    })?;
    Some((
        quoted(disposition, "name")?,
        quoted(disposition, "filename"),
    ))
}

/// The text in quotes behind a name.
fn quoted(line: &str, name: &str) -> Option<String> {
    let start = line.find(&format!("; {name}=\""))? + name.len() + 4;
    let mut text = String::new();
    let mut chars = line[start..].chars();
    loop {
        match chars.next()? {
            '"' => return Some(text),
            '\\' => text.push(chars.next()?),
            char => text.push(char),
        }
    }
}

/// Where `part` begins in `bytes`.
fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=\"xYz\"";

    #[test]
    fn a_form_has_fields_and_files() {
        let body =
            b"--xYz\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--xYz\r\n\
                     content-disposition: form-data; name=\"file\"; filename=\"a\\\"b.jsonl\"\r\n\
                     Content-Type: application/octet-stream\r\n\r\n{}\r\n\r\n--xYz--\r\n";
        let expected = [
            Part {
                name: "purpose".to_owned(),
                file_name: None,
                content: b"batch",
            },
            Part {
                name: "file".to_owned(),
                file_name: Some("a\"b.jsonl".to_owned()),
                content: b"{}\r\n",
            },
        ];
        assert_eq!(parts(TYPE, body).expect("sound"), expected);
        for wrong in [
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "text/plain; boundary=x",
        ] {
            assert!(parts(wrong, body).is_err(), "{wrong}");
        }
        for end in [0, 20, 60, 120, body.len() - 8] {
            assert!(parts(TYPE, &body[..end]).is_err(), "{end}");
        }
        let part = "--xYz\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\r\n";
        let many = |num: usize| format!("{}--xYz--", part.repeat(num));
        assert_eq!(parts(TYPE, many(16).as_bytes()).expect("sound").len(), 16);
        assert!(parts(TYPE, many(17).as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_content_is_read_back(contents in prop::collection::vec("[-xYz\r\n{}\"]{0,40}", 0..4)) {
            prop_assume!(contents.iter().all(|content| !content.contains("--xYz")));
            let part = |content: &String| format!("--xYz\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{content}\r\n");
            let body = format!("{}--xYz--\r\n", contents.iter().map(part).collect::<String>());
            let read = parts(TYPE, body.as_bytes()).expect("sound");
            let read: Vec<_> = read.iter().map(|part| part.content).collect();
            prop_assert_eq!(read, contents.iter().map(|it| it.as_bytes()).collect::<Vec<_>>());
        }

        #[test]
        fn no_bytes_are_too_wrong(body in "(--xYz|\r\n|; name=|\"|[a-z:]){0,30}") {
            let _ = parts(TYPE, body.as_bytes());
        }
    }
}
