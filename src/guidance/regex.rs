//! Escaping for regular expressions.

/// A regular expression that matches `char` literally.
pub(super) fn escaped(char: char) -> String {
    match char {
        'a'..='z' | 'A'..='Z' | '0'..='9' | ' ' => char.to_string(),
        _ => format!("\\x{{{:X}}}", u32::from(char)),
    }
}
