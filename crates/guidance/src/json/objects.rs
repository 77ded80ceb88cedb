//! The objects of a branch.
//!
//! Properties come in the order in which the schema names them, then those that only patterns and
//! `additionalProperties` allow.

use serde_json::Value;

use super::branches::{Branch, Term};
use super::matches;
use super::rules::{Grammar, Part, RuleId, scalar_text};
use super::schema::Problem;
use super::text::Texts;

/// The most patterns of which names may match any number; of more, a name matches one at most.
const MAX_OVERLAPPING: usize = 3;

/// The most rules for the number of properties.
const MAX_STATES: u64 = 3_000;

/// A property with a name of its own.
struct Member {
    is_required: bool,
    part: Part,
}

/// The part for the objects of a branch.
pub(super) fn object<'a>(grammar: &mut Grammar<'a>, branch: &Branch<'a>) -> Result<Part, Problem> {
    let names = known_names(branch);
    let mut members = Vec::new();
    for name in &names {
        let is_required = branch.required.contains(name);
        let as_value = Value::from(*name);
        let is_name = |term: &Term| {
            matches::is_valid(&grammar.schema.document, term.schema, &as_value, 0)
                != term.is_negated
        };
        if branch.forbidden.contains(name) || !branch.names.iter().all(is_name) {
            match is_required {
                true => return Ok(Part::nothing()),
                false => continue,
            }
        }
        let goal = grammar.schema.property(branch, name)?;
        let value = grammar.goal(goal)?;
        let name = Part::Text(scalar_text(&as_value)?);
        let part = Part::Sequence(vec![name, Part::Text(":".to_owned()), value]);
        members.push(Member { is_required, part });
    }
    let others = others(grammar, branch, &names)?;
    let num_required = members.iter().filter(|it| it.is_required).count() as u64;
    let mut min = branch.min_properties;
    let max = branch.max_properties;
    if max.is_some_and(|max| max < min.max(num_required)) {
        return Ok(Part::nothing());
    }
    // Names that come twice count once.
    if min > members.len() as u64 + 1 && !matches!(others, Part::Choice(ref all) if all.is_empty())
    {
        let owner = branch.owner("minProperties", &grammar.schema);
        grammar.schema.leave_out("minProperties", owner);
        min = members.len() as u64 + 1;
    }
    let mut is_counted = min > num_required
        || max.is_some_and(|max| max < members.len() as u64 || others != Part::nothing());
    let count = match is_counted {
        true => max.unwrap_or(min).max(min).max(1),
        false => 1,
    };
    let num_states = (members.len() as u64 + 1).saturating_mul(count.saturating_add(1));
    if num_states > MAX_STATES {
        let given = [("minProperties", min > 0), ("maxProperties", max.is_some())];
        for (keyword, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            let owner = branch.owner(keyword, &grammar.schema);
            grammar.schema.leave_out(keyword, owner);
        }
        is_counted = false;
    }
    let counted = if is_counted { (min, max) } else { (0, None) };
    let mut states = States {
        members: &members,
        others,
        count: if is_counted { count } else { 1 },
        bounds: counted,
    };
    let inner = states.part_of_all(grammar)?;
    Ok(Part::Sequence(vec![
        Part::Text("{".to_owned()),
        inner,
        Part::Text("}".to_owned()),
    ]))
}

/// The names that schemas of a branch mention, in this order.
fn known_names<'a>(branch: &Branch<'a>) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    let named = branch
        .properties
        .iter()
        .filter_map(|it| it.named)
        .flat_map(|it| it.keys().map(String::as_str));
    let single = branch.single.iter().map(|(name, _)| *name);
    let mut seen = std::collections::HashSet::new();
    for name in named
        .chain(branch.required.iter().copied())
        .chain(single)
        .chain(branch.forbidden.iter().copied())
    {
        if seen.insert(name) {
            names.push(name);
        }
    }
    names
}

/// Objects as an automaton over the members and the number of those that have come.
struct States<'m> {
    members: &'m [Member],
    others: Part,
    /// The largest number that makes a difference.
    count: u64,
    bounds: (u64, Option<u64>),
}

impl States<'_> {
    /// The part for all members, without rules where each can only be reached in one way.
    fn part_of_all(&mut self, grammar: &mut Grammar<'_>) -> Result<Part, Problem> {
        let (min, max) = self.bounds;
        let is_simple =
            min == 0 && max.is_none() && self.members.first().is_none_or(|it| it.is_required);
        if !is_simple {
            let rules = self.rules(grammar)?;
            return Ok(Part::Rule(rules));
        }
        let mut parts = Vec::new();
        for (index, member) in self.members.iter().enumerate() {
            let own = member.part.clone();
            let part = if index == 0 { own } else { behind_comma(own) };
            parts.push(if member.is_required {
                part
            } else {
                Part::Optional(Box::new(part))
            });
        }
        parts.push(self.rest(self.members.len() as u64));
        Ok(Part::Sequence(parts))
    }

    /// The rule for all members, each state a rule.
    fn rules(&self, grammar: &mut Grammar<'_>) -> Result<RuleId, Problem> {
        let width = self.count as usize + 1;
        let mut next: Vec<RuleId> = Vec::new();
        for num in 0..width {
            next.push(grammar.add_rule(self.rest(num as u64))?);
        }
        for member in self.members.iter().rev() {
            let mut rules = Vec::new();
            for num in 0..width {
                let own = if num == 0 {
                    member.part.clone()
                } else {
                    behind_comma(member.part.clone())
                };
                let is_full = self.bounds.1.is_some_and(|max| num as u64 >= max);
                let mut options = Vec::new();
                if !is_full {
                    let then = Part::Rule(next[(num + 1).min(width - 1)]);
                    options.push(Part::Sequence(vec![own, then]));
                }
                if !member.is_required {
                    options.push(Part::Rule(next[num]));
                }
                rules.push(grammar.add_rule(Part::Choice(options))?);
            }
            next = rules;
        }
        Ok(next[0])
    }

    /// The properties behind the named ones, of which `num` have come.
    fn rest(&self, num: u64) -> Part {
        let (min, max) = self.bounds;
        let min = min.saturating_sub(num);
        if min > 1 && self.others != Part::nothing() {
            return Part::nothing();
        }
        let max = max.map(|max| max.saturating_sub(num));
        let repeat = |min: u64, max: Option<u64>| Part::Repeat {
            part: Box::new(behind_comma(self.others.clone())),
            min,
            max,
        };
        match (num, max) {
            (_, Some(0)) if min == 0 => Part::empty(),
            (_, Some(0)) => Part::nothing(),
            (0, _) => {
                let more = repeat(min.saturating_sub(1), max.map(|max| max - 1));
                let all = Part::Sequence(vec![self.others.clone(), more]);
                if min == 0 {
                    Part::Optional(Box::new(all))
                } else {
                    all
                }
            }
            _ => repeat(min, max),
        }
    }
}

fn behind_comma(part: Part) -> Part {
    Part::Sequence(vec![Part::Text(",".to_owned()), part])
}

/// A property with another name than the known ones.
fn others<'a>(
    grammar: &mut Grammar<'a>,
    branch: &Branch<'a>,
    names: &[&str],
) -> Result<Part, Problem> {
    // The patterns, each with its texts and the properties that it stands in.
    let mut patterns: Vec<(Texts, Vec<(usize, Term)>)> = Vec::new();
    for (index, properties) in branch.properties.iter().enumerate() {
        for (pattern, schema) in properties.patterns.into_iter().flatten() {
            let entry = (index, grammar.schema.term(schema));
            match grammar.schema.pattern(pattern)? {
                Some(texts) => match patterns.iter_mut().find(|(it, _)| *it == texts) {
                    Some((_, entries)) => entries.push(entry),
                    None => patterns.push((texts, vec![entry])),
                },
                None => {
                    let owner = branch.owner("patternProperties", &grammar.schema);
                    grammar.schema.leave_out("patternProperties", owner);
                }
            }
        }
    }
    let mut allowed = Vec::new();
    for term in &branch.names {
        allowed.push(names_of(grammar, *term)?);
    }
    if !names.is_empty() {
        let known = names.iter().map(|name| Texts::literal(name)).collect();
        allowed.push(Texts::Not(Box::new(Texts::Any(known))));
    }
    let num = patterns.len();
    let sets: Vec<Vec<usize>> = match num <= MAX_OVERLAPPING {
        true => (0..1usize << num)
            .map(|set| (0..num).filter(|it| set >> it & 1 == 1).collect())
            .collect(),
        false => std::iter::once(Vec::new())
            .chain((0..num).map(|it| vec![it]))
            .collect(),
    };
    let mut options = Vec::new();
    for set in sets {
        grammar.schema.spend(1)?;
        let mut goal: Vec<Term> = Vec::new();
        let mut named = vec![false; branch.properties.len()];
        for (index, term) in set.iter().flat_map(|it| &patterns[*it].1) {
            goal.push(*term);
            named[*index] = true;
        }
        let unnamed = branch
            .properties
            .iter()
            .zip(&named)
            .filter(|(_, is_named)| !**is_named);
        goal.extend(unnamed.filter_map(|(properties, _)| properties.others));
        goal.extend(branch.unevaluated(|index| named[index]));
        let is_never = |term: &Term| {
            *grammar.schema.document.value(term.schema) == Value::Bool(term.is_negated)
        };
        if goal.iter().any(is_never) {
            continue;
        }
        let mut texts: Vec<Texts> = set.iter().map(|it| patterns[*it].0.clone()).collect();
        let without = patterns
            .iter()
            .enumerate()
            .filter(|(index, _)| !set.contains(index));
        texts.extend(without.map(|(_, (texts, _))| Texts::Not(Box::new(texts.clone()))));
        texts.extend(allowed.iter().cloned());
        let texts = match texts.len() {
            0 => Texts::any(),
            1 if !matches!(texts[0], Texts::Not(_)) => texts.remove(0),
            _ => Texts::All(texts),
        };
        // A set of names of which it is not known whether there are any is left out.
        if texts != Texts::any() && texts.has_any() != Some(true) {
            continue;
        }
        let Some(name) = grammar.terminal(&texts, true)? else {
            continue;
        };
        let value = grammar.goal(goal)?;
        options.push(Part::Sequence(vec![
            Part::Terminal(name),
            Part::Text(":".to_owned()),
            value,
        ]));
    }
    Ok(match options.len() {
        1 => options.remove(0),
        _ => Part::Choice(options),
    })
}

/// The texts that a schema of names allows.
fn names_of<'a>(grammar: &mut Grammar<'a>, term: Term) -> Result<Texts, Problem> {
    let mut all = Vec::new();
    for branch in super::branches::branches(&mut grammar.schema, &[term])? {
        if branch.is_listed {
            let listed = grammar.schema.listed(&branch, &[term]);
            all.extend(
                listed
                    .into_iter()
                    .filter_map(|it| it.as_str())
                    .map(Texts::literal),
            );
        } else if branch.kinds.has(super::branches::Kinds::STRING) {
            all.push(branch.string_texts().ok_or(Problem::TooLarge)?);
        }
    }
    Ok(match all.len() {
        1 => all.remove(0),
        _ => Texts::Any(all),
    })
}
