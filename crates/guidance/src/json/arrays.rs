//! The arrays of a branch.

use super::branches::{Branch, Term};
use super::rules::{Grammar, Part, literal};
use super::schema::Problem;

/// The most places with rules of their own.
const MAX_PLACES: u64 = 128;

/// The most items that are counted.
const MAX_ITEMS: u64 = 1 << 30;

/// The most values of which each may be in an array once, in any order.
const MAX_DISTINCT: usize = 6;

/// The part for the arrays of a branch.
pub(super) fn array<'a>(grammar: &mut Grammar<'a>, branch: &Branch<'a>) -> Result<Part, Problem> {
    // The parser's library counts in 32 bits.
    let max = branch.max_items.map(|max| max.min(MAX_ITEMS));
    if branch.min_items > MAX_ITEMS {
        return Err(Problem::TooLarge);
    }
    if max.is_some_and(|max| max < branch.min_items) {
        return Ok(Part::nothing());
    }
    if let Some(unique) = branch.is_unique.filter(|_| max.is_none_or(|max| max > 1)) {
        match distinct(grammar, branch)? {
            Some(part) => return Ok(part),
            None => grammar.schema.leave_out("uniqueItems", unique),
        }
    }
    let num_places = num_places(branch);
    if num_places > MAX_PLACES {
        return Err(Problem::TooLarge);
    }
    let comma = |place: u64, item: Part| match place {
        0 => item,
        _ => Part::Sequence(vec![Part::Text(",".to_owned()), item]),
    };
    let tail = grammar.goal(item(grammar, branch, num_places))?;
    let (min, rest) = (
        branch.min_items.saturating_sub(num_places),
        max.map(|max| max.saturating_sub(num_places)),
    );
    let repeat = |part: Part, min: u64, max: Option<u64>| Part::Repeat {
        part: Box::new(part),
        min,
        max,
    };
    let mut inner = match (num_places, rest) {
        (_, Some(0)) => Part::empty(),
        (0, _) => {
            let others = repeat(
                comma(1, tail.clone()),
                min.saturating_sub(1),
                rest.map(|max| max - 1),
            );
            let all = Part::Sequence(vec![tail, others]);
            if min == 0 {
                Part::Optional(Box::new(all))
            } else {
                all
            }
        }
        _ => repeat(comma(1, tail), min, rest),
    };
    for place in (0..num_places).rev() {
        if max.is_some_and(|max| place >= max) {
            continue;
        }
        let own = grammar.goal(item(grammar, branch, place))?;
        let from = Part::Sequence(vec![comma(place, own), inner]);
        inner = if place >= branch.min_items {
            Part::Optional(Box::new(from))
        } else {
            from
        };
    }
    Ok(enclosed(inner))
}

fn enclosed(inner: Part) -> Part {
    Part::Sequence(vec![
        Part::Text("[".to_owned()),
        inner,
        Part::Text("]".to_owned()),
    ])
}

/// The places whose items have schemas of their own.
fn num_places(branch: &Branch<'_>) -> u64 {
    let prefixes = branch.items.iter().map(|items| items.prefix.len() as u64);
    let placed = branch.placed.iter().map(|(place, _)| place + 1);
    let from = branch.from_place.iter().map(|(place, _)| *place);
    prefixes.chain(placed).chain(from).max().unwrap_or(0)
}

/// What the item at a place must be.
fn item<'a>(grammar: &Grammar<'a>, branch: &Branch<'a>, place: u64) -> Vec<Term> {
    let mut goal: Vec<Term> = Vec::new();
    for items in &branch.items {
        match items.prefix.get(place as usize) {
            Some(schema) => goal.push(grammar.schema.term(schema)),
            None => goal.extend(items.rest),
        }
    }
    goal.extend(
        branch
            .placed
            .iter()
            .filter(|(it, _)| *it == place)
            .map(|(_, term)| *term),
    );
    goal.extend(
        branch
            .from_place
            .iter()
            .filter(|(from, _)| *from <= place)
            .map(|(_, term)| *term),
    );
    goal.extend(branch.unevaluated_items(place));
    goal.sort_unstable();
    goal.dedup();
    goal
}

/// Arrays that have each of a few values at most once; `None` if there are too many values, or they differ by place.
fn distinct<'a>(grammar: &mut Grammar<'a>, branch: &Branch<'a>) -> Result<Option<Part>, Problem> {
    if num_places(branch) > 0 {
        return Ok(None);
    }
    let goal = item(grammar, branch, 0);
    let Some(values) = grammar.values(&goal, MAX_DISTINCT)? else {
        return Ok(None);
    };
    let num = values.len() as u64;
    let max = branch.max_items.map_or(num, |max| max.min(num));
    if branch.min_items > max {
        return Ok(Some(Part::nothing()));
    }
    // A rule for each set of values that have come.
    let sets = 1usize << values.len();
    let mut rules = vec![None; sets];
    for set in (0..sets).rev() {
        let count = u64::from(set.count_ones());
        if count > max {
            continue;
        }
        let mut options = Vec::new();
        if count >= branch.min_items {
            options.push(Part::empty());
        }
        for (index, value) in values.iter().enumerate() {
            let next = set | 1 << index;
            if let (true, Some(rule)) = (next != set, rules[next]) {
                let comma = if count > 0 {
                    Part::Text(",".to_owned())
                } else {
                    Part::empty()
                };
                options.push(Part::Sequence(vec![
                    comma,
                    literal(value)?,
                    Part::Rule(rule),
                ]));
            }
        }
        rules[set] = Some(grammar.add_rule(Part::Choice(options))?);
    }
    Ok(rules[0].map(|rule| enclosed(Part::Rule(rule))))
}
