//! The rules of a grammar that are regular expressions.

use super::grammar::{Expr, rules_in};

/// The rules that do not reach a recursive rule, each after the rules that it uses (topological order).
pub(super) fn terminals(rules: &[Expr]) -> Vec<usize> {
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
