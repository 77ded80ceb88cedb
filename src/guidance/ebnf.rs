//! Converts EBNF grammars, as used by llama.cpp (GBNF) and XGrammar, to Lark's syntax, which the parser reads.
//!
//! ```text
//! root  ::= "[" item ("," item)* "]"         start: r0
//! item  ::= root | digit+                    r0: T2 r1 (T3 r1)* T4        r1: r0 | T5
//! digit ::= [0-9]                            T5: T1+                      T1: /[\x{30}-\x{39}]/
//! ```
//!
//! Parts without recursion become *terminals*: regular expressions. A terminal always matches the longest text, so parts of
//! an ambiguous grammar may be unreachable; the output always conforms to the grammar. A grammar without any recursion
//! is a single terminal and exact.

use std::collections::HashMap;
use std::fmt::Write as _;

use crate::guidance::grammar_error::GrammarError;
use crate::guidance::regex::escaped;

/// Maximum nesting of parentheses: the parser's limit.
const MAX_NESTING: usize = 25;

/// Maximum number of literals and character classes in a terminal, including the terminals in it.
const MAX_TERMINAL_SIZE: usize = 4_000;

/// Maximum number of optional parts in a terminal. A sequence of them costs the square of its length for every character.
const MAX_OPTIONAL_PARTS: usize = 400;

/// Maximum number in `{m,n}`.
const MAX_REPEATS: u32 = 10_000;

/// A grammar in either notation as Lark.
pub(super) fn lark(text: &str) -> Result<String, GrammarError> {
    match is_ebnf(text) {
        true => to_lark(text),
        false => Ok(text.to_owned()),
    }
}

/// Whether a grammar is EBNF instead of Lark.
pub(super) fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// Converts an EBNF grammar to Lark's syntax.
///
/// # Errors
/// A syntax error with its line, or a grammar that is too large.
pub fn to_lark(text: &str) -> Result<String, GrammarError> {
    let grammar = Parser::new(text)?.grammar()?;
    let writer = Writer::new(&grammar);
    check_sizes(&grammar.rules, &writer.order)?;
    writer.write()
}

/// Rules by number, in order of first occurrence.
struct Grammar {
    rules: Vec<Expr>,
    root: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Expr {
    /// Alternatives.
    Any(Vec<Expr>),
    /// A sequence.
    All(Vec<Expr>),
    /// Minimum and maximum number of repetitions; None is unlimited.
    Repeat(Box<Expr>, u32, Option<u32>),
    /// The regular expression of a literal or a character class.
    Regex(String),
    /// The number of a rule.
    Rule(usize),
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Defines,
    Regex(String),
    Sign(char),
    Repeat(u32, Option<u32>),
}

/// Splits a grammar into tokens, each with its line number.
struct Lexer<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
}

impl<'a> Lexer<'a> {
    fn tokens(text: &'a str) -> Result<Vec<(Token, usize)>, GrammarError> {
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
                '.' => Token::Regex("(?s:.)".to_owned()),
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

struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    /// Rule numbers by name, including rules that are not defined yet.
    numbers: HashMap<String, usize>,
    rules: Vec<Option<Expr>>,
    nesting: usize,
}

impl Parser {
    fn new(text: &str) -> Result<Self, GrammarError> {
        Ok(Self {
            tokens: Lexer::tokens(text)?,
            at: 0,
            numbers: HashMap::new(),
            rules: Vec::new(),
            nesting: 0,
        })
    }

    fn grammar(mut self) -> Result<Grammar, GrammarError> {
        while self.at < self.tokens.len() {
            self.rule()?;
        }
        let Some(&root) = self.numbers.get("root") else {
            return Err("the grammar has no rule 'root'".to_owned());
        };
        let mut rules = Vec::with_capacity(self.rules.len());
        for (number, rule) in self.rules.into_iter().enumerate() {
            let name = || self.numbers.iter().find(|(_, other)| **other == number);
            let undefined = || name().map(|(name, _)| name.as_str()).unwrap_or_default();
            rules.push(rule.ok_or_else(|| format!("the grammar has no rule '{}'", undefined()))?);
        }
        Ok(Grammar { rules, root })
    }

    fn rule(&mut self) -> Result<(), GrammarError> {
        let (Some(Token::Name(name)), true) = (self.peek().cloned(), self.begins_rule()) else {
            return Err(self.error("expected a rule such as 'name ::= ...'"));
        };
        self.at += 2;
        let number = self.number(&name);
        let body = self.alternatives()?;
        if self.rules[number].replace(body).is_some() {
            return Err(format!("the grammar defines the rule '{name}' twice"));
        }
        Ok(())
    }

    fn alternatives(&mut self) -> Result<Expr, GrammarError> {
        let mut options = vec![self.sequence()?];
        while self.consume_sign('|') {
            options.push(self.sequence()?);
        }
        Ok(match options.len() {
            1 => options.remove(0),
            _ => Expr::Any(options),
        })
    }

    fn sequence(&mut self) -> Result<Expr, GrammarError> {
        let mut parts = Vec::new();
        while !self.begins_rule()
            && let Some(mut part) = self.part()?
        {
            while let Some((min, max)) = self.consume_repeat() {
                part = Expr::Repeat(Box::new(part), min, max);
            }
            parts.push(part);
        }
        Ok(match parts.len() {
            1 => parts.remove(0),
            _ => Expr::All(parts),
        })
    }

    /// One part of a sequence. None at the end of the sequence.
    fn part(&mut self) -> Result<Option<Expr>, GrammarError> {
        let part = match self.peek().cloned() {
            Some(Token::Regex(regex)) => Expr::Regex(regex),
            Some(Token::Name(name)) => Expr::Rule(self.number(&name)),
            Some(Token::Sign('(')) => {
                self.at += 1;
                self.nesting += 1;
                if self.nesting > MAX_NESTING {
                    let text = format!("more than {MAX_NESTING} nested parentheses");
                    return Err(self.error(&text));
                }
                let inner = self.alternatives()?;
                self.nesting -= 1;
                if !self.consume_sign(')') {
                    return Err(self.error("a parenthesis is not closed"));
                }
                return Ok(Some(inner));
            }
            Some(Token::Sign('|' | ')')) | None => return Ok(None),
            Some(Token::Sign(_) | Token::Repeat(..)) => {
                return Err(self.error("nothing to repeat"));
            }
            Some(Token::Defines) => return Err(self.error("'::=' does not follow a name")),
        };
        self.at += 1;
        Ok(Some(part))
    }

    fn consume_repeat(&mut self) -> Option<(u32, Option<u32>)> {
        let bounds = match self.peek()? {
            Token::Sign('*') => (0, None),
            Token::Sign('+') => (1, None),
            Token::Sign('?') => (0, Some(1)),
            Token::Repeat(min, max) => (*min, *max),
            _ => return None,
        };
        self.at += 1;
        Some(bounds)
    }

    fn consume_sign(&mut self, sign: char) -> bool {
        let is_next = self.peek() == Some(&Token::Sign(sign));
        self.at += usize::from(is_next);
        is_next
    }

    fn begins_rule(&self) -> bool {
        let next = self.tokens.get(self.at + 1).map(|(token, _)| token);
        matches!(self.peek(), Some(Token::Name(_))) && next == Some(&Token::Defines)
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn error(&self, text: &str) -> GrammarError {
        let line = self.tokens.get(self.at).or(self.tokens.last());
        let line = line.map_or(1, |(_, line)| *line);
        format!("line {line} of the grammar: {text}")
    }

    fn number(&mut self, name: &str) -> usize {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        let number = self.rules.len();
        self.numbers.insert(name.to_owned(), number);
        self.rules.push(None);
        number
    }
}

/// Writes a grammar in Lark's syntax: `r0` for recursive rules, `T0` for the others, and further terminals for the
/// non-recursive parts of recursive rules.
struct Writer<'a> {
    grammar: &'a Grammar,
    is_terminal: Vec<bool>,
    /// The rules that are terminals, each after the terminals in it.
    order: Vec<usize>,
    /// Numbers of further terminals by content.
    numbers: HashMap<String, usize>,
    lark: String,
}

impl<'a> Writer<'a> {
    fn new(grammar: &'a Grammar) -> Self {
        let order = terminals(&grammar.rules);
        let mut is_terminal = vec![false; grammar.rules.len()];
        order.iter().for_each(|&rule| is_terminal[rule] = true);
        Self {
            is_terminal,
            order,
            grammar,
            numbers: HashMap::new(),
            lark: String::new(),
        }
    }

    fn write(mut self) -> Result<String, GrammarError> {
        self.line(format!("start: {}", self.name(self.grammar.root)));
        for (number, rule) in self.grammar.rules.iter().enumerate() {
            let body = match self.is_terminal[number] {
                true => self.terminal(rule),
                false => self.rule(rule),
            };
            self.line(format!("{}: {body}", self.name(number)));
        }
        Ok(self.lark)
    }

    fn line(&mut self, line: String) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.lark, "{line}");
    }

    fn name(&self, rule: usize) -> String {
        let kind = if self.is_terminal[rule] { 'T' } else { 'r' };
        format!("{kind}{rule}")
    }

    fn does_not_recurse(&self, expr: &Expr) -> bool {
        does_not_recurse(expr, &self.is_terminal)
    }

    /// The body of a rule: recursive rules, and the name of a terminal for each stretch between them.
    fn rule(&mut self, expr: &Expr) -> String {
        if self.does_not_recurse(expr) {
            return self.terminal_name(expr);
        }
        match expr {
            Expr::Any(options) => {
                let options: Vec<_> = options.iter().map(|option| self.rule(option)).collect();
                format!("({})", options.join(" | "))
            }
            Expr::All(parts) => {
                let mut written = Vec::new();
                let mut stretches =
                    parts.chunk_by(|a, b| self.does_not_recurse(a) && self.does_not_recurse(b));
                let stretches: Vec<_> = stretches.by_ref().collect();
                for stretch in stretches {
                    written.push(match stretch {
                        [part] => self.rule(part),
                        parts => self.terminal_name(&Expr::All(parts.to_vec())),
                    });
                }
                format!("({})", written.join(" "))
            }
            Expr::Repeat(part, min, max) => format!("({}){}", self.rule(part), times(*min, *max)),
            Expr::Rule(rule) => self.name(*rule),
            Expr::Regex(_) => self.terminal_name(expr),
        }
    }

    /// The name of the terminal for `expr`. Writes the terminal if it is new.
    fn terminal_name(&mut self, expr: &Expr) -> String {
        if let Expr::Rule(rule) = expr {
            return self.name(*rule);
        }
        let body = self.terminal(expr);
        let next = self.grammar.rules.len() + self.numbers.len();
        let number = *self.numbers.entry(body.clone()).or_insert(next);
        if number == next {
            self.line(format!("T{number}: {body}"));
        }
        format!("T{number}")
    }

    /// The body of a terminal.
    fn terminal(&self, expr: &Expr) -> String {
        let list = |parts: &[Expr], between| {
            let parts: Vec<_> = parts.iter().map(|part| self.terminal(part)).collect();
            parts.join(between)
        };
        match expr {
            Expr::Any(options) => format!("({})", list(options, " | ")),
            Expr::All(parts) if parts.is_empty() => "\"\"".to_owned(),
            Expr::All(parts) => format!("({})", list(parts, " ")),
            Expr::Repeat(part, min, max) => {
                format!("({}){}", self.terminal(part), times(*min, *max))
            }
            Expr::Regex(regex) if regex.is_empty() => "\"\"".to_owned(),
            Expr::Regex(regex) => format!("/{regex}/"),
            Expr::Rule(rule) => self.name(*rule),
        }
    }
}

fn times(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

/// The rules that do not reach a recursive rule, each after the rules that it uses (topological order).
fn terminals(rules: &[Expr]) -> Vec<usize> {
    let mut num_unresolved: Vec<usize> = Vec::with_capacity(rules.len());
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    for (number, rule) in rules.iter().enumerate() {
        let mut used = Vec::new();
        rules_in(rule, &mut used);
        num_unresolved.push(used.len());
        for rule in used {
            users[rule].push(number);
        }
    }
    let mut found: Vec<usize> = (0..rules.len())
        .filter(|&rule| num_unresolved[rule] == 0)
        .collect();
    let mut next = 0;
    while let Some(&rule) = found.get(next) {
        next += 1;
        for &user in &users[rule] {
            num_unresolved[user] -= 1;
            if num_unresolved[user] == 0 {
                found.push(user);
            }
        }
    }
    found
}

/// Rejects terminals that are too large once the terminals in them are expanded.
fn check_sizes(rules: &[Expr], order: &[usize]) -> Result<(), GrammarError> {
    let mut sizes = vec![Size::default(); rules.len()];
    for &rule in order {
        sizes[rule] = size(&rules[rule], &sizes);
    }
    // A recursive rule counts as zero inside others; its own terminals are counted where they occur.
    let all = rules.iter().map(|rule| size(rule, &sizes));
    let (num_parts, num_optional) = all.fold((0, 0), |(parts, optional), size| {
        (size.num_parts.max(parts), size.num_optional.max(optional))
    });
    if num_parts <= MAX_TERMINAL_SIZE && num_optional <= MAX_OPTIONAL_PARTS {
        return Ok(());
    }
    Err(format!(
        "a rule of the grammar, fully expanded, has {num_parts} literals and character classes and {num_optional} \
         optional parts; the limits are {MAX_TERMINAL_SIZE} and {MAX_OPTIONAL_PARTS}"
    ))
}

#[derive(Clone, Copy, Default)]
struct Size {
    num_parts: usize,
    num_optional: usize,
}

fn size(expr: &Expr, sizes: &[Size]) -> Size {
    match expr {
        Expr::Any(parts) | Expr::All(parts) => parts.iter().fold(Size::default(), |sum, part| {
            let size = size(part, sizes);
            Size {
                num_parts: sum.num_parts.saturating_add(size.num_parts),
                num_optional: sum.num_optional.saturating_add(size.num_optional),
            }
        }),
        Expr::Repeat(part, min, _) => {
            let size = size(part, sizes);
            Size {
                num_optional: size.num_optional.saturating_add(usize::from(*min == 0)),
                ..size
            }
        }
        Expr::Rule(rule) => sizes[*rule],
        Expr::Regex(_) => Size {
            num_parts: 1,
            num_optional: 0,
        },
    }
}

fn rules_in(expr: &Expr, rules: &mut Vec<usize>) {
    match expr {
        Expr::Any(parts) | Expr::All(parts) => parts.iter().for_each(|part| rules_in(part, rules)),
        Expr::Repeat(part, ..) => rules_in(part, rules),
        Expr::Rule(rule) => rules.push(*rule),
        Expr::Regex(_) => {}
    }
}

fn does_not_recurse(expr: &Expr, is_terminal: &[bool]) -> bool {
    match expr {
        Expr::Any(parts) | Expr::All(parts) => {
            parts.iter().all(|part| does_not_recurse(part, is_terminal))
        }
        Expr::Repeat(part, ..) => does_not_recurse(part, is_terminal),
        Expr::Rule(rule) => is_terminal[*rule],
        Expr::Regex(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_non_recursive_grammar_is_one_terminal() {
        let lark = to_lark(
            "# a date\nroot ::= year \"-\" [0-9]{2} |\n  \"to\\u0064ay\"\nyear ::= [1-9] [0-9]{3,}\n",
        );
        assert_eq!(
            lark.expect("good"),
            "start: T0\n\
             T0: ((T1 /\\x{2D}/ (/[\\x{30}-\\x{39}]/){2,2}) | /today/)\n\
             T1: (/[\\x{31}-\\x{39}]/ (/[\\x{30}-\\x{39}]/){3,})\n"
        );
    }

    #[test]
    fn recursive_rules_keep_terminals_between_them() {
        let lark = to_lark(
            "root ::= \"[\" ws item (ws \",\" item)* \"]\"\nitem ::= root | [^a\\]-]+\nws ::= \" \"?",
        );
        assert_eq!(
            lark.expect("good"),
            "start: r0\n\
             T3: (/\\x{5B}/ T1)\n\
             T4: (T1 /\\x{2C}/)\n\
             T5: /\\x{5D}/\n\
             r0: (T3 r2 ((T4 r2))* T5)\n\
             T1: (/ /)?\n\
             T6: (/[^\\x{61}\\x{5D}\\x{2D}]/)+\n\
             r2: (r0 | T6)\n"
        );
    }

    #[test]
    fn errors_name_the_line() {
        let nested = format!("root ::= {}\"a\"{}", "(".repeat(26), ")".repeat(26));
        for (grammar, words) in [
            ("a ::= \"x\"", "no rule 'root'"),
            ("root ::= a", "no rule 'a'"),
            ("root ::= \"a\"\nroot ::= \"b\"", "rule 'root' twice"),
            (
                "root ::= \"a",
                "line 1 of the grammar: a literal has no closing quote",
            ),
            (
                "root ::= \"a\"\n  [",
                "line 2 of the grammar: a character class has no",
            ),
            ("root ::= []", "class is empty"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= * \"a\"", "nothing to repeat"),
            ("root ::= (\"a\"", "parenthesis is not closed"),
            ("root ::= \"a\")", "expected a rule"),
            ("::= \"a\"", "expected a rule"),
            ("root ::= \"\\q\"", "unknown escape '\\q'"),
            ("root ::= \"\\ud800\"", "is not a character"),
            ("root ::= \"a\"{3,2}", "{3,2} is not"),
            ("root ::= \"a\"{100000}", "numbers up to 10000"),
            ("root ::= \"a\" (= \"b\")", "unexpected character '='"),
            ("root := \"a\" ::=", "not followed by ':='"),
            (nested.as_str(), "more than 25 nested parentheses"),
        ] {
            let problem = to_lark(grammar).expect_err(grammar);
            assert!(problem.contains(words), "{grammar}: {problem}");
        }
    }
}
