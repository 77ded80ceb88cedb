//! A schema while it is compiled: its document, what was left out of it, and the work that is left.

use std::collections::{BTreeSet, HashMap};

use llguidance::derivre::Regex;
use serde_json::Value;

use super::branches::{self, Branch, Kinds, Term};
use super::document::{Document, Id};
use super::keywords;
use super::text::{Texts, Unusable};
use crate::guidance::grammar_error::GrammarError;

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
    is_probing: bool,
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
    fn has_match(&mut self, pattern: &'a str, name: &str) -> Result<bool, Problem> {
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

    /// Whether two schemas certainly have no value in common.
    pub fn are_disjoint(&mut self, one: Term, other: Term) -> Result<bool, Problem> {
        self.is_probing = true;
        let is_empty = self.is_empty(&[one, other], 3);
        self.is_probing = false;
        is_empty
    }

    /// Whether a goal certainly has no value. Looks so many properties deep.
    fn is_empty(&mut self, goal: &[Term], depth: usize) -> Result<bool, Problem> {
        let mut goal = goal.to_vec();
        goal.sort_unstable();
        goal.dedup();
        for branch in branches::branches(self, &goal)? {
            if !self.is_branch_empty(&branch, &goal, depth)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_branch_empty(
        &mut self,
        branch: &Branch<'a>,
        goal: &[Term],
        depth: usize,
    ) -> Result<bool, Problem> {
        if branch.is_listed {
            return Ok(self.listed(branch, goal).is_empty());
        }
        let others = [Kinds::NULL, Kinds::BOOLEAN, Kinds::ARRAY];
        if others.iter().any(|kind| branch.kinds.has(*kind)) {
            return Ok(false);
        }
        if branch.kinds.has(Kinds::NUMBER) && branch.number_texts().has_any() != Some(false) {
            return Ok(false);
        }
        if branch.kinds.has(Kinds::STRING) {
            let is_plain = branch.texts.is_empty() && branch.excluded.is_empty();
            if is_plain
                || branch
                    .string_texts()
                    .is_none_or(|it| it.has_any() != Some(false))
            {
                return Ok(false);
            }
        }
        if !branch.kinds.has(Kinds::OBJECT) {
            return Ok(true);
        }
        if branch
            .required
            .iter()
            .any(|it| branch.forbidden.contains(it))
        {
            return Ok(true);
        }
        if depth > 0 {
            for name in &branch.required {
                let property = self.property(branch, name)?;
                if self.is_empty(&property, depth - 1)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The values that a branch of a goal lists and that are valid.
    pub fn listed(&self, branch: &Branch<'a>, goal: &[Term]) -> Vec<&'a Value> {
        let is_valid = |value: &&&Value| {
            goal.iter().all(|term| {
                super::matches::is_valid(&self.document, term.schema, value, 0) != term.is_negated
            })
        };
        branch.listed.iter().filter(is_valid).copied().collect()
    }

    /// What the property of a name must be in a branch.
    pub fn property(&mut self, branch: &Branch<'a>, name: &str) -> Result<Vec<Term>, Problem> {
        let mut goal = Vec::new();
        let mut named = Vec::new();
        for properties in &branch.properties {
            let own = properties
                .named
                .and_then(|it| it.get(name))
                .map(|it| self.term(it));
            let before = goal.len();
            goal.extend(own);
            for (pattern, schema) in properties.patterns.into_iter().flatten() {
                if self.has_match(pattern, name)? {
                    goal.push(self.term(schema));
                }
            }
            let is_named = goal.len() > before;
            named.push(is_named);
            if !is_named {
                goal.extend(properties.others);
            }
        }
        goal.extend(branch.unevaluated(|index| named[index]));
        goal.extend(
            branch
                .single
                .iter()
                .filter(|(it, _)| *it == name)
                .map(|(_, term)| *term),
        );
        goal.sort_unstable();
        goal.dedup();
        Ok(goal)
    }

    pub fn term(&self, value: &'a Value) -> Term {
        Term {
            schema: self.document.id(value),
            is_negated: false,
        }
    }
}
