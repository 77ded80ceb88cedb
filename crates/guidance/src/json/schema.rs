//! A schema while it is compiled: its document, what was left out of it, and the work that is left.

use std::collections::{BTreeSet, HashMap};

use llguidance::derivre::Regex;
use serde_json::Value;

use super::document::{Document, Id};
use super::keywords;
use super::text::{Texts, Unusable};
use crate::grammar_error::GrammarError;

/// The most steps: alternatives, and parts of the grammar.
pub(super) const MAX_STEPS: usize = 60_000;

/// The most references within each other in what is negated.
const MAX_DEPTH: usize = 24;

/// Why a schema has no grammar.
pub(super) enum Problem {
    TooLarge,
    Wrong(GrammarError),
}

impl Problem {
    pub fn text(self) -> GrammarError {
        match self {
            Self::Wrong(problem) => problem,
            Self::TooLarge => {
                "it is too large, or has too many combinations of alternatives; write a simpler schema".to_owned()
            }
        }
    }
}

pub(super) struct Schema<'a> {
    pub document: Document<'a>,
    /// Whether it matters which schema a keyword is part of.
    pub has_scopes: bool,
    left_out: BTreeSet<(Id, &'static str)>,
    patterns: HashMap<&'a str, Option<Texts>>,
    matchers: HashMap<&'a str, Option<Regex>>,
    num_steps: usize,
    max_steps: usize,
    /// Whether it is only asked whether there is a value. Then nothing is left out.
    pub is_probing: bool,
}

impl<'a> Schema<'a> {
    pub fn new(schema: &'a Value, max_steps: usize) -> Self {
        let document = Document::new(schema);
        Self {
            has_scopes: document.has_key(&["unevaluatedProperties", "unevaluatedItems"]),
            document,
            left_out: BTreeSet::new(),
            patterns: HashMap::new(),
            matchers: HashMap::new(),
            num_steps: 0,
            max_steps,
            is_probing: false,
        }
    }

    pub fn is_probing(&self) -> bool {
        self.is_probing
    }

    /// Counts work.
    pub fn spend(&mut self, num: usize) -> Result<(), Problem> {
        self.num_steps += num;
        match self.num_steps > self.max_steps {
            true => Err(Problem::TooLarge),
            false => Ok(()),
        }
    }

    /// Notes that a keyword of a schema is not enforced.
    pub fn leave_out(&mut self, keyword: &str, schema: Id) {
        let known = keywords::ASSERTIONS.iter().find(|it| **it == keyword);
        if let (false, Some(keyword)) = (self.is_probing, known) {
            self.left_out.insert((schema, keyword));
        }
    }

    /// The keywords that are not enforced, each with its place.
    pub fn left_out(&self) -> Vec<String> {
        let place = |(schema, keyword): &(Id, &str)| {
            format!("'{keyword}' at '#{}'", self.document.path(*schema))
        };
        self.left_out.iter().map(place).collect()
    }

    /// The texts that a pattern matches; `None` if they cannot be guided.
    pub fn pattern(&mut self, pattern: &'a str) -> Result<Option<Texts>, Problem> {
        if let Some(found) = self.patterns.get(pattern) {
            return Ok(found.clone());
        }
        let texts = match Texts::with_match(pattern) {
            Ok(texts) => Some(texts),
            Err(Unusable::Unsupported) => None,
            Err(Unusable::Wrong(problem)) => {
                let pattern: String = pattern.chars().take(60).collect();
                return Err(Problem::Wrong(format!(
                    "its regular expression (regex) '{pattern}' is wrong: {problem}"
                )));
            }
        };
        self.patterns.insert(pattern, texts.clone());
        Ok(texts)
    }

    /// Whether a pattern that can be guided matches a name.
    pub fn has_match(&mut self, pattern: &'a str, name: &str) -> Result<bool, Problem> {
        self.spend(1)?;
        if !self.matchers.contains_key(pattern) {
            let texts = self.pattern(pattern)?;
            self.matchers
                .insert(pattern, texts.and_then(|it| it.matcher()));
        }
        let matcher = self.matchers.get_mut(pattern).and_then(Option::as_mut);
        Ok(matcher.is_some_and(|it| it.is_match(name)))
    }

    /// Whether it can be enforced that a schema does not hold.
    pub fn can_be_negated(&mut self, schema: &'a Value, depth: usize) -> bool {
        let members = match schema {
            Value::Bool(_) => return true,
            Value::Object(members) if depth < MAX_DEPTH => members,
            _ => return false,
        };
        let is_simple = |value: &Value| !value.is_array() && !value.is_object();
        members
            .iter()
            .all(|(keyword, argument)| match keyword.as_str() {
                "type" | "required" | "not" | "minItems" | "maxItems" | "minLength"
                | "maxLength" => true,
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                    !["exclusiveMinimum", "exclusiveMaximum"]
                        .iter()
                        .any(|it| members.get(*it).is_some_and(Value::is_boolean))
                }
                "const" => is_simple(argument),
                "enum" => argument
                    .as_array()
                    .is_some_and(|list| list.iter().all(is_simple)),
                "pattern" => {
                    let pattern = argument.as_str().map(|it| self.pattern(it));
                    matches!(pattern, Some(Ok(Some(_))))
                }
                "anyOf" | "allOf" => {
                    let list = argument.as_array();
                    list.is_some_and(|list| {
                        list.iter().all(|it| self.can_be_negated(it, depth + 1))
                    })
                }
                "properties" => {
                    let schemas = argument.as_object();
                    schemas
                        .is_some_and(|it| it.values().all(|it| self.can_be_negated(it, depth + 1)))
                }
                "$ref" => {
                    let target = argument
                        .as_str()
                        .map(|it| self.document.referred(self.document.id(schema), it));
                    match target {
                        Some(Ok(target)) => {
                            self.can_be_negated(self.document.value(target), depth + 1)
                        }
                        _ => false,
                    }
                }
                other => !keywords::ASSERTIONS.contains(&other),
            })
    }
}
