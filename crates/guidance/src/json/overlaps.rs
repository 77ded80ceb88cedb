//! Alternatives of a schema that have a value in common, whose text is then derived in as many ways.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Keywords that make no two alternatives different.
const ANNOTATIONS: [&str; 8] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
];

/// Keywords whose values are no schemas.
const VALUES: [&str; 5] = ["const", "enum", "default", "examples", "x-guidance"];

/// The `anyOf` of `schema` of which most alternatives have a value in common, and what to write instead: a part of a
/// sentence. Only what is certain is named.
pub(crate) fn overlap(schema: &Value) -> Option<String> {
    let mut found: Option<Overlap> = None;
    // A path is written only if it is shown: the paths of all parts may be as long as the square of the schema.
    let mut places = vec![Place::ROOT];
    let mut stack = vec![(schema, 0)];
    while let Some((value, place)) = stack.pop() {
        let mut add = |value, name| {
            places.push(Place {
                parent: Some(place),
                name,
            });
            stack.push((value, places.len() - 1));
        };
        match value {
            Value::Object(members) => {
                if let Some(Value::Array(options)) = members.get("anyOf")
                    && let Some(overlap) = Overlap::of(options, place)
                    && found.as_ref().is_none_or(|it| it.num < overlap.num)
                {
                    found = Some(overlap);
                }
                let inner = members.iter().rev();
                let inner = inner.filter(|(name, _)| !VALUES.contains(&name.as_str()));
                inner.for_each(|(name, value)| add(value, Name::Member(name)));
            }
            Value::Array(list) => {
                let inner = list.iter().enumerate().rev();
                inner.for_each(|(index, value)| add(value, Name::Item(index)));
            }
            _ => {}
        }
    }
    found.map(|it| it.text(&places))
}

/// A part of a schema.
struct Place<'a> {
    /// The number of the part that it is in.
    parent: Option<usize>,
    name: Name<'a>,
}

enum Name<'a> {
    Member(&'a str),
    Item(usize),
}

impl Place<'_> {
    const ROOT: Self = Self {
        parent: None,
        name: Name::Item(0),
    };
}

/// The JSON pointer of a part.
fn pointer(places: &[Place<'_>], mut place: usize) -> String {
    let mut names = Vec::new();
    while let Some(parent) = places[place].parent {
        names.push(match places[place].name {
            Name::Member(name) => name.replace('~', "~0").replace('/', "~1"),
            Name::Item(index) => index.to_string(),
        });
        place = parent;
    }
    let names = names.iter().rev();
    names.flat_map(|name| ["/", name]).collect()
}

/// Alternatives that have a value in common.
struct Overlap {
    num: usize,
    /// The schema whose `anyOf` it is.
    place: usize,
    common: Common,
}

/// A value that several alternatives allow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Common {
    /// All that they say.
    All(String),
    EmptyObject,
    /// Arrays of items that a schema describes.
    Arrays(String),
}

impl Overlap {
    /// The largest among the alternatives of a schema.
    fn of(options: &[Value], place: usize) -> Option<Self> {
        // The numbers of items that each allows; of other values, none.
        let mut ranges: BTreeMap<Common, Vec<(u64, u64)>> = BTreeMap::new();
        for option in options {
            for (common, range) in commons(option) {
                ranges.entry(common).or_default().push(range);
            }
        }
        let overlaps = ranges.into_iter().map(|(common, ranges)| Self {
            num: max_overlapping(&ranges),
            place,
            common,
        });
        // Of as many, equal ones come first.
        let largest = overlaps.min_by_key(|it| Reverse(it.num));
        largest.filter(|it| it.num > 1)
    }

    fn text(self, places: &[Place<'_>]) -> String {
        let Self { num, place, common } = self;
        let path = pointer(places, place);
        let what = match common {
            Common::All(_) => "are equal; keep one of them",
            Common::EmptyObject => {
                "all allow an object without members; write one alternative, or let each begin with a 'required' property \
                 that has its own 'const'"
            }
            Common::Arrays(_) => {
                "all allow an equal array; write one alternative, with one 'minItems' and 'maxItems'"
            }
        };
        format!("{num} alternatives of its schema at '#{path}/anyOf' {what}")
    }
}

/// The most of these closed ranges that have a number in common.
fn max_overlapping(ranges: &[(u64, u64)]) -> usize {
    let mut starts: Vec<u64> = ranges.iter().map(|range| range.0).collect();
    let mut ends: Vec<u64> = ranges.iter().map(|range| range.1).collect();
    starts.sort_unstable();
    ends.sort_unstable();
    let mut num_ended = 0;
    let overlapping = starts.iter().zip(1..).map(|(&start, num_begun)| {
        while ends[num_ended] < start {
            num_ended += 1;
        }
        num_begun - num_ended
    });
    overlapping.max().unwrap_or(0)
}

/// Values that an alternative allows for certain, and of arrays the numbers of items.
fn commons(option: &Value) -> Vec<(Common, (u64, u64))> {
    let Value::Object(members) = option else {
        return Vec::new();
    };
    let mut found = vec![(Common::All(essence(option)), (0, 0))];
    let has_only = |keywords: &[&str]| {
        let mut names = members.keys().map(String::as_str);
        names.all(|it| it == "type" || keywords.contains(&it) || ANNOTATIONS.contains(&it))
    };
    let members_of_objects = ["properties", "additionalProperties", "patternProperties"];
    match members.get("type").and_then(Value::as_str) {
        Some("object") if has_only(&members_of_objects) => {
            found.push((Common::EmptyObject, (0, 0)));
        }
        Some("array") if has_only(&["items", "minItems", "maxItems"]) => {
            let items = members.get("items").map(essence).unwrap_or_default();
            let bound = |name| members.get(name).map(Value::as_u64);
            let range = (bound("minItems"), bound("maxItems"));
            if let (None | Some(Some(_)), None | Some(Some(_))) = range {
                let min = range.0.flatten().unwrap_or(0);
                let max = range.1.flatten().unwrap_or(u64::MAX);
                found.extend((min <= max).then_some((Common::Arrays(items), (min, max))));
            }
        }
        _ => {}
    }
    found
}

/// A schema without what makes no difference.
fn essence(schema: &Value) -> String {
    let Value::Object(members) = schema else {
        return schema.to_string();
    };
    let kept = members.iter();
    let kept = kept.filter(|(name, _)| !ANNOTATIONS.contains(&name.as_str()));
    let mut kept: Vec<_> = kept.collect();
    kept.sort_by_key(|(name, _)| *name);
    let kept: Map<String, Value> = kept
        .into_iter()
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    Value::Object(kept).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ranges_that_touch_overlap() {
        for (ranges, expected) in [
            (&[][..], 0),
            (&[(1, 1)], 1),
            (&[(0, 1), (1, 2), (2, 3)], 2),
            (&[(0, 9), (1, 2), (3, 4), (2, 3)], 3),
            (&[(0, 0), (1, u64::MAX), (2, 2)], 2),
        ] {
            assert_eq!(max_overlapping(ranges), expected, "{ranges:?}");
        }
    }

    #[test]
    fn names_the_alternatives_and_what_to_write_instead() {
        let itself = json!({"$ref": "#/$defs/a"});
        let of =
            |options: Vec<Value>| json!({"$defs": {"a": {"anyOf": options}}, "$ref": "#/$defs/a"});
        let arrays = |bounds: &dyn Fn(u64) -> Value| {
            let option = |num| {
                let mut option = bounds(num);
                option["type"] = json!("array");
                option["items"] = itself.clone();
                option
            };
            (0..5).map(option).collect::<Vec<_>>()
        };
        let objects = (0..4).map(|num| {
            json!({"type": "object", "properties": {format!("k{num}"): itself}, "additionalProperties": itself})
        });
        let mixed = objects
            .clone()
            .chain(arrays(&|num| json!({"minItems": num, "maxItems": num})));
        for (schema, expected) in [
            (
                of(arrays(
                    &|num| json!({"minItems": 1, "title": num.to_string()}),
                )),
                "5 alternatives of its schema at '#/$defs/a/anyOf' are equal; keep one of them",
            ),
            (
                of(arrays(&|num| json!({"minItems": 1, "maxItems": num + 2}))),
                "5 alternatives of its schema at '#/$defs/a/anyOf' all allow an equal array; write one alternative, with \
                 one 'minItems' and 'maxItems'",
            ),
            (
                of(objects.collect()),
                "4 alternatives of its schema at '#/$defs/a/anyOf' all allow an object without members; write one \
                 alternative, or let each begin with a 'required' property that has its own 'const'",
            ),
            (
                of(mixed.collect()),
                "4 alternatives of its schema at '#/$defs/a/anyOf' all allow an object without members; write one \
                 alternative, or let each begin with a 'required' property that has its own 'const'",
            ),
            (
                json!({"properties": {"a/b": {"anyOf": [true, {"$ref": "#"}, {"$ref": "#"}]}}}),
                "2 alternatives of its schema at '#/properties/a~1b/anyOf' are equal; keep one of them",
            ),
        ] {
            assert_eq!(overlap(&schema).as_deref(), Some(expected), "{schema}");
        }
    }

    #[test]
    fn blames_no_distinct_alternatives() {
        for schema in [
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            json!({"anyOf": [
                {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
                {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            ]}),
            json!({"anyOf": [
                {"type": "array", "items": {"type": "null"}, "maxItems": 1},
                {"type": "array", "items": {"type": "null"}, "minItems": 2},
            ]}),
            json!({"anyOf": [
                {"type": "array", "items": {"type": "null"}, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]}),
            json!({"anyOf": [{"type": "array", "minItems": 2, "maxItems": 1}, {"type": "array"}]}),
            json!({"enum": [{"anyOf": [{"a": 1}, {"a": 1}]}]}),
            json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}),
            json!({"anyOf": {"type": "string"}}),
        ] {
            assert_eq!(overlap(&schema), None, "{schema}");
        }
    }
}
