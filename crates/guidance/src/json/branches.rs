//! What a value must be to be valid under several schemas at once, as alternatives without choices.
//!
//! ```text
//! {a} and {b}, where a: anyOf [c, d] --> a branch with what b and c say, and one with what b and d say
//! ```
//!
//! References, `allOf`, `anyOf`, `oneOf`, `not`, `if` and what depends on a property are resolved here. Of a branch,
//! keywords are left that each say something about one kind of value. A schema may be negated: one of its keywords does
//! not hold then.

use serde_json::{Map, Value};

use super::decimal::{Bound, Decimal};
use super::document::Id;
use super::formats;
use super::schema::{Problem, Schema};
use super::text::Texts;

/// A schema that holds, or must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Term {
    pub schema: Id,
    pub is_negated: bool,
}

/// Kinds of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kinds(u8);

impl Kinds {
    pub const NULL: Self = Self(1);
    pub const BOOLEAN: Self = Self(2);
    pub const NUMBER: Self = Self(4);
    pub const STRING: Self = Self(8);
    pub const ARRAY: Self = Self(16);
    pub const OBJECT: Self = Self(32);
    pub const ALL: Self = Self(63);

    pub fn has(self, kind: Self) -> bool {
        self.0 & kind.0 != 0
    }
}

/// Properties that one schema names.
#[derive(Clone)]
pub(super) struct Properties<'a> {
    pub named: Option<&'a Map<String, Value>>,
    pub patterns: Option<&'a Map<String, Value>>,
    pub others: Option<Term>,
    scope: usize,
}

/// Items that one schema describes.
#[derive(Clone)]
pub(super) struct Items<'a> {
    pub prefix: &'a [Value],
    pub rest: Option<Term>,
    scope: usize,
}

/// An alternative: what all of its keywords say together.
#[derive(Clone)]
pub(super) struct Branch<'a> {
    pub kinds: Kinds,
    /// Whether the values are among those that a schema lists.
    pub is_listed: bool,
    pub listed: Vec<&'a Value>,
    pub excluded: Vec<&'a Value>,
    pub is_integer: bool,
    pub is_fraction: bool,
    pub minimum: Option<Bound>,
    pub maximum: Option<Bound>,
    pub multiples: Vec<Decimal>,
    pub min_length: u64,
    pub max_length: Option<u64>,
    pub texts: Vec<Texts>,
    pub properties: Vec<Properties<'a>>,
    pub required: Vec<&'a str>,
    pub forbidden: Vec<&'a str>,
    /// What single properties must be besides.
    pub single: Vec<(&'a str, Term)>,
    pub names: Vec<Term>,
    pub min_properties: u64,
    pub max_properties: Option<u64>,
    pub items: Vec<Items<'a>>,
    pub min_items: u64,
    pub max_items: Option<u64>,
    pub is_unique: Option<Id>,
    /// What items at single places must be besides.
    pub placed: Vec<(u64, Term)>,
    /// What all items from a place on must be besides.
    pub from_place: Vec<(u64, Term)>,
    unevaluated: Vec<(usize, Term)>,
    unevaluated_items: Vec<(usize, Term)>,
    /// The terms that were taken in.
    scopes: Vec<Scope>,
    /// Terms that are still to be taken in.
    pending: Vec<Scope>,
}

/// A term, and the one that it is part of.
#[derive(Clone, Copy)]
struct Scope {
    term: Term,
    parent: Option<usize>,
    /// Whether it is one of several alternatives of its parent.
    is_choice: bool,
}

impl<'a> Branch<'a> {
    pub fn new(goal: &[Term]) -> Self {
        Self {
            kinds: Kinds::ALL,
            is_listed: false,
            listed: Vec::new(),
            excluded: Vec::new(),
            is_integer: false,
            is_fraction: false,
            minimum: None,
            maximum: None,
            multiples: Vec::new(),
            min_length: 0,
            max_length: None,
            texts: Vec::new(),
            properties: Vec::new(),
            required: Vec::new(),
            forbidden: Vec::new(),
            single: Vec::new(),
            names: Vec::new(),
            min_properties: 0,
            max_properties: None,
            items: Vec::new(),
            min_items: 0,
            max_items: None,
            is_unique: None,
            placed: Vec::new(),
            from_place: Vec::new(),
            unevaluated: Vec::new(),
            unevaluated_items: Vec::new(),
            scopes: Vec::new(),
            pending: goal
                .iter()
                .rev()
                .map(|term| Scope {
                    term: *term,
                    parent: None,
                    is_choice: false,
                })
                .collect(),
        }
    }

    pub fn keep(&mut self, kinds: Kinds) {
        self.kinds.0 &= kinds.0;
    }

    fn at_least(&mut self, bound: Bound) {
        let is_tighter =
            |old: &Bound| (&bound.value, bound.is_exclusive) > (&old.value, old.is_exclusive);
        let is_bound = !bound.value.is_negative() || !bound.value.is_beyond_all();
        if is_bound && self.minimum.as_ref().is_none_or(is_tighter) {
            self.minimum = Some(bound);
        }
    }

    fn at_most(&mut self, bound: Bound) {
        let is_tighter =
            |old: &Bound| (&bound.value, !bound.is_exclusive) < (&old.value, !old.is_exclusive);
        let is_bound = bound.value.is_negative() || !bound.value.is_beyond_all();
        if is_bound && self.maximum.as_ref().is_none_or(is_tighter) {
            self.maximum = Some(bound);
        }
    }

    fn limit(current: &mut Option<u64>, max: u64) {
        *current = Some(current.map_or(max, |it| it.min(max)));
    }

    /// Whether a scope is within another one.
    fn is_within(&self, mut scope: usize, outer: usize) -> bool {
        while scope != outer {
            match self.scopes[scope].parent {
                Some(parent) => scope = parent,
                None => return false,
            }
        }
        true
    }

    /// The schema of the branch that has a keyword.
    pub fn owner(&self, keyword: &str, schema: &Schema<'a>) -> Id {
        let has = |scope: &&Scope| {
            schema
                .document
                .value(scope.term.schema)
                .get(keyword)
                .is_some()
        };
        self.scopes
            .iter()
            .find(has)
            .map_or(0, |scope| scope.term.schema)
    }

    /// Schemas of the properties that only `unevaluatedProperties` covers; `is_named` says whether a given entry of
    /// `properties` names them.
    pub fn unevaluated(&self, is_named: impl Fn(usize) -> bool) -> Vec<Term> {
        let applies = |(scope, _): &&(usize, Term)| {
            let names = |(index, it): (usize, &Properties<'_>)| {
                self.is_within(it.scope, *scope) && (it.others.is_some() || is_named(index))
            };
            !self.properties.iter().enumerate().any(names)
        };
        self.unevaluated
            .iter()
            .filter(applies)
            .map(|(_, term)| *term)
            .collect()
    }

    /// What the item at a place must be that no keyword beside `unevaluatedItems` has described.
    pub fn unevaluated_items(&self, place: u64) -> Vec<Term> {
        let describes = |it: &Items<'a>| it.rest.is_some() || place < it.prefix.len() as u64;
        let applies = |(scope, _): &&(usize, Term)| {
            !self
                .items
                .iter()
                .any(|it| self.is_within(it.scope, *scope) && describes(it))
        };
        self.unevaluated_items
            .iter()
            .filter(applies)
            .map(|(_, term)| *term)
            .collect()
    }
}

/// The most alternatives of a goal.
const MAX_BRANCHES: usize = 5_000;

/// The alternatives of a goal: terms that all hold.
pub(super) fn branches<'a>(
    schema: &mut Schema<'a>,
    goal: &[Term],
) -> Result<Vec<Branch<'a>>, Problem> {
    let mut finished = Vec::new();
    let mut open = vec![Branch::new(goal)];
    while let Some(mut branch) = open.pop() {
        schema.spend(1)?;
        let Some(next) = branch.pending.pop() else {
            finished.push(branch);
            continue;
        };
        let mut expansion = Expansion {
            schema,
            alternatives: vec![branch],
        };
        expansion.take_in(next)?;
        let live = expansion
            .alternatives
            .into_iter()
            .filter(|it| it.kinds.0 != 0);
        open.extend(live.rev());
        if finished.len() + open.len() > MAX_BRANCHES {
            return Err(Problem::TooLarge);
        }
    }
    Ok(finished)
}

/// The branches that a term makes of one.
struct Expansion<'s, 'a> {
    schema: &'s mut Schema<'a>,
    alternatives: Vec<Branch<'a>>,
}

type Change<'c, 'a> = Box<dyn Fn(&mut Branch<'a>) + 'c>;

impl<'a> Expansion<'_, 'a> {
    fn take_in(&mut self, next: Scope) -> Result<(), Problem> {
        let branch = &mut self.alternatives[0];
        match branch.circle(next) {
            // A value that is valid only because it is valid.
            Some(true) => {
                self.alternatives.clear();
                return Ok(());
            }
            Some(false) => {
                let path = self.schema.document.path(next.term.schema);
                return Err(Problem::Wrong(format!(
                    "its '$ref' to '#{path}' leads back to itself without any output in between"
                )));
            }
            None => {}
        }
        if !self.schema.has_scopes && branch.scopes.iter().any(|scope| scope.term == next.term) {
            return Ok(());
        }
        branch.scopes.push(next);
        let scope = branch.scopes.len() - 1;
        let Term { schema, is_negated } = next.term;
        let members = match self.schema.document.value(schema) {
            Value::Bool(is_valid) => {
                if *is_valid == is_negated {
                    self.alternatives.clear();
                }
                return Ok(());
            }
            Value::Object(members) => members,
            other => {
                return Err(Problem::Wrong(format!(
                    "a schema in it is neither an object, true nor false: {}",
                    short(other)
                )));
            }
        };
        if is_negated {
            return self.negation(members, schema, scope);
        }
        // Some programs write null for what they leave out.
        let given =
            |(keyword, argument): &(&String, &Value)| !argument.is_null() || *keyword == "const";
        for (keyword, argument) in members.iter().filter(given) {
            self.keyword(keyword, argument, members, schema, scope)?;
        }
        self.properties(members, scope)?;
        self.items(members, schema, scope)
    }

    /// Applies a change to all alternatives.
    fn all(&mut self, change: impl Fn(&mut Branch<'a>)) {
        self.alternatives.iter_mut().for_each(change);
    }

    /// Makes of each alternative one for each of some changes.
    fn choose(&mut self, changes: &[Change<'_, 'a>]) -> Result<(), Problem> {
        let old = std::mem::take(&mut self.alternatives);
        if old.len() * changes.len() > MAX_BRANCHES {
            return Err(Problem::TooLarge);
        }
        for branch in &old {
            for change in changes {
                let mut changed = branch.clone();
                change(&mut changed);
                self.alternatives.push(changed);
            }
        }
        Ok(())
    }

    fn term(&self, value: &'a Value) -> Term {
        Term {
            schema: self.schema.document.id(value),
            is_negated: false,
        }
    }

    fn opposite(&self, value: &'a Value) -> Term {
        Term {
            is_negated: true,
            ..self.term(value)
        }
    }

    fn hold(&mut self, term: Term, scope: usize) {
        self.all(|branch| branch.push(term, scope, false));
    }

    /// The change that makes terms hold in one of several alternatives.
    fn holding(terms: Vec<Term>, scope: usize) -> Change<'static, 'a> {
        Box::new(move |branch| {
            terms
                .iter()
                .for_each(|term| branch.push(*term, scope, true))
        })
    }

    fn keyword(
        &mut self,
        keyword: &'a str,
        argument: &'a Value,
        members: &'a Map<String, Value>,
        schema: Id,
        scope: usize,
    ) -> Result<(), Problem> {
        let wrong = || Problem::Wrong(format!("its '{keyword}' cannot be {}", short(argument)));
        let schemas = || argument.as_array().ok_or_else(wrong);
        let number = || argument.as_number().ok_or_else(wrong).and_then(decimal);
        let is_set = |name: &str| members.get(name) == Some(&Value::Bool(true));
        let count = || count(argument).ok_or_else(wrong);
        let bound = |value, is_exclusive| Bound {
            value,
            is_exclusive,
        };
        match keyword {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let reference = argument.as_str().ok_or_else(wrong)?;
                let target = self
                    .schema
                    .document
                    .referred(schema, reference)
                    .map_err(Problem::Wrong)?;
                self.hold(
                    Term {
                        schema: target,
                        is_negated: false,
                    },
                    scope,
                );
            }
            "allOf" => schemas()?
                .iter()
                .for_each(|it| self.hold(self.term(it), scope)),
            "anyOf" => {
                let options = schemas()?
                    .iter()
                    .map(|it| Self::holding(vec![self.term(it)], scope));
                let options: Vec<_> = options.collect();
                self.choose(&options)?;
            }
            "oneOf" => self.one_of(schemas()?, schema, scope)?,
            "not" if self.schema.can_be_negated(argument, 0) => {
                self.hold(self.opposite(argument), scope)
            }
            "not" => self.schema.leave_out(keyword, schema),
            "if" => {
                let branch = |name: &str| given(members, name).map(|it| self.term(it));
                let (then, otherwise) = (branch("then"), branch("else"));
                if then.is_none() && otherwise.is_none() {
                    return Ok(());
                }
                if !self.schema.can_be_negated(argument, 0) {
                    self.schema.leave_out(keyword, schema);
                    return Ok(());
                }
                let with = |condition: Term, then: Option<Term>| {
                    Self::holding(
                        [Some(condition), then].into_iter().flatten().collect(),
                        scope,
                    )
                };
                let options = [
                    with(self.term(argument), then),
                    with(self.opposite(argument), otherwise),
                ];
                self.choose(&options)?;
            }
            "dependentRequired" | "dependentSchemas" | "dependencies" => {
                for (name, needed) in argument.as_object().ok_or_else(wrong)? {
                    let without: Change<'_, 'a> =
                        Box::new(move |branch| branch.forbidden.push(name));
                    let term = self.term(needed);
                    let names = needed.as_array();
                    let with: Change<'_, 'a> = Box::new(move |branch| {
                        branch.keep(Kinds::OBJECT);
                        branch.required.push(name);
                        match names {
                            Some(names) => branch
                                .required
                                .extend(names.iter().filter_map(Value::as_str)),
                            None => branch.push(term, scope, true),
                        }
                    });
                    self.choose(&[without, with])?;
                }
            }
            "type" => {
                let (kinds, is_integer) = kinds_of(argument).ok_or_else(wrong)?;
                self.all(|branch| {
                    branch.keep(kinds);
                    branch.is_integer |= is_integer;
                });
            }
            "enum" => {
                let values: Vec<_> = schemas()?.iter().collect();
                self.all(|branch| branch.list(&values));
            }
            "const" => self.all(|branch| branch.list(&[argument])),
            "minimum" => {
                let bound = bound(number()?, is_set("exclusiveMinimum"));
                self.all(|branch| branch.at_least(bound.clone()));
            }
            "maximum" => {
                let bound = bound(number()?, is_set("exclusiveMaximum"));
                self.all(|branch| branch.at_most(bound.clone()));
            }
            "exclusiveMinimum" | "exclusiveMaximum" if argument.is_boolean() => {}
            "exclusiveMinimum" => {
                let bound = bound(number()?, true);
                self.all(|branch| branch.at_least(bound.clone()));
            }
            "exclusiveMaximum" => {
                let bound = bound(number()?, true);
                self.all(|branch| branch.at_most(bound.clone()));
            }
            "multipleOf" => {
                let step = number()?;
                if step.is_zero() || step.text().starts_with('-') {
                    return Err(wrong());
                }
                self.all(|branch| branch.multiples.push(step.clone()));
            }
            "minLength" => {
                let min = count()?;
                self.all(|branch| branch.min_length = branch.min_length.max(min));
            }
            "maxLength" => {
                let max = count()?;
                self.all(|branch| Branch::limit(&mut branch.max_length, max));
            }
            "pattern" => {
                let pattern = argument.as_str().ok_or_else(wrong)?;
                match self.schema.pattern(pattern)? {
                    Some(texts) => self.all(|branch| branch.texts.push(texts.clone())),
                    None => self.schema.leave_out(keyword, schema),
                }
            }
            "format" => {
                let regex = argument.as_str().ok_or_else(wrong).map(formats::regex)?;
                if let Some(Ok(texts)) = regex.map(|it| Texts::whole(&it)) {
                    self.all(|branch| branch.texts.push(texts.clone()));
                }
            }
            "required" => {
                // A flag, in older drafts.
                let names = match argument {
                    Value::Bool(_) => return Ok(()),
                    _ => schemas()?
                        .iter()
                        .map(|it| it.as_str().ok_or_else(wrong))
                        .collect::<Result<Vec<_>, _>>()?,
                };
                self.all(|branch| branch.required.extend(&names));
            }
            "propertyNames" => {
                let term = self.term(argument);
                self.all(|branch| branch.names.push(term));
            }
            "minProperties" => {
                let min = count()?;
                self.all(|branch| branch.min_properties = branch.min_properties.max(min));
            }
            "maxProperties" => {
                let max = count()?;
                self.all(|branch| Branch::limit(&mut branch.max_properties, max));
            }
            "unevaluatedProperties" => {
                let term = self.term(argument);
                self.all(|branch| branch.unevaluated.push((scope, term)));
            }
            "unevaluatedItems" => {
                let term = self.term(argument);
                self.all(|branch| branch.unevaluated_items.push((scope, term)));
            }
            "minItems" => {
                let min = count()?;
                self.all(|branch| branch.min_items = branch.min_items.max(min));
            }
            "maxItems" => {
                let max = count()?;
                self.all(|branch| Branch::limit(&mut branch.max_items, max));
            }
            "uniqueItems" if is_set(keyword) => self.all(|branch| branch.is_unique = Some(schema)),
            _ => {}
        }
        Ok(())
    }

    fn properties(&mut self, members: &'a Map<String, Value>, scope: usize) -> Result<(), Problem> {
        let schemas = |name: &str| match members.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(schemas)) => Ok(Some(schemas)),
            Some(other) => Err(Problem::Wrong(format!(
                "its '{name}' cannot be {}",
                short(other)
            ))),
        };
        let properties = Properties {
            named: schemas("properties")?,
            patterns: schemas("patternProperties")?,
            others: given(members, "additionalProperties").map(|it| self.term(it)),
            scope,
        };
        let is_given = properties.named.is_some()
            || properties.patterns.is_some()
            || properties.others.is_some();
        if is_given {
            self.all(|branch| branch.properties.push(properties.clone()));
        }
        Ok(())
    }

    fn items(
        &mut self,
        members: &'a Map<String, Value>,
        schema: Id,
        scope: usize,
    ) -> Result<(), Problem> {
        let rest = |name: &str| given(members, name).map(|it| self.term(it));
        let (prefix, rest) = match (given(members, "items"), given(members, "prefixItems")) {
            (Some(Value::Array(prefix)), _) => (&prefix[..], rest("additionalItems")),
            (_, Some(Value::Array(prefix))) => (&prefix[..], rest("items")),
            (_, Some(other)) => {
                return Err(Problem::Wrong(format!(
                    "its 'prefixItems' cannot be {}",
                    short(other)
                )));
            }
            (_, None) => (&[][..], rest("items")),
        };
        if !prefix.is_empty() || rest.is_some() {
            let items = Items {
                prefix,
                rest,
                scope,
            };
            self.all(|branch| branch.items.push(items.clone()));
        }
        let Some(contained) = given(members, "contains") else {
            return Ok(());
        };
        let bound = |name: &str| members.get(name).and_then(count);
        let (min, max) = (bound("minContains").unwrap_or(1), bound("maxContains"));
        let is_limited = max.is_some() && self.schema.can_be_negated(contained, 0);
        if max.is_some_and(|max| max < min) {
            self.all(|branch| branch.kinds.0 &= !Kinds::ARRAY.0);
            return Ok(());
        }
        if max.is_some() && !is_limited {
            self.schema.leave_out("maxContains", schema);
        }
        if min > MAX_PLACES {
            self.schema.leave_out("contains", schema);
            return Ok(());
        }
        let (term, opposite) = (self.term(contained), self.opposite(contained));
        let num_places = if min == 0 {
            1
        } else {
            (prefix.len() as u64).min(MAX_PLACES) + 1
        };
        let at = |place: u64| -> Change<'_, 'a> {
            Box::new(move |branch| {
                if place > 0 {
                    branch.keep(Kinds::ARRAY);
                }
                branch.min_items = branch.min_items.max(if min == 0 { 0 } else { place + min });
                branch
                    .placed
                    .extend((place..place + min).map(|place| (place, term)));
                if is_limited {
                    branch
                        .placed
                        .extend((0..place).map(|place| (place, opposite)));
                    branch.from_place.push((place + min, opposite));
                }
            })
        };
        let places: Vec<_> = (0..num_places).map(at).collect();
        self.choose(&places)
    }

    /// Exactly one of some schemas. Of schemas that have a value in common, all others are negated.
    fn one_of(&mut self, list: &'a [Value], schema: Id, scope: usize) -> Result<(), Problem> {
        let is_probing = self.schema.is_probing();
        let mut options = Vec::new();
        for (index, own) in list.iter().enumerate() {
            let mut terms = vec![self.term(own)];
            let others = list.iter().enumerate().filter(|(other, _)| *other != index);
            for (_, other) in others.filter(|_| !is_probing) {
                if self.schema.are_disjoint(self.term(own), self.term(other))? {
                    continue;
                }
                match self.schema.can_be_negated(other, 0) {
                    true => terms.push(self.opposite(other)),
                    false => self.schema.leave_out("oneOf", schema),
                }
            }
            options.push(Self::holding(terms, scope));
        }
        self.choose(&options)
    }

    /// What makes a schema not hold: that one of its keywords does not.
    fn negation(
        &mut self,
        members: &'a Map<String, Value>,
        schema: Id,
        scope: usize,
    ) -> Result<(), Problem> {
        let mut changes: Vec<Change<'_, 'a>> = Vec::new();
        for (keyword, argument) in members {
            let number = || argument.as_number().and_then(Decimal::of);
            let list = || argument.as_array().map(Vec::as_slice).unwrap_or_default();
            let count = count(argument);
            let of = |kinds: Kinds, change: Change<'a, 'a>| -> Change<'a, 'a> {
                Box::new(move |branch| {
                    branch.keep(kinds);
                    change(branch);
                })
            };
            match keyword.as_str() {
                "type" => {
                    let Some((kinds, is_integer)) = kinds_of(argument) else {
                        continue;
                    };
                    changes.push(Box::new(move |branch| branch.kinds.0 &= !kinds.0));
                    if is_integer {
                        changes.push(of(
                            Kinds::NUMBER,
                            Box::new(|branch| branch.is_fraction = true),
                        ));
                    }
                }
                "enum" => changes.push(Box::new(move |branch| branch.excluded.extend(list()))),
                "const" => changes.push(Box::new(move |branch| branch.excluded.push(argument))),
                "minimum" | "exclusiveMinimum" => {
                    let Some(value) = number() else { continue };
                    let bound = Bound {
                        value,
                        is_exclusive: keyword == "minimum",
                    };
                    changes.push(of(
                        Kinds::NUMBER,
                        Box::new(move |branch| branch.at_most(bound.clone())),
                    ));
                }
                "maximum" | "exclusiveMaximum" => {
                    let Some(value) = number() else { continue };
                    let bound = Bound {
                        value,
                        is_exclusive: keyword == "maximum",
                    };
                    changes.push(of(
                        Kinds::NUMBER,
                        Box::new(move |branch| branch.at_least(bound.clone())),
                    ));
                }
                "minLength" => {
                    let Some(max) = count.and_then(|min| min.checked_sub(1)) else {
                        continue;
                    };
                    changes.push(of(
                        Kinds::STRING,
                        Box::new(move |branch| Branch::limit(&mut branch.max_length, max)),
                    ));
                }
                "maxLength" => {
                    let Some(max) = count else { continue };
                    let min = max.saturating_add(1);
                    changes.push(of(
                        Kinds::STRING,
                        Box::new(move |branch| branch.min_length = branch.min_length.max(min)),
                    ));
                }
                "minItems" => {
                    let Some(max) = count.and_then(|min| min.checked_sub(1)) else {
                        continue;
                    };
                    changes.push(of(
                        Kinds::ARRAY,
                        Box::new(move |branch| Branch::limit(&mut branch.max_items, max)),
                    ));
                }
                "maxItems" => {
                    let Some(max) = count else { continue };
                    let min = max.saturating_add(1);
                    changes.push(of(
                        Kinds::ARRAY,
                        Box::new(move |branch| branch.min_items = branch.min_items.max(min)),
                    ));
                }
                "pattern" => {
                    let Some(texts) = self.schema.pattern(argument.as_str().unwrap_or_default())?
                    else {
                        continue;
                    };
                    let texts = Texts::Not(Box::new(texts));
                    changes.push(of(
                        Kinds::STRING,
                        Box::new(move |branch| branch.texts.push(texts.clone())),
                    ));
                }
                "required" => {
                    for name in list().iter().filter_map(Value::as_str) {
                        changes.push(of(
                            Kinds::OBJECT,
                            Box::new(move |branch| branch.forbidden.push(name)),
                        ));
                    }
                }
                "properties" => {
                    for (name, property) in argument.as_object().into_iter().flatten() {
                        let term = self.opposite(property);
                        changes.push(of(
                            Kinds::OBJECT,
                            Box::new(move |branch| {
                                branch.required.push(name);
                                branch.single.push((name, term));
                            }),
                        ));
                    }
                }
                "not" => changes.push(Self::holding(vec![self.term(argument)], scope)),
                "anyOf" => {
                    let terms = list().iter().map(|it| self.opposite(it)).collect();
                    changes.push(Self::holding(terms, scope));
                }
                "allOf" => {
                    changes.extend(
                        list()
                            .iter()
                            .map(|it| Self::holding(vec![self.opposite(it)], scope)),
                    );
                }
                "$ref" => {
                    let target = self
                        .schema
                        .document
                        .referred(schema, argument.as_str().unwrap_or_default());
                    let term = Term {
                        schema: target.map_err(Problem::Wrong)?,
                        is_negated: true,
                    };
                    changes.push(Self::holding(vec![term], scope));
                }
                _ => {}
            }
        }
        self.choose(&changes)
    }
}

/// The most places of an array at which what it contains may be.
const MAX_PLACES: u64 = 16;

impl<'a> Branch<'a> {
    fn push(&mut self, term: Term, scope: usize, is_choice: bool) {
        // The first of them is taken in first.
        self.pending.insert(
            0,
            Scope {
                term,
                parent: Some(scope),
                is_choice,
            },
        );
    }

    fn list(&mut self, values: &[&'a Value]) {
        match std::mem::replace(&mut self.is_listed, true) {
            false => self.listed = values.to_vec(),
            true => self.listed.retain(|it| {
                values
                    .iter()
                    .any(|value| super::matches::is_equal(it, value))
            }),
        }
    }

    /// Whether a term is one that it is part of itself; if so, whether there is a choice between the two.
    fn circle(&self, next: Scope) -> Option<bool> {
        let Scope {
            term,
            mut parent,
            mut is_choice,
        } = next;
        while let Some(index) = parent {
            let scope = self.scopes[index];
            if scope.term == term {
                return Some(is_choice);
            }
            is_choice |= scope.is_choice;
            parent = scope.parent;
        }
        None
    }
}

/// The argument of a keyword, unless it is null.
fn given<'a>(members: &'a Map<String, Value>, keyword: &str) -> Option<&'a Value> {
    members.get(keyword).filter(|argument| !argument.is_null())
}

/// The kinds of values of a type, or of a list of types, and whether of the numbers only the integers.
fn kinds_of(types: &Value) -> Option<(Kinds, bool)> {
    let list = match types {
        Value::Array(list) => list.iter().map(Value::as_str).collect::<Option<Vec<_>>>()?,
        single => vec![single.as_str()?],
    };
    let mut kinds = Kinds(0);
    for name in &list {
        kinds.0 |= match *name {
            "null" => Kinds::NULL.0,
            "boolean" => Kinds::BOOLEAN.0,
            "number" | "integer" => Kinds::NUMBER.0,
            "string" => Kinds::STRING.0,
            "array" => Kinds::ARRAY.0,
            "object" => Kinds::OBJECT.0,
            // A type of old drafts.
            "any" => Kinds::ALL.0,
            _ => return None,
        };
    }
    Some((
        kinds,
        list.contains(&"integer") && !list.contains(&"number") && !list.contains(&"any"),
    ))
}

fn decimal(number: &serde_json::Number) -> Result<Decimal, Problem> {
    Decimal::of(number).ok_or_else(|| {
        Problem::Wrong(format!(
            "its number {number} has more digits than are kept; write an integer of 64 bits, or at most 16 digits"
        ))
    })
}

fn count(value: &Value) -> Option<u64> {
    let number = value.as_number()?;
    let is_whole = |it: &f64| it.fract() == 0.0 && (0.0..9e15).contains(it);
    number
        .as_u64()
        .or_else(|| number.as_f64().filter(is_whole).map(|it| it as u64))
}

pub(super) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl<'a> Schema<'a> {
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
        for branch in branches(self, &goal)? {
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
