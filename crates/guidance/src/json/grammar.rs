//! The grammar of a schema: what the rule of each goal consists of.

use std::collections::HashSet;

use serde_json::Value;

use super::branches::{self, Branch, Kinds, Term};
use super::rules::{Grammar, Part, literal, quoted, scalar_text};
use super::scalars::Numbers;
use super::schema::Problem;
use super::{arrays, objects};

/// The grammar of a whole schema.
pub(super) fn grammar(schema: &Value, max_steps: usize) -> Result<Grammar<'_>, Problem> {
    let mut grammar = Grammar::new(schema, max_steps)?;
    while let Some((goal, rule)) = grammar.next_open() {
        let part = alternatives(&mut grammar, &goal)?;
        grammar.set_rule(rule, part);
    }
    Ok(grammar)
}

/// The alternatives of a goal.
fn alternatives<'a>(grammar: &mut Grammar<'a>, goal: &[Term]) -> Result<Part, Problem> {
    let mut parts: Vec<Part> = Vec::new();
    let mut terminals: Vec<String> = Vec::new();
    let mut listed: Vec<&Value> = Vec::new();
    for branch in branches::branches(&mut grammar.schema, goal)? {
        if branch.is_listed {
            listed.extend(grammar.schema.listed(&branch, goal));
            continue;
        }
        add(grammar, &branch, &mut terminals, &mut parts)?;
    }
    for value in listed {
        grammar.schema.spend(1)?;
        match value {
            Value::Array(_) | Value::Object(_) => {
                let part = literal(value)?;
                if !parts.contains(&part) {
                    parts.push(part);
                }
            }
            scalar => terminals.push(quoted(&scalar_text(scalar)?)),
        }
    }
    let mut seen = HashSet::new();
    terminals.retain(|it| seen.insert(it.clone()));
    if !terminals.is_empty() {
        parts.insert(0, Part::Terminal(terminals.join(" | ")));
    }
    parts.dedup();
    Ok(match parts.len() {
        1 => parts.remove(0),
        _ => Part::Choice(parts),
    })
}

/// Adds what a branch allows: scalars to the terminals, and others to the parts.
fn add<'a>(
    grammar: &mut Grammar<'a>,
    branch: &Branch<'a>,
    terminals: &mut Vec<String>,
    parts: &mut Vec<Part>,
) -> Result<(), Problem> {
    let is_excluded = |value: &Value| branch.excluded.contains(&value);
    if branch.kinds.has(Kinds::NULL) && !is_excluded(&Value::Null) {
        terminals.push("\"null\"".to_owned());
    }
    for (value, text) in [(true, "\"true\""), (false, "\"false\"")] {
        if branch.kinds.has(Kinds::BOOLEAN) && !is_excluded(&Value::Bool(value)) {
            terminals.push(text.to_owned());
        }
    }
    if branch.kinds.has(Kinds::NUMBER) {
        match branch.numbers() {
            Numbers::Texts(texts) => terminals.extend(grammar.terminal(&texts, false)?),
            Numbers::Multiples(schema) => parts.push(Part::Library(schema)),
            Numbers::AnySteps(texts) => {
                let owner = branch.owner("multipleOf", &grammar.schema);
                grammar.schema.leave_out("multipleOf", owner);
                terminals.extend(grammar.terminal(&texts, false)?);
            }
        }
    }
    if branch.kinds.has(Kinds::STRING) {
        let texts = branch.string_texts().ok_or(Problem::TooLarge)?;
        terminals.extend(grammar.terminal(&texts, true)?);
    }
    if branch.kinds.has(Kinds::ARRAY) {
        parts.push(arrays::array(grammar, branch)?);
    }
    if branch.kinds.has(Kinds::OBJECT) {
        parts.push(objects::object(grammar, branch)?);
    }
    Ok(())
}
