//! Writes an EBNF grammar in Lark's syntax.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::grammar::{Expr, Grammar, does_not_recurse};
use super::sizes::check_sizes;
use super::source::times;
use super::terminals::terminals;
use crate::grammar_error::GrammarError;

/// Writes `grammar`.
///
/// # Errors
/// One of its terminals is too large.
pub(super) fn write(grammar: &Grammar) -> Result<String, GrammarError> {
    let writer = Writer::new(grammar);
    check_sizes(&grammar.rules, &writer.order)?;
    writer.write()
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
