//! The text of a token, which may be a part of a character.

use std::borrow::Cow;
use std::fmt::Write;

/// The bytes that a token adds to a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText(Vec<u8>);

impl TokenText {
    /// A text of these bytes.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The text, with U+FFFD for what is no whole character.
    pub fn shown(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }

    /// The text, or if it is none, `bytes:` and the bytes as a literal of Python has them, as in the completions of
    /// OpenAI's API: different tokens have different keys.
    pub fn key(&self) -> String {
        if let Ok(text) = std::str::from_utf8(&self.0) {
            return text.to_owned();
        }
        let mut key = "bytes:".to_owned();
        for byte in &self.0 {
            match byte {
                b'\\' => key.push_str("\\\\"),
                b' '..=b'~' => key.push(char::from(*byte)),
                // Writing to a text never fails.
                _ => drop(write!(key, "\\x{byte:02x}")),
            }
        }
        key
    }

    /// Whether it begins within a character.
    pub fn continues(&self) -> bool {
        self.0.first().is_some_and(|byte| !begins(*byte))
    }

    /// The characters that begin in it: over the tokens of a text, all of the text's.
    pub fn num_chars(&self) -> usize {
        self.0.iter().filter(|byte| begins(**byte)).count()
    }
}

/// Whether a character begins with this byte of UTF-8.
fn begins(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

impl From<&str> for TokenText {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_can_be_told_apart_and_joined() {
        let fox = "a \u{1f98a}".as_bytes();
        let cut = |from: usize, to: usize| TokenText::of(fox[from..to].to_vec());
        for (part, shown, key, num_chars) in [
            (cut(0, 6), "a \u{1f98a}", "a \u{1f98a}", 3),
            (cut(1, 4), " \u{fffd}", "bytes: \\xf0\\x9f", 2),
            (cut(4, 5), "\u{fffd}", "bytes:\\xa6", 0),
            (cut(5, 6), "\u{fffd}", "bytes:\\x8a", 0),
            (
                TokenText::of(b"\\\n\xf0".to_vec()),
                "\\\n\u{fffd}",
                "bytes:\\\\\\x0a\\xf0",
                3,
            ),
            ("\u{fffd}".into(), "\u{fffd}", "\u{fffd}", 1),
            ("".into(), "", "", 0),
        ] {
            assert_eq!((&part.shown()[..], &part.key()[..]), (shown, key));
            assert_eq!(part.num_chars(), num_chars, "{key}");
            assert_eq!(part.continues(), num_chars == 0 && !key.is_empty(), "{key}");
        }
    }
}
