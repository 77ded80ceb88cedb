//! Parses an EBNF grammar.

use std::collections::HashMap;

use super::grammar::{Expr, Grammar};
use super::lexer::{Lexer, Token};
use crate::grammar_error::GrammarError;

/// Maximum nesting of parentheses: the parser's limit.
const MAX_NESTING: usize = 25;

/// Parses a grammar.
///
/// # Errors
/// A syntax error with its line.
pub(super) fn parse(text: &str) -> Result<Grammar, GrammarError> {
    Parser::new(text)?.grammar()
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
        let mut names = vec![String::new(); self.rules.len()];
        for (name, number) in self.numbers {
            names[number] = name;
        }
        let mut rules = Vec::with_capacity(names.len());
        for (rule, name) in self.rules.into_iter().zip(&names) {
            rules.push(rule.ok_or_else(|| format!("the grammar has no rule '{name}'"))?);
        }
        Ok(Grammar { rules, names, root })
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
