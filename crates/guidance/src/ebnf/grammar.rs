//! An EBNF grammar: rules by number.

/// Rules by number, in order of first occurrence.
pub(super) struct Grammar {
    pub(super) rules: Vec<Expr>,
    /// Names of the rules.
    pub(super) names: Vec<String>,
    pub(super) root: usize,
}

/// The body of a rule, or a part of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expr {
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

/// Adds the rules that occur in `expr`.
pub(super) fn rules_in(expr: &Expr, rules: &mut Vec<usize>) {
    match expr {
        Expr::Any(parts) | Expr::All(parts) => parts.iter().for_each(|part| rules_in(part, rules)),
        Expr::Repeat(part, ..) => rules_in(part, rules),
        Expr::Rule(rule) => rules.push(*rule),
        Expr::Regex(_) => {}
    }
}

/// Whether all rules in `expr` are terminals.
pub(super) fn does_not_recurse(expr: &Expr, is_terminal: &[bool]) -> bool {
    match expr {
        Expr::Any(parts) | Expr::All(parts) => {
            parts.iter().all(|part| does_not_recurse(part, is_terminal))
        }
        Expr::Repeat(part, ..) => does_not_recurse(part, is_terminal),
        Expr::Rule(rule) => is_terminal[*rule],
        Expr::Regex(_) => true,
    }
}
