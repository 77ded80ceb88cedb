//! Texts as regular expressions: both of the texts themselves, and of their form in JSON.

use std::fmt::Write as _;

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use regex_syntax::hir::{Class, ClassUnicode, Hir, HirKind, Look};

/// The work to find out whether expressions have a text in common.
const MAX_WORK: u64 = 50_000;

/// The most alternatives that anchors within an expression make of it.
const MAX_ALTERNATIVES: usize = 64;

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Texts {
    /// Texts that an expression matches as a whole: as they are, and in JSON without the marks around.
    Matching {
        plain: String,
        quoted: String,
    },
    All(Vec<Texts>),
    Any(Vec<Texts>),
    Not(Box<Texts>),
}

/// Why an expression is not used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// The expression is wrong, for this reason.
    Wrong(String),
    /// The expression has parts that cannot be guided.
    Unsupported,
}

/// A class without characters.
pub(super) const NO_CHAR: &str = "[a&&b]";

/// A character in JSON.
const CHAR: &str =
    r#"(?:[^"\\\x00-\x1F\x7F]|\\(?:["\\bfnrt]|u00(?:0[0-7bB]|0[eEfF]|1[0-9a-fA-F]|7[fF])))"#;

impl Texts {
    pub fn any() -> Self {
        Self::Matching {
            plain: "(?s:.)*".to_owned(),
            quoted: format!("{CHAR}*"),
        }
    }

    /// Texts of so many characters.
    pub fn of_length(min: u64, max: Option<u64>) -> Option<Self> {
        let bounded = |it: u64| u32::try_from(it).ok();
        let min = bounded(min)?;
        let max = match max.map(bounded) {
            None | Some(None) => String::new(),
            Some(Some(max)) => max.to_string(),
        };
        Some(Self::Matching {
            plain: format!("(?s:.){{{min},{max}}}"),
            quoted: format!("{CHAR}{{{min},{max}}}"),
        })
    }

    pub fn literal(text: &str) -> Self {
        let hir = Hir::literal(text.as_bytes());
        Self::of_hir(&hir).unwrap_or_else(|_| Self::Any(Vec::new()))
    }

    /// Texts that an expression matches as a whole, which is the same in JSON.
    pub fn unquoted(regex: String) -> Self {
        Self::Matching {
            plain: regex.clone(),
            quoted: regex,
        }
    }

    /// Texts that an expression of this project matches as a whole.
    pub fn whole(regex: &str) -> Result<Self, Unusable> {
        let hir = regex_syntax::parse(regex).map_err(|error| Unusable::Wrong(error.to_string()))?;
        Self::of_hir(&hir)
    }

    /// Texts in which an expression of a schema matches anywhere. It is ECMA's, in which `\d` and `\w` are ASCII.
    ///
    /// # Errors
    /// It is no expression, or has parts that cannot be guided.
    pub fn with_match(regex: &str) -> Result<Self, Unusable> {
        let (ahead, rest) = look_ahead(regex)?;
        let mut all = Vec::new();
        for (is_wanted, inner) in ahead {
            let texts = Self::search(&format!("^(?:{inner})"))?;
            all.push(if is_wanted {
                texts
            } else {
                Self::Not(Box::new(texts))
            });
        }
        if all.is_empty() {
            return Self::search(rest);
        }
        // What follows begins where the look-aheads do.
        all.push(Self::search(&format!("^{rest}"))?);
        Ok(Self::All(all))
    }

    fn search(regex: &str) -> Result<Self, Unusable> {
        let translated = of_ecma(regex)?;
        let hir = regex_syntax::parse(&translated).map_err(|error| not_parsed(&error))?;
        let mut found = Vec::new();
        searched(&hir, &mut found)?;
        let found: Result<Vec<_>, _> = found.iter().map(Self::of_hir).collect();
        let mut found = found?;
        Ok(match found.len() {
            1 => found.remove(0),
            _ => Self::Any(found),
        })
    }

    fn of_hir(hir: &Hir) -> Result<Self, Unusable> {
        let (mut plain, mut quoted) = (String::new(), String::new());
        write(hir, false, &mut plain)?;
        write(hir, true, &mut quoted)?;
        Ok(Self::Matching { plain, quoted })
    }

    /// The form of the set in Lark's syntax for terminals.
    pub fn terminal(&self) -> String {
        match self {
            Self::Matching { quoted, .. } => format!("/{quoted}/"),
            Self::All(parts) => {
                // What all others leave out is taken from all texts.
                let has_base = parts.iter().any(|part| !matches!(part, Self::Not(_)));
                let base = (!has_base).then(Self::any);
                let parts = base.iter().chain(parts).map(Self::terminal_part);
                format!("({})", parts.collect::<Vec<_>>().join(" & "))
            }
            Self::Any(parts) if parts.is_empty() => format!("/{NO_CHAR}/"),
            Self::Any(parts) => {
                let parts: Vec<_> = parts.iter().map(Self::terminal_part).collect();
                format!("({})", parts.join(" | "))
            }
            Self::Not(_) => Self::All(vec![Self::any(), self.clone()]).terminal(),
        }
    }

    fn terminal_part(&self) -> String {
        match self {
            Self::Not(part) => format!("~{}", part.terminal()),
            _ => self.terminal(),
        }
    }

    fn ast(&self) -> RegexAst {
        match self {
            Self::Matching { plain, .. } => RegexAst::Regex(plain.clone()),
            Self::All(parts) => RegexAst::And(
                std::iter::once(RegexAst::Regex("(?s:.)*".to_owned()))
                    .chain(parts.iter().map(Self::ast))
                    .collect(),
            ),
            Self::Any(parts) => RegexAst::Or(parts.iter().map(Self::ast).collect()),
            // The opposite of a set of bytes has more than texts.
            Self::Not(part) => RegexAst::And(vec![
                RegexAst::Regex("(?s:.)*".to_owned()),
                RegexAst::Not(Box::new(part.ast())),
            ]),
        }
    }

    /// Whether it certainly has a text, certainly none (`false`), or neither is known (`None`).
    pub fn has_any(&self) -> Option<bool> {
        if let Self::Matching { plain, .. } = self
            && !plain.contains(NO_CHAR)
        {
            return Some(true);
        }
        let mut builder = RegexBuilder::new();
        let expression = builder.mk(&self.ast()).ok()?;
        let mut regex = builder.to_regex_limited(expression, MAX_WORK).ok()?;
        Some(!regex.always_empty())
    }

    /// What finds out whether it has a text; `None` if that would be too much work.
    pub fn matcher(&self) -> Option<Regex> {
        let mut builder = RegexBuilder::new();
        let expression = builder.mk(&self.ast()).ok()?;
        builder.to_regex_limited(expression, 20 * MAX_WORK).ok()
    }

    /// Whether it has this text; `None` if that is not known.
    pub fn has(&self, text: &str) -> Option<bool> {
        Some(self.matcher()?.is_match(text))
    }
}

fn not_parsed(error: &regex_syntax::Error) -> Unusable {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    match text.contains("not supported") {
        true => Unusable::Unsupported,
        false => Unusable::Wrong(last.trim_start_matches("error: ").to_owned()),
    }
}

/// Texts that an expression matches anywhere, as expressions without anchors for whole texts.
fn searched(hir: &Hir, found: &mut Vec<Hir>) -> Result<(), Unusable> {
    if found.len() >= MAX_ALTERNATIVES {
        return Err(Unusable::Unsupported);
    }
    let items = match hir.kind() {
        HirKind::Alternation(parts) => {
            return parts.iter().try_for_each(|part| searched(part, found));
        }
        HirKind::Capture(capture) => return searched(&capture.sub, found),
        HirKind::Concat(items) => items.clone(),
        _ => vec![hir.clone()],
    };
    let is_start = |item: &Hir| matches!(item.kind(), HirKind::Look(Look::Start));
    let is_end = |item: &Hir| matches!(item.kind(), HirKind::Look(Look::End));
    let first = items
        .iter()
        .position(|item| !is_start(item))
        .unwrap_or(items.len());
    let last = items
        .iter()
        .rposition(|item| !is_end(item))
        .map_or(first, |it| it + 1)
        .max(first);
    let middle = &items[first..last];
    // Anchors in the alternatives at the outer ends.
    for (index, item) in [
        (0, middle.first()),
        (middle.len().saturating_sub(1), middle.last()),
    ] {
        let Some(item) = item.filter(|item| !item.properties().look_set().is_empty()) else {
            continue;
        };
        let parts = match item.kind() {
            HirKind::Alternation(parts) => parts.clone(),
            HirKind::Capture(capture) => match capture.sub.kind() {
                HirKind::Alternation(parts) => parts.clone(),
                _ => vec![(*capture.sub).clone()],
            },
            HirKind::Concat(parts) => vec![Hir::concat(parts.clone())],
            _ => continue,
        };
        for part in parts {
            let (before, behind) = (&middle[..index], &middle[index + 1..]);
            let whole = [&items[..first], before, &[part], behind, &items[last..]].concat();
            searched(&Hir::concat(whole), found)?;
        }
        return Ok(());
    }
    let inner = Hir::concat(middle.to_vec());
    if !inner.properties().look_set().is_empty() {
        return Err(Unusable::Unsupported);
    }
    let any = || {
        Hir::repetition(regex_syntax::hir::Repetition {
            min: 0,
            max: None,
            greedy: true,
            sub: Box::new(Hir::dot(regex_syntax::hir::Dot::AnyChar)),
        })
    };
    let before = (first == 0).then(any);
    let behind = (last == items.len()).then(any);
    found.push(Hir::concat(
        before.into_iter().chain([inner]).chain(behind).collect(),
    ));
    Ok(())
}

/// Look-aheads, each with whether it must match.
type LookAheads<'a> = Vec<(bool, &'a str)>;

/// The look-aheads at the beginning of an expression, and what follows them.
fn look_ahead(regex: &str) -> Result<(LookAheads<'_>, &str), Unusable> {
    let mut found = Vec::new();
    let Some(mut rest) = regex
        .strip_prefix('^')
        .filter(|rest| rest.starts_with("(?=") || rest.starts_with("(?!"))
    else {
        return match ["(?=", "(?!", "(?<=", "(?<!"]
            .iter()
            .find(|it| regex.contains(**it))
        {
            Some(_) => Err(Unusable::Unsupported),
            None => Ok((found, regex)),
        };
    };
    while let Some(inner) = rest
        .strip_prefix("(?=")
        .or_else(|| rest.strip_prefix("(?!"))
    {
        let end = group_end(inner)
            .ok_or_else(|| Unusable::Wrong("has a group without an end".to_owned()))?;
        found.push((rest.starts_with("(?="), &inner[..end]));
        rest = &inner[end + 1..];
    }
    let tail = &regex[regex.len() - rest.len()..];
    let nested = found.iter().map(|(_, inner)| *inner).chain([tail]);
    for part in nested {
        if ["(?=", "(?!", "(?<=", "(?<!"]
            .iter()
            .any(|it| part.contains(it))
        {
            return Err(Unusable::Unsupported);
        }
        if has_bar(part) && part.as_ptr() == tail.as_ptr() {
            return Err(Unusable::Unsupported);
        }
    }
    Ok((found, tail))
}

/// Whether alternatives are not within a group.
fn has_bar(regex: &str) -> bool {
    let mut depth = 0;
    scan(regex, |char, is_class| {
        match char {
            _ if is_class => {}
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => return true,
            _ => {}
        }
        false
    })
    .is_some()
}

/// Where the group ends that a text is within.
fn group_end(regex: &str) -> Option<usize> {
    let mut depth = 0;
    scan(regex, |char, is_class| {
        match char {
            _ if is_class => {}
            '(' => depth += 1,
            ')' if depth == 0 => return true,
            ')' => depth -= 1,
            _ => {}
        }
        false
    })
}

/// The first character that is not escaped and that `is_it`.
fn scan(regex: &str, mut is_it: impl FnMut(char, bool) -> bool) -> Option<usize> {
    let (mut is_escaped, mut in_class) = (false, false);
    for (index, char) in regex.char_indices() {
        if std::mem::take(&mut is_escaped) {
            continue;
        }
        match char {
            '\\' => is_escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            _ if is_it(char, in_class) => return Some(index),
            _ => {}
        }
    }
    None
}

/// An expression of ECMA-262 in the syntax of the crate `regex`. Where validators differ, it matches what all of them
/// do.
fn of_ecma(regex: &str) -> Result<String, Unusable> {
    let mut out = String::new();
    let mut in_class = false;
    let mut chars = regex.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\\' => {
                let Some(escaped) = chars.next() else {
                    return Err(Unusable::Wrong("it ends with a lone backslash".to_owned()));
                };
                match escaped {
                    'd' if in_class => out.push_str("0-9"),
                    'd' => out.push_str("[0-9]"),
                    'w' if in_class => out.push_str("0-9A-Za-z_"),
                    'w' => out.push_str("[0-9A-Za-z_]"),
                    's' if in_class => out.push_str(r" \t\n\r\x0B\x0C"),
                    's' => out.push_str(r"[ \t\n\r\x0B\x0C]"),
                    'S' if in_class => out.push_str(r"\S"),
                    'S' => out.push_str(r"[^\s\x{FEFF}\x1C-\x1F]"),
                    '/' | '-' | '"' | '\'' | '#' | '@' | '%' | ',' | ':' | ';' | '=' | '<'
                    | '>' | '!' | '~' | '`' | '_' | ' ' => {
                        _ = write!(out, "\\x{{{:X}}}", u32::from(escaped));
                    }
                    'u' if chars.peek() != Some(&'{') => {
                        let mut unit = || {
                            let digits: String = chars.by_ref().take(4).collect();
                            u16::from_str_radix(&digits, 16).map_err(|_| {
                                Unusable::Wrong("'\\u' without four digits".to_owned())
                            })
                        };
                        let first = unit()?;
                        let mut units = vec![first];
                        if (0xD800..0xDC00).contains(&first) {
                            if (chars.next(), chars.next()) != (Some('\\'), Some('u')) {
                                return Err(Unusable::Unsupported);
                            }
                            let digits: String = chars.by_ref().take(4).collect();
                            units.push(
                                u16::from_str_radix(&digits, 16)
                                    .map_err(|_| Unusable::Unsupported)?,
                            );
                        }
                        let text = String::from_utf16(&units).map_err(|_| Unusable::Unsupported)?;
                        text.chars()
                            .for_each(|it| _ = write!(out, "\\x{{{:X}}}", u32::from(it)));
                    }
                    'c' => {
                        let letter = chars
                            .next()
                            .filter(char::is_ascii_alphabetic)
                            .ok_or(Unusable::Unsupported)?;
                        _ = write!(out, "\\x{{{:X}}}", u32::from(letter) % 32);
                    }
                    '0' => out.push_str(r"\x00"),
                    'b' if in_class => out.push_str(r"\x08"),
                    'Z' | 'z' => out.push('$'),
                    'A' => out.push('^'),
                    other => {
                        out.push('\\');
                        out.push(other);
                    }
                }
            }
            '[' if in_class => out.push_str(r"\["),
            '[' => {
                in_class = true;
                out.push('[');
                if chars.peek() == Some(&'^') {
                    chars.next();
                    out.push('^');
                }
                // In ECMA's syntax it ends the class, which then has no character.
                if chars.peek() == Some(&']') {
                    return Err(Unusable::Unsupported);
                }
            }
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '&' | '~' if in_class => _ = write!(out, "\\x{{{:X}}}", u32::from(char)),
            '-' if in_class && out.ends_with('-') => out.push_str(r"\-"),
            '.' if !in_class => out.push_str(r"[^\n\r\x{2028}\x{2029}]"),
            other => out.push(other),
        }
    }
    Ok(out)
}

/// Writes an expression without anchors, for texts as they are or `in_json`.
fn write(hir: &Hir, in_json: bool, out: &mut String) -> Result<(), Unusable> {
    match hir.kind() {
        HirKind::Empty => out.push_str("(?:)"),
        HirKind::Look(_) => {
            return Err(Unusable::Unsupported);
        }
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| Unusable::Unsupported)?;
            for char in text.chars() {
                let mut class = ClassUnicode::empty();
                class.push(regex_syntax::hir::ClassUnicodeRange::new(char, char));
                write_class(&class, in_json, out);
            }
        }
        HirKind::Class(Class::Unicode(class)) => write_class(class, in_json, out),
        HirKind::Class(Class::Bytes(class)) => {
            let class = class.to_unicode_class().ok_or(Unusable::Unsupported)?;
            write_class(&class, in_json, out);
        }
        HirKind::Repetition(repetition) => {
            out.push_str("(?:");
            write(&repetition.sub, in_json, out)?;
            // Writing to a String cannot fail.
            _ = match repetition.max {
                None => write!(out, "){{{},}}", repetition.min),
                Some(max) => write!(out, "){{{},{max}}}", repetition.min),
            };
        }
        HirKind::Capture(capture) => {
            out.push_str("(?:");
            write(&capture.sub, in_json, out)?;
            out.push(')');
        }
        HirKind::Concat(parts) => parts
            .iter()
            .try_for_each(|part| write(part, in_json, out))?,
        HirKind::Alternation(parts) => {
            for (index, part) in parts.iter().enumerate() {
                out.push_str(if index == 0 { "(?:" } else { "|" });
                write(part, in_json, out)?;
            }
            out.push(')');
        }
    }
    Ok(())
}

/// Writes a class of characters. In JSON, some are escaped: each in one way.
fn write_class(class: &ClassUnicode, in_json: bool, out: &mut String) {
    let is_escaped = |char: char| char < ' ' || matches!(char, '"' | '\\' | '\x7F');
    let mut raw = class.clone();
    let mut escapes = Vec::new();
    if in_json {
        let mut special = ClassUnicode::empty();
        for (first, last) in [('\0', '\x1F'), ('"', '"'), ('\\', '\\'), ('\x7F', '\x7F')] {
            special.push(regex_syntax::hir::ClassUnicodeRange::new(first, last));
        }
        let mut inside = class.clone();
        inside.intersect(&special);
        raw.difference(&special);
        let chars = inside.iter().flat_map(|range| range.start()..=range.end());
        escapes.extend(chars.filter(|char| is_escaped(*char)).map(escape));
    }
    let has_raw = raw.iter().next().is_some();
    if !has_raw && escapes.is_empty() {
        out.push_str(NO_CHAR);
        return;
    }
    if !escapes.is_empty() {
        out.push_str("(?:");
    }
    if has_raw {
        let code = |char: char| match char {
            'a'..='z' | 'A'..='Z' | '0'..='9' => char.to_string(),
            _ => format!("\\x{{{:X}}}", u32::from(char)),
        };
        let is_single =
            raw.iter().count() == 1 && raw.iter().all(|range| range.start() == range.end());
        let ranges = raw.iter().map(|range| match range.start() == range.end() {
            true => code(range.start()),
            false => format!("{}-{}", code(range.start()), code(range.end())),
        });
        let ranges: String = ranges.collect();
        match is_single {
            true => out.push_str(&ranges),
            false => _ = write!(out, "[{ranges}]"),
        }
    }
    for (index, escape) in escapes.iter().enumerate() {
        if has_raw || index > 0 {
            out.push('|');
        }
        out.push_str(escape);
    }
    if !escapes.is_empty() {
        out.push(')');
    }
}

/// The form of an escaped character in JSON, as an expression.
fn escape(char: char) -> String {
    match char {
        '"' => r#"\\""#.to_owned(),
        '\\' => r"\\\\".to_owned(),
        '\n' => r"\\n".to_owned(),
        '\r' => r"\\r".to_owned(),
        '\t' => r"\\t".to_owned(),
        '\x08' => r"\\b".to_owned(),
        '\x0C' => r"\\f".to_owned(),
        other => {
            let digits = format!("{:04x}", u32::from(other));
            let last = digits.chars().last().unwrap_or('0');
            match last.is_ascii_alphabetic() {
                true => format!("\\\\u{}[{last}{}]", &digits[..3], last.to_ascii_uppercase()),
                false => format!("\\\\u{digits}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an expression of a schema matches in the crate `regex`, and a text's form in JSON in the form for JSON.
    #[test]
    fn patterns_match_what_the_validators_match() {
        let samples = [
            "", "a", "ab", "abc", "b", "A1", "a-b", "a b", "\n", "a\nb", "\"", "\\", "é", "🦊",
            "x.y", "12", "12a", "a12", "AB12cd", "Passw0rd", "password", "a/b", "a[b", "\u{7f}",
            "\t\u{1}",
        ];
        for (pattern, expected) in [
            (
                "^a",
                vec!["a", "ab", "abc", "a-b", "a b", "a\nb", "a12", "a/b", "a[b"],
            ),
            (
                "^a|b$",
                vec![
                    "a", "ab", "abc", "a-b", "a b", "a\nb", "a12", "a/b", "a[b", "b",
                ],
            ),
            ("^(a|b)$", vec!["a", "b"]),
            ("(^a|^b)[c]?$", vec!["a", "b"]),
            (r"^\d+$", vec!["12"]),
            (r"\s", vec!["a b", "\n", "a\nb", "\t\u{1}"]),
            (r"^[\w.]+\.\w$", vec!["x.y"]),
            (r#"^["\\]$"#, vec!["\"", "\\"]),
            (r"^[^a-z0-9A-Z\n]$", vec!["\"", "\\", "é", "🦊", "\u{7f}"]),
            (r"^\u00e9$|^\uD83E\uDD8A$", vec!["é", "🦊"]),
            (r"^a[/[]b$", vec!["a/b", "a[b"]),
            (r"^a\/b$", vec!["a/b"]),
            (r"^(?=.*[A-Z])(?=.*\d)(?!.*2).{5,}$", vec!["Passw0rd"]),
            (r"^(?!a)[a-z0-9]+$", vec!["b", "12", "12a", "password"]),
            ("^$", vec![""]),
        ] {
            let texts = Texts::with_match(pattern)
                .unwrap_or_else(|problem| panic!("{pattern}: {problem:?}"));
            for sample in samples {
                let is_match = expected.contains(&sample);
                assert_eq!(texts.has(sample), Some(is_match), "{pattern} {sample:?}");
                if let Texts::Matching { quoted, .. } = &texts {
                    let quoted = regex::Regex::new(&format!("^(?:{quoted})$")).expect("good");
                    let json = serde_json::to_string(sample)
                        .expect("JSON")
                        .replace('\u{7f}', "\\u007f");
                    assert_eq!(
                        quoted.is_match(&json[1..json.len() - 1]),
                        is_match,
                        "{pattern} {json}"
                    );
                }
            }
        }
        for pattern in [r"\bfox\b", "a(?=b)", "(?<=a)b", r"(a)\1", "(", "a^b", "[]"] {
            assert!(Texts::with_match(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn sets_without_a_text_are_found() {
        let with = |pattern: &str| Texts::with_match(pattern).expect("good");
        let length = |min, max| Texts::of_length(min, Some(max)).expect("small");
        for (texts, expected) in [
            (Texts::All(vec![with("^a"), with("^b")]), false),
            (Texts::All(vec![with("^a+$"), length(2, 3)]), true),
            (Texts::All(vec![with("^a{5}$"), length(2, 3)]), false),
            (
                Texts::All(vec![
                    with("^(a|b)$"),
                    Texts::Not(Box::new(Texts::literal("a"))),
                ]),
                true,
            ),
            (
                Texts::All(vec![with("^a$"), Texts::Not(Box::new(Texts::literal("a")))]),
                false,
            ),
            (Texts::Any(vec![]), false),
            (Texts::Not(Box::new(Texts::any())), false),
        ] {
            assert_eq!(texts.has_any(), Some(expected), "{texts:?}");
        }
    }
}
