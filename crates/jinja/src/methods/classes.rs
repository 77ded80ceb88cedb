//! Methods that say what a text consists of.

use crate::unicode::{
    is_alpha, is_alphanumeric, is_cased, is_decimal, is_digit, is_numeric, is_printable, is_space,
    is_titlecase,
};

/// The answer of a method such as `isdigit`, if it is one.
pub(super) fn answer(text: &str, name: &str) -> Option<bool> {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    Some(match name {
        "isalnum" => all(is_alphanumeric),
        "isalpha" => all(is_alpha),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(is_decimal),
        "isdigit" => all(is_digit),
        "isidentifier" => {
            let mut chars = text.chars();
            chars
                .next()
                .is_some_and(|first| first == '_' || is_alpha(first))
                && chars.all(|char| char == '_' || is_alpha(char) || is_decimal(char))
        }
        "islower" => is_lower(text),
        "isnumeric" => all(is_numeric),
        "isprintable" => text.chars().all(is_printable),
        "isspace" => all(is_space),
        "istitle" => is_title(text),
        "isupper" => is_upper(text),
        _ => return None,
    })
}

/// Whether all letters are small, and there is one.
pub(crate) fn is_lower(text: &str) -> bool {
    let has_other = text
        .chars()
        .any(|char| char.is_uppercase() || is_titlecase(char));
    !has_other && text.chars().any(char::is_lowercase)
}

/// Whether all letters are capitals, and there is one.
pub(crate) fn is_upper(text: &str) -> bool {
    let has_other = text
        .chars()
        .any(|char| char.is_lowercase() || is_titlecase(char));
    !has_other && text.chars().any(char::is_uppercase)
}

fn is_title(text: &str) -> bool {
    let mut is_within = false;
    let mut has_any = false;
    for char in text.chars() {
        let is_capital = char.is_uppercase() || is_titlecase(char);
        if is_capital && is_within || char.is_lowercase() && !is_within {
            return false;
        }
        is_within = is_cased(char);
        has_any |= is_within;
    }
    has_any
}
