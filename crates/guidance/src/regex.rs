//! Checking and escaping of regular expressions.

use crate::grammar_error::GrammarError;

/// A regular expression that matches `char` literally.
pub(super) fn escaped(char: char) -> String {
    match char {
        'a'..='z' | 'A'..='Z' | '0'..='9' | ' ' => char.to_string(),
        _ => format!("\\x{{{:X}}}", u32::from(char)),
    }
}

/// A single regular expression for all texts. It avoids ambiguity between texts of which one is a prefix of another.
pub(super) fn choice(texts: &[String]) -> String {
    let literal = |text: &String| text.chars().map(escaped).collect::<String>();
    let texts: Vec<String> = texts.iter().map(literal).collect();
    format!("({})", texts.join("|"))
}

/// Checks that `regex` does not end with a lone backslash, which would escape the end of the expression.
pub(super) fn complete(regex: &str) -> Result<&str, GrammarError> {
    let num_backslashes = regex.len() - regex.trim_end_matches('\\').len();
    match num_backslashes % 2 {
        0 => Ok(regex),
        _ => Err("the regular expression ends with a lone backslash".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_escaped() {
        let texts = ["a|b".to_owned(), "é/\n".to_owned()];
        assert_eq!(choice(&texts), r"(a\x{7C}b|\x{E9}\x{2F}\x{A})");
    }

    #[test]
    fn rejects_a_trailing_backslash() {
        for (regex, is_complete) in [
            (r"a\\", true),
            (r"a\$", true),
            (r"a\", false),
            (r"\\\", false),
        ] {
            assert_eq!(complete(regex).is_ok(), is_complete, "{regex}");
        }
    }
}
