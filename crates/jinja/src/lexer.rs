//! Splits a template into tokens, with the rules for white space around tags.

use std::sync::Arc;

use crate::error::CompileError;
use crate::literals;
use crate::unicode::is_space;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TokenKind {
    Text(Arc<str>),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) line: usize,
    pub(crate) kind: TokenKind,
}

/// The tokens of a template; the last one is `End`.
pub(crate) fn tokens(source: &str) -> Result<Vec<Token>, CompileError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        is_line_start: true,
        tokens: Vec::new(),
    };
    while lexer.at < source.len() {
        lexer.text()?;
    }
    lexer.push(TokenKind::End);
    Ok(lexer.tokens)
}

/// Longer ones come before their beginnings.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: usize,
    /// Whether the last match ended a line.
    is_line_start: bool,
    tokens: Vec<Token>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn push(&mut self, kind: TokenKind) {
        let line = self.line;
        self.tokens.push(Token { line, kind });
    }

    fn error<T>(&self, problem: impl Into<String>) -> Result<T, CompileError> {
        Err(CompileError {
            line: self.line,
            problem: problem.into(),
        })
    }

    /// Goes past `bytes` bytes.
    fn skip(&mut self, bytes: usize) {
        let skipped = &self.rest()[..bytes];
        self.line += skipped.matches('\n').count();
        if bytes > 0 {
            self.is_line_start = skipped.ends_with('\n');
        }
        self.at += bytes;
    }

    /// Goes past the white space after a tag that ends in `-`.
    fn skip_spaces(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
    }

    /// Text up to the next tag, then the tag.
    fn text(&mut self) -> Result<(), CompileError> {
        let rest = self.rest();
        let begins = rest
            .match_indices('{')
            .find(|(at, _)| matches!(rest.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#')));
        let Some((begin, _)) = begins else {
            self.push_text(rest);
            self.skip(rest.len());
            return Ok(());
        };
        let tag = &rest[begin..];
        let kind = tag.as_bytes()[1];
        let raw = (kind == b'%').then(|| raw_tag(tag)).flatten();
        let sign = tag
            .as_bytes()
            .get(2)
            .copied()
            .filter(|sign| b"-+".contains(sign));
        self.push_stripped(&rest[..begin], sign, kind != b'{');
        self.skip(begin);
        if let Some(length) = raw {
            self.skip(length);
            return self.raw();
        }
        let open = 2 + usize::from(sign.is_some());
        match kind {
            b'#' => {
                self.skip(open);
                self.comment()
            }
            b'%' => {
                self.push(TokenKind::BlockBegin);
                self.skip(open);
                self.tag("%}", TokenKind::BlockEnd)
            }
            _ => {
                self.push(TokenKind::VariableBegin);
                self.skip(open);
                self.tag("}}", TokenKind::VariableEnd)
            }
        }
    }

    /// The text before a tag with this sign.
    fn push_stripped(&mut self, text: &'s str, sign: Option<u8>, is_stripped: bool) {
        let text = match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            Some(_) => text,
            None if !is_stripped => text,
            None => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let can_strip = line > 0 || self.is_line_start;
                if can_strip && text[line..].chars().all(is_space) {
                    &text[..line]
                } else {
                    text
                }
            }
        };
        self.push_text(text);
    }

    fn push_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(TokenKind::Text(text.into()));
        }
    }

    fn comment(&mut self) -> Result<(), CompileError> {
        let rest = self.rest();
        let Some(end) = rest.find("#}") else {
            if rest.is_empty() {
                return Ok(());
            }
            return self.error("the end of a comment ('#}') is missing");
        };
        let sign = rest.as_bytes()[..end].last().copied();
        self.skip(end + 2);
        match sign {
            Some(b'-') => self.skip_spaces(),
            Some(b'+') => {}
            _ => self.skip_newline(),
        }
        Ok(())
    }

    fn skip_newline(&mut self) {
        if self.rest().starts_with('\n') {
            self.skip(1);
        }
    }

    /// Text without tags up to `endraw`.
    fn raw(&mut self) -> Result<(), CompileError> {
        let rest = self.rest();
        for (begin, _) in rest.match_indices("{%") {
            let tag = &rest[begin + 2..];
            let sign = tag
                .as_bytes()
                .first()
                .copied()
                .filter(|sign| b"-+".contains(sign));
            let name = tag[usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(after) = name.strip_prefix("endraw") else {
                continue;
            };
            let close = after.trim_start_matches(is_space);
            let close_sign = close
                .as_bytes()
                .first()
                .copied()
                .filter(|sign| b"-+".contains(sign));
            let Some(after) = close[usize::from(close_sign.is_some())..].strip_prefix("%}") else {
                continue;
            };
            self.push_stripped(&rest[..begin], sign, true);
            self.skip(rest.len() - after.len());
            match close_sign {
                Some(b'-') => self.skip_spaces(),
                Some(_) => {}
                None => self.skip_newline(),
            }
            return Ok(());
        }
        if rest.is_empty() {
            return Ok(());
        }
        self.error("the end of a 'raw' block is missing")
    }

    /// The inside of a tag up to its end.
    fn tag(&mut self, end: &str, end_kind: TokenKind) -> Result<(), CompileError> {
        let mut brackets = Vec::new();
        loop {
            let rest = self.rest();
            if brackets.is_empty() && self.tag_end(end, &end_kind) {
                return Ok(());
            }
            let Some(first) = rest.chars().next() else {
                // The parser says what it expected.
                return Ok(());
            };
            if is_space(first) {
                self.skip_spaces();
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first == '_' || first.is_alphanumeric() {
                let name =
                    rest.trim_start_matches(|char: char| char == '_' || char.is_alphanumeric());
                let name = &rest[..rest.len() - name.len()];
                if first.is_numeric() {
                    return self.error(format!("'{name}' is not a name"));
                }
                self.push(TokenKind::Name(name.into()));
                self.skip(name.len());
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else {
                self.operator(first, &mut brackets)?;
            }
        }
    }

    fn tag_end(&mut self, end: &str, kind: &TokenKind) -> bool {
        let rest = self.rest();
        let is_block = *kind == TokenKind::BlockEnd;
        let (sign, length) = if rest.starts_with(end) {
            (None, end.len())
        } else {
            match rest.as_bytes().first() {
                Some(b'-') if rest[1..].starts_with(end) => (Some(b'-'), end.len() + 1),
                Some(b'+') if is_block && rest[1..].starts_with(end) => (Some(b'+'), end.len() + 1),
                _ => return false,
            }
        };
        self.push(kind.clone());
        self.skip(length);
        match sign {
            Some(b'-') => self.skip_spaces(),
            None if is_block => self.skip_newline(),
            _ => {}
        }
        true
    }

    fn number(&mut self) -> Result<(), CompileError> {
        let rest = self.rest();
        // Not after a dot: `x.1.2` is an element of an element.
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot && let Some(length) = literals::float_length(rest) {
            let number = rest[..length].replace('_', "").parse().ok();
            let Some(number) = number.filter(|number: &f64| number.is_finite()) else {
                return self.error(format!(
                    "the number {} is too large: use a smaller one",
                    &rest[..length]
                ));
            };
            self.push(TokenKind::Float(number));
            self.skip(length);
            return Ok(());
        }
        let (length, number) = literals::integer(rest);
        let Some(number) = number else {
            return self.error(format!(
                "the number {} is too large: use a smaller one",
                &rest[..length]
            ));
        };
        self.push(TokenKind::Int(number));
        self.skip(length);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), CompileError> {
        let rest = self.rest();
        let mut is_escaped = false;
        for (at, char) in rest.char_indices().skip(1) {
            if is_escaped {
                is_escaped = false;
            } else if char == '\\' {
                is_escaped = true;
            } else if char == quote {
                match literals::unescaped(&rest[1..at]) {
                    Ok(text) => self.push(TokenKind::Str(text)),
                    Err(problem) => return self.error(problem),
                }
                self.skip(at + 1);
                return Ok(());
            }
        }
        self.error("the end of a string is missing")
    }

    fn operator(&mut self, first: char, brackets: &mut Vec<char>) -> Result<(), CompileError> {
        let rest = self.rest();
        let Some(operator) = OPERATORS
            .into_iter()
            .find(|operator| rest.starts_with(operator))
        else {
            return self.error(format!("unexpected character '{first}'"));
        };
        match first {
            '(' => brackets.push(')'),
            '[' => brackets.push(']'),
            '{' => brackets.push('}'),
            ')' | ']' | '}' => {
                let expected = brackets.pop();
                if expected != Some(first) {
                    let hint =
                        expected.map_or(String::new(), |char| format!(", expected '{char}'"));
                    return self.error(format!("unexpected '{first}'{hint}"));
                }
            }
            _ => {}
        }
        self.push(TokenKind::Operator(operator));
        self.skip(operator.len());
        Ok(())
    }
}

/// The length of a `raw` tag with the white space that it takes, if this is one.
fn raw_tag(tag: &str) -> Option<usize> {
    let inside = &tag[2..];
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    let after = inside.trim_start_matches(is_space).strip_prefix("raw")?;
    let after = after.trim_start_matches(is_space);
    let after = match after.strip_prefix("-%}") {
        Some(after) => after.trim_start_matches(is_space),
        None => after.strip_prefix("%}")?,
    };
    Some(tag.len() - after.len())
}
