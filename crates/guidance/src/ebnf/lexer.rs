//! Splits an EBNF grammar into tokens.

use crate::grammar_error::GrammarError;
use crate::regex::escaped;

/// Maximum number in `{m,n}`.
const MAX_REPEATS: u32 = 10_000;

/// The regular expression of `.`.
pub(super) const ANY_CHARACTER: &str = "(?s:.)";

/// A token of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Defines,
    Regex(String),
    Sign(char),
    Repeat(u32, Option<u32>),
}

/// Splits a grammar into tokens, each with its line number.
pub(super) struct Lexer<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
}

impl<'a> Lexer<'a> {
    /// The tokens of a grammar, each with its line number.
    pub(super) fn tokens(text: &'a str) -> Result<Vec<(Token, usize)>, GrammarError> {
        let mut lexer = Self {
            rest: text.chars().peekable(),
            line: 1,
        };
        let mut tokens = Vec::new();
        while let Some(token) = lexer.token()? {
            tokens.push((token, lexer.line));
        }
        Ok(tokens)
    }

    fn token(&mut self) -> Result<Option<Token>, GrammarError> {
        loop {
            let Some(char) = self.next() else {
                return Ok(None);
            };
            return Ok(Some(match char {
                '#' => {
                    while self.rest.peek().is_some_and(|char| *char != '\n') {
                        self.next();
                    }
                    continue;
                }
                char if char.is_whitespace() => continue,
                '"' => self.literal()?,
                '[' => self.class()?,
                '{' => self.repeat()?,
                '.' => Token::Regex(ANY_CHARACTER.to_owned()),
                ':' => {
                    for expected in [':', '='] {
                        if self.next() != Some(expected) {
                            return Err(self.error("':' is not followed by ':='"));
                        }
                    }
                    Token::Defines
                }
                '(' | ')' | '|' | '*' | '+' | '?' => Token::Sign(char),
                char if is_name(char) => {
                    let mut name = char.to_string();
                    while let Some(&char) = self.rest.peek().filter(|char| is_name(**char)) {
                        name.push(char);
                        self.next();
                    }
                    Token::Name(name)
                }
                other => return Err(self.error(&format!("unexpected character {other:?}"))),
            }));
        }
    }

    fn next(&mut self) -> Option<char> {
        let char = self.rest.next();
        self.line += usize::from(char == Some('\n'));
        char
    }

    fn error(&self, text: &str) -> GrammarError {
        format!("line {} of the grammar: {text}", self.line)
    }

    fn literal(&mut self) -> Result<Token, GrammarError> {
        let mut regex = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Token::Regex(regex)),
                Some('\\') => regex.push_str(&escaped(self.escape()?)),
                Some(char) => regex.push_str(&escaped(char)),
                None => return Err(self.error("a literal has no closing quote")),
            }
        }
    }

    /// `[a-z_]` or `[^a-z_]`.
    fn class(&mut self) -> Result<Token, GrammarError> {
        let mut regex = "[".to_owned();
        if self.rest.next_if_eq(&'^').is_some() {
            regex.push('^');
        }
        let mut num_members = 0;
        loop {
            let first = match self.next() {
                Some(']') if num_members > 0 => {
                    regex.push(']');
                    return Ok(Token::Regex(regex));
                }
                Some(']') => return Err(self.error("a character class is empty")),
                Some('\\') => self.escape()?,
                Some(char) => char,
                None => return Err(self.error("a character class has no closing bracket")),
            };
            regex.push_str(&in_class(first));
            num_members += 1;
            let mut ahead = self.rest.clone();
            if ahead.next() == Some('-') && ahead.next().is_some_and(|char| char != ']') {
                self.next();
                let last = match self.next() {
                    Some('\\') => self.escape()?,
                    Some(char) => char,
                    None => return Err(self.error("a character class has no closing bracket")),
                };
                if last < first {
                    let text = format!("the range {first:?} to {last:?} is empty");
                    return Err(self.error(&text));
                }
                regex.push('-');
                regex.push_str(&in_class(last));
            }
        }
    }

    /// The character after a backslash.
    fn escape(&mut self) -> Result<char, GrammarError> {
        let char = self.next().ok_or_else(|| self.error("a lone backslash"))?;
        let num_digits = match char {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            char if char.is_alphanumeric() => {
                return Err(self.error(&format!("unknown escape '\\{char}'")));
            }
            char => return Ok(char),
        };
        let digits: String = self.rest.by_ref().take(num_digits).collect();
        let code = u32::from_str_radix(&digits, 16).ok();
        code.filter(|_| digits.len() == num_digits)
            .and_then(char::from_u32)
            .ok_or_else(|| self.error(&format!("'\\{char}{digits}' is not a character")))
    }

    /// `{3}`, `{3,}` or `{3,5}`.
    fn repeat(&mut self) -> Result<Token, GrammarError> {
        let mut text = String::new();
        loop {
            match self.next() {
                Some('}') => break,
                Some(char) if text.len() < 32 => text.push(char),
                _ => return Err(self.error("'{' has no '}'")),
            }
        }
        let number = |text: &str| {
            let number: u32 = text.trim().parse().ok()?;
            (number <= MAX_REPEATS).then_some(number)
        };
        let bounds = match text.split_once(',') {
            None => number(&text).map(|count| (count, Some(count))),
            Some((min, "")) => number(min).map(|min| (min, None)),
            Some((min, max)) => number(min).zip(number(max).map(Some)),
        };
        match bounds {
            Some((min, max)) if max.is_none_or(|max| min <= max) => Ok(Token::Repeat(min, max)),
            _ => Err(self.error(&format!(
                "{{{text}}} is not {{m}}, {{m,}} or {{m,n}} with numbers up to {MAX_REPEATS}"
            ))),
        }
    }
}

fn is_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '_' | '-')
}

fn in_class(char: char) -> String {
    format!("\\x{{{:X}}}", u32::from(char))
}
