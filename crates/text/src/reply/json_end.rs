//! Where a JSON value ends in a text that arrives in pieces.

/// Deeper values are no arguments of a function. The parser of calls has the same limit.
const MAX_DEPTH: u32 = 127;

/// What is known of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// The value is not complete.
    More,
    /// The value ends before this byte.
    End(usize),
    /// The text cannot be JSON from this byte on.
    Bad(usize),
}

/// Finds the end of an object or a list. Checks no more than brackets, strings and the characters between them.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonEnd {
    num_scanned: usize,
    depth: u32,
    is_string: bool,
    is_escaped: bool,
    /// Where the last two escapes begin.
    last_escapes: [usize; 2],
    found: Option<Scan>,
}

impl JsonEnd {
    /// Scans what is new of `text`, which begins with the value and only grows from call to call.
    pub(super) fn scan(&mut self, text: &str) -> Scan {
        if let Some(found) = self.found {
            return found;
        }
        for (i, byte) in text.bytes().enumerate().skip(self.num_scanned) {
            self.found = self.step(byte, i);
            if let Some(found) = self.found {
                return found;
            }
        }
        self.num_scanned = text.len();
        Scan::More
    }

    /// Scans what is new of `text`, and returns how many of its bytes are the value's and end within no escape.
    pub(super) fn certain_len(&mut self, text: &str) -> usize {
        let len = match self.scan(text) {
            Scan::End(end) | Scan::Bad(end) => return end,
            Scan::More => text.len(),
        };
        // Two of them may be one character: a pair of surrogates.
        let is_half = |start: &usize| len < start + escape_len(&text.as_bytes()[*start..]);
        let half = self.last_escapes.iter().copied().find(is_half);
        half.unwrap_or(len)
    }

    fn step(&mut self, byte: u8, i: usize) -> Option<Scan> {
        if self.is_string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => {
                    self.is_escaped = true;
                    self.last_escapes = [self.last_escapes[1], i];
                }
                b'"' => self.is_string = false,
                _ => {}
            }
            return None;
        }
        match byte {
            b'{' | b'[' if self.depth < MAX_DEPTH => self.depth += 1,
            _ if self.depth == 0 => return Some(Scan::Bad(i)),
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Some(Scan::End(i + 1));
                }
            }
            b'"' => self.is_string = true,
            b' ' | b'\t' | b'\r' | b'\n' | b',' | b':' | b'+' | b'-' | b'.' | b'E' => {}
            b'0'..=b'9' | b'a'..=b'z' => {}
            _ => return Some(Scan::Bad(i)),
        }
        None
    }
}

/// How many bytes the escape has that a text begins with, or needs before it is known; 0 if it begins with none.
fn escape_len(text: &[u8]) -> usize {
    match text {
        [
            b'\\',
            b'u',
            b'd' | b'D',
            b'8'..=b'9' | b'a'..=b'b' | b'A'..=b'B',
            _,
            _,
            rest @ ..,
        ] => match rest {
            [] => 7,
            [b'\\'] => 8,
            [b'\\', b'u', ..] => 12,
            _ => 6,
        },
        [b'\\', b'u', ..] => 6,
        [b'\\', ..] => 2,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_certain_ends_within_no_escape() {
        for (text, certain) in [
            (r#"{"a": "#, r#"{"a": "#),
            (r#"{"a\"#, r#"{"a"#),
            (r#"{"a\\"#, r#"{"a\\"#),
            (r#"{"\\\"#, r#"{"\\"#),
            (r#"{"\u00e"#, r#"{""#),
            (r#"{"\u00e9"#, r#"{"\u00e9"#),
            (r#"{"\u00e9\"#, r#"{"\u00e9"#),
            (r#"{"\ud83d"#, r#"{""#),
            (r#"{"\ud83d\"#, r#"{""#),
            (r#"{"\uD83D\ude0"#, r#"{""#),
            (r#"{"\ud83d\ude00"#, r#"{"\ud83d\ude00"#),
            (r#"{"\ud83d""#, r#"{"\ud83d""#),
            (r#"{"\ud83d\n"#, r#"{"\ud83d\n"#),
            (r#"{"\ud83d\\\"#, r#"{"\ud83d\\"#),
            (r#"{"\\ud83d"#, r#"{"\\ud83d"#),
            (r#"{"é\"#, r#"{"é"#),
            (r#"{} "#, r#"{}"#),
            (r#"{"\n": ]é"#, r#"{"\n": ]"#),
            (r#"{é"#, r#"{"#),
            ("", ""),
        ] {
            let mut scan = JsonEnd::default();
            for (end, char) in text.char_indices() {
                let text = &text[..end + char.len_utf8()];
                assert!(text.is_char_boundary(scan.certain_len(text)), "{text}");
            }
            assert_eq!(&text[..scan.certain_len(text)], certain, "{text}");
        }
    }

    #[test]
    fn finds_the_end_of_the_first_value() {
        let deep = "[".repeat(128);
        for (text, expected) in [
            (r#"{"a": "}\"]", "b": [1, {}]} x"#, Scan::End(27)),
            ("[1e-5]", Scan::End(6)),
            (r#"{"a": "é"#, Scan::More),
            ("", Scan::More),
            ("x", Scan::Bad(0)),
            ("{<", Scan::Bad(1)),
            ("[é", Scan::Bad(1)),
            (&deep, Scan::Bad(127)),
        ] {
            assert_eq!(JsonEnd::default().scan(text), expected, "{text}");
            let mut pieces = JsonEnd::default();
            let mut last = Scan::More;
            for (end, char) in text.char_indices() {
                last = pieces.scan(&text[..end + char.len_utf8()]);
            }
            assert_eq!(last, expected, "{text}");
        }
    }
}
