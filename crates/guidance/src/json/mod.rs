//! Schemas of JSON as grammars.
//!
//! ```text
//! schema --> Document: references --> branches: alternatives of a goal --> Grammar: a rule for each goal --> Lark
//!
//! document.rs   parts of the schema by number, and references between them
//! keywords.rs   the keywords, and what becomes of each
//! schema.rs     what is known while a schema is compiled, and what was left out
//! branches.rs   a goal, schemas that all hold, as alternatives without choices
//! matches.rs    which of the values that a schema lists are valid
//! scalars.rs    numbers and texts of a branch; decimal.rs, text.rs and formats.rs
//! arrays.rs     arrays of a branch
//! objects.rs    objects of a branch
//! overlaps.rs   alternatives that have values in common, for errors
//! rules.rs      rules, of which only those are written that lead to an end
//! grammar.rs    what they consist of
//! ```
//!
//! A goal is a set of schemas that a value must meet at once, such as what `properties` and two `patternProperties` say
//! about one property. There are finitely many, so that rules may refer to each other where schemas do. What is written
//! is live: each rule and each terminal in it has a text, so that whatever it offers leads to an end.

mod arrays;
mod branches;
mod decimal;
mod document;
mod formats;
mod grammar;
mod keywords;
mod matches;
mod objects;
mod overlaps;
mod rules;
mod scalars;
mod schema;
mod text;

#[cfg(test)]
mod random_schemas;
#[cfg(test)]
mod tests;

use llguidance::api::GrammarWithLexer;
use serde_json::{Map, Value};

use self::grammar::grammar;
pub(super) use self::overlaps::overlap;
use self::schema::{MAX_STEPS, Problem};
use crate::grammar_error::GrammarError;

/// White space between two parts of JSON: a space, or a line break with indentation. (If any amount were allowed, a
/// model might generate white space forever.)
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,20}";

/// A schema's grammar.
///
/// # Errors
/// The schema is none, or has no value, or a keyword cannot be enforced and `x-guidance` says that all must be.
pub(super) fn of_schema(schema: &Value) -> Result<GrammarWithLexer, GrammarError> {
    let explained = |problem: Problem| {
        let is_too_large = matches!(problem, Problem::TooLarge);
        let cause = is_too_large.then(|| overlap(schema)).flatten();
        match cause {
            Some(cause) => format!("{}; {cause}", problem.text()),
            None => problem.text(),
        }
    };
    let (lark, left_out) = compiled(schema, MAX_STEPS).map_err(explained)?;
    let layout = schema.get("x-guidance");
    let is_strict = layout.and_then(|it| it.get("lenient")) == Some(&Value::Bool(false));
    match left_out.is_empty() || !is_strict {
        true => Ok(GrammarWithLexer::from_lark(lark)),
        false => Err(format!(
            "it is strict, and these parts cannot be enforced: {}",
            listed(&left_out)
        )),
    }
}

/// Whether a schema has a keyword that may be left out.
pub(super) fn may_leave_out(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => members.iter().any(|(name, value)| {
            keywords::PERHAPS_LEFT_OUT.contains(&name.as_str()) || may_leave_out(value)
        }),
        Value::Array(list) => list.iter().any(may_leave_out),
        _ => false,
    }
}

/// The keywords of a schema that are not enforced, each with its place.
///
/// # Errors
/// The schema has no grammar.
pub(super) fn left_out(schema: &Value) -> Result<Vec<String>, GrammarError> {
    // A request is being prepared, and others wait.
    match compiled(schema, MAX_STEPS / 5) {
        Ok((_, left_out)) => Ok(left_out),
        Err(Problem::TooLarge) => Ok(vec!["perhaps parts of it, for it is large".to_owned()]),
        Err(Problem::Wrong(problem)) => Err(problem),
    }
}

fn listed(left_out: &[String]) -> String {
    const MAX: usize = 8;
    let more = match left_out.len().checked_sub(MAX) {
        None | Some(0) => String::new(),
        Some(num) => format!(", and {num} more"),
    };
    format!("{}{more}", left_out[..left_out.len().min(MAX)].join(", "))
}

fn compiled(schema: &Value, max_steps: usize) -> Result<(String, Vec<String>), Problem> {
    let head = head(schema.get("x-guidance")).map_err(Problem::Wrong)?;
    let grammar = grammar(schema, max_steps)?;
    match grammar.write(&head) {
        Some(lark) => Ok((lark, grammar.schema.left_out())),
        None => Err(Problem::Wrong(
            "it matches no text: no value is valid under the schema (unsatisfiable)".to_owned(),
        )),
    }
}

/// The lines of a grammar that say what may be between two parts of JSON.
fn head(layout: Option<&Value>) -> Result<String, GrammarError> {
    let empty = Map::new();
    let layout = match layout {
        None => &empty,
        Some(Value::Object(layout)) => layout,
        Some(other) => {
            return Err(format!(
                "its 'x-guidance' is no object: {}",
                branches::short(other)
            ));
        }
    };
    let mut pattern = Some(WHITE_SPACE.to_owned());
    for (name, value) in layout {
        match (name.as_str(), value) {
            ("whitespace_flexible", Value::Bool(false))
                if !layout.contains_key("whitespace_pattern") =>
            {
                pattern = None
            }
            ("whitespace_flexible", Value::Bool(true))
                if !layout.contains_key("whitespace_pattern") =>
            {
                pattern = Some(r"[ \n\r\t]+".to_owned());
            }
            ("whitespace_pattern", Value::String(own)) => {
                pattern = Some(llguidance::regex_to_lark(own, ""))
            }
            ("whitespace_flexible" | "lenient" | "coerce_one_of", Value::Bool(_))
            | ("whitespace_pattern", Value::Null) => {}
            ("item_separator", Value::String(own)) if own == "," => {}
            ("key_separator", Value::String(own)) if own == ":" => {}
            (name, value) => {
                return Err(format!(
                    "its 'x-guidance' has '{name}': {}; it may have 'whitespace_pattern', 'whitespace_flexible' and 'lenient'",
                    branches::short(value)
                ));
            }
        }
    }
    Ok(match pattern {
        None => String::new(),
        Some(pattern) => format!("%llguidance {{\"ignore_once\": true}}\n%ignore /{pattern}/\n"),
    })
}
