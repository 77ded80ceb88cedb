//! Writes the body of a rule as EBNF, for errors.

use super::grammar::Expr;

/// `expr` as it may stand in a sequence.
pub(super) fn part(expr: &Expr, names: &[String]) -> String {
    match expr {
        Expr::Any(options) if options.len() > 1 => format!("({})", alternatives(options, names)),
        Expr::All(parts) if parts.len() > 1 => format!("({})", sequence(parts, names)),
        Expr::Any(parts) | Expr::All(parts) => match parts.first() {
            Some(only) => part(only, names),
            None => "\"\"".to_owned(),
        },
        Expr::Repeat(inner, min, max) => {
            let inner = match **inner {
                Expr::Repeat(..) => format!("({})", part(inner, names)),
                _ => part(inner, names),
            };
            format!("{inner}{}", times(*min, *max))
        }
        Expr::Regex(regex) => text(regex),
        Expr::Rule(rule) => names[*rule].clone(),
    }
}

/// Parts one behind the other.
pub(super) fn sequence(parts: &[Expr], names: &[String]) -> String {
    let parts: Vec<_> = parts.iter().map(|it| part(it, names)).collect();
    parts.join(" ")
}

/// Alternatives without parentheses.
pub(super) fn alternatives(options: &[Expr], names: &[String]) -> String {
    let option = |option: &Expr| match option {
        Expr::All(parts) if !parts.is_empty() => sequence(parts, names),
        option => part(option, names),
    };
    options.iter().map(option).collect::<Vec<_>>().join(" | ")
}

/// How often a part is repeated, in EBNF as in Lark.
pub(super) fn times(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

/// A literal or a character class. Its regular expression has characters other than letters and digits by number.
fn text(regex: &str) -> String {
    if regex == super::lexer::ANY_CHARACTER {
        return ".".to_owned();
    }
    let is_class = regex.starts_with('[');
    let mut text = String::new();
    let mut rest = regex;
    while let Some((before, behind)) = rest.split_once("\\x{") {
        let (number, behind) = behind.split_once('}').unwrap_or((behind, ""));
        text.push_str(before);
        let char = u32::from_str_radix(number, 16)
            .ok()
            .and_then(char::from_u32);
        let written = char.map(|char| match (char, is_class) {
            ('\n' | '\r' | '\t' | '\\', _) | ('"', false) => char.escape_default().to_string(),
            (']' | '^' | '-', true) => format!("\\{char}"),
            _ if char.is_control() => format!("\\U{:08X}", u32::from(char)),
            _ => char.to_string(),
        });
        text.extend(written);
        rest = behind;
    }
    text.push_str(rest);
    match is_class {
        true => text,
        false => format!("\"{text}\""),
    }
}
