//! Bounds the terminals of a grammar.

use super::grammar::Expr;
use crate::grammar_error::GrammarError;

/// Maximum number of literals and character classes in a terminal, including the terminals in it.
const MAX_TERMINAL_SIZE: usize = 4_000;

/// Maximum number of optional parts in a terminal. A sequence of them costs the square of its length for every
/// character.
const MAX_OPTIONAL_PARTS: usize = 400;

/// Rejects terminals that are too large once the terminals in them are expanded.
pub(super) fn check_sizes(rules: &[Expr], order: &[usize]) -> Result<(), GrammarError> {
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
