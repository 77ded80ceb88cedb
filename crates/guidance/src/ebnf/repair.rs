//! Rewrites an ambiguous rule as an unambiguous one that accepts equal texts.
//!
//! ```text
//! s ::= A | s s                -->  s ::= A+
//! s ::= A | s B s              -->  s ::= A (B A)*
//! s ::= A | H s | s T          -->  s ::= H* A T*
//! ```

use super::grammar::{Expr, Grammar, rules_in};

/// The body of `rule` written so; `None` if it has another form.
pub(super) fn repaired(grammar: &Grammar, rule: usize) -> Option<Expr> {
    let own = Expr::Rule(rule);
    let body = std::slice::from_ref(&grammar.rules[rule]);
    let options = match &grammar.rules[rule] {
        Expr::Any(options) => options,
        _ => body,
    };
    let (mut bases, mut heads, mut tails, mut joints) = (vec![], vec![], vec![], vec![]);
    let mut is_repeated = false;
    for option in options {
        match parts(option) {
            [only] if *only == own => {}
            all if all.len() > 1 && all.iter().all(|it| *it == own) => {
                // Three of them or more are as many as two of them make.
                is_repeated |= all.len() == 2;
                joints.extend((all.len() > 2).then(|| option.clone()));
            }
            [first, inner @ .., last] if *first == own && *last == own => {
                joints.push(Expr::All(inner.to_vec()));
            }
            [first, rest @ ..] if *first == own => tails.push(Expr::All(rest.to_vec())),
            [rest @ .., last] if *last == own => heads.push(Expr::All(rest.to_vec())),
            _ => bases.push(option.clone()),
        }
    }
    if is_repeated {
        joints.retain(|it| !parts(it).iter().all(|it| *it == own));
    }
    let mut used = Vec::new();
    let edges = heads.iter().chain(&tails).chain(&joints);
    edges.for_each(|it| rules_in(it, &mut used));
    if bases.is_empty() || used.contains(&rule) {
        return None;
    }
    let one = |mut options: Vec<Expr>| match options.len() {
        1 => options.remove(0),
        _ => Expr::Any(options),
    };
    let base = one(bases);
    let repeated = |expr: Expr, min| Expr::Repeat(Box::new(expr), min, None);
    let written = match (is_repeated, joints.is_empty()) {
        (true, true) if heads.is_empty() && tails.is_empty() => vec![repeated(base, 1)],
        (false, false) if heads.is_empty() && tails.is_empty() => {
            let more = repeated(Expr::All(vec![one(joints), base.clone()]), 0);
            vec![base, more]
        }
        (false, true) if !heads.is_empty() && !tails.is_empty() => {
            vec![repeated(one(heads), 0), base, repeated(one(tails), 0)]
        }
        _ => return None,
    };
    Some(Expr::All(written))
}

/// The parts of an alternative.
pub(super) fn parts(option: &Expr) -> &[Expr] {
    match option {
        Expr::All(parts) => parts,
        other => std::slice::from_ref(other),
    }
}
