//! Texts as regular expressions.

/// A character as a regular expression that matches it.
pub(super) fn escaped(char: char) -> String {
    match char {
        'a'..='z' | 'A'..='Z' | '0'..='9' | ' ' => char.to_string(),
        _ => format!("\\x{{{:X}}}", u32::from(char)),
    }
}
